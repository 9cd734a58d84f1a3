"""Roster: which ranks of a host are there, have failed, died or left; and waiting that notices.

One page that all ranks see.  Each rank writes its own line; the line FAILED takes the
first failure, whose text stands in the failed rank's own box.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from penstock.transport.segment import LINE_WORDS, SharedSegment, sleep_while, wake
from penstock.transport.transport import Store, TransportError

_STATE, _PID = 0, 1  # words of a rank's line
_ABSENT, _HERE, _LEFT = 0, 1, 2
_LOOK_S = 0.02  # how often a sleeper looks around
_POLL_S = 0.001  # how often a rank that joins asks the store
_BOX_BYTES = 1024


@final
class Roster:
    """The ranks of one job on one host; built by all of them together."""

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, Sequence[int]],
        store: Store,
        *,
        spin_s: float,
        limit_s: float,
        news: Callable[[], None] = lambda: None,
    ) -> None:
        """Join the others of `ranks`: how many there are in all, and which of them here.

        While they are waited for, `news` is asked, and raises to end that.
        """
        self.rank = rank
        self.num_ranks, self._here = num_ranks, here = ranks
        self._store = store
        self._spin_s = spin_s
        self._limit_s, self._news = limit_s, news
        self._made: list[SharedSegment] = []
        self._ranks: dict[int, int] = {}  # by the pidfd of their process
        self._deaths = select.poll()
        self._asleep = set[int]()  # addresses on which threads of this rank sleep
        self._looking = threading.Lock()  # a poll object serves one thread at a time
        self._page: SharedSegment | None = None
        self.failed_word = LINE_WORDS * (1 + num_ranks)
        boxes_bytes = 4 * LINE_WORDS * (2 + num_ranks)
        self._boxes = [boxes_bytes + _BOX_BYTES * r for r in range(num_ranks)]
        num_words = (boxes_bytes + _BOX_BYTES * num_ranks) // 4
        self._page = self.share("roster", num_words, maker=min(here), agreed=f"{num_ranks} ranks")
        self.words = self._page.words
        self._join()

    def _join(self) -> None:
        self.words[self._line(self.rank) + _PID] = os.getpid()
        self.words[self._line(self.rank) + _STATE] = _HERE
        until = time.monotonic() + self._limit_s
        watched = {self.rank}
        while len(watched) < len(self._here):
            for rank in sorted(set(self._here) - watched):
                if self.words[self._line(rank) + _STATE] != _ABSENT:
                    self._watch(rank)
                    watched.add(rank)
                elif time.monotonic() > until:
                    raise TransportError(rank, f"has not joined within {self._limit_s:g} s")
            self.look()
            self._news()
            time.sleep(_POLL_S)

    def _watch(self, rank: int) -> None:
        try:
            fd = os.pidfd_open(self._pid(rank))
        except ProcessLookupError:
            self._mourn(rank)
        else:
            self._ranks[fd] = rank
            self._deaths.register(fd, select.POLLIN)

    def share(
        self,
        key: str,
        num_words: int,
        *,
        maker: int,
        agreed: str,
        prepare: Callable[[SharedSegment], None] = lambda _: None,
    ) -> SharedSegment:
        """Return the segment `key`, which rank `maker` makes, prepares and shows the others.

        The maker does not wait.  `agreed` is what all who share it must agree on.

        Raises:   TransportError: the maker is gone, or does not make it in time, or disagrees.
        """
        if self.rank == maker:
            segment = SharedSegment.make(num_words)
            prepare(segment)
            self._made.append(segment)
            self._store.set(key, f"{segment.address} {agreed}")
            return segment
        until = time.monotonic() + self._limit_s
        while not self._store.check([key]):
            self._news()
            if self._page is not None:
                self._look_for(maker, f"rank {self.rank} waits for its {key}")
            if time.monotonic() > until:
                raise TransportError(
                    maker, f"has not shown {key} to rank {self.rank} within {self._limit_s:g} s"
                )
            time.sleep(_POLL_S)
        pid, fd, token, theirs = self._store.get(key).decode().split(maxsplit=3)
        if theirs != agreed:
            raise TransportError(maker, f"has {key} with {theirs}, rank {self.rank} with {agreed}")
        try:
            return SharedSegment.open(f"{pid} {fd} {token}", num_words)
        except OSError as error:
            self.look()
            raise TransportError(maker, f"does not show {key} any more: {error}") from error

    def wait_while(
        self, segment: SharedSegment, word: int, old: int, *, sleeps: int, peer: int, what: str
    ) -> None:
        """Return once `word`, which rank `peer` writes, is not `old`.

        While this rank sleeps, its own word `sleeps` is 1: it asks to be woken.
        Raises:   TransportError: a rank failed or died, or `peer` left, and `what` waits for it.
        """
        words, clock, give_way = segment.words, time.perf_counter, os.sched_yield
        until = clock() + self._spin_s
        while clock() < until:
            if words[word] != old:
                return
            give_way()
        words[sleeps], address = 1, segment.address_of(word)  # a fence: the futex call that follows
        self._asleep.add(address)
        try:
            while words[word] == old:
                sleep_while(address, old, _LOOK_S)
                if words[word] == old:
                    self.look()
                    if self._has_left(peer) and words[word] == old:
                        raise TransportError(peer, f"has left; {what}")
        finally:
            self._asleep.discard(address)
            words[sleeps] = 0

    def look(self) -> None:
        """Raise TransportError if some rank has failed or died."""
        failed = self.words[self.failed_word]
        if failed:
            raise TransportError(failed - 1, self._text(failed - 1))
        with self._looking:
            dead = [self._ranks[fd] for fd, _ in self._deaths.poll(0)]
        for rank in dead:
            if not self._has_left(rank):
                self._mourn(rank)

    def _look_for(self, peer: int, what: str) -> None:
        self.look()
        if self._has_left(peer):
            raise TransportError(peer, f"has left; {what}")

    def _mourn(self, rank: int) -> None:
        if not self._has_left(rank):
            self.fail(rank, f"died: its process {self._pid(rank)} ended without a word")
            self.look()

    def fail(self, rank: int, text: str) -> None:
        """Let all ranks raise TransportError(rank, text), threads of this one at once.

        The first failure counts.
        """
        if not self.words[self.failed_word]:
            self._tell(rank, text)
        for address in tuple(self._asleep):
            wake(address)

    def _tell(self, rank: int, text: str) -> None:
        data = text.encode(errors="replace")[: _BOX_BYTES - 4]
        start = self._boxes[rank]
        assert self._page is not None
        self._page.memory[start + 4 : start + 4 + len(data)] = data
        self.words[start // 4] = len(data)
        self.words[self.failed_word] = rank + 1

    def _text(self, rank: int) -> str:
        start = self._boxes[rank]
        assert self._page is not None
        return bytes(self._page.memory[start + 4 : start + 4 + self.words[start // 4]]).decode(
            errors="ignore"
        )

    def leave(self) -> None:
        """Note that this rank ends in good order; a second call does nothing."""
        self.words[self._line(self.rank) + _STATE] = _LEFT
        for fd in self._ranks:
            self._deaths.unregister(fd)
            os.close(fd)
        self._ranks.clear()
        for segment in self._made:
            segment.close()

    def _has_left(self, rank: int) -> bool:
        return self.words[self._line(rank) + _STATE] == _LEFT

    def _pid(self, rank: int) -> int:
        return self.words[self._line(rank) + _PID]

    def _line(self, rank: int) -> int:
        return LINE_WORDS * (1 + rank)
