"""Weighted: a step's mean over micro-batches that count by what their author says, as by tokens.

    loss of a step = sum of weight_i * loss_i / sum of weight_i

Where a loss is a mean over the tokens of its micro-batch, and weight_i is their number, that is the
mean over the tokens of the whole step, and so is its gradient: the one of one large batch.  A plan
has means over micro-batches, so each loss is multiplied by `factor_i` = weight_i / mean weight of
its step.  Whoever reads a micro-batch therefore reads all of its step.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from penstock.errors import JobError

Loss = Callable[[Any, Any], Any]
Data = Callable[[int], Iterator[Any]]
Weight = Callable[[Any], Any]
_HINT = 'return how much it counts: weight=lambda batch: (batch["labels"] != -100).sum()'


class WeightedBatch(NamedTuple):
    """A micro-batch, and what its loss is multiplied by: a tensor of one number."""

    batch: Any
    factor: Any


@dataclass(frozen=True)
class WeightedLoss:
    """The loss of a weighted micro-batch."""

    of: Loss

    def __call__(self, model: Any, batch: Any, *carry: Any) -> Any:
        """Return loss and figures of the author's, times the factor.

        Raises:   JobError: the batch has none.
        """
        if not isinstance(batch, WeightedBatch):
            message = "Job.weight weighs micro-batches, and the job was given other data afterwards"
            raise JobError(message, hint="make the job anew: Job(..., data=data, weight=weight)")
        told = self.of(model, batch.batch, *carry)
        pair = cast("tuple[Any, ...]", told) if isinstance(told, tuple) else ()
        if len(pair) == 2 and isinstance(pair[1], Mapping):
            given = cast("Mapping[str, Any]", pair[1])
            figures = {name: value * batch.factor for name, value in given.items()}
            return _times(pair[0], batch.factor), figures
        return _times(told, batch.factor)


def _times(loss: Any, factor: Any) -> Any:
    """Return a loss times the factor, in its own dtype; what is no tensor stays, to be refused."""
    return loss * factor.to(loss.dtype) if hasattr(loss, "backward") else loss


@dataclass(frozen=True)
class WeightedData:
    """Micro-batches with their factors, of steps of `per_step` micro-batches each."""

    of: Data
    weight: Weight
    per_step: int

    def __call__(self, start: int) -> Iterator[WeightedBatch]:
        """Return the micro-batches from number `start` on."""
        return self._numbered(_from(start))

    def picked(self, reads: Any) -> Iterator[WeightedBatch]:
        """Return the micro-batches of these numbers, in this order."""
        return self._numbered(reads.numbers())

    def _numbered(self, numbers: Iterator[int]) -> Iterator[WeightedBatch]:
        source: Iterator[Any] = iter(())
        held, rows = -2, list[WeightedBatch]()
        for number in numbers:
            step, place = divmod(number, self.per_step)
            if step != held:
                if step != held + 1:
                    source = iter(self.of(step * self.per_step))
                held, rows = step, self._step(source, step)
            if place >= len(rows):
                return
            yield rows[place]

    def _step(self, source: Iterator[Any], step: int) -> list[WeightedBatch]:
        """Read a step; what is read may be in memory into which the next one is read, too.

        Raises:   JobError: the weights of a step cannot be.
        """
        batches: list[Any] = []
        weights: list[float] = []
        for batch in source:
            number = step * self.per_step + len(batches)
            batches.append(batch if self.per_step == 1 else copy.deepcopy(batch))
            weights.append(weight_of(self.weight, batch, number))
            if len(batches) == self.per_step:
                break
        total = sum(weights)
        if batches and not total:
            message = f"Job.weight gives 0 for every micro-batch of step {step}"
            raise JobError(message, hint="leave out micro-batches that count for nothing")
        factors = (weight * len(weights) / total for weight in weights)
        return [
            WeightedBatch(b, number_as_tensor(f)) for b, f in zip(batches, factors, strict=True)
        ]


def _from(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1


def number_as_tensor(number: float) -> Any:
    """Return a tensor of one number; who has micro-batches has torch."""
    torch: Any = sys.modules["torch"]
    return torch.tensor(number, dtype=torch.float64)


def weight_of(weight: Weight, batch: Any, number: int) -> float:
    """Return the weight of a micro-batch.

    Raises:   JobError: the job's function gives none.
    """
    given = weight(batch)
    try:
        value = float(given)
    except (TypeError, ValueError, RuntimeError) as problem:
        message = f"Job.weight gives a {type(given).__name__} for micro-batch {number}: {problem}"
        raise JobError(message, hint=_HINT) from problem
    if not (math.isfinite(value) and value >= 0):
        raise JobError(f"Job.weight gives {value} for micro-batch {number}", hint=_HINT)
    return value


def weighted(loss: Any, data: Any, weight: Weight | None, per_step: int) -> tuple[Any, Any]:
    """Return loss and data of a job that weighs micro-batches, or of one that does not any more.

    What is weighted already stays so; data that others have made of it is left alone.
    """
    if weight is None:
        own = data.of if isinstance(data, WeightedData) else data
        return (loss.of, own) if isinstance(loss, WeightedLoss) else (loss, own)
    if isinstance(data, WeightedData):
        data = WeightedData(data.of, weight, per_step)
    elif not isinstance(loss, WeightedLoss):
        data = WeightedData(data, weight, per_step)
    return loss if isinstance(loss, WeightedLoss) else WeightedLoss(loss), data
