"""Loops as Python: run as they are written until compiling them would have paid.

Where numba is not installed they are Python for good, and that they are slow is said once.

All loops of a plan take a minute to compile and, on a few ranks, a second or two to run as Python.
So a loop whose machine code is not kept begins as Python, and is compiled once it has run so for
as long as compiling takes, in this process and, as a file beside the machine code says, in those
before it; or at once where it is given much.  Who rents until the rent is the price pays at most
twice the least.

Ignores:  how long a loop takes that is given little: one that searches is to be compiled at once.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, cast, final

import numpy as np

from penstock.extras import hint_of

log = logging.getLogger(__name__)

BYTE_S = 1e-3  # to compile one of bytecode: 0.5 to 2.3 ms in 17 loops of 700 to 12,000 bytes
MUCH = 20_000  # elements: a tenth of a second of Python where each is looked at once
_WORTH_NOTING_S = 0.05  # a process in which a loop takes less could go on so for ever
_SLOW_S = 20.0  # of all loops in a process that has no numba: from then on it would have paid
SLOW = "loops have taken %d s as Python, for numba is not installed: %s makes them fast"


@final
class Interpreted:
    """A loop where there is no numba: Python, as is all that it calls."""

    spent_s = 0.0  # by all loops of this process

    def __init__(self, py_func: FunctionType) -> None:
        self.py_func = py_func
        update_wrapper(self, py_func)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        start, before_s = time.thread_time(), Interpreted.spent_s
        try:
            with np.errstate(all="ignore"):  # as machine code does
                return python_of(self)(*arguments, **named)
        finally:
            Interpreted.spent_s = before_s + time.thread_time() - start
            if Interpreted.spent_s >= _SLOW_S:
                _say_that_they_are_slow()

    def __reduce__(self) -> str:
        return self.py_func.__qualname__


@cache  # once
def _say_that_they_are_slow() -> None:
    log.warning(SLOW, _SLOW_S, hint_of("fast"))


def _machine_loops() -> tuple[type, ...]:
    """Return the type of what numba compiles; nothing where it is not installed."""
    try:
        from numba.core.dispatcher import Dispatcher
    except ImportError:  # also one that this numpy is too new for
        return ()
    return (Dispatcher,)


MACHINE_LOOPS = _machine_loops()
LOOPS = (Interpreted, *MACHINE_LOOPS)


def begin_as_python(made: Any, file: Any) -> None:
    """Let a compiled function begin as Python where Python calls it.

    file:  numba's index of kept machine code.

    (`_compile_for_args` is numba's own name: what it asks for a function to call where it has no
    machine code for arguments of these types.  It is used here only.)
    """
    compiled, rent = made._compile_for_args, Rent(made, file)

    def as_python(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            with np.errstate(all="ignore"):  # as machine code does
                return python_of(made)(*arguments, **named)
        finally:
            rent.add(time.perf_counter() - start)

    def function_for(*arguments: Any, **named: Any) -> Callable[..., Any]:
        if rent.is_enough() or num_elements((*arguments, *named.values())) > MUCH:
            return compiled(*arguments, **named)
        return as_python

    made._compile_for_args = function_for


@final
class Rent:
    """The seconds that a loop has run as Python, and those that compiling it takes."""

    def __init__(self, made: Any, file: Any) -> None:
        self._made, self._file = made, file
        self._place = Path(file._index_path).with_suffix(".spent")
        self._seconds, self._price_s = 0.0, math.nan  # until somebody asks
        self._not_noted_s = 0.0

    def is_enough(self) -> bool:
        """Return whether compiling pays from now on, or has been done."""
        if math.isnan(self._price_s):
            self._seconds = _noted(self._place)
            self._price_s = 0.0 if self._file._load_index() else price_s(self._made)
        return self._seconds >= self._price_s

    def add(self, seconds: float) -> None:
        """Count seconds; what is worth it is noted for the processes that come."""
        self._seconds += seconds
        self._not_noted_s += seconds
        if self._not_noted_s >= _WORTH_NOTING_S:
            self._not_noted_s = 0.0
            with suppress(OSError):  # a full disk, or an installation that cannot be written to
                self._place.write_text(f"{self._seconds:.3f}\n")


def _noted(place: Path) -> float:
    try:
        seconds = float(place.read_text())
    except (OSError, ValueError):  # none, or one that is being written
        return 0.0
    return seconds if seconds >= 0 else 0.0


def price_s(made: Any) -> float:
    """Return about how many seconds compiling a function takes, with all that it calls."""
    todo, seen = [made], set[Any]()
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            names = one.py_func.__code__.co_names
            called: list[Any] = [one.py_func.__globals__.get(name) for name in names]
            todo += [each for each in called if isinstance(each, LOOPS)]
    return BYTE_S * sum(len(one.py_func.__code__.co_code) for one in seen)


def num_elements(values: Sequence[Any]) -> int:
    """Return the number of elements of the arrays among values, and in tuples among them."""
    sizes = (
        value.size if isinstance(value, np.ndarray) else num_elements(cast("Sequence[Any]", value))
        for value in values
        if isinstance(value, (np.ndarray, tuple))
    )
    return sum(sizes)


@cache
def python_of(made: Any) -> FunctionType:
    """Return a compiled function's Python, in which all that it calls is Python too."""
    function: FunctionType = made.py_func
    names = _as_python(function.__globals__)
    own = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


_NAMES: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # of modules, theirs and ours


def _as_python(names: dict[str, Any]) -> dict[str, Any]:
    """Return names of a module with the Python of its compiled functions in their place."""
    if id(names) not in _NAMES:
        own = dict(names)
        _NAMES[id(names)] = names, own  # before its functions, which call each other
        made: dict[str, Any] = {k: v for k, v in names.items() if isinstance(v, LOOPS)}
        own |= {name: python_of(one) for name, one in made.items()}
    return _NAMES[id(names)][1]
