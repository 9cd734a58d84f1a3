"""Placed rows: buffers with a row for each place of a step, of which a rank has those of its own.

A micro-batch reads and writes the row of its place alone (step_places.py), and a place is taken by
one rank in all steps.  So no message is sent in a step.  The whole is made on request: each row
from the rank that has written it since the last time, every bit as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.program.codes import COMPUTE
from penstock.program.program import Program
from penstock.schedule.orders import F
from penstock.transport.transport import Transport

_WIDE = {True: torch.float64, False: torch.int64}  # which any number of fewer bits fits


@dataclass(slots=True)
class PlacedRows:
    """The rows of some buffers that one rank holds.

    tensors:  returns the buffers as they are now, each with `places` rows.
    ranks:    those that put their rows together.
    written:  places whose rows were written here since they did.
    """

    tensors: Callable[[], Sequence[Tensor]]
    places: int
    ranks: tuple[int, ...]
    written: set[int] = field(default_factory=set[int])

    def note(self, index: int) -> None:
        """Note that F of the micro-batch with this number in the run was run here."""
        self.written.add(index % self.places)

    def join(self, transport: Transport) -> None:
        """Put the whole in place; all of `ranks` call it together."""
        if len(self.ranks) > 1:
            tensors = self.tensors()
            own = torch.zeros(self.places, dtype=torch.bool, device=tensors[0].device)
            own[sorted(self.written)] = True
            count = own.to(torch.int64)
            transport.all_reduce(count, self.ranks)
            for is_real in (True, False):
                rows = [each for each in tensors if _is_real(each) == is_real]
                self._join(rows, own, count > 0, _WIDE[is_real], transport)
        self.written = set()

    def _join(
        self,
        tensors: Sequence[Tensor],
        own: Tensor,
        known: Tensor,
        dtype: torch.dtype,
        transport: Transport,
    ) -> None:
        """Put together buffers of kinds whose numbers `dtype` holds; `known`: rows anybody has."""
        if not tensors:
            return
        wide = [_plain(each).to(dtype, copy=True).view(self.places, -1) for each in tensors]
        for part in wide:
            part[~own] = 0
        flat = torch.cat(wide, dim=1)
        transport.all_reduce(flat, self.ranks)
        start = 0
        for tensor, part in zip(tensors, wide, strict=True):
            whole = flat[:, start : start + part.shape[1]]
            plain = _plain(tensor)
            plain[known] = whole.reshape(plain.shape)[known].to(plain.dtype)
            start += part.shape[1]


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _plain(tensor: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def misplaced_row(
    programs: Iterable[Program], stage: int, ranks: Sequence[int], places: int
) -> str:
    """Return why a place of a stage is not always that of one of `ranks`, in order; "" if it is."""
    holder: dict[int, int] = {}
    for program in programs:
        last: dict[int, int] = {}
        for rank, number in _forwards(program, stage, ranks):
            place = number % places
            if holder.setdefault(place, rank) != rank:
                return f"ranks {holder[place]} and {rank} both take place {place} of a step"
            if number < last.get(place, -1):
                return f"place {place} takes a later step before an earlier one"
            last[place] = number
    return ""


def _forwards(program: Program, stage: int, ranks: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Yield rank and number of each forward of a stage, in the order of each rank.

    Numbers are counted from the first micro-batch of the window.
    """
    code = program.code
    forwards = (code.op == COMPUTE) & (code.kind == F) & (code.stage == stage)
    for rank in ranks:
        part, replica = code.slice_of(rank), program.grid.replica_of(rank)
        for micro_batch in code.micro_batch[part][forwards[part]].tolist():
            step, place = program.grid.in_step(replica, micro_batch)
            yield rank, step * program.grid.step_micro_batches + place
