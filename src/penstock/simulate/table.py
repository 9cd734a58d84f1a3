"""Table: who waits for whom in a schedule, as arrays that a loop over many candidates takes.

A row ends at max(end of the row before it on its rank, end of its source + message) + cost:

    F          source: F of the stage before, where that is on another rank
    B, I       source: B or I of the stage after, where that is on another rank
    W          needs nothing that its rank has not done
    reduction  of a stage that lives on several ranks: max over their last rows, + its cost;
               n ranks make n - 1 rows
    U          source: the reductions before it.  A synchronous schedule lists none: then the
               reductions of all stages stand at the end, by stage, and after them the updates

Ends are kept in slots, and a slot is reused after its last reader: what is alive at one time
stays in the cache.  An end that nobody reads keeps its slot; the largest end is one of them, so
the step is the maximum over the slots.  Ranks do one action each in turn, so that consecutive rows
belong to different ranks, and a processor works on several of them at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.clock import Clockwork, Joins, Numbers, log_of, numbers_of, run
from penstock.schedule.compiled import compiled
from penstock.schedule.orders import KINDS, F, U
from penstock.schedule.schedule import Schedule

Bools: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]

_REDUCE = len(KINDS)  # its costs come after those of the kinds; then come nothing and messages


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The dependencies of one schedule, in an order in which every row stands after its sources.

    previous, source  [row]: slots that are read; slot 0 is the beginning, 0 s
    message, cost     [row]: columns of the prices (`num_prices`), which are, for each stage:
                      F, B, I, W, U, reduction; then 0 s; then a message from it to the next stage
    slot              [row]: where the end is kept

    Raises:   ValueError: arrays of other lengths, numbers out of range, a slot that is read
              before it is written, or that overwrites what the same row reads.
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
    """The rows, with row numbers in place of slots."""

    previous: Ints
    source: Ints
    message: Ints
    cost: Ints


def table_of(schedule: Schedule) -> Table:
    """Return the table of `schedule`, for a chain of stages.

    The dependencies are those of `simulate` on what `lower` makes from the schedule alone.
    """
    orders, homes = schedule.orders, schedule.stage_ranks
    copies = np.array([len(ranks) for ranks in homes])
    steps = schedule.num_steps if schedule.has_updates else 0
    members = np.repeat(np.where(copies > 1, copies, 0), steps)
    numbers = numbers_of(orders, schedule.ranks.shape, steps)
    joins = Joins(_joins(schedule, numbers, members), members)
    work = Clockwork(schedule.ranks, np.zeros(1), 0.0, joins)
    num_rows = orders.num_actions + int(np.maximum(members - 1, 0).sum())
    is_listed = steps > 0 or not (orders.kinds != F).any()
    more = 0 if is_listed else int((2 * copies - 1).sum())
    log = log_of(2 * schedule.ranks.size, num_rows + more, len(orders))
    stops, _ = run(numbers, orders.offsets, work, log)
    assert (stops == orders.offsets[1:]).all(), stops  # the schedule has passed its checks
    message, cost = np.full((2, num_rows + more), 6 * schedule.num_stages, np.int32)
    if steps:
        sums = np.flatnonzero(log.place < 0)
        full = np.full(len(members), -1)
        full[-1 - log.place[sums]] = sums  # the last row of each
        cost[full[full >= 0]] = _REDUCE * schedule.num_stages + np.flatnonzero(full >= 0) // steps
    if more:
        last = _finish(homes, num_rows, log.last.tolist())
        log.previous[num_rows:], log.source[num_rows:], cost[num_rows:] = np.array(last).T
    rows = _ActionRows(log.previous, log.source, message, cost)
    slot, num_slots = _assign(rows, log.place[:num_rows], (orders.kinds, orders.stages))
    return Table(schedule.num_stages, orders.num_actions, num_slots, *rows, slot)


def _joins(schedule: Schedule, numbers: Numbers, members: Longs) -> Longs:
    """Return for each action the sum that begins when it has ended: that of the update after it."""
    if not members.any():
        return np.empty(0, np.int64)
    of = np.maximum(numbers.astype(np.int64) - 3 * schedule.ranks.size, -1)
    updates = np.flatnonzero(of >= 0)
    of[updates[members[of[updates]] == 0]] = -1
    return np.append(of[1:], -1)


def _finish(
    homes: Sequence[tuple[int, ...]], first: int, last: list[int]
) -> list[tuple[int, int, int]]:
    """Return previous, source and cost of the reductions and then the updates that are not listed.

    `first` is the number of rows before them, `last` the last of these on each rank.
    """
    num_stages, made = len(homes), list[tuple[int, int, int]]()
    for stage, ranks in enumerate(homes):
        summed = last[ranks[0]]
        for rank in ranks[1:]:
            cost = _REDUCE * num_stages + stage if rank == ranks[-1] else 6 * num_stages
            made.append((summed, last[rank], cost))
            summed = first + len(made) - 1
        for rank in ranks if len(ranks) > 1 else ():
            last[rank] = summed
    for rank, stage in sorted((rank, stage) for stage, ranks in enumerate(homes) for rank in ranks):
        made.append((last[rank], last[rank], U * num_stages + stage))
        last[rank] = first + len(made) - 1
    return made


@compiled
def _assign(
    rows: _ActionRows, places: Ints, actions: tuple[NDArray[np.uint8], Ints]
) -> tuple[Ints, int]:
    """Put slots in place of the rows that are read; return every row's slot, and how many.

    A slot is free after its last reader has got its own.  Rows that have a place among the
    `actions`, kinds and stages, get the columns of their cost and message.
    """
    previous, sources, messages, costs = rows
    (kinds, stages), num_rows = actions, len(previous)
    num_stages = messages[0] // 6 if num_rows > 0 else 0
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
        place = places[row] if row < len(places) else -1
        if place >= 0:
            stage, kind = stages[place], kinds[place]
            costs[row] = kind * num_stages + stage
            if first != second and kind != U:  # from another rank
                messages[row] += stage + (kind != F)
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
