"""Lower: from the order of work to what every rank executes, message by message."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ProgramError
from penstock.program.codes import REDUCE, UPDATE, Codes, concatenate, small_type
from penstock.program.edges import Edge, StageGraph, check_edges, check_tied
from penstock.program.issue import (
    Clock,
    Inbox,
    Sources,
    Turns,
    run_clock,
    write_code,
)
from penstock.program.needed import (
    Needed,
    as_made,
    holders_of,
    last_gradients,
    needed,
    stages_by_rank,
    waits_for_all,
)
from penstock.program.passes.collect import with_collects
from penstock.program.passes.offload_listed import offload_listed
from penstock.program.program import Draft, Program, sound
from penstock.program.reductions import AFTER_UPDATES, AT_THE_END
from penstock.program.rules import Columns
from penstock.program.slots import assign_slots
from penstock.program.step_end import StepEnd
from penstock.program.wiring import Wiring, laws, wire
from penstock.schedule.grid import Grid, InnerAxis
from penstock.schedule.orders import B, F, I, U
from penstock.schedule.schedule import Schedule
from penstock.schedule.verify_orders import updated_only


def lower(schedule: Schedule) -> Program:
    """Return the program of `schedule` for a chain of stages and messages of unknown size."""
    return lower_schedule(schedule)


def lower_schedule(
    schedule: Schedule | Sequence[Schedule],
    graph: StageGraph | None = None,
    end: StepEnd = StepEnd(),  # noqa: B008 - a frozen record
    *,
    replicas: int = 1,
    axis: InnerAxis = InnerAxis(),  # noqa: B008 - a frozen record
    far: AbstractSet[int] = frozenset(),
) -> Program:
    """Return the program of `replicas` copies of `schedule`, or one copy of each of several.

    Each value of an edge between two ranks is sent when it is made and received at that moment of
    one order of everything (issue.py), into the smallest free slot.  Where the schedule lists
    updates, the sums that one needs come right before it.  Else updates are at the end, and each
    sum comes as soon as the last gradient for it is made, on all ranks in one order (`as_made`).
    Copies to far memory come where the schedule lists them (passes/offload_listed.py).

    schedule: several must have the same sizes, except for the micro-batches of a step.
    graph:    None: a chain, F from each stage to the next and B back.
    axis:     so many of the copies, one after the other, divide the ops of each stage, or tokens.
    far:      stages whose sums leave the gradients in far memory, as a sum in shards.
    Raises:   ProgramError: an invalid edge or group; sums for which the order has no place;
              schedules that cannot run side by side.
    """
    many = [schedule] * replicas if isinstance(schedule, Schedule) else list(schedule)
    return sound(drafted(many, graph, end, axis, far))


def drafted(
    many: Sequence[Schedule],
    graph: StageGraph | None,
    end: StepEnd,
    axis: InnerAxis,
    far: AbstractSet[int],
) -> Program:
    """Return what `lower_schedule` does, for passes to change before it has to be sound."""
    if len(many) % axis.ranks:
        message = f"{len(many)} replicas cannot divide the ops of stages by {axis.ranks}"
        raise ProgramError(message, hint=f"give a multiple of {axis.ranks} replicas")
    _check_wishes(many, end.post_validation)
    largest = max(many, key=lambda one: one.num_micro_batches)
    backward = bool((largest.orders.kinds != F).any())
    if not (backward and len(many) > 1):  # nobody to agree with
        end = replace(end, averages="", served="")
    end = replace(end, post_validation=backward and end.post_validation)
    graph = graph or StageGraph(chain(largest.num_stages, backward=backward))
    _check_graph(graph, largest.num_stages)
    lives = {id(one): _homes(one) for one in many}
    grid = Grid(largest.num_ranks, tuple(one.num_micro_batches for one in many), *axis)
    holders = [_on(lives[id(one)], grid.ranks_of(at)) for at, one in enumerate(many)]
    sums = needed(holders, graph, end, sharded=far, grid=grid)
    sums = sums if largest.has_updates else as_made(sums, largest.orders, grid)
    # 4 in docs/architecture.md
    wires = wire(largest.num_stages, graph.edges)
    code = _side_by_side(many, grid, sums if backward else (), wires)
    program = Draft(
        *(largest.num_stages, largest.num_micro_batches),
        with_collects(code, graph.edges, grid),
        graph,
        end,
        *(largest.num_steps, largest.weight_rule, len(many)),
        axis=axis,
        shares=grid.shares,
        together=largest.together,
    )
    return offload_listed(program, many)


def _check_graph(graph: StageGraph, num_stages: int) -> None:
    check_edges(graph.edges, num_stages)
    check_tied(graph.tied, num_stages)


def _check_wishes(many: Sequence[Schedule], post_validation: bool) -> None:
    if not many:
        raise ProgramError("replicas is 0", hint="give 1 or more")
    first = many[0]
    for at, other in enumerate(many):
        if other is not first and _sizes(other) != _sizes(first):
            hint = "give all replicas the same stages, ranks, steps and weight rule"
            told = f"replica {at} has {_sizes(other)}, replica 0 has {_sizes(first)}"
            raise ProgramError(told, hint=hint)
    if post_validation and first.has_updates:
        hint = "use a schedule that drains, or clip before the update"
        raise ProgramError(f"{first.name or 'it'} updates before a step's end", hint=hint)


def _sizes(schedule: Schedule) -> str:
    split = "split" if (schedule.orders.kinds == I).any() else "whole"
    sizes = f"{schedule.num_stages} stages on {schedule.num_ranks} ranks, {split} backwards"
    together = f", {schedule.together} together" if schedule.together > 1 else ""
    return f"{sizes}, {schedule.num_steps} steps, weights {schedule.weight_rule.name}{together}"


def _homes(schedule: Schedule) -> Sequence[tuple[int, ...]]:
    """Return the ranks on which each stage of a schedule lives."""
    without = updated_only(schedule.orders) if schedule.has_updates else ()
    return schedule.stage_ranks if without else holders_of(schedule.ranks[None])[0]


def _on(holders: Sequence[tuple[int, ...]], ranks: range) -> tuple[tuple[int, ...], ...]:
    """Return the ranks on which each stage lives, where a replica has `ranks`."""
    return tuple(tuple(ranks[rank] for rank in own) for own in holders)


def _by_replica(sums: Sequence[Needed], grid: Grid) -> list[list[int]]:
    """Return for each replica the numbers of the sums in which any of its ranks takes part."""
    own: list[list[int]] = [[] for _ in range(grid.replicas)]
    for number, one in enumerate(sums):
        for replica in sorted({*map(grid.replica_of, one.reduction.ranks)}):
            own[replica].append(number)
    return own


def chain(num_stages: int, *, backward: bool = True, size_bytes: int = 0) -> tuple[Edge, ...]:
    """Return the edges of a chain of stages: F from each to the next, then B to the one before."""
    forward = [Edge("F", stage, stage + 1, size_bytes) for stage in range(num_stages - 1)]
    back = [Edge("B", stage, stage - 1, size_bytes) for stage in range(1, num_stages)]
    return tuple(forward + back if backward else forward)


class _Extra(NamedTuple):
    """A reduction or Update that comes before the action at `at` of the orders."""

    at: int
    op: int
    of: int  # place among the sums, or stage
    step: int


def _extras(
    schedule: Schedule,
    sums: Mapping[int, Needed],
    holders: Sequence[tuple[int, ...]],
    grid: Grid,
) -> list[list[_Extra]]:
    """Return for each rank the sums, and the updates that the schedule does not list, in order.

    sums:     by number, those in which it takes part.  holders: the ranks of each stage.
    """
    held, offsets = stages_by_rank([holders], schedule.num_ranks)
    of_stage: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    for number, one in sums.items():
        for stage in one.stages:
            of_stage[stage].append(number)
    norm = any(one.reduction.word in AT_THE_END for one in sums.values())
    backward, updates = bool((schedule.orders.kinds != F).any()), schedule.has_updates
    last = last_gradients(schedule.orders) if sums and not updates else {}
    extras: list[list[_Extra]] = []
    ends: list[int] = schedule.orders.offsets[1:].tolist()
    for rank, end in enumerate(ends):
        stages: list[int] = held[offsets[rank] : offsets[rank + 1]].tolist()
        if updates:
            own = _before_updates(schedule, rank, of_stage, stages if norm else ())
        else:
            made = {stage: last.get((rank, stage), end) for stage in stages if backward}
            own = _as_made(end, sums, of_stage, made, grid)
        extras.append(list(own))
    return extras


def _as_made(
    end: int,
    sums: Mapping[int, Needed],
    of_stage: Sequence[Sequence[int]],
    made: Mapping[int, int],
    grid: Grid,
) -> Iterator[_Extra]:
    """Each sum behind the last gradient for it that is made here; updates, and norms, at the end.

    made:     by stage of this rank, the place of its last gradient.
    """
    own, at = sorted({number for stage in made for number in of_stage[stage]}), 0
    for number in own:
        word, stages = sums[number].reduction.word, sums[number].stages
        if word not in AFTER_UPDATES:
            after = (made[s] + 1 for s in stages if s in made)
            at = end if waits_for_all(word, grid) else max(at, *after)
            yield _Extra(at, REDUCE, number, 0)
    for stage in made:
        yield _Extra(end, UPDATE, stage, 0)
    for number in own:
        if sums[number].reduction.word in AFTER_UPDATES:
            yield _Extra(end, REDUCE, number, 0)


def _before_updates(
    schedule: Schedule, rank: int, of_stage: list[list[int]], together: Sequence[int]
) -> Iterator[_Extra]:
    """Each sum before the first update that needs it; a norm needs those of all `together`."""
    part = schedule.orders.slice_of(rank)
    made: set[tuple[int, int]] = set()
    for place in np.flatnonzero(schedule.orders.kinds[part] == U).tolist():
        action = schedule.orders.action(part.start + place)
        stages = {action.stage, *together}
        for number in sorted({number for stage in stages for number in of_stage[stage]}):
            if (number, action.micro_batch) not in made:
                made.add((number, action.micro_batch))
                yield _Extra(part.start + place, REDUCE, number, action.micro_batch)


def _work(schedule: Schedule, extras: Sequence[Sequence[_Extra]]) -> Turns:
    orders = schedule.orders
    rows = np.array([extra for own in extras for extra in own], np.int64).reshape(-1, 4)
    at, op, of, step = (np.ascontiguousarray(column) for column in rows.T)
    offsets = np.cumsum([0, *map(len, extras)], dtype=np.int64)
    own = orders.kinds, orders.stages, orders.micro_batches, orders.offsets
    return Turns(*own, at, op, of, step, offsets, schedule.has_updates)


def _issue(work: Turns, sources: Sources, all_ranks: int) -> Columns:
    """Return the instructions of one replica, without slots, in columns wide for `all_ranks`.

    Raises:   ProgramError: some rank waits forever in a sum.
    """
    num_sums = len(sources.member_offsets) - 1
    sent, received = _num_messages(work, sources)
    rows = np.diff(work.offsets) + np.diff(work.extra_offsets) + sent + received
    numbers = (*sources.where.shape, len(sources.wiring.source), num_sums, all_ranks)
    small, total = small_type(max(numbers)), int(rows.sum())
    clock = _run_clock(work, sources)
    code = Columns(
        np.empty(total, np.uint8),
        np.empty(total, np.uint8),
        np.empty(total, small),
        np.empty(total, np.int32),
        np.empty(total, small),
        np.empty(total, small),
        np.empty(total, small),
        np.empty(total, small),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)]),
    )
    most, ticks = int(received.max()), int(clock.time.max()) + 2
    mail = Inbox(
        tick=np.empty(most, np.int64),
        peer=np.empty(most, np.int64),
        edge=np.empty(most, np.int64),
        micro_batch=np.empty(most, np.int64),
        by_i=np.empty(most, np.int64),
        order=np.empty(most, np.int64),
        starts=np.empty(ticks, np.int64),
        cursor=np.zeros(3, np.int64),
    )
    write_code(work, sources, clock, mail, code)
    return code


def _num_messages(work: Turns, sources: Sources) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many messages each rank sends, and how many it receives."""
    source, target = sources.wiring.source, sources.wiring.target
    made, used = sources.where[source], sources.where[target]
    crosses = made != used
    if not (work.kinds != F).any():
        crosses &= (source < target)[:, None]
    at = (work.kinds == B) | (work.kinds == I)
    if at.any():  # a B edge has a message for each B and I there is
        listed = np.zeros(sources.where.shape, np.bool_)
        listed[work.stages[at], work.numbers[at]] = True
        crosses &= (source < target)[:, None] | listed[source]
    num_ranks = len(work.offsets) - 1
    sent, received = (np.bincount(each[crosses], minlength=num_ranks) for each in (made, used))
    return sent, received


def _run_clock(work: Turns, sources: Sources) -> Clock:
    num_ranks, num_sums = len(work.offsets) - 1, len(sources.member_offsets) - 1
    clock = Clock(
        made=np.full(2 * sources.where.size, -1, np.int32),
        summed=np.zeros(len(work.extra_at), np.int64),
        time=np.zeros(num_ranks, np.int64),
        action=work.offsets[:-1].copy(),
        extra=work.extra_offsets[:-1].copy(),
        waits_for=np.full(num_ranks, -1, np.int64),
        came=np.zeros(num_sums, np.int64),
        latest=np.zeros(num_sums, np.int64),
        ready=np.arange(num_ranks)[::-1].copy(),
        queued=np.ones(num_ranks, np.uint8),
    )
    run_clock(work, sources, clock)
    waiting = np.flatnonzero(clock.extra < work.extra_offsets[1:])
    if len(waiting):
        hint = "update the stages of a step together, after all of their backwards"
        raise ProgramError(f"rank {waiting[0]} waits forever in a sum before an update", hint=hint)
    return clock


def _side_by_side(
    many: Sequence[Schedule], grid: Grid, sums: Sequence[Needed], wiring: Wiring
) -> Codes:
    """Return the instructions of all replicas; those with one schedule differ by their numbers."""
    table = tuple(one.reduction for one in sums)
    own = _by_replica(sums, grid)
    made: dict[tuple[int, int], tuple[Columns, int]] = {}  # the code of the first replica
    copies: list[Codes] = []
    for at, one in enumerate(many):
        key = id(one), len(own[at])  # with an odd number of replicas one may be without a partner
        if key not in made:
            mine = {number: sums[number] for number in own[at]}
            code = _of_replica(one, mine, (at, grid), (wiring, len(sums)))
            made[key] = code, at
        columns, other = made[key]
        copy = Codes(*columns, table)
        if len(many) > 1:
            peer = np.where(columns.peer >= 0, columns.peer + grid.ranks_of(at).start, columns.peer)
            copy = replace(copy, peer=peer.astype(columns.peer.dtype))
        if other != at:
            rows = np.flatnonzero(columns.op == REDUCE)
            edge, of = columns.edge.copy(), np.zeros(len(sums), np.int64)
            of[own[other]] = own[at]
            edge[rows] = of[edge[rows]]
            copy = replace(copy, edge=edge)
        copies.append(copy)
    return copies[0] if len(copies) == 1 else concatenate(copies, table)


def _of_replica(
    schedule: Schedule,
    sums: Mapping[int, Needed],
    replica: tuple[int, Grid],
    beside: tuple[Wiring, int],
) -> Columns:
    """Return the instructions of one replica, with ranks counted from its first.

    sums:     by number, those in which it takes part.  replica: which, and of which grid.
    beside:   the wiring, and how many sums there are.
    Raises:   ProgramError: some rank waits forever in a sum.
    """
    (at, grid), (wiring, num_sums) = replica, beside
    where = schedule.ranks
    extras = _extras(schedule, sums, _homes(schedule), grid)
    ranks = grid.ranks_of(at)
    members: list[list[int]] = [[] for _ in range(num_sums)]
    for number, one in sums.items():
        members[number] = [rank - ranks.start for rank in one.reduction.ranks if rank in ranks]
    sizes = schedule.num_stages, schedule.num_micro_batches, schedule.num_steps
    sources = Sources(
        where,
        wiring,
        laws(schedule.weight_rule, *sizes),
        np.array([rank for ranks in members for rank in ranks], np.int32),
        np.cumsum([0, *map(len, members)], dtype=np.int64),
    )
    code = _issue(_work(schedule, extras), sources, grid.replicas * grid.num_ranks)
    backward = bool((schedule.orders.kinds != F).any())
    alone = np.zeros(schedule.num_ranks, np.int64)
    assign_slots(code, code.slot, wiring, (alone, where.shape[1], schedule.together), backward)
    return code
