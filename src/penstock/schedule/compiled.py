"""The one decorator for loops over millions of actions: numba, with the types left as they are."""

from collections.abc import Callable
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Return `function` compiled at its first call; the machine code is kept on disk."""
    return njit(cache=True)(function)  # pyright: ignore[reportReturnType]
