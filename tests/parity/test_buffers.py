"""Buffers that forward writes are those of the plain loop, whatever replicas, copies and order.

The oracle is a loop of its own: eager autograd over all micro-batches of the run, in order.
Linear buffers are sums that the copies add in another order: in float64 their difference is the
rounding of at most 40 additions, 1e-14, and 1e-12 is asked for, as of weights.  Whole numbers and
what stands in the newest micro-batch are equal to the bit.
"""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from penstock.graph.trace import capture
from penstock.job import Job
from tests.parity.models import plan_of
from tests.parity.training import Run, difference, train

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


@pytest.fixture(scope="module")
def kept() -> Run:
    job = job_of(keeping)
    return Run(None, job, capture(job))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return plain_loop(keeping, STEPS, MICRO_BATCHES)


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
def test_carried_buffers_are_those_of_the_plain_loop(  # noqa: PLR0913
    schedule, stages, micro_batches, options, kept, expected, tmp_path
):
    plan = plan_of(kept.captured.graph, schedule, stages, micro_batches, **options)
    outcome = train(kept._replace(plan=plan), tmp_path, lengths=(STEPS,))
    assert_those(outcome.weights, expected)
