"""Writer: a process beside a rank that writes its checkpoints from memory that both share.

It is started with file descriptors: of the memory, and of the lock that says that it writes.  Each
order comes as a line of JSON on stdin, each answer goes as one to stdout.  It loads no torch, and
computes only when nobody else does.  What it was ordered before its rank died it still completes.

While an order is under way a word about it may come.  `LOST`: the ranks work together no more, and
one of them may have been lost before it ordered its part.  `DROP`: another checkpoint is due, so
this one is waited for no longer.  `END` is the last word of a rank: the pipe itself may stay open,
in processes that the job's data has forked meanwhile.
"""

import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoints import folders
from penstock.checkpoints.part_file import Piece
from penstock.errors import CheckpointError

_NICE = 10
_LOOK_S = 0.02  # between looks whether others have written
LOST, DROP, END = b"lost\n", b"drop\n", b"end\n"
# Without a sign of others, after which a writer gives up whose rank is lost, or has lost others:
_ALONE_S = 10.0  # where all were ordered: a busy machine gives a nice process little
_ABSENT_S = 1.0  # where some were not, and never will be
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14


@dataclass(frozen=True, slots=True)
class Order:
    """A checkpoint to write.

    step:    0: nothing is written, but room made in the memory.
    pieces:  of this rank, as they lie in the memory one after another.
    token:   of the run: what others left half-written is not taken for its.
    ranks:   whose parts make it whole; the first of them finishes it.
    keep:    which checkpoints stay once it is there.
    stale:   folders that the first of `ranks` removes then: of attempts before.
    """

    checkpoints: str
    step: int
    rank: int
    token: str
    ranks: Sequence[int]
    size_bytes: int
    keep: folders.Keep
    pieces: tuple[Piece, ...] = ()
    plain: dict[str, Any] | None = None
    stale: tuple[str, ...] = ()

    @property
    def hidden(self) -> Path:
        """Return the folder in which it is made."""
        return folders.hidden_of(Path(self.checkpoints), self.step, self.token)

    @property
    def is_there(self) -> bool:
        """Return whether it is complete."""
        return (folders.folder_of(Path(self.checkpoints), self.step) / "state.json").exists()

    def line(self) -> bytes:
        """Return the order as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> "Order":
        """Return the order that `line` made a line of."""
        told: dict[str, Any] = json.loads(line)
        told["keep"] = folders.Keep(**told["keep"])
        told["pieces"] = tuple(Piece._make(row) for row in told["pieces"])
        told["stale"] = tuple(told["stale"])
        return cls(**told)


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of an order.

    problem:  why it is not there, and what to do about it; empty where it is.
    follows:  whether another rank has the problem.
    seconds:  from the order until the checkpoint was complete.
    """

    step: int
    seconds: float
    problem: str = ""
    hint: str = ""
    follows: bool = False


class OrderLines:
    """What comes on a file: orders, and words about the one that is under way."""

    def __init__(self, file: int) -> None:
        self._file, self._rest = file, bytearray()
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)
        self._has_ended = self._is_lost = self._is_dropped = False

    def next(self) -> Order | None:
        """Return the next order; None: who orders is gone, or has no more to order."""
        self._is_lost = self._is_dropped = False
        while True:
            line = self._line()
            if line is None:
                if self._has_ended:
                    return None
                self._read(None)
            elif line not in (LOST, DROP):  # about one that is complete
                return Order.of_line(line)

    def is_alone(self) -> bool:
        """Return whether who orders is gone, or others of its kind are."""
        self._listen()
        return self._has_ended or self._is_lost

    def is_dropped(self) -> bool:
        """Return whether the order that is under way is to be waited for no longer."""
        self._listen()
        return self._is_dropped

    def _listen(self) -> None:
        self._read(0.0)
        while self._rest.startswith((LOST, DROP)):
            line = self._line()
            self._is_lost, self._is_dropped = True, self._is_dropped or line == DROP

    def _line(self) -> bytes | None:
        line, end, rest = self._rest.partition(b"\n")
        if not end:
            return None
        self._rest = rest
        return bytes(line + end)

    def _read(self, wait_s: float | None) -> None:
        """Take what comes."""
        if not self._has_ended and self._poll.poll(wait_s):
            more = os.read(self._file, 65536)
            self._rest += more
            self._has_ended = not more or self._rest.endswith(END)
            self._rest = self._rest.removesuffix(END)


def written(order: Order, memory: mmap.mmap, parent: int, orders: OrderLines) -> Reply:
    """Write this rank's part, and return once the checkpoint is complete or cannot become so."""
    start_s, view = time.perf_counter(), memoryview(memory)
    problem = hint = ""
    is_whole = False
    try:
        blocks = _blocks(order, view)
        folders.put_part(order.hidden, order.rank, order.pieces, blocks, order.plain or {})
        is_whole = _completed(order, parent, orders)
    except CheckpointError as found:
        is_gone = isinstance(found.__cause__, FileNotFoundError)  # another one has given up
        if not (is_gone or _given_up(order)):
            problem, hint = found.message, found.hint
            folders.give_up(order.hidden, order.rank)
    finally:
        view.release()
    if order.rank == order.ranks[0]:
        if is_whole:
            folders.clear(Path(order.checkpoints), order.stale)
        else:
            folders.call_off(order.hidden, order.rank)
    follows = not (is_whole or problem)
    return Reply(order.step, time.perf_counter() - start_s, problem, hint, follows)


def _blocks(order: Order, view: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of each piece."""
    place = 0
    for piece in order.pieces:
        with view[place : place + piece.size_bytes] as block:
            yield block
        place += piece.size_bytes


def _completed(order: Order, parent: int, orders: OrderLines) -> bool:
    """Return whether all others have written their part, once that is known; the first finishes.

    Raises:   CheckpointError: it cannot be finished.
    """
    seen, seen_s = -1, time.monotonic()
    while not _given_up(order):
        if order.rank == order.ranks[0]:
            if folders.has_parts(order.hidden, order.ranks):
                folders.finish(Path(order.checkpoints), order.step, order.token)
                folders.tidy(Path(order.checkpoints), order.keep)
                return True
        elif not order.hidden.exists():
            return order.is_there
        is_alone = os.getppid() != parent or orders.is_alone()
        if orders.is_dropped():
            return False
        if (size := _size(order.hidden)) != seen or not is_alone:
            seen, seen_s = size, time.monotonic()
        elif time.monotonic() - seen_s > _patience_s(order):
            return False
        time.sleep(_LOOK_S)
    return False


def _size(folder: Path) -> int:
    with suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0


def _patience_s(order: Order) -> float:
    is_ordered = folders.are_announced(order.hidden, order.ranks)
    return _ALONE_S if is_ordered else _ABSENT_S


def _given_up(order: Order) -> bool:
    try:
        names = os.listdir(order.hidden)
    except (FileNotFoundError, NotADirectoryError):  # it has its name by now, or never was
        return False
    return any(name.endswith(".failed") for name in names)


def serve(memory_file: int, lock: int) -> None:
    """Do what is ordered until stdin ends; `lock` is held by who orders, and let go of here."""
    parent, orders = os.getppid(), OrderLines(sys.stdin.fileno())
    while (order := orders.next()) is not None:
        with mmap.mmap(memory_file, order.size_bytes) as memory:
            is_first = order.step == 0
            answer = (
                _room(memory_file, memory) if is_first else written(order, memory, parent, orders)
            )
        folders.unlock(lock)
        sys.stdout.write(json.dumps(asdict(answer)) + "\n")
        sys.stdout.flush()


def _room(memory_file: int, memory: mmap.mmap) -> Reply:
    """Have the system find the memory now: the rank that copies into it then need not wait."""
    try:
        os.posix_fallocate(memory_file, 0, len(memory))  # else a signal would tell the rank
    except OSError as problem:
        hint = "use fewer ranks, or write checkpoints less often than the run is long"
        return Reply(0, 0.0, f"no memory for a copy of the state: {problem}", hint)
    with suppress(OSError):  # systems that only know it from being used
        memory.madvise(_POPULATE_WRITE)
    return Reply(0, 0.0)


def main(arguments: Sequence[str]) -> None:
    """Serve as the process beside a rank: `arguments` are the numbers of memory and lock."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the rank says when it is over
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    with suppress(BrokenPipeError):  # nobody is there to be told
        serve(*map(int, arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # stdout may be gone
