"""The one decorator for loops over millions of actions: numba, with the types left as they are."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Return `function` compiled at its first call; the machine code is kept on disk if it can be.

    Kept code is made anew when the function's own file changes, not when a constant does that it
    imports from another file: after such a change remove the __pycache__ folders.
    """
    return kept(function)


def kept(function: Function, **options: Any) -> Function:
    """Return `function` compiled by numba with `options`, as `compiled` does."""
    try:
        made: Any = njit(cache=True, **options)(function)  # pyright: ignore
    except RuntimeError:  # a read-only installation, and no home to write to
        return njit(**options)(function)  # pyright: ignore
    cache: Any = getattr(made, "_cache", None)
    if cache is not None:  # numba compiles
        _forget_what_is_older(cache._cache_file)
    return made


def _forget_what_is_older(file: Any) -> None:
    """Let code be made anew that was kept for types that are no longer there.

    Numba reads the types of kept code before it looks at its age, and fails where a record was
    renamed or is gone.  (`_cache_file` and `_load_index` are its own names, used here only.)
    """
    read = file._load_index

    def load() -> dict[Any, str]:
        try:
            return read()
        except (AttributeError, ImportError):
            return {}

    file._load_index = load
