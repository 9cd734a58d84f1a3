"""Either: formulas that take one run or many: numbers, or arrays with a number for each run.

Annotated as for one run, so that a formula reads, and is checked, as that of one; `Runs` (runs.py)
puts arrays in their places.
"""

from collections.abc import Collection
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Number = TypeVar("Number", int, float)


def most(a: Number, b: Number) -> Number:
    """Return the larger."""
    if _is_array(a) or _is_array(b):
        return np.maximum(a, b)
    return max(a, b)


def least(a: Number, b: Number) -> Number:
    """Return the smaller."""
    if _is_array(a) or _is_array(b):
        return np.minimum(a, b)
    return min(a, b)


def where(condition: bool, a: Number, b: Number) -> Number:
    """Return `a` where the condition holds, else `b`."""
    if _is_array(condition):
        return cast("Any", np.where(condition, a, b))
    return a if condition else b


def ever(condition: bool) -> bool:
    """Return whether the condition holds for any run."""
    return bool(np.any(condition)) if _is_array(condition) else condition


def among(word: str, words: Collection[str]) -> bool:
    """Return whether a word is one of `words`."""
    if _is_array(word):
        return cast("Any", np.isin(cast("Any", word), list(words)))
    return word in words


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)
