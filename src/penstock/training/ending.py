"""Ending: a run is ended from anywhere, by whoever may, and its end is one for all of its ranks.

An elastic run is told by its own lines, with its token; any other one by a signal to the process
that holds its folder's lock.  Ranks that were apart when the run ended, or when another run began
in its folder, see it there before they go on without the others.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.errors import RunError
from penstock.members.calling import ask_to_stop
from penstock.members.mesh import anybody_at
from penstock.training import lock
from penstock.training.addresses import addresses_in
from penstock.training.at_work import ADDRESSES, ENDED

_LOOK_S = 0.1


def why_over(folder: Path, token: str, holder: lock.Holder | None) -> str:
    """Return why ranks of a run may not go on without the others; "": they may.

    token:    of the run.
    holder:   who held the lock of its folder when these ranks began.
    """
    if (folder / ENDED).exists():
        return f"the run has ended: {folder / ENDED} is there"
    with suppress(RunError):
        if (folder / ADDRESSES).exists() and addresses_in(folder).token != token:
            return f"another run has begun in {folder}"
    now = lock.holder_of(folder)
    if now is not None and now != holder and lock.may_be_there(now):
        return f"{folder} is in use by {now}"
    return ""


def tell_members(folder: Path) -> int:
    """Ask the ranks of an elastic run to end with a checkpoint; return how many have heard it."""
    heard, known = 0, addresses_in(folder)
    for where in known.members.values():
        with suppress(RunError, OSError):
            ask_to_stop(where, known.secret)
            heard += 1
    return heard


def stop_run(folder: Path, limit_s: float, say: Callable[[str], None]) -> bool:
    """End the run in a folder as the first Ctrl-C does; return whether it has ended in time.

    Raises:   RunError: no run is at work there, or only its own host can reach it.
    """
    has_file = (folder / ADDRESSES).exists() and not (folder / ENDED).exists()
    if has_file and (heard := tell_members(folder)):
        say(f"{heard} rank{'s' if heard > 1 else ''} of the run asked to end with a checkpoint")
        return _waited(lambda: (folder / ENDED).exists() or not _anybody(folder), limit_s)
    pid = lock.holding_pid(folder)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        say(f"process {pid} asked to end the run with a checkpoint")
        return _waited(lambda: lock.holding_pid(folder) != pid, limit_s)
    holder = lock.holder_of(folder)
    if holder is not None and not lock.is_here(holder):
        message = (
            f"the run in {folder} was begun by {holder}, and no rank of it is reached from here"
        )
        raise RunError(message, hint="press Ctrl-C there")
    raise RunError(
        f"no run is at work in {folder}", hint=f"penstock watch {folder} says how it ended"
    )


def _anybody(folder: Path) -> bool:
    return anybody_at(addresses_in(folder).members.values())


def _waited(is_so: Callable[[], bool], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not (is_over := is_so()) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    return is_over
