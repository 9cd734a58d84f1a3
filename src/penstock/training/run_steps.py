"""Run steps: all steps of a run, each told of as it is done."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.choose.choose import Choice
from penstock.errors import RunError
from penstock.listener import Row
from penstock.processes.started import under_torchrun
from penstock.runtime.shared_cores import await_start
from penstock.training.chronicle import row_of, sizes
from penstock.training.key_session import sizes_by_step
from penstock.training.results import explained, lines
from penstock.training.run_folder import is_over, tell_newest

if TYPE_CHECKING:
    from penstock.checkpoints.checkpoint import Checkpoint
    from penstock.gauge.joules import Joules
    from penstock.runtime.launch import Work
    from penstock.runtime.rank import StepResult
    from penstock.runtime.run import Outcome
    from penstock.training.session import Launch, Session


def run_steps(
    session: "Session",
    work: "Work",
    ranks: int,
    choice: Choice | None,
    first_step: int,
    launch: "Launch",
) -> "Outcome | None":
    """Return what the run gave; None if it was asked to stop before its last step."""
    from penstock.runtime.left_steps import complete_and_discard
    from penstock.runtime.run import Steps, outcome_of

    _await_other(session, first_step)
    joules = joules_here()
    samples, tokens, micro_batches, predicted = sizes(session.job, choice)
    sizes_of = sizes_by_step((session.job, session.learned.shapes), choice, samples, tokens)
    heard = heard_by(session, micro_batches)
    with (
        session.listener.steps(first_step, session.num_steps, predicted) as show,
        lines(session.folder / "metrics.jsonl") as write,
    ):

        def done(step: "StepResult") -> None:
            row = row_of(step, *sizes_of(step.step))
            for hear in (joules.hear, write, show, *heard):
                hear(row)

        steps = Steps(micro_batches, done, partial(awaits, session))
        try:
            results = launch(work, ranks, steps.add)
        except KeyboardInterrupt:
            tell_newest(session)
            raise
        except RunError as problem:
            complete_and_discard(session.folder / "checkpoints")
            job = session.ended_by(choice).job if choice else session.job
            raise explained(session.folder, job, problem, session.listener) from problem.__cause__
        steps.flush()
    last = last_of(session)
    outcome = outcome_of(results, steps, last.tensors) if is_over(session, last.step) else None
    return outcome and replace(outcome, joules=joules.per_step)


def _await_other(session: "Session", first_step: int) -> None:
    """Return once the run may begin: with the other one, if two were started together."""
    if session.asked.turns is not None:
        await_start(session.asked.turns, session.num_steps - first_step)


def last_of(session: "Session") -> "Checkpoint":
    """Return the checkpoint with which a run ends."""
    from penstock.checkpoints.checkpoint import latest, load

    newest = latest(session.folder / "checkpoints")
    assert newest is not None, "a run ends with a checkpoint"
    return load(newest)


def joules_here() -> "Joules":
    """Return what counts the joules of this machine; nothing where others have ranks too."""
    from penstock.gauge.joules import Joules, meters

    local, world = (os.environ.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    is_alone = not under_torchrun() or local == world
    return Joules(meters() if is_alone else [])


def heard_by(session: "Session", micro_batches: int) -> list[Callable[[Row], object]]:
    """Return who is told the rows of steps of so many micro-batches."""
    goal = [] if session.goal is None else [partial(session.goal.hear, micro_batches=micro_batches)]
    on_step = session.asked.on_step
    return [*session.job.writers, *([on_step] if on_step else []), *goal]


def awaits(session: "Session", step: int) -> bool:
    """Return whether a validation is told of a step, if it is run at all and not stopped at."""
    every = session.job.validate_every
    return every is not None and ((step + 1) % every == 0 or step + 1 == session.num_steps)
