"""bench.scripts: its loop is the plain one, it sees what differs, a few scripts come out right."""

import math
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.scripts import __main__ as command
from bench.scripts import runs
from bench.scripts.cases import PLANS, Script, scripts
from bench.scripts.compare import ROUNDING, ULP, difference
from bench.scripts.oracle import Found, plain_loop
from penstock.job import Job
from penstock.state.values import put_value

ALL = {f"{script.about}:{script.name}": script for script in scripts()}


def job_of(**options) -> Job:
    def data(start: int):
        for index in range(start, 1000):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(index))
            yield x, x.sum(1, keepdim=True)

    return Job(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        data=data,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        micro_batches=2,
        **options,
    )


def test_there_are_scripts_of_every_kind_with_a_sentence_and_three_plans_each() -> None:
    assert len(ALL) >= 80
    assert len({script.about for script in ALL.values()}) >= 8
    for script in ALL.values():
        assert script.odd.endswith((".", ")"))
        assert len(set(script.plans)) == 3
        assert set(script.plans) <= PLANS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loop_that_is_moved_by_a_rounding_moves_weights_of_any_dtype(dtype) -> None:
    job = job_of()
    cast = replace(
        job,
        model=lambda: job.model().to(dtype),
        loss=lambda model, batch: job.loss(model, [each.to(dtype) for each in batch]),
    )
    still, moved = (plain_loop(cast, 1, moved=far) for far in (0.0, 2.0**-22))
    assert not torch.equal(still.tensors["weights/2.weight"], moved.tensors["weights/2.weight"])


def test_the_loop_is_what_a_person_would_write() -> None:
    job = job_of(clip_norm=0.5, learning_rate=lambda step: 1 / (1 + step), seed=3)
    torch.manual_seed(3)
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, losses = job.data(0), []
    for step in range(3):
        optimizer.zero_grad()
        both = [job.loss(model, next(data)) for _ in range(2)]
        (sum(both) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
        losses.append(sum(both).item() / 2)
    found = plain_loop(job, 3)
    assert found.losses == pytest.approx(losses)
    assert found.tensors["buffers/1.num_batches_tracked"] == 6
    expected = {f"weights/{name}": value for name, value in model.named_parameters()}
    expected |= {f"buffers/{name}": value for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        expected[f"optimizer/{name}/momentum_buffer"] = optimizer.state[parameter][
            "momentum_buffer"
        ]
    assert found.tensors.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found.tensors[key], value.detach(), rtol=1e-5, atol=1e-7)


def test_a_late_gradient_is_that_of_the_weights_before() -> None:
    job = job_of()
    plain, late = plain_loop(job, 2), plain_loop(job, 2, delay=1)
    assert plain.losses[0] == late.losses[0]
    assert plain.losses[1] != late.losses[1]


def test_dropout_draws_what_penstock_defines() -> None:
    job = replace(
        job_of(), model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
    )
    assert plain_loop(job, 1).losses == plain_loop(job, 1).losses
    assert plain_loop(job, 1).losses != plain_loop(replace(job, micro_batches=1), 1).losses


def found_of(**tensors: torch.Tensor) -> Found:
    return Found({key.replace("__", "/"): value for key, value in tensors.items()}, {}, [1.0])


@pytest.mark.parametrize(
    ("other", "least"),
    [
        (found_of(weights__a=torch.tensor([1.0, 100.0])), 0.0),
        (found_of(weights__a=torch.tensor([1.1, 100.0])), 1e-3),
        (found_of(weights__a=torch.tensor([1.0, math.nan])), math.inf),
        (found_of(weights__b=torch.tensor([1.0, 100.0])), math.inf),
        (found_of(weights__a=torch.tensor([[1.0, 100.0]])), math.inf),
    ],
)
def test_a_difference_is_that_of_the_worst_element(other: Found, least: float) -> None:
    value = difference(other, found_of(weights__a=torch.tensor([1.0, 100.0]))).value
    assert value == pytest.approx(least, rel=1e-3)
    assert (value <= ROUNDING) == (least == 0)


def test_what_is_nothing_beside_its_kind_is_rounding() -> None:
    like = found_of(weights__a=torch.ones(1), weights__b=torch.full((1,), 1e-12))
    other = found_of(weights__a=torch.ones(1), weights__b=torch.full((1,), 3e-12))
    assert difference(other, like).value < ROUNDING


def test_state_that_is_a_plain_number_and_losses_are_compared() -> None:
    like = Found({}, {"optimizer/a/step": 3}, [1.0, 2.0])
    assert difference(like, like).value == 0
    assert difference(like._replace(plain={"optimizer/a/step": 4}), like).value > 0.3
    assert difference(like._replace(losses=[1.0, 2.1]), like).where == "loss/1"


def rows(tmp_path: Path, name: str, *plans: str) -> list[runs.Row]:
    return list(runs.Bench(tmp_path).rows_of(ALL[name], plans))


@pytest.mark.long
def test_an_ordinary_script_is_equal(tmp_path) -> None:
    (row,) = rows(tmp_path, "ordinary:mlp", "1f1b")
    assert (row.equal, row.refused, row.silent) == (True, False, False)
    assert row.ran == "1 x 2 one_f_one_b"
    assert row.difference is not None
    assert row.difference < 1e-6


@pytest.mark.long
def test_data_that_ends_is_refused_in_words(tmp_path) -> None:
    (row,) = rows(tmp_path, "data:ends_too_early", "1f1b")
    assert (row.equal, row.refused, row.silent, row.unclean) == (False, True, False, False)
    assert "ended" in row.why


@pytest.mark.long
def test_a_run_that_differs_from_the_loop_is_silent(tmp_path, monkeypatch) -> None:
    def wrong(job, steps: int, *, delay: int = 0) -> Found:
        found = plain_loop(job, steps, delay=delay)
        found.tensors["weights/0.bias"][0] += 1e-3
        return found

    monkeypatch.setattr(runs, "plain_loop", wrong)
    (row,) = rows(tmp_path, "ordinary:mlp", "1f1b")
    assert (row.equal, row.refused, row.silent) == (False, False, True)
    assert row.why == "weights/0.bias"
    assert "1 unequal and silent: ordinary:mlp" in command.summary([row])


def test_a_command_that_never_ends_is_ended_and_no_refusal(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "LIMIT_S", 0.05)
    script = Script(ALL["ordinary:mlp"].path, "mlp", "", ("1f1b",))
    row = next(iter(runs.Bench(tmp_path).rows_of(script)))
    assert (row.equal, row.refused, row.silent) == (False, False, True)
    assert "still running" in row.why


def test_tensors_in_lists_of_an_optimizers_state_have_the_keys_of_a_checkpoint() -> None:
    """As `put_value` of the product takes a value apart."""

    class Listing(torch.optim.Optimizer):
        def __init__(self, weights) -> None:
            super().__init__(weights, {"lr": 0.1})

        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                state = self.state[weight]
                state["last"] = [*state.get("last", []), weight.grad.clone()]
                state["queue"] = deque([{"a": 1.0, "b": weight.grad.clone()}, 2])
                state["pair"] = (0.5, 3)

    job = replace(job_of(), optimizer=Listing)
    found = plain_loop(job, 2)
    name = next(iter(dict(job.model().named_parameters())))
    tensors, plain = {}, {}
    put_value(f"optimizer/{name}/queue", deque([{"a": 1.0, "b": torch.ones(1)}, 2]), tensors, plain)
    own = {k for k in found.tensors if k.startswith(f"optimizer/{name}/")}
    assert own == {f"optimizer/{name}/last/{n}" for n in (0, 1)} | tensors.keys()


def test_a_small_difference_is_rounding_where_moved_weights_make_as_much(tmp_path) -> None:
    script = next(s for s in scripts() if f"{s.about}:{s.name}" == "ordinary:mlp")
    bench = runs.Bench(tmp_path)
    loop = bench.loop(script, 3)
    assert not isinstance(loop, str)
    moved = bench.loop(script, 3, moved=ULP)
    assert not isinstance(moved, str)
    most = difference(moved, loop).value
    assert bench.is_rounding(most / 2, script, 3, loop)
    assert not bench.is_rounding(most * 1.01, script, 3, loop)
    assert not bench.is_rounding(1.0, script, 3, loop)


LOGGED = "Traceback (most recent call last):\n  File x.py, line 1\nRuntimeError: logged\n"


@pytest.mark.parametrize(
    ("code", "said", "is_refused"),
    [
        (1, "error: the job is refused\nhint: mend it\n", True),
        (1, f"W0101 torch: {LOGGED}error: the job is refused\nhint: mend it\n", True),
        (1, f"error: the job is refused\n{LOGGED}", False),
        (1, f"{LOGGED}said error: of no command\n", False),
        (0, "error: the job is refused\n", False),
        (None, "error: the job is refused\n", False),
    ],
)
def test_refusal_is_a_command_that_ends_with_an_error_in_words(code, said, is_refused) -> None:
    assert runs.is_refusal(runs.Ran(code, said)) is is_refused
