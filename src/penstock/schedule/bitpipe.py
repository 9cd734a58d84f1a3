"""BitPipe: two V-shaped pipelines in opposite directions over the same ranks.

Even micro-batches go from rank 0 to the last rank and back, two stages per rank; odd ones come from
the other end.  Chimera with stages of half the size, so with half the bubble, and nothing is sent
where a V turns.  Every stage lives on two ranks, whose gradients are summed.

    S = 4, R = 2, M = 2, one second per action:
    rank 0  F0.0 F1.1 F2.1 F3.0 B3.0 B2.1 B1.1 B0.0
    rank 1  F0.1 F1.0 F2.0 F3.1 B3.1 B2.0 B1.0 B0.1

Source: BitPipe, arXiv:2410.19367.
"""

from penstock.schedule.alternating import both_ways
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import mirror, ranks_for, vee


def bitpipe(num_stages: int, num_micro_batches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the BitPipe schedule; without `num_ranks`, two stages per rank in each direction.

    Bubble, in seconds, for equal stages, free links, R even, S = 2 R and M divisible by R:
    (R - 2) * max(f, b), of one stage.  A rank then holds at most 2 R activations of a stage.
    For other sizes it is whichever is shorter for f = i = w, this or a greedy schedule.

    Raises:   ScheduleError: `num_ranks` is less than 1, or there are more than two stages per rank.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    placement = mirror(vee(num_stages, ranks), num_micro_batches, ranks)
    orders = both_ways(placement, ranks, directions=2)
    return Schedule(num_stages, num_micro_batches, orders, name=bitpipe.__name__)
