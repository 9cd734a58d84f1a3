"""Shared cores: two runs on the same ranks, of which the second computes while the first waits.

    first    take F0 F1 B1 B0 give   wait for sums                take U1 U0 give
    second                           take F0 give  take B0 give                   take U0 give

Who computes holds the lock of a file, one for each rank.  The first run keeps it from one compute
to the last one before it may wait for somebody; the second takes it for each compute anew, so the
first has it back after one.  Messages and sums need none.  As all ranks prefer the same run, those
of the other one do not wait for each other in a ring; should job code inside a compute do that, the
second goes on without after some seconds.  The kernel lets go for a process that ends, however.

Source:  arXiv:2103.07974 (two jobs that compute and sum by turns).
"""

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock.errors import PlanError
from penstock.files import write_text
from penstock.runtime.calls import Bound, Call

_COMPUTES = "compute", "update"
_QUICK = "begin", "versions", "post"  # beside computes, and wait for nobody
_LEAST_S, _MOST_S = 50e-6, 2e-3  # between two looks of the second run
_PATIENCE_S = 5.0  # of the second run
GATE, READY = "gate", "ready"  # names of files


class CoreTerms(NamedTuple):
    """Which of two runs this one is, and the folder of their locks, on each host."""

    is_first: bool
    folder: Path

    @property
    def ready(self) -> Path:
        """Return the file that says that this run is about to begin."""
        return self.folder / f"{READY}-{'first' if self.is_first else 'second'}"


def parse_turns(text: str) -> CoreTerms:
    """Return what "first:DIR" or "second:DIR" says.

    Raises:   PlanError: it says neither.
    """
    which, _, folder = text.partition(":")
    if which not in ("first", "second") or not folder:
        hint = "write first:DIR in the run that goes before, second:DIR in the other one"
        raise PlanError(f"turns is {text!r}", hint=hint)
    return CoreTerms(which == "first", Path(folder))


def await_start(terms: CoreTerms, steps: int) -> None:
    """Say that this run is about to begin, and wait while who has started both holds the gate.

    steps:    that it has to do.
    """
    terms.folder.mkdir(parents=True, exist_ok=True)
    gate = os.open(terms.folder / GATE, os.O_RDONLY | os.O_CREAT)
    try:
        write_text(terms.ready, str(steps))
        fcntl.flock(gate, fcntl.LOCK_SH)
    finally:
        os.close(gate)


def in_turns(calls: Sequence[Bound], terms: CoreTerms | None, rank: int) -> list[Bound]:
    """Return the calls with those between that take the core and give it away; None: as they are.

    rank:     whose core it is.
    """
    if terms is None:
        return list(calls)
    terms.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(terms.folder / f"core-{rank}", os.O_RDWR | os.O_CREAT)
    take = _taking(lock) if terms.is_first else _waiting(lock)
    found: list[Bound] = []
    for run in _runs(calls, whole=terms.is_first):
        if run[0].lane not in _COMPUTES:
            found += run
            continue
        found += [
            _turn(take, run[0]),
            *run,
            _turn(lambda: fcntl.flock(lock, fcntl.LOCK_UN), run[-1]),
        ]
    return found


def _runs(calls: Sequence[Bound], *, whole: bool) -> list[list[Bound]]:
    """Return the calls in order, divided where the core changes hands.

    whole:    whether computes in a row, with nothing but quick calls between them, are one.
    """
    runs: list[list[Bound]] = []
    quick: list[Bound] = []  # behind a compute, and perhaps before another one
    for bound in calls:
        computes = bound.lane in _COMPUTES
        is_open = whole and bool(runs) and runs[-1][0].lane in _COMPUTES
        if is_open and not computes and bound.lane in _QUICK:
            quick.append(bound)
        elif is_open and computes:
            runs[-1] += [*quick, bound]
            quick = []
        else:
            runs += [[each] for each in (*quick, bound)]
            quick = []
    return [*runs, *([each] for each in quick)]


def _turn(call: Call, beside: Bound) -> Bound:
    return replace(beside, call=call, lane="turn", ranks=(), edge=-1, begun=None)


def _taking(lock: int) -> Callable[[], None]:
    return lambda: fcntl.flock(lock, fcntl.LOCK_EX)


def _waiting(lock: int) -> Callable[[], None]:
    """Return the call by which the second run takes the core: it looks, and lets others before."""

    def take() -> None:
        until, pause_s = time.monotonic() + _PATIENCE_S, _LEAST_S
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_S)
            else:
                return

    return take
