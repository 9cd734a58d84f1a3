"""Buffers that forward writes are those of the plain loop, whatever replicas, copies and order.

The oracle is a loop of its own: eager autograd over all micro-batches of the run, in order.
Linear buffers are sums that the copies add in another order: in float64 their difference is the
rounding of at most 40 additions, 1e-14, and 1e-12 is asked for, as of weights.  Whole numbers and
what stands in the newest micro-batch are equal to the bit.
"""

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from penstock.errors import PlanError
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan.lower_plan import lower_plan
from penstock.runtime.launch import run_processes
from penstock.schedule import Schedule
from tests.draws import examples
from tests.parity.models import plan_of
from tests.parity.training import Run, difference, differing, train
from tests.program.programs import random_schedule

WIDTH, STEPS, MICRO_BATCHES = 6, 4, 4


class Keeping(nn.Module):
    """A layer whose forward writes what nothing reads: averages, a sum, a count, the newest."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.register_buffer("total", torch.ones(WIDTH))
        self.register_buffer("newest", torch.zeros(WIDTH))
        self.register_buffer("teacher", self.layer.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.layer(x)))
        with torch.no_grad():
            self.seen += 3
            self.total += y.sum((0, 2))
            self.newest.copy_(y.mean((0, 2)))
            self.teacher.lerp_(self.layer.weight, 0.02)
        return x + y


def keeping() -> nn.Module:
    return nn.Sequential(*(Keeping(0.1 * (at + 1)) for at in range(8)), nn.Flatten())


class Codebook(nn.Module):
    """Vector quantisation whose codes are a moving average of what they stood for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.mean(2)
        nearest = F.one_hot(torch.cdist(flat, self.codes).argmin(1), 5).to(x.dtype)
        quantised = nearest @ self.codes
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(nearest.t() @ flat, alpha=0.1)
            self.codes.copy_(self.sums / self.sizes.unsqueeze(1))
        return x + (quantised - flat).detach().unsqueeze(2) * x


class Teacher(nn.Module):
    """A moving average of the weights, to whose output the student's is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 1)
        self.register_buffer("mean", self.layer.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(self.layer.weight, 0.1)
        return self.layer(x) + torch.conv1d(x, self.mean)


ORDERED: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: spectral_norm(nn.Conv1d(WIDTH, WIDTH, 1)),
    "codebook": Codebook,
    "teacher": Teacher,
}


def between(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with such a part among layers that keep something."""
    return nn.Sequential(Keeping(0.1), make(), Keeping(0.2), Keeping(0.1), nn.Flatten())


def data(start: int) -> Iterator[Tensor]:
    for index in count(start):
        yield torch.randn(3, WIDTH, 4, generator=torch.Generator().manual_seed(index)).double()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def job_of(make: Callable[[], nn.Module], **options: object) -> Job:
    return Job(lambda: make().double(), loss, data, sgd, micro_batches=MICRO_BATCHES, **options)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_loop(make: Callable[[], nn.Module], steps: int, micro_batches: int) -> dict[str, Tensor]:
    """Train in one process, one micro-batch after the other; return weights and buffers."""
    torch.manual_seed(0)
    model, batches = make().double(), data(0)
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            (loss(model, next(batches)) / micro_batches).backward()
        optimizer.step()
    weights = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    return weights | {f"buffers/{name}": value for name, value in model.named_buffers()}


@cache
def run_of(make: Callable[[], nn.Module]) -> Run:
    """Return a model's job and trace, without a plan."""
    job = job_of(make)
    return Run(None, job, capture(job))


@cache
def expected(make: Callable[[], nn.Module] = keeping) -> dict[str, Tensor]:
    return plain_loop(make, STEPS, MICRO_BATCHES)


def planned(schedule: str, stages: int, micro_batches: int, **options: object) -> Run:
    run = run_of(keeping)
    return run._replace(
        plan=plan_of(run.captured.graph, schedule, stages, micro_batches, **options)
    )


def assert_those(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    exact = [k for k in expected if k.endswith((".seen", "num_batches_tracked"))]
    assert exact == [k for k in expected if not expected[k].is_floating_point()]
    assert [k for k in exact if not torch.equal(found[k], expected[k])] == []
    assert difference(found, expected) < 1e-12


PLANS = (
    ("one_f_one_b", 1, 2, {"replicas": 2}),
    ("one_f_one_b", 1, 1, {"replicas": 4}),
    ("one_f_one_b", 2, 2, {"replicas": 2, "recompute": (True, True)}),
    ("interleaved", 4, 2, {"replicas": 2}),
    ("zb_h1", 2, 2, {"replicas": 2}),
    ("chimera", 4, 4, {}),
    ("chimera", 2, 1, {"replicas": 4}),  # one of the copies has nothing to do
    ("bitpipe", 8, 4, {"recompute": (True,) * 8}),
    ("dual_pipe", 4, 2, {"replicas": 2}),
    ("layer_pipe", 4, 4, {}),
)


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "options"), PLANS)
@pytest.mark.sampled(3)
def test_carried_buffers_are_those_of_the_plain_loop(
    schedule, stages, micro_batches, options, tmp_path
):
    run = planned(schedule, stages, micro_batches, **options)
    assert_those(train(run, tmp_path, lengths=(STEPS,)).weights, expected())


@pytest.mark.parametrize("run", [("zb_h1", 2, 2, 2), ("bitpipe", 4, 4, 1)])
def test_processes_carry_buffers_too(run, tmp_path):
    schedule, stages, micro_batches, replicas = run
    found = train(
        planned(schedule, stages, micro_batches, replicas=replicas),
        tmp_path,
        lengths=(STEPS,),
        launcher=run_processes,
        every=1,  # the sum is made four times
    )
    assert_those(found.weights, expected())


def test_one_copy_keeps_every_bit(tmp_path):
    found = train(planned("zb_h1", 4, 4, recompute=(True,) * 4), tmp_path, lengths=(STEPS,))
    assert differing(found.weights, expected()) == []


def test_a_run_goes_on_with_other_copies(tmp_path):
    first, second = planned("chimera", 4, 4), planned("one_f_one_b", 2, 2, replicas=2)
    train(first, tmp_path / "first", lengths=(2,))
    windows = tuple((lower_plan(second.plan, second.captured.graph), step) for step in (2, 3))
    done = tmp_path / "first" / "step-000002"
    found = train(second, tmp_path / "second", windows=windows, resume=done)
    assert_those(found.weights, expected())


def test_single_precision_differs_by_rounding(tmp_path):
    """Coefficients go down to 0.2, additions are few: 1e-6 is some ten roundings."""
    job = replace(
        job_of(keeping), model=keeping, data=lambda start: (x.float() for x in data(start))
    )
    captured = capture(job)
    plan = plan_of(captured.graph, "dual_pipe", 2, 2, replicas=2)
    found = train(Run(plan, job, captured), tmp_path, lengths=(STEPS,)).weights
    torch.manual_seed(0)
    model, batches, optimizer = keeping(), job.data(0), None
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (loss(model, next(batches)) / MICRO_BATCHES).backward()
        optimizer.step()
    assert difference(found, {f"buffers/{n}": b for n, b in model.named_buffers()}) < 1e-6


def test_late_weights_are_carried_like_new_ones(tmp_path):
    """2BW: forward and backward at W(t - 1), with the buffers as they are."""
    torch.manual_seed(0)
    model, batches = keeping().double(), data(0)
    newest, before = deepcopy(model), deepcopy(model)
    optimizer = sgd(newest.parameters())
    for _ in range(STEPS):
        for own, old in zip(model.parameters(), before.parameters(), strict=True):
            own.data.copy_(old)
        model.zero_grad()
        for _ in range(MICRO_BATCHES):
            (loss(model, next(batches)) / MICRO_BATCHES).backward()
        before.load_state_dict(newest.state_dict())
        for own, new in zip(model.parameters(), newest.parameters(), strict=True):
            new.grad = own.grad.clone()
        optimizer.step()
    run = planned("double_buffered", 2, 2, replicas=2)
    found = train(run, tmp_path, lengths=(2, 2)).weights
    assert_those(found, {f"buffers/{name}": value for name, value in model.named_buffers()})


@examples(5)
@given(
    num_stages=st.integers(1, 3),
    num_micro_batches=st.integers(1, 4),
    num_ranks=st.integers(1, 3),
    replicas=st.integers(1, 2),
    seed=st.integers(0, 999),
)
def test_any_order_and_any_copies_give_the_plain_buffers(
    num_stages, num_micro_batches, num_ranks, replicas, seed
):
    chance = random.Random(seed)
    schedule = random_schedule(
        chance, num_stages, num_micro_batches, num_ranks, fixed=False, backward=True
    )
    with TemporaryDirectory() as folder:
        found = trained_by(schedule, replicas, Path(folder))
    assert_those(found, plain_loop(keeping, 2, num_micro_batches * replicas))


def trained_by(schedule: Schedule, replicas: int, folder: Path) -> dict[str, Tensor]:
    run = run_of(keeping)
    sizes = schedule.num_stages, schedule.num_micro_batches
    plan = plan_of(run.captured.graph, schedule, *sizes, replicas=replicas)
    program = lower_plan(plan, run.captured.graph)
    return train(run._replace(plan=plan), folder, windows=((program, 0), (program, 1))).weights


# -- what only order tells -----------------------------------------------------------------------


def ordered(name: str) -> Callable[[], nn.Module]:
    return lambda: between(ORDERED[name])


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_buffers_of_one_copy_have_the_bits_of_the_plain_loop(name, tmp_path):
    job = job_of(ordered(name))
    captured = capture(job)
    weights = plain_loop(ordered(name), STEPS, MICRO_BATCHES)
    for schedule, recompute in (("one_f_one_b", False), ("zb_h1", True)):
        plan = plan_of(captured.graph, schedule, 2, MICRO_BATCHES, recompute=(recompute,) * 2)
        plan = plan.changed(buffers="one copy")
        found = train(Run(plan, job, captured), tmp_path / schedule, lengths=(STEPS,)).weights
        assert differing(found, weights) == []


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_buffers_are_refused_by_name_where_there_are_copies(name, tmp_path):
    job = job_of(ordered(name))
    captured = capture(job)
    graph = captured.graph
    plans = plan_of(graph, "gpipe", 1, 2, replicas=2), plan_of(graph, "chimera", 2, 4)
    for plan in plans:
        with pytest.raises(PlanError, match=r"buffer 1\.\S+ has to see every micro-batch in order"):
            train(Run(plan, job, captured), tmp_path, lengths=(1,))


def test_another_order_than_theirs_is_refused_for_ordered_buffers(tmp_path):
    orders = "rank 0  F0.1 F0.0 B0.1 B0.0"
    schedule = Schedule.parse(orders)
    job = job_of(ordered("teacher"))
    captured = capture(job)
    plan = plan_of(captured.graph, schedule, 1, 2)
    program = lower_plan(plan, captured.graph)
    with pytest.raises(PlanError, match="stage 0 takes them in another order"):
        train(Run(plan, job, captured), tmp_path, windows=((program, 0),))


# -- each replica its own ------------------------------------------------------------------------


def test_replicas_of_their_own_save_those_of_the_first(tmp_path):
    """At a rate of 0 each replica's buffers follow from its own micro-batches alone."""
    still = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "buffers": "per replica"}
    job = replace(job_of(keeping), **still)
    captured = run_of(keeping).captured
    plan = plan_of(captured.graph, "chimera", 2, 2, replicas=2)
    found = train(Run(plan, job, captured), tmp_path, lengths=(STEPS,)).weights
    torch.manual_seed(0)
    model, batches = keeping().double(), data(0)
    for number in range(STEPS * MICRO_BATCHES):
        batch = next(batches)
        if number % MICRO_BATCHES < MICRO_BATCHES // 2:
            model(batch)
    assert_those(found, {f"buffers/{name}": value for name, value in model.named_buffers()})


def test_ordered_buffers_may_be_each_replicas_own(tmp_path):
    job = job_of(ordered("codebook"), buffers="per replica")
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2, replicas=2)
    train(Run(plan, job, captured), tmp_path, lengths=(1,))
    copied = plan_of(captured.graph, "chimera", 2, 2, replicas=2)
    with pytest.raises(PlanError, match="buffer 1"):
        train(Run(copied, job, captured), tmp_path, lengths=(1,))
