"""Outset: what is said of a job, or refused, before its first step."""

import time
from dataclasses import dataclass
from typing import Any

from penstock.batches import Endless
from penstock.errors import JobError, RunError
from penstock.job import Job
from penstock.runtime.child import Beat, can_fork, in_a_fork
from penstock.runtime.validate import most_of, too_many, without_end
from penstock.training.listener import Listener
from penstock.training.store import keep, kept, key_of

_READ_S = 1.0  # for which the micro-batches of a validation are read beforehand
_MADE_S = 3.0  # for which it may take to be made, or to yield one: then nobody waits for more


def check_validation(job: Job, text: str, listener: Listener) -> None:
    """Raise where a validation is found to have no end, before any step is made for it.

    It is read for a second in a process of its own, which keeps nothing; what has a length is not.
    text:     how the job was named.
    Raises:   JobError: it yields more than a validation does, or goes on epoch after epoch.
    """
    if job.validation is None or not can_fork():
        return
    key = key_of(job, text, "validation")
    if kept(_SoonRead, key, "validation") is not None:
        return
    with listener.busy("looking for the end of the validation"):
        try:
            problem = in_a_fork(lambda beat: _endless(job, beat), _MADE_S)
        except RunError:  # it takes long, or fails: it does so in the run
            return
    if problem:
        raise JobError(problem[0], hint=problem[1])
    keep(key, "validation", {"within_s": _READ_S})


@dataclass(frozen=True, slots=True)
class _SoonRead:
    """No validation without an end was found within so many seconds."""

    within_s: float


def _endless(job: Job, beat: Beat) -> list[str]:
    """Return why a validation does not end, and the mend; [] as far as a second tells."""
    assert job.validation is not None, "the job has one"
    batches: Any = job.validation()
    if isinstance(batches, Endless):
        problem = without_end(batches)
        return [problem.message, problem.hint]
    if hasattr(batches, "__len__"):
        return []
    start_s, most = time.monotonic(), most_of(job)
    for number, _ in enumerate(batches, 1):
        if number >= most:
            problem = too_many(number)
            return [problem.message, problem.hint]
        if time.monotonic() - start_s > _READ_S:
            break
        beat()
    return []
