"""Stop: the first SIGINT or SIGTERM ends a run after the current step, the second at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board

_FIRST = b"ending after the step under way, with a checkpoint; once more ends at once\n"


class Stopped(KeyboardInterrupt):
    """A signal ended a run, as far as `words` say in good order."""

    def __init__(self, signal: int, words: str = "interrupted") -> None:
        super().__init__(words)
        self.code, self.words = 128 + signal, words


@contextlib.contextmanager
def stopping(board: "Board | None", *, tells: bool = True) -> "Generator[Board]":
    """Have the signals that end a program ask the ranks of a board to stop; yield the board.

    board:    None: the ranks will be threads or children of this process.
    tells:    whether this process says what happens.
    Raises:   Stopped: a second signal came.
    """
    from penstock.checkpoints.control import LocalBoard
    from penstock.processes.spared_readers import sparing

    with contextlib.ExitStack() as opened:
        if board is None:
            board = opened.enter_context(contextlib.closing(LocalBoard()))
        if threading.current_thread() is threading.main_thread():  # only that one may ask for them
            opened.enter_context(_hearing(board, tells=tells))
            opened.enter_context(sparing())  # it may be a rank itself
        yield board


@contextlib.contextmanager
def handed_on(pids: Sequence[int]) -> Generator[None]:
    """While active, hand the signals that end a program on to processes, which then end."""

    def hand_on(number: int, _: object) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    with _answering(hand_on):
        yield


@contextlib.contextmanager
def _hearing(board: "Board", *, tells: bool) -> Generator[None]:
    heard, own = False, os.getpid()

    def hear(number: int, _: object) -> None:
        nonlocal heard
        if os.getpid() != own:  # it reads data for this one
            return
        if heard:
            raise Stopped(number)
        heard = True
        board.ask_to_stop(number)
        if tells:
            with contextlib.suppress(OSError):
                os.write(2, _FIRST)  # a print could have been interrupted by this very call

    with _answering(hear):
        yield


@contextlib.contextmanager
def _answering(handler: Callable[[int, object], None]) -> Generator[None]:
    """While active, let `handler` answer the signals that end a program."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
