"""Control: after which step all ranks together write a checkpoint that nobody planned, make the
plan again, measure their links, share micro-batches otherwise, keep a step for an audit, or stop.

The first rank to reach the end of a window decides what is done there, and says so on a board
that all ranks see; the others obey when they arrive.  So no rank waits, and what is done
in between - a step, a message - costs nothing.  A late rank finds the command for a later
place on the board, and continues: had it been told to save or stop, none could have passed.
"""

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Literal, NamedTuple, Protocol

Do = Literal["go", "save", "plan", "stop", "probe", "share", "audit"]
_DOES: tuple[Do, ...] = ("go", "save", "plan", "stop", "probe", "share", "audit")
_POST_BYTES = 2**16  # of what a rank lets others see
_LOOK_S = 0.25  # for which ranks of several hosts go on without asking


class Command(NamedTuple):
    """What is done when `at` windows are finished; the next command is requested at `until`."""

    at: int
    do: Do
    until: int


class Board(Protocol):
    """What all ranks of a run see: the newest command, what they were asked for, what they post."""

    @property
    def look_s(self) -> float:
        """Return for how many seconds ranks need not look; 0 if looking costs nothing."""
        ...

    def agree(self, own: Command) -> Command:
        """Return the command for `own.at`: that of the first rank to ask, else `own`."""
        ...

    def ask_to_stop(self, signal: int) -> None:
        """Make the next command a stop; may be called in a signal handler."""
        ...

    def asked(self) -> int:
        """Return the signal for which ranks were asked to stop, or 0."""
        ...

    def ask_to_plan(self, count: int) -> None:
        """Make the next command one to make the plan again, which is done for the time `count`."""
        ...

    def plans_asked(self) -> int:
        """Return how often ranks were asked to make the plan again."""
        ...

    def ask_to_probe(self, count: int) -> None:
        """Make the next command one to measure links, which is done for the time `count`."""
        ...

    def probes_asked(self) -> int:
        """Return how often ranks were asked to measure links."""
        ...

    def ask_to_share(self, count: int) -> None:
        """Make the next command one to share micro-batches otherwise, for the time `count`."""
        ...

    def shares_asked(self) -> int:
        """Return how often ranks were asked to share micro-batches otherwise."""
        ...

    def ask_to_audit(self, count: int) -> None:
        """Make the next command one to keep a step for an audit, which is done for the time
        `count`; a process that this one has forked may ask, too."""
        ...

    def audits_asked(self) -> int:
        """Return how often ranks were asked to keep a step for an audit."""
        ...

    def post(self, rank: int, text: str) -> None:
        """Let all ranks see `text`, in place of what this one posted before."""
        ...

    def posts(self, num_ranks: int) -> list[str]:
        """Return what each rank posted last; "" where it posted nothing, or another one did not."""
        ...


def obeyed(own: Command, found: Command) -> Command:
    """Return what `found` on the board means for a rank that is at `own.at`."""
    if found.at == own.at:
        return found
    return Command(own.at, "go", found.at)


class Control:
    """One rank's view: what it has to do at the end of each window.

    board:    None: nothing may stop the run, and no checkpoint is due by the clock.
    every_s:  seconds after which a checkpoint is due, by the clock of the rank that decides.
    put_off:  asked then, whether that has to wait: another one is still being written.
    """

    def __init__(self, board: Board | None, every_s: float | None = None) -> None:
        self.board, self.every_s = board, every_s
        self._saved_s = self._looked_s = time.monotonic()
        self._looked = 0
        self._order = Command(0, "go", 1)
        self._plans = self._before = 0  # plans made again, and windows before the last of them
        self._probes = 0
        self._shares = 0  # times that micro-batches were shared otherwise
        self._audits = 0  # steps that were asked for and kept
        self.put_off: Callable[[], bool] = lambda: False

    def saved(self) -> None:
        """Note that a checkpoint was written."""
        self._saved_s = time.monotonic()

    def after(self, windows: int) -> Do:
        """Return what to do, the same on all ranks, after that many windows of this plan."""
        windows += self._before
        if self.board is None or windows < self._order.until:
            return "go"
        self._order = self.board.agree(self._decided(self.board, windows))
        return self._order.do

    def planned(self, windows: int) -> None:
        """Note that the plan is made again, after so many windows of the last one."""
        self._plans, self._before = self._plans + 1, self._before + windows

    def probed(self) -> None:
        """Note that links were measured."""
        self._probes += 1

    def shared(self) -> None:
        """Note that micro-batches are shared otherwise from now on."""
        self._shares += 1

    def audited(self) -> None:
        """Note that the step that begins is one that was asked for."""
        self._audits += 1

    def _decided(self, board: Board, windows: int) -> Command:
        now, look_s = time.monotonic(), board.look_s
        ahead = 1
        if look_s:
            each_s = (now - self._looked_s) / max(1, windows - self._looked)
            ahead = max(1, int(look_s / max(each_s, 1e-6)))
            self._looked_s, self._looked = now, windows
        do: Do = "go"
        if board.asked():
            do = "stop"
        elif board.plans_asked() > self._plans:
            do = "plan"
        elif board.probes_asked() > self._probes:
            do = "probe"
        elif board.shares_asked() > self._shares:
            do = "share"
        elif self.every_s is not None and now - self._saved_s >= self.every_s:
            do = "go" if self.put_off() else "save"
        if do == "go" and board.audits_asked() > self._audits:
            do = "audit"
        return Command(windows, do, windows + ahead)


class LocalBoard:
    """The board of ranks on one host that share what this process has, as threads or by a fork."""

    def __init__(self) -> None:
        self._file = os.memfd_create("penstock board")
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("q")  # at, do, signal, and what is asked
        self._posts = os.memfd_create("penstock posts")
        self._threads = threading.Lock()

    @property
    def look_s(self) -> float:
        return 0.0

    def agree(self, own: Command) -> Command:
        with self._threads, self._alone():
            if own.at > self._words[0]:
                self._words[0], self._words[1] = own.at, _DOES.index(own.do)
            at, do = self._words[0], _DOES[self._words[1]]
        return obeyed(own, Command(at, do, at + 1))

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # a rank that dies lets go of it
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def ask_to_stop(self, signal: int) -> None:
        self._words[2] = signal

    def asked(self) -> int:
        return self._words[2]

    def ask_to_plan(self, count: int) -> None:
        self._words[3] = count

    def plans_asked(self) -> int:
        return self._words[3]

    def ask_to_probe(self, count: int) -> None:
        self._words[4] = count

    def probes_asked(self) -> int:
        return self._words[4]

    def ask_to_share(self, count: int) -> None:
        self._words[5] = count

    def shares_asked(self) -> int:
        return self._words[5]

    def ask_to_audit(self, count: int) -> None:
        self._words[6] = count

    def audits_asked(self) -> int:
        return self._words[6]

    def post(self, rank: int, text: str) -> None:
        content = text.encode()
        if len(content) < _POST_BYTES - 4:
            with self._threads, self._alone():
                os.pwrite(
                    self._posts, struct.pack("<I", len(content)) + content, rank * _POST_BYTES
                )

    def posts(self, num_ranks: int) -> list[str]:
        with self._threads, self._alone():
            rows = [os.pread(self._posts, _POST_BYTES, r * _POST_BYTES) for r in range(num_ranks)]
        sizes = [struct.unpack_from("<I", row)[0] if len(row) >= 4 else 0 for row in rows]
        return [row[4 : 4 + size].decode() for row, size in zip(rows, sizes, strict=True)]

    def close(self) -> None:
        """Free the memory; no rank looks any more."""
        self._words.release()
        self._memory.close()
        os.close(self._file)
        os.close(self._posts)


class StoreBoard:
    """The board of ranks that torchrun started; `store` is one that nobody else writes to."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._known = ""  # the order on the board, as text
        self._own = 0  # the signal that this rank got
        self._told = False
        self._audits = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")  # seen by forks, too
        self._audits_told = 0

    @property
    def look_s(self) -> float:
        return _LOOK_S

    def agree(self, own: Command) -> Command:
        new = json.dumps(own)
        while (
            _at(self._known) < own.at
        ):  # the newest that this rank has seen is of an earlier place
            self._known = self._store.compare_set("order", self._known, new).decode()
        return obeyed(own, Command(*json.loads(self._known)))

    def ask_to_stop(self, signal: int) -> None:
        self._own = signal

    def asked(self) -> int:
        if self._own and not self._told:
            self._store.set("asked", str(self._own))
            self._told = True
        if not self._own and self._store.check(["asked"]):
            self._own, self._told = int(self._store.get("asked")), True
        return self._own

    def ask_to_plan(self, count: int) -> None:
        self._store.set("plans", str(count))

    def plans_asked(self) -> int:
        return int(self._store.get("plans")) if self._store.check(["plans"]) else 0

    def ask_to_probe(self, count: int) -> None:
        self._store.set("probes", str(count))

    def probes_asked(self) -> int:
        return int(self._store.get("probes")) if self._store.check(["probes"]) else 0

    def ask_to_share(self, count: int) -> None:
        self._store.set("shares", str(count))

    def shares_asked(self) -> int:
        return int(self._store.get("shares")) if self._store.check(["shares"]) else 0

    def ask_to_audit(self, count: int) -> None:
        self._audits[0] = count

    def audits_asked(self) -> int:
        if self._audits[0] > self._audits_told:
            self._audits_told = self._audits[0]
            self._store.set("audits", str(self._audits_told))
        return int(self._store.get("audits")) if self._store.check(["audits"]) else 0

    def post(self, rank: int, text: str) -> None:
        self._store.set(f"post/{rank}", text)

    def posts(self, num_ranks: int) -> list[str]:
        keys = [f"post/{rank}" for rank in range(num_ranks)]
        if not self._store.check(keys):
            return [""] * num_ranks
        return [text.decode() for text in self._store.multi_get(keys)]


def _at(order: str) -> int:
    return json.loads(order)[0] if order else 0
