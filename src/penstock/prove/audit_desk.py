"""Audit desk: what the process that audits a run and its ranks tell each other, in shared memory.

Ranks that are forked after it was made see it; others see a desk of their own, that says nothing.
"""

import mmap
import os
import select
from pathlib import Path
from typing import final

_PID, _MAY, _OVER, _FORK_NS = range(4)


@final
class AuditDesk:
    """A few words in memory that forked processes share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("q")
        self._bell = os.eventfd(0)

    def may(self, may: bool) -> None:
        """Say whether ranks may keep a step that nobody has asked for."""
        self._words[_MAY] = may

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
        """Return whether ranks may keep a step, and somebody is there to audit it."""
        return bool(self._words[_MAY]) and _is_alive(self._words[_PID])

    @property
    def is_open(self) -> bool:
        """Return whether ranks may keep a step that nobody has asked for."""
        return bool(self._words[_MAY])

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

    def close(self) -> None:
        """Free the memory here."""
        self._words.release()
        self._memory.close()
        os.close(self._bell)


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
