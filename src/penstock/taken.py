"""Taken: how many of a job's micro-batches one of a plan's takes: several, one, or a part of one.

2      two are joined
1      it is one of the job's
1/4    each of the job's is divided into four
"""

from fractions import Fraction
from typing import TypeAlias

from penstock.typed import MisfitError

Taken: TypeAlias = int | Fraction

_MOST = 2**31


def read(value: object) -> Taken:
    """Return what `written` made a number or a text of.

    Raises:   MisfitError: it is neither a whole number nor a part of one.
    """
    wanted = 'a number, or a part of one as "1/4"'
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    head, _, rest = value.partition("/") if isinstance(value, str) else ("", "", "")
    if head != "1" or not rest.isascii() or not rest.isdigit() or not 1 < int(rest) < _MOST:
        raise MisfitError.of(value, wanted)
    return Fraction(1, int(rest))


def written(taken: Taken) -> int | str:
    """Return it as files have it: a whole number, or "1/4"."""
    return int(taken) if taken == int(taken) else str(taken)


def words(taken: Taken) -> str:
    """Return it in words; empty where a micro-batch of the plan is one of the job's."""
    if taken == 1:
        return ""
    return f"{taken} joined" if taken > 1 else f"each in {1 / taken} parts"


def counted(taken: Taken, count: Taken) -> float:
    """Return how many of the job's micro-batches are some of the plan's."""
    found = taken * count
    return int(found) if found == int(found) else float(found)
