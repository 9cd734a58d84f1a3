"""Measuring: what is attributed to what.  How long anything takes is not asserted."""

import functools
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import GraphError
from penstock.far import FarMemory
from penstock.graph.cut import cut
from penstock.graph.trace import Capture, capture, trace
from penstock.job import Job
from penstock.processes.child import apart
from penstock.profile import Profile, measure
from penstock.profile.of_graph import measure as measure_graph
from tests.graph.zoo import JOBS, Blocks, floats, job_of, vectors


@functools.cache
def captured(name: str) -> Capture:
    return capture(JOBS[name])


@functools.cache
def profile(name: str) -> Profile:
    return measure.measure(captured(name), JOBS[name])


def test_profile_is_of_its_graph_and_has_a_row_for_each_node() -> None:
    graph, found = captured("blocks").graph, profile("blocks")
    assert (found.graph, found.basis.how, found.basis.beside) == (graph.digest, "measured", 0)
    assert len(found.op_s) == len(found.workspace_bytes) == len(graph.nodes)
    assert f"torch {torch.__version__}" in found.basis.versions


def test_only_ops_take_time() -> None:
    rows = list(zip(captured("blocks").graph.nodes, profile("blocks").op_s, strict=True))
    assert all(seconds == 0 for node, seconds in rows if node.kind != "op")
    assert all(seconds > 0 for node, seconds in rows if node.flop > 1000)


def test_ops_sum_to_the_whole_forward_and_the_whole_backward(monkeypatch) -> None:
    monkeypatch.setattr(measure, "_whole", lambda capture, stages, inputs: (0.25, 0.75, 0.125))
    found = measure.measure(captured("blocks"), JOBS["blocks"])
    nodes = captured("blocks").graph.nodes
    for phase, seconds in (("F", 0.25), ("B", 0.75)):
        own = (s for node, s in zip(nodes, found.op_s, strict=True) if node.phase == phase)
        assert sum(own) == pytest.approx(seconds)
    assert found.call_s == 0.125
    assert found.micro_batch_s == pytest.approx(1.0)


def test_update_is_measured_with_clipping_where_the_job_clips(monkeypatch) -> None:
    size = sum(p.numel() * p.element_size() for p in captured("blocks").model.parameters())
    monkeypatch.setattr(measure, "_timed", lambda call, **_: {"_clip": 2.0}.get(_name(call), 1.0))
    for clip_norm, seconds in ((None, 1.0), (0.5, 3.0)):
        job = replace(JOBS["blocks"], clip_norm=clip_norm)
        found = measure.optimizer_costs(captured("blocks"), job)
        assert found["update_s"] + size * found["update_s_per_byte"] == pytest.approx(seconds)


def test_update_of_many_parameters_is_one_call_and_the_rest_by_bytes(monkeypatch) -> None:
    """Seconds that are 5 and 1 for each parameter: of one alone they are 6."""

    def timed(call: Any, *, inside=lambda timed: timed(), **_: object) -> float:
        groups = getattr(getattr(call, "__self__", None), "param_groups", [])
        found = list[int]()
        inside(lambda: found.append(sum(p.grad is not None for g in groups for p in g["params"])))
        return 5.0 + found[0]

    monkeypatch.setattr(measure, "_timed", timed)
    held = captured("blocks")
    count = sum(p.requires_grad for p in held.model.parameters())
    size = sum(p.numel() * p.element_size() for p in held.model.parameters())
    found = measure.optimizer_costs(held, JOBS["blocks"])
    assert found["update_s"] == pytest.approx(5.0)
    assert size * found["update_s_per_byte"] == pytest.approx(count)


def _name(call: Any) -> str:
    return getattr(call, "func", call).__name__


def test_measuring_changes_neither_weights_nor_buffers() -> None:
    job = JOBS["average"]
    held = capture(job)
    before = {name: value.clone() for name, value in held.model.state_dict().items()}
    measure.measure(held, job)
    after = held.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.is_grad_enabled()


def test_ops_that_draw_and_ops_that_mutate_are_measured_too() -> None:
    for name in ("dropout", "batch_norm", "recurrent"):
        assert sum(profile(name).op_s) > 0


def test_workspace_of_an_op_is_what_it_holds_besides_its_result() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sort(-1).values.exp()

    held = capture(job_of(Model, floats(16, 8)))
    inputs = measure.inputs_of(held, job_of(Model, floats(16, 8)))
    workspace = measure.workspaces(held, inputs)
    rows = {n.target: w for n, w in zip(held.graph.nodes, workspace, strict=True) if n.phase == "F"}
    assert rows["aten.sort.default"] >= 16 * 8 * (4 + 8)  # both results, handed out one by one
    assert rows["aten.exp.default"] == rows["aten.t.default"] == 0


def optimizer_profile(optimizer) -> dict[str, float]:
    job = replace(JOBS["blocks"], optimizer=optimizer)
    return measure.optimizer_costs(captured("blocks"), job)


@pytest.mark.parametrize(
    ("optimizer", "held"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=False), (0, 0, 0)),
        (lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=False), (0, 2, 1)),
        (lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True), (1, 0, 0)),
    ],
)
def test_workspace_of_an_update_is_that_of_its_largest_parameters(optimizer, held) -> None:
    """One by one, or all at once: as torch's optimizers are written."""
    layers = [nn.Linear(64, 64, bias=False) for _ in range(5)]
    job = job_of(lambda: nn.Sequential(*layers), floats(2, 64))
    job = replace(job, optimizer=optimizer)
    names = "per_byte", "of_largest", "of_second"
    found = measure.optimizer_costs(capture(job), job)
    each = tuple(found[f"update_workspace_{name}"] for name in names)
    assert each == pytest.approx(held, abs=0.02)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1), 0.0),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 1.0),
        (lambda ps: torch.optim.Adam(ps, lr=0.1), 2.0),
        (lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True), 3.0),
    ],
)
def test_optimizer_state_is_counted_per_byte_of_weights(optimizer, state: float) -> None:
    found = optimizer_profile(optimizer)
    assert found["state_bytes_per_byte"] == state
    assert found["state_bytes_per_tensor"] == (4 if state > 1 else 0)  # Adam counts steps too
    assert all(value >= 0 for value in found.values())


@pytest.mark.parametrize(("text", "awake"), [("9 2000000000 1", 8.0), (None, 10.0)])
def test_time_awake_is_all_but_waiting_for_a_core(text, awake, monkeypatch) -> None:
    def told(path: Path) -> str:
        assert str(path) == "/proc/thread-self/schedstat"
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", told)
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    assert measure.awake_s() == awake


def test_rate_of_far_memory_has_the_time_in_it_that_a_disk_takes(monkeypatch) -> None:
    """Waiting for it takes no processor time."""
    write, now = os.pwritev, [0.0]

    def slow(handle, buffers, place):
        now[0] += 1.0
        return write(handle, buffers, place)

    monkeypatch.setattr(os, "pwritev", slow)
    monkeypatch.setattr(measure, "awake_s", lambda: now[0])
    found = measure.far_costs(1 << 20)
    assert found["far_s"] == 0.5 / 256
    assert 16 * found["far_s"] + (1 << 20) * found["far_s_per_byte"] == pytest.approx(0.5)


def test_far_memory_is_as_slow_as_its_disk_where_there_is_no_room_to_keep_it(monkeypatch) -> None:
    evicted, job = list[int](), JOBS["blocks"]
    monkeypatch.setattr(FarMemory, "evict", lambda far: evicted.append(far.handle))
    held = captured("blocks")
    kept = cut(held.graph).stages[0].forward.change_bytes
    most = 4 * held.graph.parameter_bytes + job.micro_batches * kept
    assert measure.most_far_bytes(held, job, 2.0) == most
    for free, evicts in ((most, False), (most - 1, True)):
        evicted.clear()
        monkeypatch.setattr(measure, "free_bytes", lambda free=free: free)
        monkeypatch.setattr(measure, "most_far_bytes", lambda *_: most)
        measure.measure(held, job)
        assert bool(evicted) == evicts
    monkeypatch.setattr(measure, "free_bytes", lambda: 2 * most - 1)
    measure.measure(held, job, beside=1)  # the other rank needs as much
    assert evicted


def test_companions_run_beside_and_are_gone_afterwards(monkeypatch) -> None:
    seen: list[int] = []

    def whole(*_: object) -> tuple[float, float, float]:
        seen.append(len(multiprocessing.active_children()))
        return 1.0, 1.0, 0.0

    monkeypatch.setattr(measure, "_whole", whole)
    found = measure.measure(captured("blocks"), JOBS["blocks"], beside=2)
    assert (seen, found.basis.beside) == ([2], 2)
    assert multiprocessing.active_children() == []


def test_companions_are_gone_after_an_error(monkeypatch) -> None:
    def whole(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "_whole", whole)
    with pytest.raises(KeyboardInterrupt):
        measure.measure(captured("blocks"), JOBS["blocks"], beside=1)
    assert multiprocessing.active_children() == []


def test_model_without_a_backward_op_is_measured() -> None:
    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.number + x.sum()

    job = job_of(Number, vectors, lambda model, x: model(x))
    assert measure.measure(capture(job), job).micro_batch_s >= 0


# -- of a graph ---------------------------------------------------------------------------------


def test_graph_from_a_file_is_measured_by_its_job_and_by_no_other() -> None:
    graph = trace(JOBS["uncut"])
    assert measure_graph(graph, JOBS["uncut"]).graph == graph.digest
    with pytest.raises(GraphError, match="does not know its job"):
        measure_graph(graph)
    other: Job = job_of(Blocks, vectors)
    with pytest.raises(GraphError, match="the job traces to graph"):
        measure_graph(graph, other)


def test_hooks_of_an_optimizer_do_not_count_what_is_measured() -> None:
    calls: list[int] = []

    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_post_hook(lambda *_: calls.append(1))
        return made

    job = replace(JOBS["blocks"], optimizer=optimizer)
    found = measure.optimizer_costs(captured("blocks"), job, apart)
    assert found["update_s_per_byte"] > 0.0
    assert measure.optimizer_state(captured("blocks"), job, apart) == 0.0
    assert calls == []


def test_as_much_is_measured_as_has_room() -> None:
    asked = list[int]()

    def measured(part: int) -> int:
        asked.append(part)
        if part < 32:
            raise torch.OutOfMemoryError
        return part

    assert measure.with_room(measured, 8) == 32
    assert asked == [8, 16, 32]
    with pytest.raises(torch.OutOfMemoryError):
        measure.with_room(lambda part: measured(0), 8)
