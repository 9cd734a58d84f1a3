"""Codes: for every rank, its instructions.  Arrays inside, tuples of instructions outside."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ProgramError
from penstock.program.instructions import OPS as OPS
from penstock.program.instructions import (
    SPAN_KINDS,
    TABLE,
    Code,
    Collect,
    CollectHow,
    Instruction,
    OpRow,
)
from penstock.program.reductions import Reduction, Sum
from penstock.schedule.orders import KINDS, Action, F, U, W

COMPUTE, SEND, RECEIVE, REDUCE, UPDATE = map(
    OPS.index, ("compute", "send", "receive", "reduce", "update")
)
UNSHARD, RESHARD, OFFLOAD, RELOAD = map(OPS.index, ("unshard", "reshard", "offload", "reload"))
COLLECT = OPS.index("collect")
BEGIN_OFFLOAD, BEGIN_RELOAD = map(OPS.index, ("begin_offload", "begin_reload"))


def _flags(says: Callable[[OpRow], bool]) -> NDArray[np.bool_]:
    """Return by op what `says` returns for its row; loops look it up."""
    return np.array([says(row) for row in TABLE])


WORKS = _flags(lambda row: row.does == "works")
JOINS = _flags(lambda row: row.does == "joins")
MEETS = _flags(lambda row: row.does == "meets")
SHOWN = _flags(lambda row: row.lane is not None)
USES_STAGE = _flags(lambda row: "stage" in row.columns)
USES_EDGE = _flags(lambda row: "edge" in row.columns)
USES_PEER = _flags(lambda row: "peer" in row.columns)
USES_NUMBER = _flags(lambda row: "micro_batch" in row.columns)  # U, a reduction: of a step
OF_KIND = np.array([[kind in row.kinds for kind in KINDS] for row in TABLE])  # [op, kind]
# What works and moves have a row each in Costs and Memory: those of KINDS, then copies.
COPIED = (F, U, W)  # kinds: what F keeps, the optimizer's state, weights with gradients
COPIES = tuple(f"{word} {KINDS[kind]}" for word in ("offload", "reload") for kind in COPIED)
NUM_COSTS = len(KINDS) + len(COPIES)
COST_ROW = np.zeros((len(OPS), len(KINDS)), np.int64)  # [op, kind]
COST_ROW[:] = np.arange(len(KINDS))
COST_ROW[OFFLOAD, COPIED] = np.arange(len(KINDS), len(KINDS) + len(COPIED))
COST_ROW[RELOAD, COPIED] = np.arange(len(KINDS) + len(COPIED), NUM_COSTS)
COST_ROW[BEGIN_OFFLOAD], COST_ROW[BEGIN_RELOAD] = COST_ROW[OFFLOAD], COST_ROW[RELOAD]
WAITS_FOR_SUMS = np.array([[row.waits == "sums" for _ in KINDS] for row in TABLE])  # [op, kind]
WAITS_FOR_SUMS[[RELOAD, BEGIN_RELOAD], W] = True
SPAN_OF = np.array(  # [op, kind]: as what it is shown, a place in SPAN_KINDS
    [[SPAN_KINDS.index(row.span or kind) for kind in KINDS] for row in TABLE], np.uint8
)

_MOST_KNOWN = 2**16  # instructions of which the rows are known: the same stand in many programs
SMALL = (
    "stage",
    "edge",
    "peer",
    "version",
    "slot",
)  # int16 where all their numbers fit, else int32

Numbers: TypeAlias = NDArray[np.int16 | np.int32]


class Collectors(NamedTuple):
    """Who takes part in a Collect, and what comes of it."""

    ranks: tuple[int, ...]
    how: CollectHow


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Codes:
    """For every rank, a sequence of instructions.

    `codes[rank]` is a tuple of instructions, made anew at each call; the columns are what is kept,
    those of `rank` from `offsets[rank]` to `offsets[rank + 1]`.  16 bytes per instruction, or 26
    where a small column holds a number above 32,767.  An operand that an op lacks is -1 (a kind or
    version 0).  TABLE says which op has which.
    """

    op: NDArray[np.uint8]  # place in OPS
    kind: NDArray[np.uint8]  # place in KINDS: of its action; U of an Update
    stage: Numbers  # likewise; or of an Unshard, Reshard
    micro_batch: NDArray[np.int32]  # likewise; of a reduction, or where the kind is U, the step
    edge: Numbers  # of a message; of a reduction, its place in `reductions`
    peer: Numbers
    version: Numbers
    slot: Numbers  # of a Collect, its place in `meetings`
    offsets: NDArray[np.int64]
    reductions: tuple[Reduction, ...] = ()  # each with step 0
    meetings: tuple[Collectors, ...] = ()  # of Collects

    def __post_init__(self) -> None:
        for name in (*COLUMNS, "offsets"):
            column = np.ascontiguousarray(getattr(self, name)).view()
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        sizes = {len(getattr(self, name)) for name in COLUMNS} | {int(self.offsets[-1])}
        if len(sizes) != 1:
            raise ValueError(f"columns of {sorted(sizes)} instructions; all must be of one length")
        sums = self.edge[self.op == REDUCE]
        if (
            self.op.max(initial=0) >= len(OPS)
            or self.kind.max(initial=0) >= len(KINDS)
            or not ((sums >= 0) & (sums < len(self.reductions))).all()
            or not _among(self.slot[self.op == COLLECT], len(self.meetings))
        ):
            raise ValueError("an op, kind, reduction or meeting beyond the last one")

    @classmethod
    def of(cls, codes: "Codes | Iterable[Iterable[Instruction]]") -> "Codes":
        """Return `codes`, given as one sequence of instructions per rank, as arrays."""
        if isinstance(codes, Codes):
            return codes
        table: dict[Reduction, int] = {}
        meetings: dict[Collectors, int] = {}
        lengths: list[int] = []
        rows: list[tuple[int, ...]] = []
        for code in codes:
            before = len(rows)
            rows += [_encode(instruction, table, meetings) for instruction in code]
            lengths.append(len(rows) - before)
        values = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
        if np.abs(values).max(initial=0) >= 2**31:
            raise ProgramError(
                f"a number in an instruction is {np.abs(values).max()}", hint="stay below 2**31"
            )
        offsets = np.cumsum([0, *lengths], dtype=np.int64)
        return cls(*columns_of(values), offsets, tuple(table), tuple(meetings))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_instructions(self) -> int:
        return len(self.op)

    def slice_of(self, rank: int) -> slice:
        """Return where the instructions of `rank` lie in the columns."""
        return slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def rank_at(self, row: int) -> int:
        """Return the rank to which a row of the columns belongs."""
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def __getitem__(self, rank: int) -> Code:
        if not -len(self) <= rank < len(self):
            raise IndexError(f"rank {rank} of {len(self)} ranks")
        return self.between(self.slice_of(rank % len(self)))

    def between(self, part: slice) -> Code:
        """Return the instructions of a slice of the columns."""
        columns = (getattr(self, name)[part].tolist() for name in COLUMNS)
        return tuple(map(self._instruction, zip(*columns, strict=True)))

    def _instruction(self, row: tuple[int, ...]) -> Instruction:
        if row[0] == COLLECT:
            _, kind, stage, number, edge, *_, slot = row
            return Collect(Action(KINDS[kind], stage, number), edge, *self.meetings[slot])
        if row[0] != REDUCE:
            return _decoded(row)
        return _in_step(self.reductions[row[_EDGE]], row[_NUMBER])

    def __iter__(self) -> Iterator[Code]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Codes):
            return NotImplemented
        names = ("offsets", *(name for name in COLUMNS if name not in ("edge", "slot")))
        if not all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names):
            return False
        reduces = np.flatnonzero(self.op == REDUCE)
        if not np.array_equal(np.delete(self.edge, reduces), np.delete(other.edge, reduces)):
            return False
        if not _same_slots(self, other):
            return False
        mine = [self.reductions[int(self.edge[row])] for row in reduces]
        return mine == [other.reductions[int(other.edge[row])] for row in reduces]

    def __hash__(self) -> int:
        return hash((self.op.tobytes(), self.offsets.tobytes()))

    def __repr__(self) -> str:
        return f"Codes({len(self)} ranks, {self.num_instructions} instructions)"


def _among(places: Numbers, count: int) -> bool:
    return bool(((places >= 0) & (places < count)).all())


def _same_slots(one: Codes, other: Codes) -> bool:
    """Return whether messages fill the same slots, and the same ranks collect alike."""
    rows = one.op == COLLECT
    if not np.array_equal(one.slot[~rows], other.slot[~rows]):
        return False
    mine: list[int] = one.slot[rows].tolist()
    theirs: list[int] = other.slot[rows].tolist()
    return [one.meetings[at] for at in mine] == [other.meetings[at] for at in theirs]


COLUMNS = ("op", "kind", "stage", "micro_batch", "edge", "peer", "version", "slot")
_LACKING: tuple[int, ...] = (
    0,
    0,
    -1,
    -1,
    -1,
    -1,
    0,
    -1,
)  # what a column holds of an instruction without it
_NUMBER, _EDGE = COLUMNS.index("micro_batch"), COLUMNS.index("edge")


def columns_of(
    values: NDArray[np.int64],
) -> tuple[
    NDArray[np.uint8],
    NDArray[np.uint8],
    Numbers,
    NDArray[np.int32],
    Numbers,
    Numbers,
    Numbers,
    Numbers,
]:
    """Return rows of numbers, in the order of COLUMNS, as columns of the smallest fitting types."""
    largest = int(np.abs(values[:, [COLUMNS.index(name) for name in SMALL]]).max(initial=0))
    small = small_type(largest)
    op, kind, stage, micro_batch, edge, peer, version, slot = values.T
    return (
        op.astype(np.uint8),
        kind.astype(np.uint8),
        stage.astype(small),
        micro_batch.astype(np.int32),
        edge.astype(small),
        peer.astype(small),
        version.astype(small),
        slot.astype(small),
    )


def small_type(largest: int) -> type[np.int16] | type[np.int32]:
    """Return the type of the small columns when no number in them is above `largest`."""
    return np.int16 if largest <= np.iinfo(np.int16).max else np.int32


def _in_step(reduction: Reduction, step: int) -> Reduction:
    return reduction if reduction.step == step else replace(reduction, step=step)


@lru_cache(_MOST_KNOWN)
def _decoded(row: tuple[int, ...]) -> Instruction:
    """Return the instruction of a row: its operands stand in the columns that TABLE names."""
    own = TABLE[row[0]]
    values = [row[at] for at in _PLACES[own.of]]
    if own.columns[0] != "kind":
        return own.of(*values)
    kind, stage, micro_batch, *others = values
    return own.of(Action(KINDS[kind], stage, micro_batch), *others)


def _encode(
    instruction: Instruction, table: dict[Reduction, int], meetings: dict[Collectors, int]
) -> tuple[int, ...]:
    if isinstance(instruction, Collect):
        kind, stage, number = instruction.of
        meeting = Collectors(instruction.ranks, instruction.how)
        slot = meetings.setdefault(meeting, len(meetings))
        return COLLECT, _CODE_OF[kind], stage, number, instruction.edge, -1, 0, slot
    if not isinstance(instruction, Reduction):
        return _encoded(instruction)
    row = list(_EMPTY[Sum])
    row[_EDGE] = table.setdefault(_in_step(instruction, 0), len(table))
    row[_NUMBER] = instruction.step
    return tuple(row)


@lru_cache(_MOST_KNOWN)
def _encoded(instruction: Instruction) -> tuple[int, ...]:
    """Return the row of an instruction."""
    row = list(_EMPTY[type(instruction)])
    first, *others = (getattr(instruction, name) for name in _FIELDS[type(instruction)])
    values = (first,) if isinstance(first, int) else (_CODE_OF[first[0]], *first[1:])
    for at, value in zip(_PLACES[type(instruction)], (*values, *others), strict=True):
        row[at] = value
    return tuple(row)


_FIELDS = {row.of: [each.name for each in fields(row.of)] for row in TABLE}
_PLACES = {row.of: [COLUMNS.index(name) for name in row.columns] for row in TABLE}
_CODE_OF = {kind: code for code, kind in enumerate(KINDS)}
_EMPTY = {  # by type, the row of one without operands
    row.of: (op, _CODE_OF[row.kinds[0]], *_LACKING[2:]) for op, row in enumerate(TABLE)
}


def excerpt(codes: Codes, row: int, *, around: int = 4) -> str:
    """Return the line of the rank that has `row`, shortened to the instructions around it."""
    rank = codes.rank_at(row)
    own = codes.slice_of(rank)
    part = slice(max(own.start, row - around), min(own.stop, row + around + 1))
    words = [str(instruction) for instruction in codes.between(part)]
    before = ["..."] if part.start > own.start else []
    after = ["..."] if part.stop < own.stop else []
    return f"  rank {rank}  {' '.join([*before, *words, *after])}"


def concatenate(parts: Sequence[Codes], reductions: tuple[Reduction, ...]) -> Codes:
    """Return the ranks of all `parts`, one part after the other; all refer to `reductions`."""
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Codes(
        np.concatenate([part.op for part in parts]),
        np.concatenate([part.kind for part in parts]),
        np.concatenate([part.stage for part in parts]),
        np.concatenate([part.micro_batch for part in parts]),
        np.concatenate([part.edge for part in parts]),
        np.concatenate([part.peer for part in parts]),
        np.concatenate([part.version for part in parts]),
        np.concatenate([part.slot for part in parts]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        reductions,
    )


def begun(codes: Codes) -> NDArray[np.bool_]:
    """Return for each instruction whether it is an Offload or a Reload that was begun before."""
    found = np.zeros(len(codes.op), np.bool_)
    ranks = np.repeat(np.arange(len(codes.offsets) - 1), np.diff(codes.offsets))
    for begins, waits in ((BEGIN_OFFLOAD, OFFLOAD), (BEGIN_RELOAD, RELOAD)):
        rows, firsts = (np.flatnonzero(codes.op == op) for op in (waits, begins))
        if not len(firsts):
            continue
        columns = ranks, codes.kind, codes.stage, codes.micro_batch
        known = set(zip(*(column[firsts].tolist() for column in columns), strict=True))
        keys = zip(*(column[rows].tolist() for column in columns), strict=True)
        found[rows] = [key in known for key in keys]
    return found
