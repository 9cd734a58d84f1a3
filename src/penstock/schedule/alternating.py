"""Alternating: every rank starts one forward per tick, and half a tick later one backward.

What Chimera, BitPipe and Hanayo share.  A stage takes a tick.  The micro-batches of one direction
enter two ticks apart and fill every other tick of a rank; the other ticks are filled by those that
come back on a wave, or from the other direction.  At the last stage a micro-batch turns round and
comes back in the same way, half a tick off.  As many micro-batches as there are ranks make a unit,
and a unit follows the one before without a gap: forwards and backwards alternate throughout,
so it costs nothing if they take different times.
"""

import numpy as np

from penstock.schedule.greedy import NO_LIMIT, Rules, Seconds, greedy, prefer, script
from penstock.schedule.interleaved import in_groups
from penstock.schedule.orders import IntArray, Orders
from penstock.schedule.schedule import Row, arrange


def alternating(ranks: IntArray, num_ranks: int, *, directions: int = 1) -> Orders:
    """Return the orders for a placement `ranks` of [stage, micro-batch].

    Micro-batch m goes in direction m % directions.  Each direction has its share of a unit: at
    least R / directions micro-batches, a few more in some units if there is only one direction.
    """
    num_stages, num_micro_batches = ranks.shape
    m = np.arange(num_micro_batches, dtype=np.int64)
    number, share = m // directions, -(-num_ranks // directions)
    if directions == 1:
        first, size = in_groups(num_micro_batches, num_ranks)
    else:
        first, size = number // share * share, np.full(num_micro_batches, share)
    unit = max(num_stages, 2 * share - 1)  # ticks, for a share of each direction
    enters = first * unit // share + 2 * (number - first)
    wait = 2 * np.maximum(0, size - share)  # for the rest of the unit, once in every full wave
    wave = 2 * num_ranks
    turn = num_stages - 1 + (num_stages - 1) // wave * wait.max()
    rows: list[list[Row]] = [[] for _ in range(num_ranks)]
    for stage in range(num_stages):
        back = num_stages - 1 - stage
        goes = 2 * (enters + stage + stage // wave * wait)
        comes = 2 * (enters + turn + back + back // wave * wait) + 1
        for rank in np.unique(ranks[stage]).tolist():
            here = np.flatnonzero(ranks[stage] == rank)
            rows[rank] += [
                Row("F", stage, here, goes[here]),
                Row("B", stage, here, comes[here]),
            ]
    return arrange(rows)


def both_ways(ranks: IntArray, num_ranks: int, *, directions: int) -> Orders:
    """Return the orders for a placement in several directions, also where units do not fit.

    They fit if the ranks divide the micro-batches, and the directions the ranks.  Otherwise the
    result is whichever is shortest for f = i = w: these orders, or those of a greedy rank that
    holds no more than they do and prefers F or B.
    """
    orders = alternating(ranks, num_ranks, directions=directions)
    if ranks.shape[1] % num_ranks == 0 and num_ranks % directions == 0:
        return orders
    limit = np.full(num_ranks, -(-len(ranks) // num_ranks) * (num_ranks + 1))
    wild = np.full(num_ranks, NO_LIMIT)
    rules = [
        Rules(script(orders, ranks.shape), wild, in_order=True),
        Rules(prefer("FIW", ranks.shape), limit),
        Rules(prefer("IFW", ranks.shape), limit),
    ]
    return greedy(ranks, Seconds(), rules, split=False).orders
