"""Hanayo: one model folded in waves over the ranks, and back.

Stage by stage a micro-batch goes from rank 0 to the last rank and back, as often as there are
waves.  Both directions of Chimera are there without a second copy of the weights, and where a wave
turns nothing is sent.

    S = 4, R = 2, M = 2, one second per action:
    rank 0  F0.0 F0.1 .    F3.0 B3.0 F3.1 B3.1 B0.0 .    B0.1
    rank 1  .    F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1 .

Source: Hanayo, arXiv:2308.15762.
"""

from penstock.errors import ScheduleError
from penstock.schedule.alternating import alternating
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import one_way, ranks_for, wave


def hanayo(
    num_stages: int, num_micro_batches: int, *, num_ranks: int | None = None, waves: int = 1
) -> Schedule:
    """Return the Hanayo schedule; without `num_ranks`, on as many ranks as make that many waves.

    A wave is two stages per rank.  Bubble, in seconds, for equal stages, free links, S = 2 W R
    and M >= R: 2 * (R - 1) * max(f, b), of one stage, so 1 / W of that of a single wave.
    A rank then holds at most 2 W R + 2 (W - 1) (q - R) activations, each of one stage, with
    q = ceil(M / (M // R)): for whole units as many as the first rank of 1F1B.

    Raises:   ScheduleError: `num_ranks` or `waves` is less than 1.
    """
    if waves < 1:
        raise ScheduleError(f"waves is {waves}", hint="give 1 or more")
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks, per_rank=2 * waves)
    placement = one_way(wave(num_stages, ranks), num_micro_batches)
    orders = alternating(placement, ranks)
    return Schedule(num_stages, num_micro_batches, orders, name=hanayo.__name__)
