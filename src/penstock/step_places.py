"""Step places: tensors that a micro-batch hands on to the one at its place in the next step.

The micro-batches of a step have places 0, 1, ..., and each place has tensors of its own: the hidden
state of a recurrent net whose sequences go on from step to step, a memory, a count.  The loss reads
them and writes the next ones; no gradient goes through what is handed on (truncated
back-propagation through time).  As no place knows of another, replicas may divide a step's
micro-batches among them.

In the model they are buffers `carry.NAME`, with one row for each place.  So whatever has buffers
has them: checkpoints, stages, the proof.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from penstock.errors import JobError

CARRY = "carry"  # the submodule with the buffers
Data = Callable[[int], Iterator[Any]]
_HINT = 'give the values that a run begins with: carry={"hidden": torch.zeros(2, 8, 64)}'


class PlacedBatch(NamedTuple):
    """A micro-batch, and its place in the step: a tensor of one number; None: nothing is kept."""

    batch: Any
    place: Any


class PlacedValues(MutableMapping[str, Any]):
    """What the loss is given: the tensors of a micro-batch's place by name, to read and to replace.

    rows:   of all places, by name; where `place` is None the values of this micro-batch alone.
    """

    def __init__(self, rows: dict[str, Any], place: Any) -> None:
        self._rows = rows
        self._place = None if place is None else place.view(1)

    def __getitem__(self, name: str) -> Any:
        """Return the tensor that the micro-batch at this place left, one step before."""
        self._check(name)
        rows = self._rows[name]
        return rows if self._place is None else rows.index_select(0, self._place).squeeze(0)

    def __setitem__(self, name: str, value: Any) -> None:
        """Leave a tensor for the next step; it is detached.

        Raises:   JobError: it has another shape or dtype than the first one.
        """
        own = self[name]
        if not hasattr(value, "detach"):
            message = f'carry["{name}"] is set to the {type(value).__name__} {value!r}'
            raise JobError(message, hint="set it to a tensor of the shape that Job.carry gives it")
        if (value.shape, value.dtype) != (own.shape, own.dtype):
            told, first = (f"{list(each.shape)} of {each.dtype}" for each in (value, own))
            message = (
                f'carry["{name}"] is set to a tensor {told}, and Job.carry begins with {first}'
            )
            raise JobError(message, hint="keep shape and dtype: a sequence goes on as it begins")
        if self._place is None:
            self._rows[name] = value.detach()
        else:
            self._rows[name].index_copy_(0, self._place, value.detach().unsqueeze(0))

    def __delitem__(self, name: str) -> None:
        """Refuse: a place keeps all that Job.carry names."""
        raise JobError(f'carry["{name}"] is deleted', hint="set it to zeros instead")

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _check(self, name: str) -> None:
        if name not in self._rows:
            known = ", ".join(self._rows)
            message = f'Job.carry has no "{name}": it has {known}'
            raise JobError(message, hint="name it in Job.carry, with the value it begins with")


@dataclass(frozen=True)
class PlacedModel:
    """The model with a row for each place of a step of `per_step` micro-batches."""

    of: Callable[[], Any]
    start: Mapping[str, Any] = field(compare=False)
    per_step: int

    def __call__(self) -> Any:
        """Return the author's module, with one more submodule.

        Raises:   JobError: it has one of that name.
        """
        torch: Any = sys.modules["torch"]
        module = self.of()
        if hasattr(module, CARRY):
            message = f"the job's model has an attribute {CARRY}, where Job.carry puts its tensors"
            raise JobError(message, hint=f"give the model's {CARRY} another name")
        rows = torch.nn.Module()
        for name, value in self.start.items():
            row = torch.empty((self.per_step, *value.shape), dtype=value.dtype)
            rows.register_buffer(name, row.copy_(value.detach().expand(row.shape)))
        module.add_module(CARRY, rows)
        return module


@dataclass(frozen=True)
class PlacedLoss:
    """The loss of a micro-batch that has a place."""

    of: Callable[..., Any]
    start: Mapping[str, Any] = field(compare=False)

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return what the author's loss does, given what its place holds.

        Raises:   JobError: the batch has no place, or the model no rows.
        """
        if not isinstance(batch, PlacedBatch):
            message = "Job.carry numbers micro-batches, and the job was given other data afterwards"
            raise JobError(message, hint="make the job anew: Job(..., data=data, carry=carry)")
        if batch.place is None:
            device = next(iter(model.parameters())).device
            rows = {name: value.to(device) for name, value in self.start.items()}
        else:
            rows = dict(_rows_of(model).named_buffers())
        return self.of(model, batch.batch, PlacedValues(rows, batch.place))


def _rows_of(model: Any) -> Any:
    rows: Any = getattr(model, CARRY, None)
    if rows is None:
        message = "Job.carry is kept in the model, and the job was given another one afterwards"
        raise JobError(message, hint="make the job anew: Job(model, ..., carry=carry)")
    return rows


@dataclass(frozen=True)
class PlacedData:
    """Micro-batches with their places, of steps of `per_step` micro-batches each."""

    of: Data
    per_step: int

    def __call__(self, start: int) -> Iterator[PlacedBatch]:
        """Return the micro-batches from number `start` on."""
        return self._placed(itertools.count(start), self.of(start))

    def __getattr__(self, name: str) -> Any:
        """Return what gives the micro-batches of some numbers, where the author's data has that."""
        if name != "picked":
            raise AttributeError(name)
        picked: Callable[[Any], Iterator[Any]] = getattr(self.of, name)

        def placed_ones(reads: Any) -> Iterator[PlacedBatch]:
            return self._placed(reads.numbers(), picked(reads))

        return placed_ones

    def _placed(self, numbers: Iterator[int], source: Iterator[Any]) -> Iterator[PlacedBatch]:
        torch: Any = sys.modules["torch"]
        for number, batch in zip(numbers, source, strict=False):
            yield PlacedBatch(batch, torch.tensor(number % self.per_step))


def placed(
    model: Any, loss: Any, data: Any, start: Mapping[str, Any], per_step: int
) -> tuple[Any, Any, Any]:
    """Return model, loss and data of a job whose places hand tensors on.

    start:  the values that a run begins with, by name.
    """
    return PlacedModel(model, start, per_step), PlacedLoss(loss, start), PlacedData(data, per_step)


def unplaced(model: Any, loss: Any, data: Any) -> tuple[Any, Any, Any]:
    """Return model, loss and data as their author has them."""
    kinds = ((model, PlacedModel), (loss, PlacedLoss), (data, PlacedData))
    own_model, own_loss, own_data = (p.of if isinstance(p, kind) else p for p, kind in kinds)
    return own_model, own_loss, own_data


def check_carry(value: object) -> None:
    """Raise unless `value` is None or tensors by name.

    Raises:   JobError.
    """
    if value is None:
        return
    if not isinstance(value, Mapping) or not value:
        raise JobError(f"Job.carry is {value!r:.60}, not tensors by name", hint=_HINT)
    for name, tensor in cast("Mapping[object, object]", value).items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise JobError(f"Job.carry has the name {name!r:.60}, no identifier", hint=_HINT)
        if not hasattr(tensor, "detach") or getattr(tensor, "requires_grad", False):
            kind = "a tensor that learns" if hasattr(tensor, "detach") else repr(tensor)[:60]
            raise JobError(f'Job.carry["{name}"] is {kind}, not a plain tensor', hint=_HINT)
