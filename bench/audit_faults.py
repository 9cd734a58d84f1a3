"""Thirty faults that begin in the middle of a run, and the job that is trained with them.

A fault is a wrong line of the runtime from a step on, made where ranks are forked; the plain loop
does not have it.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.job import Job
from penstock.runtime.rank import Rank
from penstock.runtime.reader import Reader
from penstock.state.weights import StageWeights

MICRO_BATCHES = 4
Step = Callable[[StageWeights, int, float], None]
Change = Callable[[StageWeights, int, Step, float], None]  # number of the step, the right step


class Fault(NamedTuple):
    """Something wrong from a step on.

    plant:  while it is open, ranks that are forked have it.
    """

    name: str
    plant: Callable[[int], Any]


def model() -> nn.Module:
    """Return an MLP of some two milliseconds a step, with dropout."""
    rows = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*rows, nn.Linear(64, 8))


def data(start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield samples of a noisy linear map."""
    for number in count(start):
        drawn = torch.Generator().manual_seed(number)
        x = torch.randn(16, 64, generator=drawn)
        yield x, x[:, :8] + 0.1 * torch.randn(16, 8, generator=drawn)


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the squared error."""
    return (module(batch[0]) - batch[1]).square().mean()


def job() -> Job:
    """Return the job that faults are planted in."""
    return Job(
        model,
        loss,
        data,
        lambda weights: torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1),
        micro_batches=MICRO_BATCHES,
        clip_norm=1.0,
        learning_rate=lambda step: 1 / (1 + step / 50),
    )


# -- faults of an update --------------------------------------------------------------------------


def _update(change: Change, *, steps: int | None = None) -> Callable[[int], Any]:
    """Return what plants a change of updates, from a step on, of so many steps."""

    @contextmanager
    def plant(first: int) -> Generator[None]:
        right = StageWeights.step

        def step(self: StageWeights, number: int, factor: float = 1.0) -> None:
            is_wrong = number >= first and (steps is None or number < first + steps)
            if is_wrong:
                change(self, number, right, factor)
            else:
                right(self, number, factor)

        StageWeights.step = step
        try:
            yield
        finally:
            StageWeights.step = right

    return plant


def _gradient(change: Callable[[Sequence[Tensor]], None]) -> Callable[[int], Any]:
    def wrong(weights: StageWeights, number: int, right: Step, factor: float) -> None:
        change(list(weights.given.values()))
        right(weights, number, factor)

    return _update(wrong)


def _after(change: Callable[[Sequence[Tensor]], None]) -> Callable[[int], Any]:
    def wrong(weights: StageWeights, number: int, right: Step, factor: float) -> None:
        right(weights, number, factor)
        change([value.detach() for value in weights.updated.values()])

    return _update(wrong)


def _group(**options: Any) -> Callable[[int], Any]:
    def wrong(weights: StageWeights, number: int, right: Step, factor: float) -> None:
        assert weights.optimizer is not None, "it trains something"
        for group in weights.optimizer.param_groups:
            group.update(options)
        right(weights, number, factor)

    return _update(wrong)


def _state(key: str, by: float) -> Callable[[int], Any]:
    def wrong(weights: StageWeights, number: int, right: Step, factor: float) -> None:
        assert weights.optimizer is not None, "it trains something"
        for held in weights.optimizer.state.values():
            held[key].mul_(by)
        right(weights, number, factor)

    return _update(wrong)


def _all(by: Callable[[Tensor], object]) -> Callable[[Sequence[Tensor]], None]:
    def change(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            by(tensor)

    return change


def _stale() -> Callable[[int], Any]:
    before: dict[int, list[Tensor]] = {}

    def wrong(weights: StageWeights, number: int, right: Step, factor: float) -> None:
        now = [gradient.clone() for gradient in weights.given.values()]
        for gradient, old in zip(weights.given.values(), before.get(id(weights), now), strict=True):
            gradient.copy_(old)
        before[id(weights)] = now
        right(weights, number, factor)

    return _update(wrong)


def _kept_back(weights: StageWeights, number: int, right: Step, factor: float) -> None:
    first = next(iter(weights.updated.values()))
    before = first.detach().clone()
    right(weights, number, factor)
    first.detach().copy_(before)
    weights.renew_reads()


def _twice(weights: StageWeights, number: int, right: Step, factor: float) -> None:
    right(weights, number, factor)
    right(weights, number, factor)


def _swap_rows(tensors: Sequence[Tensor]) -> None:
    tensors[0].copy_(tensors[0].flip(0))


def _transpose(tensors: Sequence[Tensor]) -> None:
    square = next((t for t in tensors if t.dim() == 2 and t.shape[0] == t.shape[1]), None)
    if square is not None:
        square.copy_(square.T.clone())


def _noise(tensor: Tensor) -> None:
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    tensor.add_(1e-3 * tensor.abs().max() * drawn)


def _flip(tensors: Sequence[Tensor]) -> None:
    bits = tensors[0].view(-1)[:1].view(torch.int32)
    bits.bitwise_xor_(1 << 21)


# -- faults of what ranks read and draw -----------------------------------------------------------


def _read(change: Callable[[Any], Any]) -> Callable[[int], Any]:
    @contextmanager
    def plant(first: int) -> Generator[None]:
        right = Reader.read

        def read(self: Reader, reads: Any, fitting: Callable[[Any], Any]) -> Any:
            found, number = right(self, reads, fitting), reads.first + reads.places[reads.at]
            return change(found) if number >= first * MICRO_BATCHES else found

        Reader.read = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            Reader.read = right  # type: ignore[method-assign]

    return plant


def _row_lost(leaves: Any) -> Any:
    leaves[0][0] = 0
    return leaves


def _same_targets(leaves: Any) -> Any:
    leaves[1][:] = leaves[1].flip(0)
    return leaves


@contextmanager
def _other_seed(first: int) -> Generator[None]:
    right = Rank.seed

    def seed(self: Rank, micro_batch: int) -> int:
        return right(self, micro_batch) + (self.progress.first_step >= first)

    Rank.seed = seed
    try:
        yield
    finally:
        Rank.seed = right


FAULTS = (
    Fault("gradients 1 % too large", _gradient(_all(lambda g: g.mul_(1.01)))),
    Fault("one gradient 0.1 % too large", _gradient(lambda gs: gs[0].mul_(1.001))),
    Fault("one parameter has no gradient", _gradient(lambda gs: gs[0].zero_())),
    Fault("the last parameter has no gradient", _gradient(lambda gs: gs[-1].zero_())),
    Fault("one gradient has the other sign", _gradient(lambda gs: gs[0].neg_())),
    Fault("gradients in bfloat16", _gradient(_all(lambda g: g.copy_(g.bfloat16())))),
    Fault("gradients with noise of 0.1 %", _gradient(_all(_noise))),
    Fault("half of a sum is lost", _gradient(_all(lambda g: g.mul_(0.5)))),
    Fault("rows of a gradient in another order", _gradient(_swap_rows)),
    Fault("a square gradient is transposed", _gradient(_transpose)),
    Fault("one element of a gradient is lost", _gradient(lambda gs: gs[0].view(-1)[0].zero_())),
    Fault("gradients of the step before", _stale()),
    Fault("updates by the sign", _gradient(_all(lambda g: g.sign_()))),
    Fault("no update", _update(lambda weights, number, right, factor: None)),
    Fault("each update twice", _update(_twice)),
    Fault("one parameter keeps its value", _update(_kept_back)),
    Fault("a rate 1 % too high", _update(lambda w, n, right, f: right(w, n, 1.01 * f))),
    Fault("the rate of the first step", _update(lambda w, n, right, f: right(w, 0, f))),
    Fault("the rate of a step later", _update(lambda w, n, right, f: right(w, n + 1, f))),
    Fault("no weight decay", _group(weight_decay=0.0)),
    Fault("another beta", _group(betas=(0.9, 0.99))),
    Fault("another eps", _group(eps=1e-5)),
    Fault("momentum is forgotten", _state("exp_avg", 0.0)),
    Fault("second moments are halved", _state("exp_avg_sq", 0.5)),
    Fault("a bit of a weight flips after each update", _after(_flip)),
    Fault("weights in bfloat16", _after(_all(lambda w: w.copy_(w.bfloat16())))),
    Fault("weights shrink by 0.01 %", _after(_all(lambda w: w.mul_(0.9999)))),
    Fault("the first sample of each micro-batch is zero", _read(_row_lost)),
    Fault("targets of other samples", _read(_same_targets)),
    Fault("dropout of another micro-batch", _other_seed),
)
