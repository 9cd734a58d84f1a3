"""Pairwise: few rows in which any two values of any two factors meet.

Faults that need three special values at once are rare; those that need two are not.
"""

import itertools
from collections.abc import Sequence


def pairwise(*factors: Sequence[object]) -> list[tuple[object, ...]]:
    """Return rows, one value of each factor, in which all pairs of values of two factors stand.

    Each row is, of all rows that there could be, the first with most pairs that are still missing.
    """
    rows = list(itertools.product(*factors))
    places = list(itertools.combinations(range(len(factors)), 2))
    missing = {(a, b, x, y) for a, b in places for x in factors[a] for y in factors[b]}
    found: list[tuple[object, ...]] = []
    while missing:
        best = max(rows, key=lambda row: sum((a, b, row[a], row[b]) in missing for a, b in places))
        missing -= {(a, b, best[a], best[b]) for a, b in places}
        found.append(best)
    return found
