"""The one decorator for loops over millions of actions: numba, with the types left as they are."""

import hashlib
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.schedule.as_python import MACHINE_LOOPS, Interpreted, begin_as_python

Function = TypeVar("Function", bound=Callable[..., object])


def njit(*given: Any, **options: Any) -> Any:
    """Return a function as numba compiles it; where it is not installed, as Python."""
    if not MACHINE_LOOPS:
        return Interpreted(*given) if given else Interpreted
    from numba import njit  # pyright: ignore

    return njit(*given, **options)  # pyright: ignore


def compiled(function: Function, **options: Any) -> Function:
    """Return `function` compiled once that pays: it begins as Python (see as_python.py).

    options:  of numba.
    """
    made: Any = kept(function, **options)
    file: Any = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if file is not None:  # else code is made anew in each process, or numba is switched off
        begin_as_python(made, file)
    return made


def kept(function: Function, **options: Any) -> Function:
    """Return `function` compiled at its first call; the machine code is kept on disk if it can be.

    Kept code is rebuilt when the function's own file changes, or a constant that it imports, or
    the file of a compiled function that it imports.

    options:  of numba.
    """
    try:
        made: Any = njit(cache=True, **options)(function)  # pyright: ignore
    except RuntimeError:  # a read-only installation, and no home to write to
        return njit(**options)(function)  # pyright: ignore
    cache: Any = getattr(made, "_cache", None)
    if cache is not None:  # numba compiles
        _forget_what_is_older(cache._cache_file, _constants(function))
        _keep_if_there_is_room(cache)
    return made


def is_kept(function: object) -> bool:
    """Return whether a function needs no compiling: its machine code is on disk, or it has none."""
    file: Any = getattr(getattr(function, "_cache", None), "_cache_file", None)
    if not isinstance(function, MACHINE_LOOPS):
        return True
    return file is not None and Path(file._index_path).exists()


@contextmanager
def random_numbers_kept() -> Generator[None]:
    """Keep numpy's random numbers what they are, while a loop that seeds them runs as Python."""
    before = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(before)


def _constants(function: Callable[..., object]) -> str:
    """Return a digest of the definitions in a function's file that compiled code depends on.

    Numbers, tables, and the stamps of compiled functions, which cover those of what they use.
    """
    values: dict[str, Any] = vars(sys.modules[function.__module__])
    known = hashlib.sha256()
    for name, value in sorted(values.items()):
        if type(value) in (np.ndarray, int, float):
            known.update(f"{name} {value!r}\n".encode())
        elif isinstance(value, MACHINE_LOOPS):
            file: Any = getattr(value._cache, "_cache_file", None)  # pyright: ignore
            known.update(f"{name} {getattr(file, '_source_stamp', '')}\n".encode())
    return known.hexdigest()


def _forget_what_is_older(file: Any, constants: str) -> None:
    """Have code rebuilt that was kept for other constants, or for types that no longer exist.

    Numba reads the types of kept code before it looks at its age, and fails where a record was
    renamed or is gone.  (`_cache_file`, `_source_stamp`, `_index_path` and `_load_index`
    are its own names, used here only.)
    """
    file._source_stamp = file._source_stamp, constants
    read = file._load_index

    def load() -> dict[Any, str]:
        try:
            return read()
        except (AttributeError, ImportError):
            return {}

    file._load_index = load


def _keep_if_there_is_room(cache: Any) -> None:
    """Have code that cannot be written down, as on a full disk, compiled again the next time."""
    save = cache.save_overload

    def saved(*about: Any) -> None:
        with suppress(OSError):
            save(*about)

    cache.save_overload = saved
