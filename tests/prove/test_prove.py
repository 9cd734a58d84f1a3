"""The proof says equal where it is, and names what is not."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.graph.merge import merged
from penstock.graph.trace import capture
from penstock.plan import Plan, is_asynchronous, schedule_of
from penstock.prove import prove as proving
from penstock.prove import read_digest
from penstock.prove.compare import (
    Difference,
    compared,
    compared_gradients,
    compared_updates,
    compared_weights,
    in_widths,
)
from penstock.prove.plain import Plain
from penstock.prove.proof import Proof, proof_of
from penstock.prove.prove import Planned, prove, prove_eager, steps_to_prove
from penstock.runtime.launch import run_processes
from penstock.state.optimizer import optimizer_trial as optimizer_trial
from penstock.state.optimizer.updates import Updates
from penstock.typed import typed
from tests.parity import models
from tests.parity.models import TRAINING, captured, job_of, plan_of

EXACT = torch.float64
BITWISE = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")  # add gradients up in order


def case_of(name: str, plan: Plan, *, optimizer: str = "adamw", **options: object) -> Planned:
    return Planned(job_of(name, EXACT, optimizer, **options), captured(name, EXACT), plan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(len(TRAINING)))
def test_planned_steps_equal_the_plain_ones(number):
    schedule, name = TRAINING[number], ("dropout", "frozen", "frozen_start")[number % 3]
    case = case_of(name, plan_of(captured(name, EXACT).graph, schedule, 4, 3))
    late = is_asynchronous(case.plan)
    proof = prove(case, (0,) if late else (0, 3))
    assert proof.problem == ""
    groups = {d.what for d in proof.differences}
    assert groups >= ({"weights"} if late else {"data", "loss", "gradients", "update", "optimizer"})
    assert ("copies" in groups) == any(len(r) > 1 for r in schedule_of(case.plan).stage_ranks)
    assert [d for d in proof.differences if d.value > 1e-11] == []
    assert all(d.bitwise for d in proof.differences) or schedule not in BITWISE
    assert bool(proof.left_out) == late
    assert typed(Proof, proof.to_json()) == proof


def test_processes_prove_the_same_and_the_plain_loop_has_one_of_its_own():
    plan = plan_of(captured("tied", EXACT).graph, "zb_h1", 2, 4, replicas=2, clip=True)
    case = case_of("tied", plan, clip_norm=0.01)
    before = [value.clone() for value in case.captured.model.parameters()]
    proof = prove(case, (2, 7), launcher=run_processes)
    assert (proof.problem, proof.steps) == ("", (2, 7))
    assert {d.what for d in proof.differences} >= {"copies", "gradients", "update"}
    assert max(d.value for d in proof.differences) < 1e-11
    after = case.captured.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def shifted(start: int) -> Iterator[object]:
    """Micro-batches that do not go by their index: a reader that begins later gets the same."""
    return models.data(0)


def blind(weights):
    """Look across all parameters that it is given."""
    made = list(weights)

    class Blind(torch.optim.SGD):
        def step(self, closure=None):
            total = sum(float(p.grad.square().sum()) for p in made if p.grad is not None)
            for group in self.param_groups:
                group["lr"] = 0.1 / (1e-3 + total**0.5)
            return super().step(closure)

    return Blind(made, lr=0.1)


def growing():
    calls = count(1)
    return lambda model, batch: models.loss(model, batch) * next(calls)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": shifted}, "micro-batch"),
        ({"optimizer": blind}, "the update of"),
        ({"loss": growing()}, "the loss differs"),
        ({"seed": 4}, "the gradient of"),
    ],
)
@pytest.mark.sampled(2)
def test_what_differs_is_named(change, named, monkeypatch):
    monkeypatch.setattr(optimizer_trial, "_TRIALS", {"divided": lambda trial: None})
    plan = plan_of(captured("gpt", EXACT).graph, "one_f_one_b", 2, 2, replicas=2)
    case = case_of("gpt", plan)
    proof = prove(replace(case, job=replace(case.job, **change)), (0, 3))
    assert named in proof.problem
    assert str(proof) == proof.problem


def test_a_buffer_that_another_copy_has_written_is_named():
    made = captured("batch_norm", EXACT)
    plan = plan_of(made.graph, "one_f_one_b", 2, 2)
    case = case_of("batch_norm", plan)
    assert prove(case).problem == ""

    def model() -> nn.Module:
        built = models.MODELS["batch_norm"]().to(EXACT)
        built.norms[5].momentum = 0.2
        return built

    problem = prove(replace(case, job=replace(case.job, model=model))).problem
    assert problem.startswith("the buffer norms.5.running_")


@pytest.mark.parametrize(
    ("schedule", "stages", "options"), [("chimera", 4, {}), ("zb_h1", 2, {"replicas": 2})]
)
def test_buffers_that_copies_carry_are_proved(schedule, stages, options):
    plan = plan_of(captured("batch_norm", EXACT).graph, schedule, stages, 4, **options)
    proof = prove(case_of("batch_norm", plan), (0, 5))
    assert proof.problem == ""
    assert [d.value < 1e-12 for d in proof.differences if d.what == "buffers"] == [True]
    own = plan.changed(buffers="per replica")
    open_choice = prove(case_of("batch_norm", own, buffers="per replica"), (0, 5))
    assert "buffers" not in {d.what for d in open_choice.differences}
    assert any(text.startswith("buffers: each replica") for text in open_choice.left_out)


def test_what_hooks_of_the_optimizer_do_to_gradients_and_buffers_is_done_once():
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built.append(models.MODELS["batch_norm"]().to(EXACT))
        built[-1].register_buffer("tau", torch.ones((), dtype=EXACT))
        return built[-1]

    def halve(made, *_: object) -> None:
        for p in made.param_groups[0]["params"]:
            p.grad.div_(2)
        built[-1].tau.mul_(2)

    def optimizer(weights):
        made = torch.optim.SGD(weights, lr=0.1)
        made.register_step_pre_hook(halve)
        return made

    job = replace(
        job_of("batch_norm", EXACT, "sgd", micro_batches=4), model=model, optimizer=optimizer
    )
    made = capture(job)
    plan = plan_of(made.graph, "one_f_one_b", 1, 4)
    assert prove(Planned(job, made, plan), (0, 5)).problem == ""
    assert prove_eager(job, 2, (0, 5), launcher=run_processes).problem == ""


def test_state_of_an_optimizer_inside_another_is_compared():
    class Outer(torch.optim.Optimizer):
        def __init__(self, weights) -> None:
            super().__init__(weights, {"lr": 0.1})
            self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

        def step(self, closure=None):
            self.inner.step()

    plan = plan_of(captured("gpt", EXACT).graph, "one_f_one_b", 2, 2)
    case = case_of("gpt", plan)
    proof = prove(replace(case, job=replace(case.job, optimizer=Outer)), (0, 5))
    assert proof.problem == ""


def parts_only(monkeypatch):
    """Let memory be short of six copies, and not of three."""
    monkeypatch.setattr(proving, "_short_of", lambda made, copies: "no room" if copies > 3 else "")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", ["tied", "frozen"])
@pytest.mark.sampled(2)
def test_one_parameter_after_the_other_is_compared_alike(name, optimizer, monkeypatch):
    plan = plan_of(captured(name, EXACT).graph, "zb_h1", 2, 4, replicas=2, clip=True)
    case = case_of(name, plan, optimizer=optimizer, clip_norm=0.01)
    whole = prove(case, (2, 7))
    parts_only(monkeypatch)
    assert proving.lacks_memory(case) == ""
    parts = prove(case, (2, 7))
    assert (parts.problem, parts.left_out) == ("", ())
    assert {d.what for d in parts.differences} == {d.what for d in whole.differences}
    for one, other in zip(parts.differences, whole.differences, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": shifted}, "micro-batch"),
        ({"loss": growing()}, "the loss differs"),
        ({"seed": 4}, "the gradient of"),
        ({}, "the update of"),
    ],
)
@pytest.mark.sampled(2)
def test_what_differs_is_named_by_parts_too(change, named, monkeypatch):
    parts_only(monkeypatch)
    if not change:
        right = Updates.step
        more = lambda self, number, given, factor=1.0: right(self, number, given, 1.01)  # noqa: E731
        monkeypatch.setattr(Updates, "step", more)
    plan = plan_of(captured("gpt", EXACT).graph, "one_f_one_b", 2, 2, replicas=2)
    case = case_of("gpt", plan)
    proof = prove(replace(case, job=replace(case.job, **change)), (0, 3))
    assert named in proof.problem


def test_an_optimizer_that_may_look_across_is_left_out_by_parts(monkeypatch):
    parts_only(monkeypatch)
    monkeypatch.setattr(optimizer_trial, "_TRIALS", {"divided": lambda trial: None})
    plan = plan_of(captured("tied", EXACT).graph, "gpipe", 2, 4)
    case = case_of("tied", plan)
    proof = prove(replace(case, job=replace(case.job, optimizer=blind)), (0, 3))
    assert proof.problem == ""
    assert any("updates" in words for words in proof.left_out)
    assert "update" not in {d.what for d in proof.differences}


def test_a_later_step_goes_on_from_a_checkpoint(tmp_path):
    from tests.parity.training import Run, train

    plan = plan_of(captured("dropout", EXACT).graph, "one_f_one_b", 2, 2)
    case = case_of("dropout", plan)
    train(Run(plan, case.job, case.captured), tmp_path, (2,))
    proof = prove(case, (2, 4), resume=tmp_path / "step-000002")
    assert proof.problem == ""
    assert all(d.bitwise for d in proof.differences)


@pytest.mark.parametrize("name", ["tied", "frozen"])
def test_eager_replicas_are_proved_too(name):
    job = job_of(name, EXACT, "adamw", clip_norm=0.1, micro_batches=4)
    proof = prove_eager(job, 2, (0, 3), launcher=run_processes)
    assert proof.problem == ""
    assert "copies" in {d.what for d in proof.differences}
    problem = prove_eager(replace(job, data=shifted), 2, (0,), launcher=run_processes).problem
    assert "micro-batch" in problem


def test_digests_tell_dtype_shape_and_every_byte():
    x = torch.arange(6.0)
    others = (x.view(2, 3), x.double(), x + 1e-6, x.flip(0), x.to(torch.bfloat16), 3)
    assert len({read_digest.digest_of([each]) for each in (x, *others)}) == 7
    assert read_digest.digest_of([x.view(2, 3).T]) == read_digest.digest_of(
        [x.view(2, 3).T.contiguous()]
    )


@pytest.mark.parametrize("schedule", ["one_f_one_b", "double_buffered"])
def test_joined_micro_batches_are_those_of_the_plain_loop(schedule):
    from penstock.graph.merge import merged
    from penstock.graph.trace import capture

    job = job_of("gpt", EXACT, micro_batches=4)
    made = capture(merged(job, 2))
    plan = plan_of(made.graph, schedule, 2, 2).changed(joined=2)
    proof = prove(Planned(job, made, plan))
    assert proof.problem == ""
    assert proof.differences[0].what == "data"


class Drops(nn.Module):
    """Layers with dropout, or without."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), self.share)
        return x.square().mean()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_plain_loop_looks_at_each_op_where_the_step_draws(share):
    def data(start: int) -> Iterator[torch.Tensor]:
        for number in count(start):
            yield torch.randn(2, 4, generator=torch.Generator().manual_seed(number))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    def optimizer(weights) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=0.1)

    job = ps.Job(lambda: Drops(share), loss, data, optimizer, micro_batches=2)
    made = capture(job)
    planned = Planned(job, made, plan_of(made.graph, "one_f_one_b", 1, 1, replicas=2))
    assert proving.case_of(planned, (0,)).draws == (share > 0)
    assert prove(planned, (0, 1)).problem == ""
    first, second = (Plain(job, draws=draws).gradients(0).gradients for draws in (True, False))
    same = all(torch.equal(first[name], second[name]) for name in first)
    assert same == (share == 0)


def test_steps_are_apart_and_within_the_run():
    assert steps_to_prove(0, 100) == (0, 5)
    assert steps_to_prove(7, 10) == (7, 9)
    assert steps_to_prove(9, 10) == (9,)
    assert steps_to_prove(0, 100, 3) == (0, 5, 10)


def test_plain_is_the_ten_line_loop():
    job = job_of("tied", EXACT, "adam", clip_norm=0.1, learning_rate=lambda step: 1 / (step + 1))
    expected = models.plain_loop(replace(job, learning_rate=None), 1, 4)
    plain = Plain(replace(job, micro_batches=4))
    made = plain.gradients(0)
    plain.update(0, made.gradients)
    assert made.loss == expected.losses[0]
    wanted = {k.removeprefix("weights/"): v for k, v in expected.weights.items() if "weights/" in k}
    assert all(torch.equal(plain.weights()[k], v) for k, v in wanted.items())


NAN = math.nan


@pytest.mark.parametrize(
    ("found", "expected", "value"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
        ([1e-3], [0.0], 1e-3),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([NAN, 2.0], [1.0, 2.0], math.inf),
        ([1.0], [NAN], math.inf),
        ([1.0, 1.0], [1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 2.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_difference_is_relative_to_the_greatest_number(found, expected, value):
    worse, fine = {"x": torch.tensor(found)}, {"y": torch.ones(1)}
    right = {"x": torch.tensor(expected), "y": torch.ones(1) + 1e-6}
    difference = compared("a", worse | fine, right)
    assert difference.value == pytest.approx(value if value else 1e-6, rel=1e-1)
    assert difference.where == ("x" if value else "y")
    assert not difference.bitwise


def test_a_weight_that_is_zero_but_for_rounding_has_no_digit_to_compare():
    """Its error counts beside a thousandth of the greatest weight; another's beside its own."""
    right = {"w": torch.tensor([2.0]), "bias": torch.tensor([1e-9]), "small": torch.tensor([0.1])}
    noise = compared_weights(right | {"bias": torch.tensor([3e-9])}, right)
    assert (noise.where, noise.value) == ("bias", pytest.approx(1e-6, rel=1e-3))
    wrong = compared_weights(right | {"small": torch.tensor([0.11])}, right)
    assert (wrong.where, wrong.value) == ("small", pytest.approx(0.1, rel=1e-3))


def test_imaginary_parts_are_compared():
    one = torch.tensor([1 + 1j, 2 - 4j])
    assert compared("weights", {"w": one}, {"w": one.real + 0j}).value == pytest.approx(2.0)
    assert compared_updates({"w": one}, {"w": one.real + 0j}, {"w": 0 * one}).value > 1


def test_what_is_on_one_side_only_is_noticed():
    a, both = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    for found, expected in ((a, both), (both, a)):
        assert compared("buffers", found, expected).where == "b"
        assert compared("buffers", found, expected).value == math.inf
        assert compared_gradients(found, expected).value >= 1.0
    zero = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert compared_gradients(a, zero).bitwise  # no gradient is one of zeros


@pytest.mark.parametrize(
    ("found", "right"), [(1.0, NAN), (1.0, math.inf), (NAN, 1.0), (math.inf, 1.0), (2.0, NAN)]
)
def test_what_is_no_number_on_one_side_is_infinitely_far_apart(found, right):
    one, other = {"w": torch.tensor([found, 0.5])}, {"w": torch.tensor([right, 0.5])}
    for row in (
        compared_updates(one, other, {"w": torch.ones(2)}),
        compared("weights", one, other),
    ):
        assert (row.value, row.where) == (math.inf, "w")


def test_a_difference_that_is_no_number_is_a_problem():
    job = job_of("dropout", EXACT, "sgd")
    for value in (NAN, math.inf, 1.0):
        row = Difference("weights", "w", value, bitwise=False)
        assert proof_of(job, (0,), (row,), (), 0.0).problem.startswith("the weight w")


def test_tensors_of_16_bits_are_compared_by_themselves():
    """What rounding takes of them does not hide what is wrong with a wider one, or excuse it."""
    right = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.ones(2)}
    found = right | {"a": right["a"] + 1e-3, "b": right["b"] + 2**-7}
    wide, narrow = in_widths(partial(compared, "buffers"), found, right)
    assert (wide.where, wide.narrow, narrow.where, narrow.narrow) == ("a", False, "b", True)
    job = job_of("dropout", EXACT, "sgd")
    proof = proof_of(job, (0,), (narrow, wide), (), 0.0)
    assert proof.problem == "the buffer a differs by 0.001"
    assert len(proof.differences) == 2
    assert str(proof_of(job, (0,), (narrow,), (), 0.0)).endswith("buffers in 16 bits 7.8e-03")
    gone = list(in_widths(partial(compared, "buffers"), {"a": right["a"]}, right))
    assert [(row.where, row.value) for row in gone] == [("c", math.inf), ("b", math.inf)]


def narrow_model(*, head: torch.dtype = torch.bfloat16) -> nn.Module:
    layers = [nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)]
    return nn.Sequential(*layers).bfloat16().append(nn.Linear(8, 4).to(head))


def narrow_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    *body, head = model.children()
    hidden = nn.Sequential(*body)(x.bfloat16()).to(head.weight.dtype)
    return head(hidden).square().mean()


def narrow_job(micro_batches: int, head: torch.dtype = torch.bfloat16) -> ps.Job:
    return ps.Job(
        partial(narrow_model, head=head),
        narrow_loss,
        lambda start: (torch.randn(4, 8, generator=seeded(i)) for i in count(start)),
        lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        micro_batches=micro_batches,
    )


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize(
    ("total", "joined", "replicas", "head"),
    [
        (8, 4, 2, torch.bfloat16),
        (64, 32, 2, torch.bfloat16),
        (8, 1, 2, torch.float32),
        (8, 2, 1, torch.float32),
    ],
)
def test_weights_of_16_bits_are_proved(total, joined, replicas, head):
    """Sums over ranks, or of joined micro-batches, round otherwise than the plain loop's."""
    job = narrow_job(total, head)
    captured = capture(merged(job, joined))
    graph = captured.graph
    plan = plan_of(graph, "one_f_one_b", 1, total // joined // replicas, replicas=replicas)
    assert prove(Planned(job, captured, plan.changed(joined=joined)), (0, 2)).problem == ""


def test_a_step_of_16_bits_that_is_another_one_is_named():
    job = narrow_job(8)
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 1, 4, replicas=2)
    wrong = replace(job, loss=lambda model, x: 1.1 * narrow_loss(model, x))
    problem = prove(Planned(wrong, captured, plan), (0,)).problem
    assert "the loss" in problem
    assert "the gradient of" in problem


def test_gradients_that_are_zero_but_for_rounding_do_not_count():
    found = {"a": torch.tensor([1.0]), "b": torch.tensor([2e-9])}
    expected = {"a": torch.tensor([1.0]), "b": torch.tensor([1e-9])}
    assert compared_gradients(found, expected).value == pytest.approx(1e-6, rel=1e-3)


def test_updates_are_measured_by_what_they_change():
    before, right = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0 - 1e-4])}
    half = {"w": torch.tensor([1.0 - 5e-5])}
    assert compared_updates(half, right, before).value == pytest.approx(0.5, rel=1e-2)
    assert compared_updates(right, right, before).bitwise
    rounded = {"w": right["w"] + 6e-8}
    found = compared_updates(rounded, right, before)
    assert (found.bitwise, found.value) == (False, 0.0)
