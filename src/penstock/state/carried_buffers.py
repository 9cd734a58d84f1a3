"""Carried buffers: buffers that several copies of a stage change, each for its own micro-batches.

A linear buffer (buffers.py) after micro-batch T is the sum of c^(T - 1 - p) * x(p) over all
micro-batches p before T, and c^T times its first value, in whatever order these are added.  So
each copy holds the part of its own micro-batches, and a number `at`: the part counts as after
micro-batch at - 1.  Before F of micro-batch p the part is multiplied by c^(p - at), F makes
c * part + x of it, and then `at` is p + 1.  The whole is the sum over copies of
c^(T - at) * part; it is made only on request, and no message is sent before.

Where p is less than `at`, F finds zeros and its x is added, times c^(at - 1 - p).
Parts are added in float64: the whole differs from the plain loop's buffer by the rounding of the
parts, at most eps / (1 - c) relative, or eps * the number of micro-batches for c = 1.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.graph.stages import Stages
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.program.codes import COMPUTE
from penstock.program.program import Program
from penstock.schedule.orders import F
from penstock.state.laws.buffers import BufferLaw, buffer_laws
from penstock.state.placed_rows import misplaced_row
from penstock.transport.transport import Transport


class Carry(NamedTuple):
    """How the buffers of one stage are carried: coefficients by name, the ranks that sum them.

    groups:  each has a whole of its own: all ranks that hold the stage, or those of one replica.
    placed:  names of those that have a row for each place of a step, and how many places.
    """

    coefficients: Mapping[str, float]
    groups: tuple[tuple[int, ...], ...]
    placed: Mapping[str, int] = {}


Carries = Mapping[int, Carry]  # by stage


def carries_of(
    programs: Iterable[Program],
    stages: Stages,
    capture: Capture,
    job: Job,
    laws: Mapping[str, BufferLaw] | None = None,
) -> dict[int, Carry]:
    """Return what has to be carried in a run of `programs`.

    That is what a stage writes that lives on several ranks, or takes micro-batches out of order.
    laws:     of all buffers that forward writes; found by trying where they are not given.
    Raises:   PlanError: a buffer has to see all micro-batches in order, and would not.
    """
    held = list({id(program): program for program in programs}.values())
    written, found = capture.graph.written, dict[int, Carry]()
    for stage in stages.stages:
        names = [capture.graph.nodes[node].name for node in stage.buffers if node in written]
        groups = _groups(held, stage.index, by_replica=job.buffers == "per replica")
        several = max(map(len, groups)) > 1
        if not names or not (several or _is_mixed_up(held, stage.index)):
            continue
        laws = buffer_laws(job, capture) if laws is None else laws
        coefficients, placed = dict[str, float](), dict[str, int]()
        for name in names:
            law = laws.get(name, BufferLaw(None, "forward did not write it when it was tried"))
            if law.places:
                _check_places(held, stage.index, name, law.places, groups)
                placed[name] = law.places
                continue
            if law.coefficient is None:
                how = "on several ranks" if several else "in another order"
                raise in_order(name, law, f"stage {stage.index} takes them {how}")
            coefficients[name] = law.coefficient
        found[stage.index] = Carry(coefficients, groups, placed)
    return found


def _check_places(
    programs: Sequence[Program],
    stage: int,
    name: str,
    places: int,
    groups: Iterable[tuple[int, ...]],
) -> None:
    """Raise unless each place of a step is always taken by one rank of a group, in order.

    Raises:   PlanError.
    """
    for ranks in groups:
        if why := misplaced_row(programs, stage, ranks, places):
            message = f"buffer {name} hands rows on from step to step, and in stage {stage} {why}"
            raise PlanError(message, hint="take another schedule, such as one_f_one_b")


def _groups(
    programs: Sequence[Program], stage: int, *, by_replica: bool
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that hold `stage` in any of the programs.

    Those that divide its ops take the same micro-batches: each is of a group of its own.
    """
    holders = sorted({r for p in programs for r in range(p.num_ranks) if stage in p.stages_of(r)})
    grid = programs[0].grid
    if not by_replica:
        slices = range(grid.tensor)
        return tuple(tuple(r for r in holders if grid.slice_of(r) == at) for at in slices)
    held = [tuple(r for r in grid.ranks_of(at) if r in holders) for at in range(grid.replicas)]
    return tuple(held)


def _is_mixed_up(programs: Sequence[Program], stage: int) -> bool:
    """Return whether a rank takes a stage's micro-batches in another order than theirs."""
    for program in programs:
        code = program.code
        forwards = (code.op == COMPUTE) & (code.kind == F) & (code.stage == stage)
        for rank in range(program.num_ranks):
            part = code.slice_of(rank)
            numbers = code.micro_batch[part][forwards[part]]
            if (numbers[1:] < numbers[:-1]).any():
                return True
    return False


def in_order(name: str, law: BufferLaw, but: str) -> PlanError:
    """Return the error that a buffer cannot be carried, `but` something requires it."""
    return PlanError(
        f"buffer {name} has to see every micro-batch in order ({law.why}), and {but}",
        hint='use one replica and a schedule such as one_f_one_b, or set Job.buffers="per replica"',
    )


@dataclass(slots=True)
class Carried:
    """The parts of some buffers that one rank holds.

    tensors:    returns the buffers as they are now.
    ranks:      those that sum their parts, in order.
    is_first:   whether this one begins with the buffers' values; all others begin with nothing.
    at:         the part counts as after micro-batch at - 1.
    is_whole:   whether the tensors hold the whole, as at first and after a sum.
    is_joined:  whether nothing was run since then, on any rank: the next step begins at its number.
    """

    tensors: Callable[[], Sequence[Tensor]]
    coefficients: Sequence[float]
    ranks: tuple[int, ...]
    is_first: bool
    at: int = 0
    is_whole: bool = True
    is_joined: bool = True
    _aside: list[Tensor] = field(default_factory=list[Tensor])

    def begin(self, number: int) -> None:
        """Note that the next micro-batches begin with `number`, on all ranks together."""
        if self.is_joined:
            self.at, self.is_joined = number, False

    def before(self, number: int) -> None:
        """Prepare for F of micro-batch `number`."""
        tensors = self.tensors()
        if self.is_whole and not self.is_first:
            for tensor in tensors:
                tensor.zero_()
            self.at = number
        self.is_whole = False
        if number < self.at:
            self._aside = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.zero_()
        else:
            self._age(tensors, number - self.at)

    def after(self, number: int) -> None:
        """Take in what F of micro-batch `number` made."""
        if not self._aside:
            self.at = number + 1
            return
        tensors = self.tensors()
        self._age(tensors, self.at - 1 - number)
        for tensor, part in zip(tensors, self._aside, strict=True):
            tensor.add_(part)
        self._aside = []

    def join(self, number: int, transport: Transport) -> None:
        """Put the whole in place, as before micro-batch `number`.

        All of `ranks` call it together.
        """
        if self.is_joined:
            return
        tensors = self.tensors()
        if self.is_whole and not self.is_first:
            for tensor in tensors:
                tensor.zero_()
        elif len(self.ranks) == 1:
            self._age(tensors, number - self.at)
        if len(self.ranks) > 1:
            self._sum(tensors, number, transport)
        self.at, self.is_whole, self.is_joined = number, True, True

    def _sum(self, tensors: Sequence[Tensor], number: int, transport: Transport) -> None:
        wide: list[Tensor] = []
        for tensor, c in zip(tensors, self.coefficients, strict=True):
            part = tensor.to(
                torch.float64 if tensor.is_floating_point() else torch.int64, copy=True
            )
            _times(part, _power(c, number - self.at))
            wide.append(part.view(-1))
        for dtype in (torch.float64, torch.int64):
            rows = [(t, part) for t, part in zip(tensors, wide, strict=True) if part.dtype == dtype]
            if not rows:
                continue
            flat = torch.cat([part for _, part in rows])
            transport.all_reduce(flat, self.ranks)
            start = 0
            for tensor, _ in rows:
                part = flat[start : start + tensor.numel()]
                tensor.copy_(part.view(tensor.shape))
                start += tensor.numel()

    def _age(self, tensors: Sequence[Tensor], count: int) -> None:
        """Multiply by the coefficients to the power of `count`."""
        for tensor, c in zip(tensors, self.coefficients, strict=True) if count else ():
            _times(tensor, _power(c, count))


def _power(coefficient: float, count: int) -> float:
    return 1.0 if coefficient == 1.0 else coefficient**count


def _times(tensor: Tensor, factor: float) -> None:
    """Multiply in place; by 0 also infinities and nan."""
    if factor == 0.0:
        tensor.zero_()
    elif factor != 1.0:
        tensor.mul_(factor)
