"""Table: who waits for whom in a schedule, as arrays that a loop over many candidates takes.

A row ends at max(end of the row before it on its rank, end of its source + message) + cost:

    F          source: F of the stage before, where that is on another rank
    B, I       source: B or I of the stage after, where that is on another rank
    W          needs nothing that its rank has not done
    reduction  of a stage that lives on several ranks: max over their last rows, + its cost;
               what n ranks have done makes n - 1 rows
    U          source: the reductions before it.  A synchronous schedule lists none: then they stand
               at the end, and each reduction comes after the last gradients of its stage and the
               reduction before it on each of its ranks, in the order in which they can begin

Ends are kept in slots, and a slot is reused after its last reader: what is alive at one time
stays in the cache.  An end that nobody reads keeps its slot; the largest end is one of them, so
the step is the maximum over the slots.  Ranks do one action each in turn, so that consecutive rows
belong to different ranks, and a processor works on several of them at once.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.program.needed import last_gradients
from penstock.schedule.clock import Clockwork, Joins, Log, Numbers, log_of, numbers_of, run
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
    log = log_of(2 * schedule.ranks.size, num_rows, len(orders))
    stops, _ = run(numbers, orders.offsets, work, log)
    assert (stops == orders.offsets[1:]).all(), stops  # the schedule has passed its checks
    more = [] if is_listed else _finish(schedule, log)
    message, cost = np.full((2, num_rows + len(more)), 6 * schedule.num_stages, np.int32)
    if steps:
        sums = np.flatnonzero(log.place < 0)
        full = np.full(len(members), -1)
        full[-1 - log.place[sums]] = sums  # the last row of each
        cost[full[full >= 0]] = _REDUCE * schedule.num_stages + np.flatnonzero(full >= 0) // steps
    ends = np.array(more, np.int32).reshape(-1, 3)
    cost[num_rows:] = ends[:, 2]
    previous, source = (
        np.concatenate(both) for both in ((log.previous, ends[:, 0]), (log.source, ends[:, 1]))
    )
    rows = _ActionRows(previous, source, message, cost)
    slot, num_slots = _assign(rows, log.place, (orders.kinds, orders.stages))
    return Table(schedule.num_stages, orders.num_actions, num_slots, *rows, slot)


def _joins(schedule: Schedule, numbers: Numbers, members: Longs) -> Longs:
    """Return for each action the sum that begins when it has ended: that of the update after it."""
    if not members.any():
        return np.empty(0, np.int64)
    of = np.maximum(numbers.astype(np.int64) - 3 * schedule.ranks.size, -1)
    updates = np.flatnonzero(of >= 0)
    of[updates[members[of[updates]] == 0]] = -1
    return np.append(of[1:], -1)


def _finish(schedule: Schedule, log: Log) -> list[tuple[int, int, int]]:
    """Return previous, source and cost of the reductions and then the updates that are not listed.

    They come after the rows of `log`.
    """
    num_stages, made = schedule.num_stages, list[tuple[int, int, int]]()
    homes, lanes = schedule.stage_ranks, dict[int, int]()
    last: list[int] = log.last.tolist()
    for stage, rows in _summed(schedule, log):
        lane = {lanes[rank] for rank in homes[stage] if rank in lanes}
        before, others = rows[0], [*rows[1:], *sorted(lane)]
        for at, other in enumerate(others, 1):
            cost = _REDUCE * num_stages + stage if at == len(others) else 6 * num_stages
            made.append((before, other, cost))
            before = len(log.place) + len(made) - 1
        lanes.update(dict.fromkeys(homes[stage], before))
    for rank, stage in sorted((rank, stage) for stage, ranks in enumerate(homes) for rank in ranks):
        made.append((last[rank], lanes.get(rank, last[rank]), U * num_stages + stage))
        last[rank] = len(log.place) + len(made) - 1
    return made


def _summed(schedule: Schedule, log: Log) -> list[tuple[int, list[int]]]:
    """Return each stage that is summed, in the order of the sums, and the rows of its gradients."""
    homes = schedule.stage_ranks
    shared = [stage for stage, ranks in enumerate(homes) if len(ranks) > 1]
    if not shared:
        return []
    last, offsets = last_gradients(schedule.orders), schedule.orders.offsets.tolist()
    made = {s: max(last[rank, s] - offsets[rank] for rank in homes[s]) for s in shared}
    row_of = np.argsort(log.place)[np.count_nonzero(log.place < 0) :].tolist()
    ordered = sorted(shared, key=made.__getitem__)
    return [(s, [row_of[last[rank, s]] for rank in homes[s]]) for s in ordered]


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
