"""LayerPipe: the two gradients of a stage as tasks of their own, the one for the weights retimed.

1F1B with every backward cut in two and one delay put between the halves: the gradient of the
input goes to the rank before at once, the next forward starts, and only then the gradient of the
weights is computed, so that no rank ever waits for it.

    S = 3, M = 4, one second per action:
    rank 0  F0 F1 F2 .  .  I0 F3 W0 I1 W1 .  I2 W2 .  I3 W3
    rank 1  .  F0 F1 .  I0 F2 W0 I1 F3 W1 I2 W2 .  I3 W3 .
    rank 2  .  .  F0 I0 F1 W0 I1 F2 W1 I2 F3 W2 I3 W3 .  .

Stages that take unlike times, on fewer processors: a stage at the border of two processors is
divided between them, so that all have equal work.  Each does some of its micro-batches.

Source: LayerPipe, arXiv:2108.06629, with a flush after the last backward, so that the
gradients are not delayed.  The paper divides the gradient of one micro-batch: see docs/schedule.md.
"""

from collections.abc import Iterator
from math import gcd

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.greedy import NO_LIMIT, Rules, Seconds, greedy_few, prefer, script
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import IntArray, Orders
from penstock.schedule.refine import refine
from penstock.schedule.schedule import Row, Schedule, arrange


def layer_pipe(
    num_stages: int,
    num_micro_batches: int,
    *,
    work: int | str = "",
    processors: int | None = None,
) -> Schedule:
    """Return the LayerPipe schedule, one stage per rank, or on `processors`.

    Bubble, in seconds, for equal stages and free links: (S - 1) * (f + i), against
    (S - 1) * (f + i + w) for 1F1B, and never more than that for any stages.
    Rank r holds min(S - r + 1, M) activations, and no more than M.

    work:        seconds of F, and of I and W, of each stage in whole numbers, like 4-2-3-1; by
                 default alike.  Stages are then divided by micro-batches, and the step is no
                 longer than with whole backwards of whole stages, placed as evenly as can be.
    processors:  by default as many as stages.
    Raises:      ScheduleError: work of another number of stages, or below 1; no processor.
    """
    sizes = num_stages, num_micro_batches
    if work == "" and processors in (None, num_stages):
        orders = arrange(_rows(rank, num_stages, num_micro_batches) for rank in range(num_stages))
        return Schedule(*sizes, orders, name=layer_pipe.__name__)
    works = _works(work, num_stages)
    count = num_stages if processors is None else processors
    if not 1 <= count <= num_stages:
        message = f"{num_stages} stages on {count} processors"
        raise ScheduleError(message, hint="give from 1 to as many as there are stages")
    return Schedule(*sizes, _divided(works, num_micro_batches, count), name=layer_pipe.__name__)


def _rows(rank: int, num_stages: int, num_micro_batches: int) -> tuple[Row, ...]:
    warm_up = num_stages - rank
    m = np.arange(num_micro_batches)
    return (
        Row("I", rank, m, 3 * m),
        Row("F", rank, m, 3 * (m - warm_up) + 1),
        Row("W", rank, m, 3 * m + 2),
    )


def _works(given: int | str, num_stages: int) -> IntArray:
    words = str(given).split("-") if given != "" else ["1"] * num_stages
    wrong = not all(word.isdecimal() and 0 < len(word) < 7 and int(word) for word in words)
    if wrong or len(words) != num_stages:
        message = f"the work is {given}, of {num_stages} stages"
        raise ScheduleError(message, hint="write seconds of each stage, from 1 on: 4-2-3-1")
    return np.array([int(word) for word in words], np.int64)


def _divided(works: IntArray, num_micro_batches: int, count: int) -> Orders:
    """Return the shortest orders, with stages divided or whole, and backwards whole or cut.

    No rank is idle: where so few micro-batches would leave one so, stages are whole.
    """
    shape, each = (len(works), num_micro_batches), works.tolist()
    seconds = Seconds(each, each, each)
    free = np.full(count, NO_LIMIT)
    apart = placed(works, num_micro_batches, count)
    is_busy = len(np.unique(apart)) == count
    found = greedy_few(apart, seconds, list(_rules(apart, free)), 1) if is_busy else []
    whole = refine(one_f_one_b(count, num_micro_batches), _evenly(works, count))
    ranks = whole.ranks.astype(np.int64)
    known = Rules(script(whole.orders, shape), free, in_order=True)
    found += greedy_few(ranks, seconds, [*_rules(ranks, free), known], 1)
    found += greedy_few(ranks, seconds, [known], 1, split=False)
    return min(found, key=lambda one: one.step_s).orders


def _rules(ranks: IntArray, free: IntArray) -> Iterator[Rules]:
    """Yield gradients first, with as many activations as 1F1B has and more, and forwards first."""
    count = len(free)
    most = np.array([(ranks == rank).sum(axis=0).max() for rank in range(count)])
    for more in (0, 1, count):
        limits = (count - np.arange(count) + more) * np.maximum(most, 1)
        yield Rules(prefer("IFW", ranks.shape), limits)
    yield Rules(prefer("FIW", ranks.shape), free)


def placed(works: IntArray, num_micro_batches: int, count: int) -> IntArray:
    """Return the rank of [stage, micro-batch] that gives all ranks equal work.

    The work of all stages lies on a line, each stage with as many points as there are micro-batches
    in an order in which neighbours are far apart; each rank has an equal part of the line.
    """
    ends = np.cumsum(works)
    stride = max(1, round(num_micro_batches * 0.618))
    while gcd(stride, num_micro_batches) > 1:
        stride += 1
    order = np.arange(num_micro_batches) * stride % num_micro_batches
    points = (2 * order + 1) * works[:, None] + 2 * num_micro_batches * (ends - works)[:, None]
    return points * count // (2 * num_micro_batches * int(ends[-1]))


def _evenly(works: IntArray, count: int) -> tuple[int, ...]:
    """Return the whole stages of each processor for which the busiest one has the least work."""
    low, high = int(works.max()), int(works.sum())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(works, middle)) <= count else (middle + 1, high)
    parts = _filled(works, low)
    while len(parts) < count:
        at = parts.index(max(parts))
        parts[at : at + 1] = [1, parts[at] - 1]
    return tuple(parts)


def _filled(works: IntArray, most: int) -> list[int]:
    """Return the stages of each processor if each takes as many as `most` work allows."""
    parts, left = [0], most
    for work in works.tolist():
        if work > left and parts[-1]:
            parts.append(0)
            left = most
        parts[-1] += 1
        left -= work
    return parts
