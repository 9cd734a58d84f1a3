"""Decorators for loops over millions of instructions: compiled once, machine code kept on disk.

Compiled without reference counts, so these functions take all arrays that they need and make none:
counting the references to some twenty arrays at every instruction would cost 30 times the rest.
(`_nrt` is numba's own name for it; it is used here and nowhere else.)
"""

from collections.abc import Callable
from typing import TypeVar

from penstock.schedule.compiled import compiled, njit

Function = TypeVar("Function", bound=Callable[..., object])


def loop(function: Function) -> Function:
    """Return `function` compiled once that pays; it must make no arrays."""
    return compiled(function, _nrt=False, error_model="numpy")


def part(function: Function) -> Function:
    """Return `function` to be copied into each loop that calls it: calls copy all their arguments.

    Both must stand in one file, for the machine code of a loop is made anew when its file changes.
    """
    return njit(inline="always", _nrt=False, error_model="numpy")(function)
