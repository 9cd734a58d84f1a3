"""Audit pace: how often steps are audited, so that a share of the processor time pays for it."""

import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

_RARER = 0.02  # of the time so far, between two audits at least
_LEAST_S = 0.01  # between two
_FIRST = 0.5  # of what the first audit took is what the next one takes: all is warm then
_EAGER = 2.0  # times what ranks compute in a step, by eager autograd with nothing joined: a guess
_KEEP_BYTES_PER_S = 5e8  # of one core that copies, a guess until it is measured
_LOOK_S = 0.25  # between two looks at what the run has used
_MOST = 0.9  # of what ranks tell is what a host sees that sees them all
_MOST_KEPT = 1 << 20  # steps at a time: as many as anybody pays for
_MAY_ERR = 4  # a run may take so many times what was predicted


class AuditBasis(NamedTuple):
    """What audits of a run are paced by.

    ranks:    how many compute at once, each on a core of its own.
    step_s:   that a step takes; 0: nobody knows.
    steps:    that are to be run.
    bytes:    that ranks keep of a step: weights and optimizer state, before and after, gradients.
    before_s: processor time that the run has taken by now, and `spent_s` what of it audits took.
    begin_s:  that beginning with audits may take.
    window:   steps that are audited at a time.
    """

    ranks: int
    step_s: float
    steps: int
    bytes: int
    before_s: float = 0.0
    spent_s: float = 0.0
    begin_s: float = 0.06
    window: int = 1

    @property
    def cost_s(self) -> float:
        """Return what the first audit may take, with all that it needs."""
        step_s = _EAGER * self.ranks * self.step_s
        return self.begin_s + self.window * step_s + self.bytes / _KEEP_BYTES_PER_S

    def affords(self, share: float, times: float = 1.0) -> int:
        """Return how many audits are within their share of the whole run, if that takes so many
        times what is expected; where nobody knows, one."""
        expected_s = self.before_s + times * self.steps * self.step_s * self.ranks
        return _count(share * expected_s - self.spent_s, self.cost_s) if self.step_s else 1

    def is_short(self, share: float) -> bool:
        """Return whether the run is too short for one audit, even if it takes far longer."""
        return not self.affords(share, _MAY_ERR)


def _count(left_s: float, cost_s: float) -> int:
    """Return how many audits so many seconds pay for."""
    return max(0, min(_MOST_KEPT, int(left_s / max(cost_s, 1e-9))))


def used_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    rows = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(row.ru_utime + row.ru_stime for row in rows)


def used_with_s(leader: int) -> float:
    """Return the processor time of a process of this host, of its children, and of all of theirs
    that have ended; 0: nothing tells.
    """
    used_s = 0.0
    with suppress(OSError):
        told = Path(f"/proc/{leader}/task/{leader}/children").read_text()
        for pid in (leader, *map(int, told.split())):
            with suppress(ProcessLookupError, FileNotFoundError):
                row = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                used_s += sum(map(int, row[11:15])) / os.sysconf("SC_CLK_TCK")
    return used_s


@final
class Pace:
    """When the next audit is due, by what the ones before took, and all that comes with them.

    seen_s:   tells the processor time of the run so far as far as this host sees it.
    """

    def __init__(
        self, share: float, basis: AuditBasis, seen_s: Callable[[], float] = float
    ) -> None:
        self.share, self.basis, self._seen_s = share, basis, seen_s
        self._looked_s, self._seen = -_LOOK_S, 0.0
        self.begun_s = self.told_s = time.monotonic()
        self.ranks_s = self.kept_s = 0.0  # of the ranks, and of these for what they keep
        self.own_s = 0.0  # of the process that audits
        self.costs_s: list[float] = []
        self.next_s = self.begun_s
        self._chance = random.Random(os.urandom(8))  # not the author's

    def used(self, own_s: float) -> None:
        """Note what this process has taken by now, waiting and beginning and all."""
        self.own_s = max(self.own_s, own_s)

    def told(self, rows: Mapping[str, tuple[float, float]], own_s: float, again_s: float) -> float:
        """Take what an audit took; return that.

        rows:     of each rank all its processor time, and what keeping steps took of it.
        own_s:    of this process by now, and `again_s` what of it the next audit takes, too.
        """
        before_s, kept_s, now = self.spent_s, self.kept_s, time.monotonic()
        self.ranks_s = sum(whole for whole, _ in rows.values())
        self.kept_s = max(kept_s, sum(kept for _, kept in rows.values()))
        self.own_s, self.told_s = own_s, now
        first = 1.0 if self.costs_s else _FIRST
        self.costs_s = [*self.costs_s[-4:], first * (self.kept_s - kept_s + again_s)]
        wait_s = max(_LEAST_S, _RARER * (now - self.begun_s))
        self.next_s = now + wait_s * self._chance.uniform(0.5, 1.5)
        return self.spent_s - before_s

    @property
    def spent_s(self) -> float:
        """Return the processor time of all audits so far."""
        return self.basis.spent_s + self.kept_s + self.own_s

    @property
    def of_s(self) -> float:
        """Return the processor time of the run so far, with all that came before it.

        Where this host does not see all ranks, as they tell it and on at that rate.
        """
        now = time.monotonic()
        if now - self._looked_s >= _LOOK_S:
            self._looked_s, self._seen = now, self._seen_s()
        if self._seen >= _MOST * (self.basis.before_s + self.ranks_s) > 0:
            return self._seen
        rate = float(min(self.basis.ranks, os.cpu_count() or 1))
        if self.ranks_s:
            rate = min(rate, self.ranks_s / max(1e-3, self.told_s - self.begun_s))
        return self.basis.before_s + self.ranks_s + rate * (now - self.told_s)

    def affords(self) -> int:
        """Return how many audits are within the share by now."""
        return _count(self.share * self.of_s - self.spent_s, self._cost_s)

    @property
    def _cost_s(self) -> float:
        return statistics.median(self.costs_s or [self.basis.cost_s])

    def is_due(self) -> bool:
        """Return whether one more is due; one is left for the last step."""
        return time.monotonic() >= self.next_s and self.affords() >= 2

    def soon_s(self) -> float:
        """Return for how long none is due, as far as can be seen."""
        now, of_s = time.monotonic(), self.of_s
        lacks_s = self.spent_s + 2 * self._cost_s - self.share * of_s
        rate = max(0.0, of_s - self.basis.before_s) / max(_LOOK_S, now - self.begun_s)
        return max(self.next_s - now, lacks_s / (self.share * max(rate, 1.0)))
