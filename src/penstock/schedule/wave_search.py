"""Found: the shortest of many patterns, under any limit of activations, stages on waves.

A micro-batch goes over the ranks and back, once or several times, forwards and then backwards.  A
pattern is that of one micro-batch, repeated every so many ticks: how many ticks it takes from rank
to rank on each leg, and where each leg begins, such that no rank does two things at once.  Many are
drawn; in one micro-batches come one after the other; one is ZB-V.  Each that holds no more than the
limit is justified (justify.py), and the shortest is kept.

    S = 4, R = 2, M = 2, limit 3, one second per action:
    rank 0  F0.0 F0.1 .    F3.0 I3.0 W3.0 .    I0.0 .    F3.1 I3.1 W0.0 W3.1 I0.1 W0.1
    rank 1  .    F1.0 F2.0 F1.1 .    I2.0 I1.0 W2.0 F2.1 W1.0 .    I2.1 I1.1 W2.1 W1.1

The activations that it needs are set by the limit, not by the kind of schedule: with two stages on
each rank it goes from below V-Min over V-Half to ZB-V, with four it is shorter than each of these
with the same bytes, for twice the messages.

Source: "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362 (building blocks), for two
stages on each rank; the rest is derived here.
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.schedule.justify import justify, orders_of, ticks_of
from penstock.schedule.orders import IntArray, Orders
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import ranks_for, wave
from penstock.schedule.zb_v import zb_v

Objective: TypeAlias = Literal["drained", "steady"]
_Taken: TypeAlias = npt.NDArray[np.bool_]  # of [rank], [tick of the period]
_MORE_TICKS = (0, 0, 0, 1, 2, 3, 4, 6)  # of a period, beyond the work of a rank
_TICKS_PER_RANK = (1, 1, 2, 5)
_FEW_FORWARDS = 10_000
_MOST_FORWARDS = 400_000  # in all patterns that fit
_PASSED_OVER = 0.3  # how often a leg that could begin waits for its next chance


def found(
    num_stages: int,
    num_micro_batches: int,
    *,
    num_ranks: int | None = None,
    limit: int | None = None,
    objective: Objective = "drained",
    tries: int = 40,
) -> Schedule:
    """Return the shortest of up to `tries` schedules; without `num_ranks`, two stages per rank.

    No rank holds more than `limit` activations, each of one stage; by default as many as there are
    stages, which is what the first rank of 1F1B holds.  What is shortest, for f = i = w and free
    links: the step that drains, or "steady", the longest time of a rank from its first action to
    its last, which is the step of a long run without a barrier; of equals the other one decides.
    Nothing more is tried after one that no schedule on these ranks can beat, or after 400,000
    forwards.

    Raises:   ScheduleError: `num_ranks` or `tries` is less than 1, or `limit` less than the stages
              of a rank.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    homes, most = wave(num_stages, ranks), num_stages if limit is None else limit
    per_rank = int(np.bincount(homes).max())
    if most < per_rank:
        message = f"a rank may hold {most} activations, and has {per_rank} stages"
        raise ScheduleError(message, hint=f"raise the limit to {per_rank} or more")
    if tries < 1:
        raise ScheduleError(f"tries is {tries}", hint="give 1 or more")
    orders = _shortest((num_stages, num_micro_batches, ranks), most, objective, tries)
    return Schedule(num_stages, num_micro_batches, orders, name=found.__name__)


@lru_cache(maxsize=256)  # a search asks again and again
def _shortest(sizes: tuple[int, int, int], limit: int, objective: Objective, tries: int) -> Orders:
    """Return the best orders; `sizes` are stages, micro-batches and ranks."""
    num_stages, num_micro_batches, ranks = sizes
    homes = wave(num_stages, ranks)
    skewed = np.arange(int(homes.max()) + 1)
    offsets = (0 * skewed,) if objective == "drained" else (0 * skewed, skewed)
    least = least_ticks(homes, num_micro_batches, objective)
    best: tuple[tuple[int, int], IntArray] | None = None
    for start in _starts(homes, num_micro_batches, limit, tries):
        for each in offsets:
            ticks = justify(start, homes, limit, each)
            length = _length(ticks, homes, objective)
            if best is None or length < best[0]:
                best = length, ticks
        if best is not None and best[0][0] <= least:
            break
    assert best is not None
    return orders_of(best[1], homes, ranks)


def least_ticks(homes: IntArray, num_micro_batches: int, objective: Objective) -> int:
    """Return the ticks that the work of some rank takes; drained, from when it can begin.

    Drained, no fewer than the way to the last stage, all its F and I, and the way back, either.
    """
    work = 3 * num_micro_batches * np.bincount(homes)
    if objective == "steady":
        return int(work.max())
    _, begin = np.unique(homes, return_index=True)
    return max(int((work + begin).max()), 2 * (len(homes) + num_micro_batches) - 1)


def _length(ticks: IntArray, homes: IntArray, objective: Objective) -> tuple[int, int]:
    own = [ticks[:, homes == rank] for rank in range(int(homes.max()) + 1)]
    steady = max(int(each.max() - each.min()) + 1 for each in own)
    drained = int(ticks.max() - ticks.min()) + 1
    return (drained, steady) if objective == "drained" else (steady, drained)


def _starts(homes: IntArray, num_micro_batches: int, limit: int, tries: int) -> Iterator[IntArray]:
    """Yield up to `tries` patterns that hold at most `limit`, at least one: ZB-V, one micro-batch
    after the other, then drawn ones."""
    num_ranks = int(homes.max()) + 1
    if max(len(homes), 2) <= 2 * num_ranks <= limit:
        yield ticks_of(zb_v(len(homes), num_micro_batches, num_ranks=num_ranks))
    numbers, stages = np.arange(num_micro_batches), np.arange(len(homes))
    alone = np.stack([stages, 2 * len(homes) - 1 - stages, 3 * len(homes) - 1 - stages])
    forwards = len(homes) * num_micro_batches
    is_small = forwards <= _FEW_FORWARDS  # else it takes too much room
    if is_small:
        yield alone[:, :, None] + 3 * len(homes) * numbers
    draw, fit = random.Random(0), int(is_small)
    for _ in range(tries - 1):
        pattern = _drawn(homes, draw)
        if pattern is not None and _held(pattern, homes) <= limit:
            fit += 1
            yield pattern.first[:, :, None] + pattern.period * numbers
        if fit and fit * forwards > _MOST_FORWARDS:
            break
    if not fit:
        yield alone[:, :, None] + 3 * len(homes) * numbers


class _Pattern(NamedTuple):
    """The ticks of [F, I, W], [stage] of one micro-batch; the next one's are `period` later."""

    first: IntArray
    period: int


def _drawn(homes: IntArray, draw: random.Random) -> _Pattern | None:
    """Return a pattern; None if a leg has no place where no rank does two things at once."""
    num_stages, num_ranks = len(homes), int(homes.max()) + 1
    period = 3 * int(np.bincount(homes).max()) + draw.choice(_MORE_TICKS)
    ways = [[draw.choice(_TICKS_PER_RANK) for _ in range(2)] for _ in "FI"]  # there, back
    first = np.zeros((3, num_stages), np.int64)
    taken = np.zeros((num_ranks, period), np.bool_)
    now = 0
    for kind in range(2):
        chain = range(num_stages) if kind == 0 else range(num_stages - 1, -1, -1)
        for leg in _legs(chain, num_ranks):
            step = ways[kind][leg[0] // num_ranks % 2]
            ticks = _leg(taken, homes[leg], now, step, draw)
            if ticks is None:
                return None
            first[kind, leg], now = ticks, int(ticks[-1]) + 1
    return _Pattern(_with_weights(first, homes, taken), period)


def _legs(chain: range, num_ranks: int) -> Iterator[list[int]]:
    """Yield the stages of a chain from turn to turn."""
    leg: list[int] = []
    for stage in chain:
        if leg and stage // num_ranks != leg[-1] // num_ranks:
            yield leg
            leg = []
        leg.append(stage)
    yield leg


def _leg(
    taken: _Taken, ranks: IntArray, now: int, step: int, draw: random.Random
) -> IntArray | None:
    """Return ticks from `now` on at which all these ranks are free, and take them."""
    period, offsets = taken.shape[1], step * np.arange(len(ranks))
    ticks: IntArray | None = None
    for wait in range(period):
        each = now + wait + offsets
        if not taken[ranks, each % period].any():
            ticks = each
            if draw.random() >= _PASSED_OVER:
                break
    if ticks is not None:
        taken[ranks, ticks % period] = True
    return ticks


def _with_weights(first: IntArray, homes: IntArray, taken: _Taken) -> IntArray:
    """Return `first` with the W of each rank behind its I, wherever it has nothing to do."""
    period = taken.shape[1]
    for rank, row in enumerate(taken):
        for stage in sorted(np.flatnonzero(homes == rank), key=lambda each: first[1, each]):
            waits = (np.flatnonzero(~row) - first[1, stage]) % period
            first[2, stage] = first[1, stage] + waits.min()
            row[first[2, stage] % period] = True
    return first


def _held(pattern: _Pattern, homes: IntArray) -> int:
    """Return the most activations held by a rank that repeats it forever."""
    begin, _, end = pattern.first
    now = np.arange(pattern.period)[:, None]
    each = (now - begin) // pattern.period - (now - 1 - end) // pattern.period
    return max(int(each[:, homes == rank].sum(axis=1).max()) for rank in np.unique(homes))
