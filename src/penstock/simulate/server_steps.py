"""Server steps: how fast ranks go whose gradients a server takes as they come.

The referee of the run decides, with a computed clock: ranks compute, and a server does one thing
after the other - a gradient that comes in, an update, weights that go out.  Where several divide
the parameters, the others do what the first one has decided once that has come to them, and a rank
goes on with the weights of all.

Ignores:  that ranks beside a server share cores with it; checkpoints.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.referee import Referee, ServedUpdate
from penstock.sums import SumsWay

STEPS = 64  # of each rank, that are played where all are alike


class ServerSeconds(NamedTuple):
    """What a server takes.

    way_s:     by rank: until a gradient is there, or weights are: latency and bytes.
    update_s:  of an update.
    told_s:    until it has what the first server has decided.
    """

    way_s: tuple[float, ...]
    update_s: float
    told_s: float = 0.0


def served_step_s(
    way: SumsWay, computes_s: NDArray[np.float64], servers: Sequence[ServerSeconds]
) -> float:
    """Return the seconds of a step: an update of backup workers, else as many as there are ranks.

    From the second quarter of the first rank's steps to their end.
    computes_s:  [rank, step] of each rank, without what it waits for.
    """
    ranks, steps = computes_s.shape
    referee, free_s = Referee(way, ranks, 0), [0.0] * len(servers)
    read, at, updates_s = [0] * ranks, [0] * ranks, list[float]()
    agenda = [(float(computes_s[rank, 0]), rank) for rank in range(ranks)]
    heapq.heapify(agenda)
    while agenda:
        now_s, rank = heapq.heappop(agenda)
        free_s = [max(now_s, f) + own.way_s[rank] for f, own in zip(free_s, servers, strict=True)]
        told_s = [free_s[0] + own.told_s for own in servers]
        for follows in referee.push(rank, at[rank], read[rank]):
            free_s = list(map(max, free_s, told_s))
            if isinstance(follows, ServedUpdate):
                free_s = [f + own.update_s for f, own in zip(free_s, servers, strict=True)]
                updates_s.append(max(free_s))
                continue
            own_s = zip(free_s, servers, strict=True)
            free_s = [f + own.way_s[follows.rank] for f, own in own_s]
            read[follows.rank] = referee.version
            at[follows.rank] = referee.version if referee.is_backup else at[follows.rank] + 1
            if at[follows.rank] >= steps:
                return _each_s(updates_s[:: 1 if referee.is_backup else ranks])
            over_s = max(free_s) + float(computes_s[follows.rank, at[follows.rank]])
            heapq.heappush(agenda, (over_s, follows.rank))
    raise AssertionError("one is the first to come to its end")


def _each_s(ends_s: list[float]) -> float:
    """Return the mean seconds from step to step, without the first ones."""
    first = len(ends_s) // 4
    if len(ends_s) < 2:
        return ends_s[-1]
    return (ends_s[-1] - ends_s[first]) / (len(ends_s) - 1 - first)
