"""Child: processes that this one forks, none of which outlives it, and threads before a fork."""

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from penstock import errors
from penstock.device import here
from penstock.errors import PenstockError, RunError
from penstock.job import exit_words
from penstock.processes.end_with_parent import die_with
from penstock.processes.inherited import be_as_plain, own_positions
from penstock.processes.stuck_forks import StuckWatch

_A_DAY_S, _SOON_S = 86_400.0, 1e-4
_STUCK_LOOK_S = 2.0
Beat = Callable[[], None]


@cache
def let_children_die_with_this() -> None:
    """Let no process that this one forks outlive it, nor those that they fork.

    They die with the thread that forks them, which the kernel takes for their parent.  Positions
    in files are their own.
    """
    parents: list[int] = []

    def note_parent() -> None:
        parents[:] = [os.getpid()]

    def begin() -> None:
        die_with(parents[0])
        own_positions()

    os.register_at_fork(before=note_parent, after_in_child=begin)


def join(thread: threading.Thread) -> None:
    """Return once `thread` has ended for the kernel too.

    After Python's join it still gives back what MKL keeps for it, under a lock of MKL's: a process
    forked meanwhile would wait for that lock for ever in its first matrix product.
    """
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(_SOON_S)


def can_fork() -> bool:
    """Return whether a forked process can compute: not on a machine with an accelerator."""
    return here().can_fork


def death_of(who: str, code: int | None) -> RunError:
    """Return the error of a process that has ended with that code and without a word."""
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"left ({code})"
    hint = "is there enough memory for it? `dmesg` shows kills" if code == -signal.SIGKILL else ""
    return RunError(f"{who} {how}", hint=hint)


class SilentError(RunError):
    """A forked process that has been silent for too long, or waits for ever."""


def in_a_fork(call: Callable[[Beat], Any], limit_s: float) -> Any:
    """Return what `call(beat)` returns in a forked process, which may be anything of JSON.

    limit_s:  after so long without a call of `beat` the process is killed.

    Raises:   what it raises of Penstock's; RunError: it dies.  SilentError: it is killed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    watch = StuckWatch()
    about = call, sender, os.getpid(), random.getstate(), watch
    child = context.Process(target=_live, args=about, daemon=True)
    child.start()
    sender.close()
    try:
        while _is_told(receiver, child.pid or 0, watch, limit_s):
            what, content = json.loads(receiver.recv_bytes())
            if what == "done":
                return content
            if what == "error":
                kind: type[PenstockError] = getattr(errors, content["kind"], RunError)
                raise kind(content["message"], hint=content["hint"])
        raise SilentError(f"a forked process was silent for {limit_s:.0f} s")
    except EOFError:
        child.join()
        raise death_of("a forked process", child.exitcode) from None
    finally:
        child.kill()
        child.join()
        child.close()
        receiver.close()
        watch.close()


def _is_told(receiver: Connection, pid: int, watch: StuckWatch, limit_s: float) -> bool:
    """Return whether a process tells something in time.

    Raises:   SilentError: it never will.
    """
    until = time.monotonic() + limit_s
    while not receiver.poll(min(_STUCK_LOOK_S, max(0.0, until - time.monotonic()))):
        if time.monotonic() >= until:
            return False
        if watch.is_stuck(pid):
            raise SilentError(f"a forked process {watch.words(pid)}")
    return True


class Aside:
    """A call in a forked process, while this one goes on."""

    def __init__(self, call: Callable[[], Any]) -> None:
        def live(beat: Beat) -> Any:
            return call()

        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._watch = StuckWatch()
        about = live, sender, os.getpid(), random.getstate(), self._watch
        self._child = context.Process(target=_live, args=about, daemon=True)
        self._child.start()
        sender.close()

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._child.pid or 0

    def poll(self, limit_s: float = 0.0) -> tuple[Any, ...] | None:
        """Return what the call returned, anything of JSON, as the only one of a row; None: not yet.

        limit_s:  for which it is waited for.

        Raises:   RunError: it failed, or the process died.  SilentError: it waits for ever, of
                  which a later call may come to know.
        """
        if not self._receiver.poll(limit_s):
            if limit_s and self._watch.is_stuck(self.pid):
                raise SilentError(f"a forked process {self._watch.words(self.pid)}")
            return None
        try:
            what, content = json.loads(self._receiver.recv_bytes())
        except EOFError:
            raise RunError("a forked process died") from None
        finally:
            self.close()
        if what == "error":
            raise RunError(content["message"], hint=content["hint"])
        return (content,)

    def close(self) -> None:
        """End the process, if it is still there."""
        self._child.kill()
        self._child.join()
        self._receiver.close()
        self._watch.close()


def apart(call: Callable[[], Any]) -> Any:
    """Return what `call()` returns, anything of JSON, in a process whose state nobody sees later.

    On a machine with an accelerator, in this one.
    Raises:   as `in_a_fork`.
    """
    return in_a_fork(lambda beat: call(), _A_DAY_S) if can_fork() else call()


def _live(
    call: Callable[[Beat], Any],
    pipe: Any,
    parent: int,
    seed: tuple[Any, ...],
    watch: StuckWatch,
) -> None:
    die_with(parent)
    watch.begin()
    be_as_plain()
    random.setstate(seed)  # as in a rank: Python seeds it anew in a fork
    let_children_die_with_this()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(1)

    def tell(what: str, content: Any = None) -> None:
        pipe.send_bytes(json.dumps([what, content]).encode())

    try:
        tell("done", call(lambda: tell("beat")))
    except PenstockError as problem:
        kind = type(problem).__name__
        tell("error", {"kind": kind, "message": problem.message, "hint": problem.hint})
    except SystemExit as problem:
        message, hint = exit_words(problem)
        tell("error", {"kind": "JobError", "message": message, "hint": hint})
    except BaseException as problem:  # noqa: BLE001 - the parent raises it again
        text = "".join(traceback.format_exception(problem))
        tell("error", {"kind": "", "message": f"a forked process failed\n{text}", "hint": ""})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # not the parent's exit handlers
