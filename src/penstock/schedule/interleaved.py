"""Interleaved 1F1B: several stages on each rank, so that a bubble is one small stage long.

Stage s lives on rank s % R.  The micro-batches enter in groups of R or a few more: a group
crosses stages 0 to R - 1, then R to 2R - 1, and so on, before the next one enters.  Going one
stage further takes a tick, and a rank starts one forward per tick; at the last stage a
micro-batch turns round and comes back in the same way, half a tick off.  A rank does its
actions in the order of these ticks.

    S = 4, R = 2, M = 2, one second per action:
    rank 0  F0.0 F0.1 F2.0 F2.1 .    B2.0 .    B2.1 B0.0 B0.1
    rank 1  .    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1 .

Source: arXiv:2104.04473, section 2.2.  Megatron-LM wants M % R == 0, torch a whole number of
equal groups; here any S, M and R will do, and where those two build a schedule it is this one.
"""

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.orders import IntArray
from penstock.schedule.schedule import Row, Schedule, arrange
from penstock.schedule.stage_placement import ranks_for


def interleaved(
    num_stages: int,
    num_micro_batches: int,
    *,
    num_ranks: int | None = None,
    group: int | None = None,
) -> Schedule:
    """Return interleaved 1F1B, stage s on rank s % num_ranks; without `num_ranks` two per rank.

    Bubble, in seconds, for equal stages, free links, S = V * R and M >= R: (R - 1) * (f + b) with
    f and b of one stage, so 1 / V of that of 1F1B on as many ranks.  Rank r then holds
    min(2 * (R - r) - 1 + (V - 1) * q, V * M) activations, each of one stage, with q the largest
    group: 1F1B runs ahead by one forward per rank behind, this by two, as Megatron-LM does.

    `group` asks for larger groups: M // group of them, as equal as possible.  The larger they are,
    the more it is like the breadth-first schedule: fewer changes of stage, more activations.  No
    group is smaller than R, except the only one.

    For other S and M rank 0 has the bubble ((S - 1) // R * max(0, R - M) + (S - 1) % R) * (f + b).
    A rank r >= S has nothing to do.

    Raises:   ScheduleError: `num_ranks` or `group` is less than 1.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    if group is not None and group < 1:
        raise ScheduleError(f"group is {group}", hint="give 1 micro-batch or more")
    groups = in_groups(num_micro_batches, max(ranks, group or ranks))
    orders = arrange(_rows(rank, ranks, num_stages, groups) for rank in range(ranks))
    return Schedule(num_stages, num_micro_batches, orders, name=interleaved.__name__)


def in_groups(num_micro_batches: int, least: int) -> tuple[IntArray, IntArray]:
    """Return, for each micro-batch, the first one of its group and the size of the group.

    No group is smaller than `least`, except the only one.
    """
    num_groups = max(1, num_micro_batches // least)
    starts = np.arange(num_groups + 1) * num_micro_batches // num_groups
    sizes = np.diff(starts)
    return np.repeat(starts[:-1], sizes), np.repeat(sizes, sizes)


def _rows(
    rank: int, num_ranks: int, num_stages: int, groups: tuple[IntArray, IntArray]
) -> list[Row]:
    first, size = groups
    m = np.arange(len(first))
    enters = first * -(-num_stages // num_ranks) + m - first
    round_ticks = np.maximum(size, num_ranks)  # from stage s to s + num_ranks
    rounds, more = divmod(num_stages - 1, num_ranks)
    turn = rounds * round_ticks.max() + more
    rows: list[Row] = []
    for stage in range(rank, num_stages, num_ranks):
        there, more_there = divmod(stage, num_ranks)
        back, more_back = divmod(num_stages - 1 - stage, num_ranks)
        goes = enters + there * round_ticks + more_there
        comes = enters + turn + back * round_ticks + more_back
        rows += [Row("F", stage, m, 2 * goes), Row("B", stage, m, 2 * comes + 1)]
    return rows
