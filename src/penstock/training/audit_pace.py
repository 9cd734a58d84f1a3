"""Audit pace: how often steps are audited, so that a share of the processor time pays for it."""

import os
import random
import resource
import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple, final

_RARER = 0.02  # of the time so far, between two audits at least
_LEAST_S = 0.01  # between two
_FIRST = 0.5  # of what the first audit took is what the next one takes: all is warm then
_EAGER = 2.0  # times what ranks compute in a step, by eager autograd with nothing joined: a guess
_KEEP_BYTES_PER_S = 5e8  # of one core that copies, a guess until it is measured


class AuditBasis(NamedTuple):
    """What audits of a run are paced by.

    ranks:    how many compute at once, each on a core of its own.
    step_s:   that a step takes; 0: nobody knows.
    steps:    that are to be run.
    bytes:    that ranks keep of a step: weights and optimizer state, before and after, gradients.
    """

    ranks: int
    step_s: float
    steps: int
    bytes: int

    @property
    def cost_s(self) -> float:
        """Return what an audit may take."""
        return _EAGER * self.ranks * self.step_s + self.bytes / _KEEP_BYTES_PER_S


def used_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    rows = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(row.ru_utime + row.ru_stime for row in rows)


@final
class Pace:
    """When the next audit is due, by what the ones before took.

    before_s:  processor time that the run had taken before its first step.
    """

    def __init__(self, share: float, basis: AuditBasis, before_s: float) -> None:
        self.share, self.basis, self.before_s = share, basis, before_s
        self.begun_s = self.told_s = time.monotonic()
        self.ranks_s = self.kept_s = 0.0  # of the ranks, and of these for what they keep
        self.own_s = 0.0  # of the process that audits
        self.costs_s: list[float] = []
        self.next_s = self.begun_s
        self._chance = random.Random(os.urandom(8))  # not the author's

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
        return self.kept_s + self.own_s

    @property
    def of_s(self) -> float:
        """Return the processor time of the run so far, with all that came before it."""
        now = time.monotonic()
        rate = float(min(self.basis.ranks, os.cpu_count() or 1))
        if self.ranks_s:
            rate = min(rate, self.ranks_s / max(1e-3, self.told_s - self.begun_s))
        return self.before_s + self.ranks_s + rate * (now - self.told_s)

    def affords(self, count: int = 1) -> bool:
        """Return whether so many audits are within the share by now."""
        left_s = self.share * self.of_s - self.spent_s
        return left_s >= count * statistics.median(self.costs_s or [self.basis.cost_s])

    def is_due(self) -> bool:
        """Return whether one more is due; one is left for the last step."""
        return time.monotonic() >= self.next_s and self.affords(2)
