"""Examination: what a run finds out of its job before there is a plan, and says of it."""

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.choose.loading import Loaded, check_replaced
from penstock.choose.prepare import traced
from penstock.choose.settle import NoPlanError
from penstock.choose.update_memory import check_updates
from penstock.cluster.cluster import Cluster
from penstock.errors import GraphError
from penstock.examine import same_run
from penstock.training.job_notices import (
    check_validation,
    noticing,
    words_before,
    words_of_step,
)
from penstock.training.key_session import examined_job, traced_shapes

if TYPE_CHECKING:
    from penstock.examine.examine import Examined
    from penstock.graph.trace import Capture
    from penstock.training.session import Session


def examine_job(session: "Session", checkpoint: Path | None) -> "Examined":
    """Return what the job is found to be.

    checkpoint:  from which it goes on, if it does.

    Raises:   JobError: only the plain loop trains it, and something else was requested; or a
              run that goes on would begin anew what the job keeps.
    """
    check_replaced(Loaded(session.author, session.job), session.fixed.rules, session.listener)
    check_validation(session.job, session.key, session.listener, tries=session.care.check)
    care = session.care._replace(strict=session.is_strict())
    try:
        found = examined_job(session, care)
    except NoPlanError as problem:
        session.knows(problem.found)
        raise
    check_goes_on(session, found, checkpoint)
    return found


def check_goes_on(session: "Session", found: "Examined", checkpoint: Path | None) -> None:
    """Raise where a run that goes on would begin anew what the job keeps in Python.

    Raises:   JobError, CheckpointError: it says what, with its line.
    """
    from penstock.training.resumed import check_late, check_resumed

    if session.care.forget or found.failed:
        return
    if checkpoint is not None:
        check_late(session.folder)
    if checkpoint is not None or session.elastic:
        with session.listener.busy("looking whether it goes on as an unbroken run"):
            check_updates(session.job, session.key)
            check_resumed(session.job, found)
    elif found.forgets:
        session.listener.say(f"a resumed run would begin anew: {found.forgets[0]}")
    elif told := [one for one in found.beside if one.by_update and one.tensor]:
        session.listener.say(f"no checkpoint holds {told[0]}: Job.state would")


def compare_with_before(
    session: "Session", found: "Examined", captured: "Capture | None", checkpoint: Path | None
) -> None:
    """Note what the run begins with; raise if it goes on and has something else than before.

    Raises:   JobError: it names that, and the line that reads it.
    """
    if not session.care.check or found.one_process or found.failed:
        return
    with session.listener.busy("reading what the run begins with"):
        facts = same_run.run_facts_of(session.author, captured)
    session.begins_with(facts)
    goes_on = checkpoint is not None and not session.care.forget
    if goes_on and (told := same_run.check_goes_on(session.folder, facts)):
        session.listener.say(told)


def trace_step(session: "Session") -> "Capture | None":
    """Return the step, traced; None where the model has to be trained as eager modules."""
    try:
        with noticing() as noticed:
            shapes = traced_shapes(session)
            if shapes:
                captured = shapes[0].captured
            else:
                captured = traced(session.job, session.listener, rules=session.fixed.rules)
    except GraphError as problem:
        if session.is_strict():
            raise
        session.cannot_trace(problem.message)
        session.listener.say(problem.message)
        session.listener.say("training it eagerly with plain data parallelism instead")
        return None
    session.traced_with(shapes, noticed)
    session.listener.say(str(captured.graph))
    return captured


def tell_of_step(session: "Session", captured: "Capture | None", *, alone: bool = False) -> None:
    """Say what a step is, and what else of the job a person should know before the first.

    alone:    whether one process alone trains it, however its micro-batches are shared.
    """
    steps = session.num_steps if session.goal is None else None
    if captured is None:
        ranks = 1 if alone else session.fixed.ranks or Cluster.here().num_ranks
        words = list(words_of_step(session.job, 0, steps, ranks))
    else:
        words = words_before(session.step_job, captured, session.learned.noticed, steps)
    for line in words:
        session.listener.say(line)
