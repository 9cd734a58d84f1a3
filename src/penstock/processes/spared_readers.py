"""Spared readers: processes that read data for a rank do not end by a signal to the whole group.

`kill -TERM -- -PGID`, Slurm and Ctrl-C reach every process of a run.  The leading one has the ranks
end after the step under way, with a checkpoint; for that step they go on reading.  So processes
that a rank forks ignore SIGTERM and SIGINT while it lives, and end with it (`child.py`).  What
ends them otherwise is the rank alone: `Process.terminate()` kills.

Ignores:  programs that they start, and processes that are spawned: these have signals of their own.
"""

import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess

from penstock import _compat


@contextmanager
def sparing() -> Generator[None]:
    """Let processes that this one forks from now on ignore what ends programs, in this context.

    Those of a DataLoader, which have a handler of torch's, as well as others that inherit one.
    """
    before = BaseProcess.terminate
    BaseProcess.terminate = BaseProcess.kill
    try:
        with _compat.after_worker_signals(_ignore):
            yield
    finally:
        BaseProcess.terminate = before


def spare() -> None:
    """Let processes that this one forks ignore what ends programs, for as long as it lives."""
    _for_good.enter_context(sparing())


_for_good = ExitStack()


def _ignore() -> None:
    """Take signals that end programs for nothing; programs that are started end as ever."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _pass)


def _pass(number: int, frame: object) -> None:
    """Take a signal for nothing."""
