"""Table: who waits for whom in a schedule, as arrays that a loop over many candidates takes.

A row ends at max(end of the row before it on its rank, end of its source + message) + cost:

    F          source: F of the stage before, where that is on another rank
    B, I       source: B or I of the stage after, where that is on another rank
    W          needs nothing that its rank has not done
    reduction  of a stage that lives on several ranks: max over their last rows, + its cost;
               n ranks make n - 1 rows
    U          source: the reductions before it.  A synchronous schedule lists none: then the
               reductions of all stages stand at the end, by stage, and after them the updates

Ends are kept in slots, and a slot is used again after its last reader: what is alive at one time
stays in the cache.  An end that nobody reads keeps its slot; the largest end is one of them, so
the step is the maximum over the slots.  Ranks do one action each in turn, so that rows that follow
each other are of different ranks, and a processor works on several of them at once.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.compiled import compiled
from penstock.schedule.orders import KINDS, B, F, I, U
from penstock.schedule.schedule import Schedule

Bools: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]

_REDUCE = len(KINDS)  # its costs come after those of the kinds; then come nothing and messages
_NO_ROW = -1


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The dependencies of one schedule, in an order in which every row stands after its sources.

    previous, source  [row]: slots that are read; slot 0 is the beginning, 0 s
    message, cost     [row]: columns of the prices (`num_prices`), which are of each stage:
                      F, B, I, W, U, reduction; then 0 s; then a message from it to the next stage
    slot              [row]: where the end is kept

    Raises:   ValueError: arrays of other lengths, numbers out of range, a slot that is read
              before it is written, or written over what the same row reads.
    """

    num_stages: int
    num_actions: int  # of the schedule; updates that it does not list and reductions not counted
    num_slots: int
    previous: Ints
    source: Ints
    message: Ints
    cost: Ints
    slot: Ints

    def __post_init__(self) -> None:
        for name in ("previous", "source", "message", "cost", "slot"):
            array = np.ascontiguousarray(getattr(self, name), np.int32).view()
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        for name in ("previous", "source", "message", "cost", "slot"):
            limit = self.num_prices if name in ("message", "cost") else self.num_slots
            array: Ints = getattr(self, name)
            if array.shape != self.slot.shape:
                raise ValueError(f"{name} has shape {array.shape}, not {self.slot.shape}")
            if len(array) and not 0 <= array.min() <= array.max() < limit:
                raise ValueError(f"{name} is not everywhere from 0 to {limit - 1}")
        if (wrong := _misread(self.previous, self.source, self.slot, self.num_slots)) >= 0:
            raise ValueError(
                f"row {wrong} reads a slot that is not written, or writes one it reads"
            )

    @property
    def num_prices(self) -> int:
        """Return the columns of the prices: six for each stage, 0 s, and the messages."""
        return 7 * self.num_stages

    def __len__(self) -> int:
        return len(self.slot)


class _ActionRows(NamedTuple):
    """The rows, with rows in place of slots."""

    previous: Ints
    source: Ints
    message: Ints
    cost: Ints


class _Homes(NamedTuple):
    """The stages of every rank, in increasing order, and on how many ranks each stage lives."""

    stages: Ints
    offsets: Longs
    copies: Ints


class _ReadyRanks(NamedTuple):
    """Ranks that may go on, first come, first served."""

    ring: Longs  # as long as there are ranks
    is_in: Bools
    ends: Longs  # [2]: how many have left and how many have come


def table_of(schedule: Schedule) -> Table:
    """Return the table of `schedule`, for a chain of stages.

    The dependencies are those of `simulate` on what `lower` makes of the schedule alone.
    """
    orders, homes = schedule.orders, _homes(schedule)
    steps = schedule.num_steps if schedule.has_updates else 0
    num_rows = orders.num_actions
    backward = bool((orders.kinds != F).any())
    if backward:
        num_rows += max(steps, 1) * int((homes.copies - 1).sum())
    if backward and not steps:
        num_rows += int(homes.copies.sum())
    rows = _ActionRows(*(np.empty(num_rows, np.int32) for _ in range(4)))
    columns = orders.kinds, orders.stages, orders.micro_batches, orders.offsets
    last, made = _link(columns, schedule.ranks, homes, rows, steps)
    if backward and not steps:
        made = _finish(homes, rows, last, made)
    assert made == num_rows, (made, num_rows)  # the schedule has passed its checks
    slot, num_slots = _assign(rows)
    return Table(schedule.num_stages, orders.num_actions, num_slots, *rows, slot)


def _homes(schedule: Schedule) -> _Homes:
    where = schedule.stage_ranks
    pairs = sorted((rank, stage) for stage, ranks in enumerate(where) for rank in ranks)
    counts = np.bincount([rank for rank, _ in pairs], minlength=schedule.num_ranks)
    return _Homes(
        np.array([stage for _, stage in pairs], np.int32),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        np.array([len(ranks) for ranks in where], np.int32),
    )


@compiled
def _link(  # long: in pieces it would hand fifteen arrays around
    columns: tuple[NDArray[np.uint8], Ints, Ints, Longs],
    ranks: Ints,
    homes: _Homes,
    rows: _ActionRows,
    num_steps: int,
) -> tuple[Ints, int]:
    """Let ranks do one action each in turn; return the last row of each rank, and how many rows.

    `num_steps` is that of the listed updates, 0 without.
    """
    kinds, stages, numbers, offsets = columns
    previous, sources, messages, costs = rows
    num_stages, num_ranks, made = len(ranks), len(offsets) - 1, 0
    nothing = 6 * num_stages
    forward = np.full(ranks.shape, _NO_ROW, np.int32)
    gradient = np.full(ranks.shape, _NO_ROW, np.int32)
    came = np.zeros((num_stages, num_steps), np.int32)  # ranks that have come to their U
    summed = np.full((num_stages, num_steps), _NO_ROW, np.int32)
    has_come = np.zeros(num_ranks, np.bool_)
    last, at = np.full(num_ranks, _NO_ROW, np.int32), offsets[:-1].copy()
    turns = _ReadyRanks(
        np.arange(num_ranks), np.ones(num_ranks, np.bool_), np.array([0, num_ranks])
    )
    while turns.ends[0] < turns.ends[1]:
        rank = int(turns.ring[turns.ends[0] % num_ranks])
        turns.ends[0] += 1
        turns.is_in[rank] = False
        if at[rank] == offsets[rank + 1]:
            continue
        index = at[rank]
        kind, stage, number = int(kinds[index]), int(stages[index]), int(numbers[index])
        before, home, message = int(last[rank]), -1, nothing
        source = before
        is_gradient = kind in (B, I)
        if kind == F and stage > 0:
            source, home = int(forward[stage - 1, number]), int(ranks[stage - 1, number])
            message = nothing + stage
        elif is_gradient and stage + 1 < num_stages:
            source, home = int(gradient[stage + 1, number]), int(ranks[stage + 1, number])
            message = nothing + stage + 1
        elif kind == U and homes.copies[stage] > 1:
            if not has_come[rank]:
                has_come[rank] = True
                came[stage, number] += 1
                is_full = came[stage, number] == homes.copies[stage]
                if came[stage, number] == 1:
                    summed[stage, number] = before
                else:
                    previous[made], sources[made] = summed[stage, number], before
                    messages[made] = nothing
                    costs[made] = _REDUCE * num_stages + stage if is_full else nothing
                    summed[stage, number] = made
                    made += 1
                for other in range(num_ranks if is_full else 0):
                    _queue_up(other, turns)
            if came[stage, number] < homes.copies[stage]:
                continue
            has_come[rank] = False
            source = int(summed[stage, number])
        if home >= 0 and source < 0:
            continue
        if home == rank:  # it stands before on this rank: nothing is sent
            source, message = before, nothing
        previous[made], sources[made], messages[made] = before, source, message
        costs[made] = kind * num_stages + stage
        last[rank] = made
        at[rank] += 1
        _queue_up(rank, turns)
        if kind == F:
            forward[stage, number] = made
            if stage + 1 < num_stages:
                _queue_up(int(ranks[stage + 1, number]), turns)
        elif is_gradient:
            gradient[stage, number] = made
            if stage > 0:
                _queue_up(int(ranks[stage - 1, number]), turns)
        made += 1
    return last, made


@compiled
def _queue_up(rank: int, turns: _ReadyRanks) -> None:
    if not turns.is_in[rank]:
        turns.is_in[rank] = True
        turns.ring[turns.ends[1] % len(turns.ring)] = rank
        turns.ends[1] += 1


@compiled
def _finish(homes: _Homes, rows: _ActionRows, last: Ints, made: int) -> int:
    """Add the reductions and then the updates that a synchronous schedule does not list."""
    previous, sources, messages, costs = rows
    num_stages, first = len(homes.copies), made
    summed = np.full(num_stages, _NO_ROW, np.int32)
    came = np.zeros(num_stages, np.int32)
    for stage in range(num_stages):
        for turn in range(2 if homes.copies[stage] > 1 else 0):
            for rank in range(len(last)):  # all ranks come to it; then all go on from it
                for place in range(homes.offsets[rank], homes.offsets[rank + 1]):
                    if homes.stages[place] != stage:
                        continue
                    if turn == 1:
                        last[rank] = summed[stage]
                        continue
                    came[stage] += 1
                    if came[stage] == 1:
                        summed[stage] = last[rank]
                        continue
                    is_full = came[stage] == homes.copies[stage]
                    previous[made], sources[made] = summed[stage], last[rank]
                    costs[made] = (_REDUCE if is_full else _REDUCE + 1) * num_stages
                    costs[made] += stage if is_full else 0
                    summed[stage] = made
                    made += 1
    for rank in range(len(last)):
        for place in range(homes.offsets[rank], homes.offsets[rank + 1]):
            previous[made], sources[made] = last[rank], last[rank]
            costs[made] = U * num_stages + homes.stages[place]
            last[rank] = made
            made += 1
    messages[first:made] = 6 * num_stages
    return made


@compiled
def _assign(rows: _ActionRows) -> tuple[Ints, int]:
    """Put slots in place of the rows that are read; return every row's slot, and how many.

    A slot is free after its last reader has got its own.
    """
    previous, sources = rows.previous, rows.source
    num_rows = len(previous)
    slot, free = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    reads = np.zeros(num_rows, np.int32)  # that are still to come
    for row in range(num_rows):
        for read in (previous[row], sources[row]):
            if read >= 0:
                reads[read] += 1
    num_free, num_slots = 0, 1
    for row in range(num_rows):
        if num_free > 0:
            num_free -= 1
            slot[row] = free[num_free]
        else:
            slot[row] = num_slots
            num_slots += 1
        first, second = previous[row], sources[row]
        previous[row] = slot[first] if first >= 0 else 0
        sources[row] = slot[second] if second >= 0 else 0
        for read in (first, second):
            if read >= 0:
                reads[read] -= 1
                if reads[read] == 0:
                    free[num_free] = slot[read]
                    num_free += 1
    return slot, num_slots


@compiled
def _misread(previous: Ints, source: Ints, slot: Ints, num_slots: int) -> int:
    """Return the first row that reads a slot never written, or writes one that it reads; or -1."""
    written = np.zeros(num_slots, np.bool_)
    written[0] = True
    for row in range(len(slot)):
        for read in (previous[row], source[row]):
            if not written[read] or slot[row] == read:
                return row
        if slot[row] == 0:
            return row
        written[slot[row]] = True
    return -1
