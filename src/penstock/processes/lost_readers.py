"""Lost readers: processes that read data for a rank may be killed - by the kernel, out of memory.

torch lets the death of a process of a DataLoader raise in whatever the rank does just then.  Here
it raises while the rank reads, and waits until it does so; then the processes are begun anew
(reader.py).
"""

import signal
import threading
import traceback
from multiprocessing import resource_sharer
from typing import Any, final

from penstock import _compat

MOST = 3  # deaths between two micro-batches


@final
class LostReaders:
    """Whether this process reads now, and the handler of deaths that torch has set."""

    def __init__(self) -> None:
        self._is_reading = False
        self._handler: Any = None

    def __enter__(self) -> None:
        """Begin to read: what has died meanwhile is told at once.

        Raises:   RuntimeError: a process of a DataLoader has died.
        """
        self._is_reading = True  # before the look: who dies behind it is heard of
        try:
            if self._handler is not None:
                _compat.check_loader_workers()
        except RuntimeError:
            self._is_reading = False
            raise

    def __exit__(self, *about: object) -> None:
        """End reading: a handler that was set meanwhile waits from now on."""
        self._is_reading = False
        if threading.current_thread() is not threading.main_thread():
            return
        handler: Any = signal.getsignal(signal.SIGCHLD)
        if getattr(handler, "__module__", "") == _compat.LOADER_SIGNALS:
            self._handler = handler
            signal.signal(signal.SIGCHLD, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        if self._is_reading:
            self._handler(number, frame)


def _is_of_handing_over(problem: BaseException) -> bool:
    """Return whether an error is that of a line to who made a batch, and has gone."""
    if not isinstance(problem, OSError | EOFError):
        return False
    frames = traceback.walk_tb(problem.__traceback__)
    return any(frame.f_code.co_filename == resource_sharer.__file__ for frame, _ in frames)


def is_lost(problem: BaseException) -> bool:
    """Return whether an error is that of a process of a DataLoader that has died."""
    if "DataLoader worker (pid" in str(problem) or _is_of_handing_over(problem):
        return True
    try:
        _compat.check_loader_workers()
    except RuntimeError:
        return True
    return False
