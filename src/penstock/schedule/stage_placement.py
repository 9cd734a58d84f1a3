"""Placement: on which rank a stage does a micro-batch.

    6 stages on 3 ranks    stage  0 1 2 3 4 5
    loop                   rank   0 1 2 0 1 2
    wave                   rank   0 1 2 2 1 0
    mirror of one a rank   rank   0 1 2 . . .   and 2 1 0 for every other micro-batch

A wave that turns once is a V: neighbouring stages share the rank where it turns, so that nothing
is sent there.
"""

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.orders import IntArray


def ranks_for(
    num_stages: int, num_micro_batches: int, num_ranks: int | None, *, per_rank: int = 2
) -> int:
    """Return `num_ranks`, or where it is None the fewest with at most `per_rank` stages each.

    Raises:   ScheduleError: one of the numbers is less than 1.
    """
    ranks = -(-num_stages // max(1, per_rank)) if num_ranks is None else num_ranks
    if min(num_stages, num_micro_batches, ranks) < 1:
        sizes = f"{num_stages} stages, {num_micro_batches} micro-batches and {ranks} ranks"
        raise ScheduleError(f"{sizes} make no schedule", hint="give 1 or more of each")
    return ranks


def loop(num_stages: int, num_ranks: int) -> IntArray:
    """Return the rank of each stage: from rank 0 to the last one, and again from rank 0."""
    return np.arange(num_stages) % num_ranks


def wave(num_stages: int, num_ranks: int) -> IntArray:
    """Return the rank of each stage: from rank 0 to the last one, and back, and so on."""
    turn, place = np.divmod(np.arange(num_stages), num_ranks)
    return np.where(turn % 2 == 0, place, num_ranks - 1 - place)


def vee(num_stages: int, num_ranks: int) -> IntArray:
    """Return the rank of each stage, as `wave`, for no more than two stages per rank.

    Raises:   ScheduleError: there are more.
    """
    if num_stages > 2 * num_ranks:
        message = f"a V of {num_stages} stages does not fit on {num_ranks} ranks"
        hint = f"give {-(-num_stages // 2)} ranks or more, or take hanayo or list_schedule"
        raise ScheduleError(message, hint=hint)
    return wave(num_stages, num_ranks)


def one_way(stage_ranks: IntArray, num_micro_batches: int) -> IntArray:
    """Return the rank of every [stage, micro-batch], the same for all micro-batches."""
    return np.repeat(stage_ranks[:, None], num_micro_batches, axis=1)


def mirror(stage_ranks: IntArray, num_micro_batches: int, num_ranks: int) -> IntArray:
    """Return the rank of every [stage, micro-batch]: odd micro-batches come from the other end."""
    ranks = one_way(stage_ranks, num_micro_batches)
    ranks[:, 1::2] = num_ranks - 1 - ranks[:, 1::2]
    return ranks
