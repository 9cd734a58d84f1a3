"""Fetcher: parts of objects on their way, many at a time, in the order in which they are wanted.

Who reads says which parts come next (`follow`) and takes them one by one (`take`).  What is on its
way or waits to be taken is at most so many bytes, and as many parts as there are requests and as
were taken before: who reads a little and stops has fetched little.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, final

from penstock.errors import StoreError
from penstock.stores.object_store import ObjectPart

_IDLE_S = 2.0  # after which a thread ends that has nothing to fetch
_WAITS = 3  # so many times as long as a request may take, somebody waits for a part


@final
@dataclass(slots=True, eq=False)
class _OnWay:
    """A part that was asked for.

    users:  who will take it.
    lost:   threads that fetch it and are not waited for any more.
    """

    part: ObjectPart
    users: int = 0
    lost: int = 0
    content: bytes | None = None
    problem: BaseException | None = None
    came: threading.Event = field(default_factory=threading.Event)


@final
@dataclass(slots=True, eq=False)
class ReadAhead:
    """What one reader said that it will take."""

    coming: Iterator[ObjectPart]
    asked: deque[_OnWay] = field(default_factory=deque[_OnWay])
    asked_bytes: int = 0
    num_taken: int = 0


class Counted(NamedTuple):
    """What was taken so far, and the seconds that it was waited for."""

    parts: int = 0
    size_bytes: int = 0
    waited_s: float = 0.0


@final
class Fetcher:
    """Fetches parts by threads of its own; of one process.

    requests:    the most at a time.
    most_bytes:  that each course has on their way, or waiting to be taken; always one part.
    limit_s:     how long a part is waited for before it is asked for again.
    """

    def __init__(
        self, fetch: Callable[[ObjectPart], bytes], requests: int, most_bytes: int, limit_s: float
    ) -> None:
        self._fetch, self._requests, self._most_bytes = fetch, requests, most_bytes
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._on_way: dict[ObjectPart, _OnWay] = {}
        self._queue: deque[_OnWay] = deque()
        self._courses: list[ReadAhead] = []
        self._threads = self._idle = 0
        self.counted = Counted()

    def follow(self, coming: Iterator[ObjectPart]) -> ReadAhead:
        """Begin to fetch what will be taken, in this order."""
        course = ReadAhead(coming)
        with self._changed:
            self._courses.append(course)
            self._ask(course)
        return course

    def go_on(self, course: ReadAhead) -> None:
        """Ask for what comes next: who reads has enough for now, and computes.

        While he takes parts, others are only asked for where few are left: threads that fetch
        would hold him up.
        """
        with self._changed:
            self._ask(course)

    def leave(self, course: ReadAhead) -> None:
        """Forget what a reader said: it takes nothing more."""
        with self._changed:
            if course in self._courses:
                self._courses.remove(course)
                for each in course.asked:
                    self._let_go(each)

    def take(self, part: ObjectPart) -> bytes:
        """Return a part, once it has come.

        Raises:   StoreError: it does not come.  What fetching it raised.
        """
        with self._changed:
            each = self._wanted(part)
            if each in self._queue:  # nothing is needed sooner
                self._queue.remove(each)
                self._queue.appendleft(each)
        begun_s = time.perf_counter()
        try:
            self._wait(each)
        finally:
            with self._changed:
                self._let_go(each)
                self._go_on(each)
        content = each.content
        if content is None:
            assert each.problem is not None, "it came or failed"
            raise each.problem
        before, waited_s = self.counted, time.perf_counter() - begun_s
        self.counted = Counted(
            before.parts + 1, before.size_bytes + len(content), before.waited_s + waited_s
        )
        return content

    def _wait(self, each: _OnWay) -> None:
        for _ in range(_WAITS):
            if each.came.wait(self._limit_s):
                return
            with self._changed:  # whoever fetches it has not come back: another one tries
                if each not in self._queue:
                    self._threads -= 1
                    each.lost += 1
                self._put(each, first=True)
        where, waited_s = each.part.of.path, _WAITS * self._limit_s
        hint = "is the store there, and the network? A resumed run goes on from its checkpoint"
        raise StoreError(f"{where} has not come within {waited_s:g} s", hint=hint)

    # -- with the lock held -----------------------------------------------------------------------

    def _wanted(self, part: ObjectPart) -> _OnWay:
        """Return a part that is asked for now, if it was not; somebody more will take it."""
        each = self._on_way.get(part)
        if each is None or each.problem is not None:
            each = self._on_way[part] = _OnWay(part)
            self._put(each)
        each.users += 1
        return each

    def _put(self, each: _OnWay, *, first: bool = False) -> None:
        if each not in self._queue:
            self._queue.insert(0 if first else len(self._queue), each)
        if self._idle < len(self._queue) and self._threads < self._requests:
            self._threads += 1
            threading.Thread(target=self._work, name="penstock store", daemon=True).start()
        self._changed.notify()

    def _ask(self, course: ReadAhead) -> None:
        """Ask for what comes next in a course, as far as it goes."""
        while len(course.asked) < self._requests + course.num_taken:
            if course.asked and course.asked_bytes >= self._most_bytes:
                return
            part = next(course.coming, None)
            if part is None:
                return
            course.asked.append(self._wanted(part))
            course.asked_bytes += max(0, part.size_bytes)

    def _go_on(self, taken: _OnWay) -> None:
        """Let the course go on that was to take this next."""
        for course in self._courses:
            if course.asked and course.asked[0].part == taken.part:
                each = course.asked.popleft()
                course.asked_bytes -= max(0, each.part.size_bytes)
                course.num_taken += 1
                self._let_go(each)
                if len(course.asked) < self._requests:
                    self._ask(course)
                return

    def _let_go(self, each: _OnWay) -> None:
        each.users -= 1
        if each.users == 0:
            if self._on_way.get(each.part) is each:
                del self._on_way[each.part]
            if each in self._queue:
                self._queue.remove(each)

    # -- in threads of its own --------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._queue, _IDLE_S)
                self._idle -= 1
                if not found:
                    self._threads -= 1
                    return
                each = self._queue.popleft()
            try:
                each.content = self._fetch(each.part)
            except BaseException as problem:  # noqa: BLE001 - who takes it raises it
                each.problem = problem
            each.came.set()
            with self._changed:
                if each.lost:
                    each.lost -= 1
                    return
