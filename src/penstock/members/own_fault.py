"""Own faults: errors that say something of one rank's process, and nothing of the job.

A rank that is short of memory, of descriptors, or whose processes that read data are killed again
and again leaves the run, as if it had died; the others have its state and go on.  If all come to
it, the last one ends the run with the error.
"""

import errno

import torch

_SHORT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)
_WORDS = ("DataLoader worker (pid", "can't allocate memory", "not enough memory")


def own_fault_in(problem: BaseException) -> BaseException | None:
    """Return what an error says of this process alone, if it, or what it came from, does."""
    found: BaseException | None = problem
    while found is not None and not is_own_fault(found):
        found = found.__cause__
    return found


def is_own_fault(problem: BaseException) -> bool:
    """Return whether an error is that of this process alone."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(problem, OSError):
        return problem.errno in _SHORT
    return isinstance(problem, RuntimeError) and any(word in str(problem) for word in _WORDS)
