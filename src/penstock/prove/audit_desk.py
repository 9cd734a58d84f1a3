"""Audit desk: what the process that audits a run and its ranks tell each other, in shared memory.

Ranks that are forked after it was made see it; others see a desk of their own, that says nothing.
A process that was begun anew opens it by the numbers of its files.
"""

import mmap
import os
import select
import threading
from pathlib import Path
from typing import Protocol, final

_PID, _MAY, _OVER, _FORK_NS, _ASKED, _STOP, _TAKEN = range(7)


class AskedBoard(Protocol):
    """What ranks are asked for by who audits: the part of a board that it needs."""

    def ask_to_audit(self, count: int) -> None:
        """Ask for a step, for the time `count`."""
        ...

    def ask_to_stop(self, signal: int) -> None:
        """Ask ranks to stop."""
        ...


@final
class AuditDesk:
    """A few words in memory that forked processes share, and such as were given its files.

    files:    the memory; what wakes who audits; what wakes who leads the run.
    """

    def __init__(self, files: tuple[int, int, int] | None = None) -> None:
        if files is None:
            memory = os.memfd_create("penstock audits")
            os.ftruncate(memory, mmap.PAGESIZE)
            files = memory, os.eventfd(0), os.eventfd(0)
        self.files, self._bell, self._call = files, files[1], files[2]
        self._memory = mmap.mmap(files[0], mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("q")
        self._hand: threading.Thread | None = None
        self._is_closing = False

    def may(self, count: int) -> None:
        """Say how many steps ranks may keep that nobody has asked for, with those that they have
        kept and nobody has found.
        """
        self._words[_MAY] = max(0, count - self._words[_TAKEN])

    def found(self) -> None:
        """Note that a step was found that ranks have kept."""
        self._words[_TAKEN] = max(0, self._words[_TAKEN] - 1)

    def began(self, pid: int, fork_s: float) -> None:
        """Note which process audits, and what starting it took."""
        self._words[_FORK_NS], self._words[_PID] = round(1e9 * fork_s), pid

    @property
    def has_begun(self) -> bool:
        """Return whether who leads the run has noted that, and what ranks may keep."""
        return bool(self._words[_PID])

    @property
    def fork_s(self) -> float:
        """Return the processor time that starting the process took."""
        return self._words[_FORK_NS] / 1e9

    def affords(self) -> bool:
        """Return whether ranks may keep a step, and somebody is there to audit it.

        Whoever is told so keeps one, which counts.
        """
        if not self._words[_MAY] or not _is_alive(self._words[_PID]):
            return False
        self._words[_MAY] -= 1
        self._words[_TAKEN] += 1
        return True

    @property
    def is_open(self) -> bool:
        """Return whether ranks may keep a step that nobody has asked for, or have kept it."""
        return bool(self._words[_MAY] or self._words[_TAKEN])

    def end(self) -> None:
        """Say that no rank is at work any more, and wake who waits."""
        self._words[_OVER] = 1
        os.eventfd_write(self._bell, 1)

    def wait(self, limit_s: float) -> None:
        """Return after so long, or once no rank is at work any more."""
        if not self.is_over():
            select.select([self._bell], [], [], limit_s)

    def is_over(self) -> bool:
        """Return whether no rank is at work any more."""
        return bool(self._words[_OVER])

    # -- what a process asks that sees no board: who leads the run hands it on --------------------

    def ask_to_audit(self, count: int) -> None:
        """Ask ranks to keep a step, for the time `count`."""
        self._words[_ASKED] = count
        os.eventfd_write(self._call, 1)

    def ask_to_stop(self, signal: int) -> None:
        """Ask ranks to stop."""
        self._words[_STOP] = signal
        os.eventfd_write(self._call, 1)

    def hand_on(self, board: AskedBoard) -> None:
        """Hand on to the ranks of a board what is asked here, until the desk is closed."""
        self._hand = threading.Thread(target=self._hand_on, args=(board,), daemon=True)
        self._hand.start()

    def _hand_on(self, board: AskedBoard) -> None:
        asked = 0
        while not self._is_closing:
            os.eventfd_read(self._call)
            if self._words[_ASKED] > asked:
                asked = self._words[_ASKED]
                board.ask_to_audit(asked)
            if self._words[_STOP]:
                board.ask_to_stop(self._words[_STOP])

    def close(self) -> None:
        """Free the memory here."""
        if self._hand is not None:
            self._is_closing = True
            os.eventfd_write(self._call, 1)
            self._hand.join()
        self._words.release()
        self._memory.close()
        for file in self.files:
            os.close(file)


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
