"""ZB-greedy: zero bubble for given seconds, under a limit of memory, found greedily.

It minimises the seconds per step of a long run without a barrier (steady.py), which is the longest
rank's own span, as the paper counts it.  Orders are laid by the paper's rounds
(zero_bubble_rounds.py), by rules for a free rank (greedy.py), and as 1F1B, ZB-H1 and ZB-H2 have
them.  In the best of them neighbours are swapped (improve.py); for few micro-batches in the next
best two as well.  Of equal ones that with the shorter step that drains is taken.

    S = 3, M = 4, at most 3 activations, I takes two seconds, all else one:
    rank 0  F0 F1 F2 .  .  .  .  I0 I0 W0 F3 I1 I1 W1 I2 I2 W2 I3 I3 W3
    rank 1  .  F0 F1 .  .  I0 I0 F2 I1 I1 W0 F3 I2 I2 W1 I3 I3 W2 W3 .
    rank 2  .  .  F0 I0 I0 F1 I1 I1 F2 I2 I2 W0 F3 I3 I3 W1 W2 W3 .  .

Source: Zero Bubble, arXiv:2401.10241 (automatic scheduling).
"""

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.clock import Numbers, numbers_of
from penstock.schedule.figures import peak_activations
from penstock.schedule.greedy import Result, Rules, Seconds, greedy_few, prefer, script
from penstock.schedule.improve import improve, orders_of, steady_of, step_of
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import B, IntArray, Orders
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import loop, one_way, ranks_for
from penstock.schedule.zero_bubble import zb_h1, zb_h2
from penstock.schedule.zero_bubble_rounds import ROUNDING, Room, lay

_STARTS = 3  # orders that are improved
_SMALL = 80  # pairs of stage and micro-batch: where there is time for it


def zb_greedy(
    num_stages: int,
    num_micro_batches: int,
    *,
    seconds: Seconds | None = None,
    limit: int | None = None,
    weight_share: float = 1.0,
) -> Schedule:
    """Return a schedule made for `seconds`, by default f = i = w, one stage per rank.

    No rank holds more than `limit` activations, by default S, as 1F1B does; with 2 S nearly all
    bubbles can go.  Of an activation the `weight_share` is left from I until W.  In a long run
    without a barrier (`steady_s`) no step takes longer than with 1F1B, ZB-H1 or ZB-H2, where these
    hold no more, nor than with the schedule that is made for f = i = w.

    Raises:   ScheduleError: `limit` is less than 1, a time is negative, or `weight_share` is not
              from 0 to 1.
    """
    if not 0 <= weight_share <= 1:
        hint = "give the part of an activation that W needs, from 0 to 1"
        raise ScheduleError(f"weight_share is {weight_share}", hint=hint)
    shape, room = (num_stages, num_micro_batches), Room(num_stages, weight_share)
    room = room if limit is None else Room(limit, weight_share)
    alike = _alike(shape, room)
    orders = alike if seconds is None else _best(shape, seconds, room, [alike])
    return Schedule(*shape, orders, name=zb_greedy.__name__)


@functools.lru_cache(maxsize=64)  # asked for again for all seconds
def _alike(shape: tuple[int, int], room: Room) -> Orders:
    """Return the orders for f = i = w."""
    return _best(shape, Seconds(), room, [])


def _best(shape: tuple[int, int], seconds: Seconds, room: Room, more: list[Orders]) -> Orders:
    """Return the orders with the shortest step in a long run, of all that are laid and `more`."""
    ranks_for(*shape, shape[0])
    ranks = one_way(loop(shape[0], shape[0]), shape[1])
    most = _STARTS if ranks.size <= _SMALL else 1
    few = greedy_few(ranks, seconds, list(_rules(ranks, int(room.limit))), _STARTS)
    numbers = [numbers_of(orders, shape).reshape(shape[0], -1) for orders in more]
    numbers += [numbers_of(each.orders, shape).reshape(shape[0], -1) for each in few]
    numbers += [each for each in _laid(shape, seconds, room) if _fits(each, shape[1], room)]
    all_orders = [orders_of(each, shape) for each in numbers]
    known = [Result(orders, steady_of(orders, seconds, shape)) for orders in all_orders]
    known.sort(key=lambda each: (each.step_s, step_of(each.orders, seconds, shape)))
    better = [
        improve(each, seconds, shape, room.limit, weight_share=room.weight_share, is_steady=True)
        for each in known[:most]
    ]
    return min(better, key=lambda each: each.step_s).orders


def _laid(shape: tuple[int, int], seconds: Seconds, room: Room) -> Iterator[Numbers]:
    """Yield orders, the numbers of their actions, [rank, place], whatever they hold."""
    table = seconds.table(shape[0], split=True)
    for taste in itertools.product((False, True), repeat=3):
        numbers = lay(table, seconds.message_s, shape[1], room, taste)
        if numbers is not None:
            yield numbers
    for builder in (zb_h2, zb_h1):
        yield numbers_of(builder(*shape).orders, shape).reshape(shape[0], -1)
    plain = one_f_one_b(*shape).orders
    times = np.where(plain.kinds == B, 2, 1)
    numbers = np.repeat(numbers_of(plain, shape), times).astype(np.int64)
    numbers[np.flatnonzero(np.repeat(plain.kinds == B, times))[1::2]] += shape[0] * shape[1]
    yield numbers.reshape(shape[0], -1)


def _fits(numbers: Numbers, num_micro_batches: int, room: Room) -> bool:
    """Return whether every rank stays within its room."""
    change = np.array([1.0, room.weight_share - 1.0, -room.weight_share])
    held = np.cumsum(change[numbers // (len(numbers) * num_micro_batches)], axis=1)
    return bool(held.max() <= room.limit + ROUNDING)


def best_of_rules(num_stages: int, num_micro_batches: int, seconds: Seconds, limit: int) -> Result:
    """Return the best orders for a step that drains, and the seconds that it takes."""
    ranks_for(num_stages, num_micro_batches, num_stages)
    ranks = one_way(loop(num_stages, num_stages), num_micro_batches)
    most = _STARTS if ranks.size <= _SMALL else 1
    few = greedy_few(ranks, seconds, list(_rules(ranks, limit)), most)
    shape = num_stages, num_micro_batches
    return min((improve(each, seconds, shape, limit) for each in few), key=lambda best: best.step_s)


def _rules(ranks: IntArray, limit: int) -> Iterator[Rules]:
    num_stages, num_micro_batches = ranks.shape
    limits = np.full(num_stages, limit, np.int64)
    behind = np.arange(num_stages, 0, -1, dtype=np.int64)
    for more in sorted({0, 1, num_stages // 2, num_stages}):
        for kinds, patience in (("IFW", 0.0), ("IFW", 0.5), ("FIW", 0.0)):
            if kinds == "IFW" or more in (0, num_stages):
                yield Rules(prefer(kinds, ranks.shape), limits, behind + more, patience)
    for builder in (zb_h1, zb_h2):
        made = builder(num_stages, num_micro_batches)
        if max(peak_activations(made)) <= limit:
            for patience in (0.0, 1.0):
                given = script(made.orders, ranks.shape)
                yield Rules(given, limits, patience=patience, in_order=True)
