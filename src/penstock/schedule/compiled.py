"""The one decorator for loops over millions of actions: numba, with the types left as they are."""

from collections.abc import Callable
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Return `function` compiled at its first call; the machine code is kept on disk if it can be.

    Kept code is made anew when the function's own file changes, not when a constant does that it
    imports from another file: after such a change remove the __pycache__ folders.
    """
    try:
        return njit(cache=True)(function)  # pyright: ignore[reportReturnType]
    except RuntimeError:  # a read-only installation, and no home to write to
        return njit(function)  # pyright: ignore[reportReturnType]
