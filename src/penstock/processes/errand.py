"""Errands: calls in forked processes whose results may be any values, beside each other.

What a call returns, or raises of Penstock's, comes back pickled, by memory that only this process
and the one that it has forked have.  How far it is can be read meanwhile.
"""

import math
import mmap
import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast, final

from penstock.errors import PenstockError, RunError
from penstock.listener import Move

if TYPE_CHECKING:
    from penstock.processes.child import Aside

_FAR = struct.Struct("qq")  # done, of how many
_LOOK_S = 0.1

Result = TypeVar("Result")


@final
class Errand(Generic[Result]):
    """A call that is made in a process of its own once there is a hand for it.

    Where that process dies, or fails by what is not Penstock's, the call is made here instead.
    """

    def __init__(self, call: Callable[[Move], Result], errands: "Errands") -> None:
        self._call, self._errands = call, errands
        self._far = mmap.mmap(-1, _FAR.size)  # shared with the process
        self._file, self._process = -1, cast("Aside | None", None)
        self._told: tuple[Result | None, PenstockError | None] | None = None
        self.is_begun = self.is_over = False

    @property
    def far(self) -> tuple[int, int]:
        """Return how much is done, and of how much."""
        done, total = _FAR.unpack(self._far[:])
        return done, total

    def begin(self) -> None:
        """Fork the process."""
        from penstock.processes.child import Aside  # it needs torch

        self._file, self.is_begun = os.memfd_create("penstock errand"), True
        self._process = Aside(self._run)

    def _run(self) -> None:
        """Make the call; in the forked process."""
        told: tuple[Any, ...]
        try:
            told = self._call(self._move), None
        except PenstockError as problem:
            told = None, problem
        with open(self._file, "wb", closefd=False) as file:
            pickle.dump(told, file)

    def _move(self, done: int, total: int) -> None:
        self._far[:] = _FAR.pack(done, total)

    def look(self, limit_s: float) -> None:
        """Take what the process tells, if it does within so many seconds."""
        if self._process is None or self.is_over:
            return
        with suppress(RunError):  # it died: then it is made here
            if self._process.poll(limit_s) is None:
                return
            with open(self._file, "rb", closefd=False) as file:
                self._told = pickle.load(file)  # of this process's own fork
        self.close()

    def result(self, tell: Move) -> Result:
        """Return what the call returns, once it has; meanwhile tell how far all errands are.

        Raises:   what it raises of Penstock's, or, made here, anything.
        """
        while not self.is_over:
            self._errands.go_on(self, _LOOK_S)
            tell(*self._errands.far)
        if self._told is None:
            self._told = self._call(tell), None
        found, problem = self._told
        if problem is not None:
            raise problem
        return cast("Result", found)

    def close(self) -> None:
        """End the process, if there is one."""
        self.is_over = True
        if self._process is not None:
            self._process.close()
            os.close(self._file)
            self._process = None


@final
class Errands:
    """Calls that are made beside each other, as many at a time as there are hands, in order.

    With fewer than two hands each is made in this process, when its result is asked for.
    """

    def __init__(self, hands: int) -> None:
        self.hands = hands
        self._rows: list[Errand[Any]] = []

    def begin(self, call: Callable[[Move], Result]) -> Errand[Result]:
        """Return an errand that is made as soon as there is a hand."""
        made = Errand(call, self)
        if self.hands < 2:
            made.is_over = True
            return made
        self._rows.append(made)
        self._fill()
        return made

    def turns(self, count: int) -> int:
        """Return how many of so many calls are made one after another."""
        return math.ceil(count / max(1, self.hands))

    @property
    def far(self) -> tuple[int, int]:
        """Return how far all are of which one knows of how much, together; else how far any is."""
        rows = [each.far for each in self._rows if each.is_begun]
        rows = [row for row in rows if row[1]] or rows
        return sum(done for done, _ in rows), sum(total for _, total in rows)

    def go_on(self, awaited: Errand[Any], limit_s: float) -> None:
        """Wait so long for one, take what others tell, and begin what there is a hand for."""
        awaited.look(limit_s)
        for each in self._rows:
            each.look(0.0)
        self._fill()

    def _fill(self) -> None:
        waiting = [each for each in self._rows if not each.is_begun and not each.is_over]
        busy = sum(each.is_begun and not each.is_over for each in self._rows)
        for each in waiting[: max(0, self.hands - busy)]:
            each.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End what nobody has waited for."""
        for each in self._rows:
            each.close()
