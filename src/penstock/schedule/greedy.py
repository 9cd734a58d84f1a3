"""Greedy: whenever a rank is free, it starts the best action that it may.

When its last action has ended a rank looks at the next F, the next I (or B) and the next W of each
of its stages.  Of those whose inputs are ready it starts the one with the lowest priority number.
Micro-batches keep their order in each stage.  A rank that holds as many activations as its limit
starts no forward.

Nothing waits forever: a forward starts only if every older micro-batch still finds room for all
its activations, once those before it are done.

Most of a schedule is then a setting: a placement, priorities, limits.  The seconds only decide;
what is kept is the order.

Source: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969 (list scheduling);
Zero Bubble, arXiv:2401.10241 (forwards under a limit, W where nothing else can run).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.clock import FORWARD as FORWARD
from penstock.schedule.clock import INPUT as INPUT
from penstock.schedule.clock import WEIGHTS as WEIGHTS
from penstock.schedule.clock import Floats as Floats
from penstock.schedule.compiled import compiled
from penstock.schedule.orders import IntArray, Orders

NO_LIMIT = 2**62


class Seconds(NamedTuple):
    """Seconds of F, I and W, one number for all stages or one for each; B takes those of I and W.

    A message takes `message_s` from one rank to another, and no time within a rank.  Where links
    are unlike, `there_s` and `back_s` say it for each stage but the last: to the next one, and
    back from there; each way then has one message at a time.  `sums_s` are those of each stage's
    sum over replicas, which runs beside other stages' actions once its last backward is done.
    """

    forward_s: float | Sequence[float] = 1.0
    input_s: float | Sequence[float] = 1.0
    weights_s: float | Sequence[float] = 1.0
    message_s: float = 0.0
    there_s: Sequence[float] = ()
    back_s: Sequence[float] = ()
    sums_s: Sequence[float] = ()

    def table(self, num_stages: int, *, split: bool) -> Floats:
        """Return the seconds of [F, I or B, W], [stage].

        Raises:   ScheduleError: a time is negative or not a number, or there is not one per stage.
        """
        rows = per_stage(dict(zip(self._fields[:4], self[:4], strict=True)), num_stages)
        self.links(num_stages)
        table = np.array([*rows.values()][:3])
        if not split:
            table[INPUT] += table[WEIGHTS]
            table[WEIGHTS] = 0.0
        return table

    def links(self, num_stages: int) -> tuple[Floats, Floats]:
        """Return the seconds of messages, [there, back] [stage but the last], and of sums [stage].

        Raises:   ScheduleError: a time is negative or not a number, or there is not one for each.
        """
        found = np.full((2, num_stages - 1), float(self.message_s)), np.zeros(num_stages)
        rows = zip(self._fields[4:], self[4:], (*found[0], found[1]), strict=True)
        for name, given, row in rows:
            times = np.asarray(given, np.float64)
            if times.size and (times.shape != row.shape or not (times >= 0).all()):
                message = f"{name} is {given}, for {num_stages} stages"
                raise ScheduleError(message, hint=f"give {len(row)} numbers, 0 or more")
            row[:] = times if times.size else row
        return found


def per_stage(values: dict[str, float | Sequence[float]], num_stages: int) -> dict[str, Floats]:
    """Return each value, one number or one per stage, as one per stage.

    Raises:   ScheduleError: a value is negative or not a number, or there is not one per stage.
    """
    rows: dict[str, Floats] = {}
    for name, value in values.items():
        times = np.asarray(value, np.float64)
        if times.shape not in ((), (num_stages,)) or not (times >= 0).all():
            message = f"{name} is {value}, for {num_stages} stages"
            raise ScheduleError(message, hint="give one number, or one per stage, 0 or more")
        rows[name] = np.broadcast_to(times, num_stages)
    return rows


class Rules(NamedTuple):
    """The actions that a rank may start, and its preferences."""

    priority: IntArray  # of [F, I or B, W], [stage], [micro-batch]; the lowest comes first
    limit: IntArray  # per rank, activations held: forwards whose W (or B) has not ended
    ahead: IntArray | None = None  # per rank, forwards whose I (or B) has not ended
    patience: float = 0.0  # no W if another action can start before this fraction of it has passed
    idle_s: float = np.inf  # ... unless it will have idled longer then, and longer than all others
    in_order: bool = False  # F and I (or B) of a rank have priorities 0, 1, ... and keep to them


class Result(NamedTuple):
    orders: Orders
    step_s: float  # when the last action ends


def greedy(
    ranks: IntArray, seconds: Seconds, rules: Sequence[Rules], *, split: bool = True
) -> Result:
    """Return the orders of ranks that are greedy by the best of `rules`, the first if tied.

    As `greedy_few` gives them.
    """
    return greedy_few(ranks, seconds, rules, 1, split=split)[0]


def greedy_few(
    ranks: IntArray, seconds: Seconds, rules: Sequence[Rules], most: int, *, split: bool = True
) -> list[Result]:
    """Return at most `most` orders of ranks that are greedy by `rules`, the shortest step first.

    No two have steps of equal length; of equals the first rule's is kept.  Rules after one that
    gives the shortest possible step are not tried.

    `ranks` is [stage, micro-batch].  With `split` every backward is I and W, without it B.

    Raises:   ScheduleError: a limit is less than the stages that a micro-batch has on the rank, or
              than what the given order of F and I needs.
    """
    table, (links_s, sums_s) = seconds.table(len(ranks), split=split), seconds.links(len(ranks))
    lanes, need = _lanes(ranks, len(rules[0].limit))
    least_s = least_step_s(ranks, table, links_s[0][:, None])
    in_turn = bool(len(seconds.there_s) or len(seconds.back_s))
    states: list[_LaneState] = []
    made: list[Result] = []
    for each in rules:
        ahead = np.full_like(each.limit, NO_LIMIT) if each.ahead is None else each.ahead
        _check_limit(need, np.minimum(each.limit, ahead))
        limits = np.array([each.limit, ahead], np.int64)
        priority = np.ascontiguousarray(each.priority, np.int64)
        own = np.ascontiguousarray(ranks, np.int64)
        work = _Lanes(own, *lanes, table, priority, limits, links_s, in_turn)
        states.append(_state(work, need, 3 if split else 2))
        _run(work, states[-1], (float(each.patience), float(each.idle_s), each.in_order))
        if (states[-1].filled < states[-1].offsets[1:]).any():
            raise ScheduleError("the limit is too low for this order", hint="raise the limit")
        made.append(_result(states[-1], ranks, sums_s, split=split))
        if made[-1].step_s <= least_s * (1 + 1e-12):
            break
    made.sort(key=lambda result: result.step_s)
    few = made[:1]
    for result in made[1:]:
        if len(few) < most and result.step_s > few[-1].step_s * (1 + 1e-12):
            few.append(result)
    return few


def _result(state: "_LaneState", ranks: IntArray, sums_s: Floats, *, split: bool) -> Result:
    codes = np.array([0, 2, 3] if split else [0, 1, 1], np.uint8)
    stages, numbers = state.stages.astype(np.int32), state.numbers.astype(np.int32)
    orders = Orders(codes[state.kinds], stages, numbers, state.offsets)
    end_s = float(state.end_s.max())
    if sums_s.any():
        end_s = max(end_s, _summed_s(state.done_s[WEIGHTS if split else INPUT], ranks, sums_s))
    return Result(orders, end_s)


def _summed_s(made_s: Floats, ranks: IntArray, sums_s: Floats) -> float:
    """Return when all sums are done; a rank makes one after the other, as gradients come.

    `made_s` are the ends of what makes the gradients of [stage, micro-batch].
    """
    end_s = 0.0
    for rank in np.unique(ranks):
        own = np.flatnonzero((ranks == rank).any(axis=1))
        last_s = np.where(ranks[own] == rank, made_s[own], 0.0).max(axis=1)
        now_s = 0.0
        for at in np.argsort(last_s, kind="stable"):
            now_s = max(now_s, last_s[at]) + sums_s[own[at]]
        end_s = max(end_s, now_s)
    return float(end_s)


def prefer(kinds: str, shape: tuple[int, ...]) -> IntArray:
    """Return priorities: `kinds`, "IFW" in some order, one after the other; I stands for B too.

    Within a kind the older micro-batch comes first, then the later stage.
    """
    num_stages, num_micro_batches = shape
    age = np.arange(num_micro_batches)[None, :] * num_stages
    depth = num_stages - 1 - np.arange(num_stages)[:, None]
    first = [kinds.index(kind) * num_stages * num_micro_batches for kind in "FIW"]
    return np.array([each + age + depth for each in first], np.int64)


def script(orders: Orders, shape: tuple[int, ...]) -> IntArray:
    """Return the priorities that keep F and I (or B) in `orders`; for W the older comes first."""
    priority = np.zeros((3, *shape), np.int64)
    row = np.array([FORWARD, INPUT, INPUT, WEIGHTS])[orders.kinds]
    for rank in range(len(orders)):
        part = orders.slice_of(rank)
        moves = np.flatnonzero(row[part] != WEIGHTS) + part.start
        at = row[moves], orders.stages[moves], orders.micro_batches[moves]
        priority[at] = np.arange(len(moves))
    priority[WEIGHTS] = priority[INPUT] + orders.num_actions
    return priority


class _Lanes(NamedTuple):
    """What does not change; a lane is a stage on a rank, with its micro-batches in order."""

    ranks: IntArray
    first: IntArray  # per rank, its first lane; one more at the end
    stage: IntArray  # per lane
    start: IntArray  # per lane, where its micro-batches begin; one more at the end
    micro_batch: IntArray
    seconds: Floats
    priority: IntArray
    limit: IntArray  # of [limit, ahead], [rank]
    links_s: Floats  # of a message [there, back], [stage but the last]
    in_turn: bool  # whether a link has one message at a time


class _LaneState(NamedTuple):
    done_s: Floats  # ends of [F, I, W], [stage], [micro-batch]
    there_s: Floats  # when what [F, I], [stage], [micro-batch] made is where it is needed
    free_s: Floats  # when the link [there, back], [stage but the last] has sent all
    at: IntArray  # next place in its lane of [F, I, W], [lane]
    need: IntArray  # forwards to come, of [rank], [micro-batch]
    held: IntArray  # activations, of [limit, ahead], [rank], [micro-batch]
    total: IntArray  # their sum
    oldest: IntArray  # per rank, the first micro-batch with forwards to come
    wake_s: Floats  # per rank, when it looks for work next
    end_s: Floats  # per rank, when its last action ends
    kinds: IntArray
    stages: IntArray
    numbers: IntArray
    offsets: IntArray
    filled: IntArray  # per rank, where its next action will stand
    turn: IntArray  # per rank, how many F and I it has started
    idle_s: Floats  # per rank, since its first action


def _lanes(
    ranks: IntArray, num_ranks: int
) -> tuple[tuple[IntArray, IntArray, IntArray, IntArray], IntArray]:
    num_stages, num_micro_batches = ranks.shape
    own: IntArray = np.arange(num_stages, dtype=np.int64)[:, None]
    key: IntArray = (ranks * num_stages + own).ravel()
    names, lane = np.unique(key, return_inverse=True)
    start = np.zeros(len(names) + 1, np.int64)
    np.cumsum(np.bincount(lane, minlength=len(names)), out=start[1:])
    begin: IntArray = np.arange(num_ranks + 1, dtype=np.int64) * num_stages
    first = np.searchsorted(names, begin).astype(np.int64)
    need = np.zeros((num_ranks, num_micro_batches), np.int64)
    np.add.at(need, (ranks, np.arange(num_micro_batches, dtype=np.int64)[None, :]), 1)
    by_lane = np.argsort(lane, kind="stable") % num_micro_batches
    return (first, names % num_stages, start, by_lane), need


def least_step_s(ranks: IntArray, table: Floats, message_s: float | Floats) -> float:
    """Return the work of some rank plus the time until it can begin: no step takes less.

    `ranks` is [stage, micro-batch], `table` what `Seconds.table` returns, `message_s` of one
    message, or [stage but the last, 1].
    """
    hops_s = message_s * (ranks[1:] != ranks[:-1])
    begins_s = np.zeros(ranks.shape)
    np.cumsum(table[FORWARD, :-1, None] + hops_s, axis=0, out=begins_s[1:])
    first_s = np.full(int(ranks.max()) + 1, np.inf)
    np.minimum.at(first_s, ranks, begins_s)
    work_s = np.zeros_like(first_s)
    np.add.at(work_s, ranks, table.sum(axis=0)[:, None])
    return float((first_s + work_s)[np.unique(ranks)].max())


def _state(work: _Lanes, need: IntArray, num_kinds: int) -> _LaneState:
    shape, num_ranks = work.ranks.shape, len(need)
    offsets = num_kinds * work.start[work.first]
    kinds, stages, numbers = np.zeros((3, int(offsets[-1])), np.int64)
    return _LaneState(
        done_s=np.full((3, *shape), np.inf),
        there_s=np.full((2, *shape), np.inf),
        free_s=np.zeros((2, shape[0] - 1)),
        at=np.zeros((3, len(work.stage)), np.int64),
        need=need.copy(),
        held=np.zeros((2, *need.shape), np.int64),
        total=np.zeros((2, num_ranks), np.int64),
        oldest=np.zeros(num_ranks, np.int64),
        wake_s=np.zeros(num_ranks),
        end_s=np.zeros(num_ranks),
        kinds=kinds,
        stages=stages,
        numbers=numbers,
        offsets=offsets,
        filled=offsets[:-1].copy(),
        turn=np.zeros(num_ranks, np.int64),
        idle_s=np.zeros(num_ranks),
    )


def _check_limit(need: IntArray, limit: IntArray) -> None:
    most = need.max(axis=1)
    if (limit < most).any():
        rank = int(np.argmax(limit < most))
        message = f"rank {rank} may hold {limit[rank]} activations, and has {most[rank]} stages"
        raise ScheduleError(message, hint=f"raise the limit to {most[rank]} or more")


@compiled
def _run(work: _Lanes, state: _LaneState, pace: tuple[float, float, bool]) -> None:
    """Let the ranks work in the order of time."""
    patience, most_s, in_order = pace
    num_kinds = len(state.kinds) // max(1, work.ranks.size)
    while True:
        rank = int(np.argmin(state.wake_s))
        now_s = state.wake_s[rank]
        if now_s == np.inf:  # all is done, or no rank can go on
            return
        kind, lane, later_s = _choose(work, state, rank, in_order, num_kinds)
        if kind == WEIGHTS and later_s < now_s + patience * work.seconds[kind, work.stage[lane]]:
            idle_s = state.idle_s[rank] + later_s - max(now_s, state.end_s[rank])
            if idle_s <= max(most_s, state.idle_s.max()):
                kind = -1
        if kind < 0:
            state.wake_s[rank] = later_s
            continue
        _start(work, state, rank, kind, lane, num_kinds)
        stage, m = work.stage[lane], state.numbers[state.filled[rank] - 1]
        other = rank  # that waits for it
        if kind == FORWARD and stage + 1 < len(work.ranks):
            other = work.ranks[stage + 1, m]
        elif kind == INPUT and stage > 0:
            other = work.ranks[stage - 1, m]
        if other != rank:
            arrives_s = max(state.there_s[kind, stage, m], state.end_s[other])
            state.wake_s[other] = min(state.wake_s[other], arrives_s)


@compiled
def _choose(
    work: _Lanes, state: _LaneState, rank: int, in_order: bool, num_kinds: int
) -> tuple[int, int, float]:
    """Return the kind and lane of the best action that may start, -1 if none may, and when the
    first of the others can, as far as is known."""
    now_s = state.wake_s[rank]
    kind, lane, best, later_s = -1, -1, NO_LIMIT, np.inf
    for k in range(work.first[rank], work.first[rank + 1]):
        stage, start, stop = work.stage[k], work.start[k], work.start[k + 1]
        for each in range(num_kinds):
            at = state.at[each, k]
            if at >= stop - start or (each > 0 and at >= state.at[each - 1, k]):
                continue
            m = int(work.micro_batch[start + at])
            priority = work.priority[each, stage, m]
            if in_order and each != WEIGHTS and priority != state.turn[rank]:
                continue
            ready_s = _ready_s(state, work.ranks, (each, stage, m))
            if ready_s == np.inf:
                continue
            if each == FORWARD:
                oldest, fits = state.oldest[rank], True
                for which in range(2):
                    room = work.limit[which, rank] - state.total[which, rank] - 1
                    fits &= room >= 0
                    if fits and oldest < m and not in_order:
                        need, held = state.need[rank], state.held[which, rank]
                        fits = _has_room(held, need, oldest, m, room)
                if not fits:
                    continue
            if ready_s > now_s:
                later_s = min(later_s, ready_s)
            elif priority < best:
                kind, lane, best = each, k, priority
    return kind, lane, later_s


@compiled
def _ready_s(state: _LaneState, ranks: IntArray, action: tuple[int, int, int]) -> float:
    """Return when the inputs of an action are on its rank; infinity if that is not known yet."""
    kind, stage, m = action
    before, other = kind - 1, stage
    if kind == FORWARD:
        if stage == 0:
            return 0.0
        before, other = FORWARD, stage - 1
    elif kind == INPUT and stage + 1 < len(ranks):
        before, other = INPUT, stage + 1
    if ranks[other, m] != ranks[stage, m]:
        return state.there_s[before, other, m]
    return state.done_s[before, other, m]


@compiled
def _has_room(held: IntArray, need: IntArray, oldest: int, micro_batch: int, room: int) -> bool:
    """Return whether each older micro-batch still finds room once those before it are done.

    `room` is what is left after the new activation.
    """
    for k in range(oldest):
        room += held[k]
    for k in range(oldest, micro_batch):
        if need[k] > room:
            return False
        room += held[k]
    return True


@compiled
def _start(
    work: _Lanes, state: _LaneState, rank: int, kind: int, lane: int, num_kinds: int
) -> None:
    """Do an action: write it down, with its end and the activation that it takes or frees."""
    stage, place = work.stage[lane], state.filled[rank]
    m = work.micro_batch[work.start[lane] + state.at[kind, lane]]
    state.at[kind, lane] += 1
    if place > state.offsets[rank]:
        state.idle_s[rank] += state.wake_s[rank] - state.end_s[rank]
    end_s = state.wake_s[rank] + work.seconds[kind, stage]
    state.done_s[kind, stage, m] = state.end_s[rank] = state.wake_s[rank] = end_s
    if kind != WEIGHTS:
        _send(work, state, kind, stage, int(m))
    state.kinds[place], state.stages[place], state.numbers[place] = kind, stage, m
    state.filled[rank] += 1
    state.turn[rank] += kind != WEIGHTS
    if kind == FORWARD:
        state.need[rank, m] -= 1
        while (
            state.oldest[rank] < len(state.need[rank]) and state.need[rank, state.oldest[rank]] == 0
        ):
            state.oldest[rank] += 1
    for which in range(2):
        last = INPUT if which == 1 or num_kinds == 2 else WEIGHTS
        change = 1 if kind == FORWARD else (-1 if kind == last else 0)
        state.held[which, rank, m] += change
        state.total[which, rank] += change
    if state.filled[rank] == state.offsets[rank + 1]:
        state.wake_s[rank] = np.inf


@compiled
def _send(work: _Lanes, state: _LaneState, kind: int, stage: int, m: int) -> None:
    """Send the result of F to the next stage, or of I (or B) to the one before, if there is one."""
    way, link, to = (0, stage, stage + 1) if kind == FORWARD else (1, stage - 1, stage - 1)
    end_s = state.done_s[kind, stage, m]
    if 0 <= to < len(work.ranks) and work.ranks[to, m] != work.ranks[stage, m]:
        if work.in_turn:
            end_s = max(end_s, state.free_s[way, link])
        end_s += work.links_s[way, link]
        state.free_s[way, link] = end_s
    state.there_s[kind, stage, m] = end_s
