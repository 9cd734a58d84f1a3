"""Number tensors: floats and whole numbers of a batch that the loss reads, as inputs of a plan.

A traced step keeps a number of Python as it was in the first micro-batch.  Where it is another one
later - a temperature, a noise level, how many of something there are - and the loss only computes
with it, the loss makes the same of a tensor of one number.  Whether it does is tried on the first
micro-batches: a loss that asks for the type, or whose result is rounded otherwise, keeps numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.batches.reads import Data, ReadNumbers, read, started
from penstock.errors import PenstockError
from penstock.graph.contents import flatten, rebuilt
from penstock.graph.trace import build_model, loss_of, on_device
from penstock.job import Batch, Job
from penstock.processes.child import Beat, can_fork, in_a_fork
from penstock.weighted import WeightedData

_LOOKED_AT, _TRIED = 100, 3  # micro-batches
_SILENT_S = 10.0  # until one of them comes
_ROUNDING = 64  # units in the last place of the largest number


@final
@dataclass(frozen=True, slots=True, eq=False)
class NumberTensors:
    """Micro-batches of other data, in which the leaves at some places are tensors of one number."""

    of: Data
    places: tuple[int, ...]

    def __call__(self, start: int) -> Iterator[Batch]:
        return map(self.made_of, started(self.of, start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Return the micro-batches of these numbers, in this order."""
        return map(self.made_of, read(self.of, reads))

    def made_of(self, batch: Batch) -> Batch:
        """Return a micro-batch with tensors for its numbers; other leaves are the very same."""
        leaves, spec = flatten(batch)
        for at in self.places:
            if type(leaves[at]) in (int, float):
                leaves[at] = torch.tensor(leaves[at])
        return rebuilt(leaves, spec)


def with_number_tensors(job: Job) -> Job | None:
    """Return a job with tensors for the numbers of its batches that change; None: none do, or its
    loss makes something else of them.
    """
    if not can_fork():
        return None
    try:
        places = in_a_fork(lambda beat: _places_of(job, beat), _SILENT_S)
    except PenstockError:  # the job fails, with tensors or without
        return None
    return with_tensors_at(job, places) if places else None


def with_tensors_at(job: Job, places: Sequence[int]) -> Job:
    """Return a job with tensors for the leaves at these places, which are numbers."""
    own = job.data
    if isinstance(own, WeightedData):
        return replace(job, data=replace(own, of=NumberTensors(own.of, tuple(places))))
    return replace(job, data=NumberTensors(own, tuple(places)))


def _places_of(job: Job, beat: Beat) -> list[int]:
    """Return the places of the numbers that change, if tensors may stand there."""
    own = job.data.of if isinstance(job.data, WeightedData) else job.data
    first, unlike = list[Any](), set[int]()
    for batch in islice(started(own, 0), _LOOKED_AT):
        leaves, _ = flatten(batch)
        first = first or leaves
        if len(leaves) != len(first):
            return []
        pairs = enumerate(zip(first, leaves, strict=True))
        unlike |= {at for at, (one, two) in pairs if _is_number(one, two) and one != two}
        beat()
    places = sorted(unlike)
    return places if places and _is_alike(job, with_tensors_at(job, places)) else []


def _is_number(*leaves: object) -> bool:
    kinds = {*map(type, leaves)}
    return kinds in ({int}, {float})


def _is_alike(job: Job, other: Job) -> bool:
    """Return whether two jobs have the same losses and gradients of the first micro-batches."""
    sources = [(each, build_model(each), started(each.data, 0)) for each in (job, other)]
    for _ in range(_TRIED):
        told = [_told(each, model, next(source)) for each, model, source in sources]
        if not all(map(_is_same, *told)):
            return False
    return True


def _told(job: Job, model: nn.Module, batch: Batch) -> list[Tensor | None]:
    """Return the loss of a micro-batch, and its gradients.

    Raises:   JobError: the loss fails.
    """
    torch.manual_seed(job.seed)  # pyright: ignore[reportUnknownMemberType]
    loss = loss_of(job, model, on_device(batch))
    wanted = [value for value in model.parameters() if value.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]


def _is_same(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    if one.dtype != two.dtype or not one.numel():
        return one.dtype == two.dtype
    most = _ROUNDING * torch.finfo(one.dtype).eps * float(one.abs().max())
    return float((one - two).abs().max()) <= most
