"""Failing: a job's own error ends the run for all, once a checkpoint holds the steps before it.

An error in data, in the model or in a loss comes in the middle of a step, before that step counts.
Each rank then still holds the state after the step before.  So the member that has the error leaves
its generation as one does that has lost another, says why, and is in the next one, too, which only
writes a checkpoint; then all raise the error.

An error in an update leaves a part of the weights changed, of a step that counts.  That member then
holds nothing but its copy of another one; the checkpoint has what replicas and guards hold: after
that step where any of them has made its update, else after the one before.

Left out: an error in the update of each that holds the same weights; one of numbers that are not
finite, of which ranks leave what they hold (runtime/finite.py); a disk that is full.
"""

import traceback
from pathlib import Path

from penstock.checkpoints import folders
from penstock.errors import PenstockError
from penstock.files import FULL
from penstock.members.vote import Vote
from penstock.members.words import Failed
from penstock.runtime.error_kinds import kind_of
from penstock.runtime.left_steps import NOT_LEFT


def may_be_saved(
    problem: Exception, vote: Vote | None, done: int, checkpoints: Path | None, *, alone: bool
) -> bool:
    """Return whether a checkpoint after `done` steps is worth writing before an error is raised.

    vote:   of the generation in which the error came; None: that was before its first step.
    alone:  whether nobody else may hold what this member does.
    """
    if isinstance(problem, NOT_LEFT):
        return False
    if isinstance(problem, OSError) and problem.errno in FULL:
        return False
    if checkpoints is None or vote is None:
        return False
    if is_in_update(vote, done):
        return not alone
    return done > 0 and not is_kept(checkpoints, done)


def is_in_update(vote: Vote, done: int) -> bool:
    """Return whether an error came once a step counted, and before its update was made."""
    return vote.passed >= done


def is_kept(checkpoints: Path, done: int) -> bool:
    """Return whether there is a checkpoint after `done` steps."""
    return (folders.folder_of(checkpoints, done) / "state.json").exists()


def failed_by(problem: Exception) -> Failed:
    """Return what all members say of an error: of the job's own, with the lines that it came by."""
    if isinstance(problem, PenstockError):
        return Failed(problem.message, problem.hint, kind_of(problem))
    trace = "".join(traceback.format_exception(problem))
    return Failed(f"{type(problem).__name__}: {problem}\n{trace}", "")
