"""Averages: which ranks average the weights of a stage after which steps.

    local, diloco, easgd   all ranks that have the stage, every H steps
    gossip                 two by two, every H steps other two; one of an odd number stays alone

Partners of gossip, by round, of n replicas; after the last round comes the first:

    n = 2^k    k rounds: r with the one whose number differs in bit `round` (a hypercube)
    n even     2 rounds: 0 1 | 2 3 | 4 5, then 1 2 | 3 4 | 5 0 (a ring)
    n odd      n rounds: the pairs of the ring from `round` on; the last one stays alone

In each round no replica is in two pairs, so an average of two leaves the mean of all as it was.

Source:  arXiv:1705.09056 (ring), arXiv:1803.05880 (partners that change, hypercube).
"""

from collections.abc import Iterable, Sequence

from penstock.program.reductions import AverageWeights
from penstock.sums import sums_way


def partners(replicas: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the pairs of replicas of each round."""
    if replicas < 2:
        return ()
    bits = (replicas - 1).bit_length()
    if replicas == 1 << bits:
        return tuple(
            tuple((one, one ^ 1 << bit) for one in range(replicas) if not one >> bit & 1)
            for bit in range(bits)
        )
    rounds = replicas if replicas % 2 else 2
    return tuple(
        tuple(
            ((at + 2 * pair) % replicas, (at + 2 * pair + 1) % replicas)
            for pair in range(replicas // 2)
        )
        for at in range(rounds)
    )


def averages_of(
    text: str, stage: int, among: Sequence[tuple[int, ...]], size_bytes: int
) -> list[AverageWeights]:
    """Return the averages of the weights of a stage, none where one replica has it.

    text:     as `sums_way` reads it.
    among:    by replica, the ranks that have the stage; of several in one replica, which have the
              same weights, all take part.
    """
    way = sums_way(text)
    if len(among) < 2:
        return []
    if way.kind != "gossip":
        ranks, every = _union(among), way.every
        return [AverageWeights(f"stage{stage}", ranks, 0, size_bytes, every, every)]
    rounds, found = partners(len(among)), list[AverageWeights]()
    for at, pairs in enumerate(rounds):
        when = way.every * len(rounds), way.every * (at + 1)
        for pair in pairs:
            ranks = _union([among[one] for one in pair])
            found.append(AverageWeights(f"stage{stage}/{at}", ranks, 0, size_bytes, *when))
    return found


def _union(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for row in rows for rank in row}))
