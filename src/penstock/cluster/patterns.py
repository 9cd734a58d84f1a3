"""Patterns: the messages of the rounds of an algorithm, by the positions of n ranks in a group."""

from collections.abc import Sequence

import numpy as np

from penstock.cluster.rounds import Floats, Ints, Messages, sent


def backwards(rounds: Sequence[Messages]) -> list[Messages]:
    """Return the messages of all rounds reversed, the last round first."""
    return [messages.back() for messages in reversed(rounds)]


def shifted(n: int, by: int, share: float) -> Messages:
    """Return messages from every rank to the one `by` places after it."""
    ranks = np.arange(n)
    return sent(ranks, (ranks + by) % n, share)


def doublings(n: int) -> int:
    """Return the least k with 2**k >= n."""
    return (n - 1).bit_length()


def core_size(n: int) -> int:
    """Return the largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def _core_ranks(n: int) -> Ints:
    """Return `core_size` ranks: every other one of the first 2 (n - core), and the rest."""
    extra = n - core_size(n)
    return np.concatenate((np.arange(0, 2 * extra, 2), np.arange(2 * extra, n)))


def folded(n: int, *, back: bool = False, share: float = 1.0) -> list[Messages]:
    """Return the round in which those not of the core send to their neighbour, if there are any."""
    left_out = np.arange(1, 2 * (n - core_size(n)), 2)
    messages = sent(left_out, left_out - 1, share)
    return [messages.back() if back else messages] if len(left_out) else []


def halves(n: int, weights: Floats) -> list[Messages]:
    """Return the rounds of a recursive halving by the core, nearest partners first.

    weights: share of the bytes that each of the core is to have in the end.  In the round at
    distance d, rank i gives away what those have whose numbers end, modulo 2 d, as that of i ^ d.
    """
    core, ranks, rounds = _core_ranks(n), np.arange(len(weights)), list[Messages]()
    for d in (2**power for power in range(doublings(len(weights)))):
        partner = ranks ^ d
        share = weights.reshape(-1, 2 * d).sum(axis=0)[partner % (2 * d)]
        rounds.append(sent(core, core[partner], share))
    return rounds


def whole_vectors(n: int) -> list[Messages]:
    """Return the rounds of a recursive doubling: partners exchange all and add."""
    core, ranks = _core_ranks(n), np.arange(core_size(n))
    steps = (2**power for power in range(doublings(core_size(n))))
    middle = [sent(core, core[ranks ^ step], 1.0) for step in steps]
    return [*folded(n), *middle, *folded(n, back=True)]


def binomial(n: int) -> list[tuple[Ints, Ints, Ints]]:
    """Return (from, to, ranks that `to` stands for) by round; the farthest first."""
    ranks, rounds = np.arange(n), list[tuple[Ints, Ints, Ints]]()
    for step in (2**power for power in reversed(range(doublings(n)))):
        source = ranks[: n - step : 2 * step]
        rounds.append((source, source + step, np.minimum(step, n - step - source)))
    return rounds
