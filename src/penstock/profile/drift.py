"""Drift: whether seconds that are sampled one after another have moved, by more than their noise.

The newest samples are compared with those of the beginning by their ranks (Wilcoxon; Mann and
Whitney): of all pairs of a new and an old sample, in how many is the new one larger.  How likely
so uneven a count is where nothing has moved is known exactly, whatever the noise looks like, so
outliers and long tails do no harm.  They have moved if that is below one in 10,000, and the
medians are apart by a tenth.

What has moved is the state from then on, which the next ones are compared with: to be back where
it was is another move, that has to show itself as clearly.  So noise around a threshold is no
coming and going.

Ignores:  that samples next to each other are alike; who acts on a move has to ask what it costs.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache

NEW = 16  # samples that have to tell of a move
_OLD = 32  # of the state, at most; NEW at least
_CHANCE = 1e-4
APART = 1.1  # of the medians


def chance(old: Collection[float], new: Collection[float]) -> float:
    """Return the probability that two samples of one distribution differ this much in their ranks.

    Both ways together.  Of equal values, half of the pairs count each way.
    """
    pairs = len(old) * len(new)
    above = sum((a < b) + 0.5 * (a == b) for a in old for b in new)
    fewest = math.ceil(min(above, pairs - above))
    ways = sum(_ways(len(old), len(new))[: fewest + 1])
    return min(1.0, 2 * ways / math.comb(len(old) + len(new), len(new)))


@cache
def _ways(old: int, new: int) -> tuple[int, ...]:
    """Return by k the number of orders of old and new values with k pairs whose new one is larger.

    The largest value is a new one, which is above every old one, or an old one.
    """
    if not (old and new):
        return (1,)
    last_new = (0,) * old + _ways(old, new - 1)
    last_old = _ways(old - 1, new)
    length = old * new + 1
    rows = [(*row, *(0,) * (length - len(row))) for row in (last_new, last_old)]
    return tuple(a + b for a, b in zip(*rows, strict=True))


@dataclass(slots=True)
class Drift:
    """Samples as they come, and how often they have moved.

    old:    of the state as it is: the first ones of it.
    new:    the newest, none of which is in `old`.
    first:  median of the first state; 0.0 until it is known.
    """

    old: list[float] = field(default_factory=list[float])
    new: deque[float] = field(default_factory=lambda: deque(maxlen=NEW))
    first: float = 0.0
    moves: int = 0

    def add(self, value: float) -> bool:
        """Take a sample; return whether it shows that they have moved."""
        if len(self.new) == NEW:
            oldest = self.new.popleft()
            if len(self.old) < _OLD:
                self.old.append(oldest)
        self.new.append(value)
        if len(self.old) < NEW or len(self.new) < NEW:
            return False
        before, after = statistics.median(self.old), statistics.median(self.new)
        self.first = self.first or before
        is_near = max(after, before) < APART * min(after, before)
        if is_near or chance(self.old, self.new) > _CHANCE:
            return False
        newer = list(self.new)[NEW // 2 :]  # the others may be of before
        self.old, self.moves = newer, self.moves + 1
        self.new.clear()
        return True

    @property
    def factor(self) -> float:
        """Return the median of the state as it is to that of the first; 1.0 without a move."""
        return statistics.median(self.old) / self.first if self.moves and self.first else 1.0
