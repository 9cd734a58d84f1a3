"""Misfits: how a run goes on in which a micro-batch does not fit the step that was traced.

The first micro-batches are looked at before a plan is made; a later one may have another shape,
another number beside its tensors, or answer a branch of the model otherwise.  All steps before it
are right.  So the run goes back to its newest checkpoint, and on without a plan: as replicas, or
in one process where these find that they cannot share a step.  Ranks that could come and go cannot
any more; those of torchrun become replicas themselves (torchrun.py).
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.choose.update_memory import forgets
from penstock.errors import AloneError, PenstockError, RankMisfitError
from penstock.pilot.phases import PHASES, until_in
from penstock.prove.audits import Audited
from penstock.runtime.stop import Stopped
from penstock.training.at_work import ADDRESSES
from penstock.training.audited_run import gone_back_to_start, rewind
from penstock.training.begin import Begin
from penstock.training.run_folder import words_to_resume

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.examine.examine import Examined
    from penstock.training.results import Trained
    from penstock.training.session import Session


def go_on_unplanned(
    session: "Session",
    found: "Examined",
    problem: RankMisfitError,
    first: Begin,
) -> "Trained":
    """Go on without a plan from the newest checkpoint; return what that gave.

    first:    where the run began.
    Raises:   RankMisfitError: a plan is required, or nobody knows how to go on.
    """
    begin = gone_back(session, found, problem, first)
    session.listener.say("training it eagerly with plain data parallelism instead")
    why = f"a later micro-batch does not fit a traced step: {problem.message}"
    return session.train_eagerly(begin, replace(found, no_plan=why))


def go_on_alone(
    session: "Session", found: "Examined", problem: AloneError, first: Begin
) -> "Trained":
    """Go on in one process from the newest checkpoint; return what that gave.

    Raises:   AloneError: replicas are required, or nobody knows how to go on.
    """
    begin = gone_back(session, found, problem, first)
    session.listener.say("training it by the plain loop instead, in one process")
    return session.train_eagerly(begin, replace(found, one_process=problem.message))


@contextmanager
def stopped_alone(session: "Session", board: "Board", first: Begin) -> Generator[None]:
    """While active, end a run that a signal stops where it would begin anew in one process.

    That is for whoever goes on with it: no checkpoint that it has written leads there.
    Raises:   Stopped.
    """
    try:
        yield
    except AloneError as problem:
        if board.asked() <= 0:
            raise
        session.listener.say(problem.message)
        if first.checkpoint is None:
            gone_back_to_start(session)
        raise Stopped(board.asked(), words_to_resume(session)) from problem


def gone_back(
    session: "Session",
    found: "Examined",
    problem: PenstockError,
    first: Begin,
    *,
    is_begun: bool = False,
) -> Begin:
    """Return where to go on; what came after is forgotten.

    What a checkpoint does not hold, an unbroken run alone has: then it begins anew; so does one
    that has looked for its batch, since other steps than the job's own are behind it.
    is_begun:  whether the processes that go on are those that have trained so far.
    Raises:   the kind of `problem`: a plan is required, or nobody knows how to go on.
    """
    asked = _asked(session)
    if asked:
        hint = (
            f"leave out {asked}, and resume=True goes on without a plan from the newest checkpoint"
        )
        raise type(problem)(problem.message, hint=hint)
    if not session.care.check:
        raise problem
    lost = found.forgets or found.beside or forgets(session.author, session.key)
    is_whole = not lost and _has_own_batch(session)
    if not is_whole and (is_begun or first[1] is not None):
        raise problem
    session.was_audited(Audited(cpu_s=session.audited.cpu_s))
    session.listener.say(problem.message)
    step, place = newest(session, first) if is_whole else Begin()
    if place is None:
        gone_back_to_start(session)
    else:
        rewind(session.folder, step)
    (session.folder / PHASES).unlink(missing_ok=True)  # nothing is searched for without a plan
    session.listener.say(f"going back to {place or 'the first step'}")
    if session.elastic:
        (session.folder / ADDRESSES).unlink(missing_ok=True)  # nobody can join
        session.stays_together()
        session.listener.say("without a plan a lost rank ends the run, which can be resumed then")
    return Begin(step, place)


def _asked(session: "Session") -> str:
    """Return what was asked for that only plans do, in words; empty: nothing."""
    if session.asked.policy is not None:
        return "policy"
    if session.job.batch_by_ranks:
        return "Job.batch_by_ranks"
    return "what asks for a plan" if session.is_strict() else ""


def _has_own_batch(session: "Session") -> bool:
    """Return whether all steps so far were of the job's own number of micro-batches."""
    told = until_in(session.folder) if session.goal is not None else None
    count = session.job.micro_batches
    return told is None or all(phase.micro_batches == count for phase in told.phases)


def newest(session: "Session", first: Begin) -> Begin:
    """Return the step and folder of the newest whole checkpoint; `first` where there is none."""
    from penstock.checkpoints import checkpoint

    kept = checkpoint.newest_whole(session.folder / "checkpoints", session.listener.say)
    return first if kept is None else Begin(kept[1], kept[0])
