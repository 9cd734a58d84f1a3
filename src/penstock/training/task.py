"""Task: what the ranks of a run do of a plan, the same whoever drives them.

A run on one host, under torchrun, with ranks that come and go and with one that joins: each hands
its terms to `task_of`.
"""

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.checkpoints.folders import Keep
from penstock.choose.choose import Choice
from penstock.choose.keys import find_key
from penstock.choose.run_windows import (
    CheckpointInterval,
    check_early,
    memory_window,
    windows_of,
    windows_of_keys,
)
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.audited import Audits
from penstock.runtime.shared_cores import CoreTerms
from penstock.runtime.step_traces import ProfiledSteps
from penstock.runtime.windows import Windows
from penstock.training.begin import Begin

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.runtime.key_steps import KeyStep
    from penstock.runtime.served import Decisions
    from penstock.runtime.worker import Task


class TaskTerms(NamedTuple):
    """What the ranks of a run have alike, whichever plan they run.

    folder:       of the run.
    num_steps:    of the whole run.
    every, keep:  how often checkpoints are written, and which stay.
    noise_every:  of how many steps one is watched for the noise of its gradients.
    audits:       where steps are kept that the plain loop makes again; None: nowhere.
    forgets:      whether they go on without what no checkpoint holds.
    decisions:    folder of a run, whose decisions of a server are made again; "": none is.
    turns:        how they share their cores with another run.
    profiled:     steps that torch's profiler watches; None: none.
    """

    folder: Path
    num_steps: int
    every: CheckpointInterval
    keep: Keep
    noise_every: int
    audits: Audits | None
    forgets: bool
    decisions: str = ""
    turns: CoreTerms | None = None
    profiled: ProfiledSteps | None = None


def task_of(
    terms: TaskTerms,
    choice: Choice,
    begin: Begin,
    board: "Board | None" = None,
) -> "Task":
    """Return what ranks do of a plan from a step on."""
    from penstock.checkpoints.saver import SavePolicy
    from penstock.runtime.served import Decisions
    from penstock.runtime.worker import Task

    plan, captured, every = choice.plan, choice.captured, terms.every
    keys, windows = _steps_from(terms, choice, begin.step)
    return Task(
        capture=captured,
        stages=stages_of(plan, captured.graph),
        job=choice.job,
        windows=windows,
        policy=SavePolicy(
            terms.folder / "checkpoints",
            every.steps,
            choice.job.validate_every or 0,
            every.seconds,
            terms.keep,
            every.mtbf_s,
        ),
        board=board,
        resume=begin.checkpoint,
        memory_window=memory_window(windows),
        compiled=plan.terms.compiled,
        joined=plan.terms.joined,
        noise_every=terms.noise_every,
        audits=terms.audits,
        forgets=terms.forgets,
        turns=terms.turns,
        profiled=terms.profiled,
        predicted_bytes=plan.predicted.peak_bytes if plan.predicted else (),
        keys=keys,
        decisions=_decisions(terms) if plan.served else Decisions(),
    )


def _decisions(terms: TaskTerms) -> "Decisions":
    """Return where decisions of a server go, and those that are made again.

    Raises:   RunError: there are none in the folder that is named.
    """
    from penstock.runtime.served import FILE, Decisions, read_decisions

    script = read_decisions(Path(terms.decisions) / FILE) if terms.decisions else ()
    return Decisions(terms.folder / FILE, script)


def steps_of_keys(choice: Choice, steps: range) -> "tuple[tuple[KeyStep, ...], Windows]":
    """Return the steps of other keys than the first, and the windows of all."""
    from penstock.runtime.key_steps import KeyStep

    check_early(choice.plan)
    programs = {choice.key: lower_plan(choice.plan, choice.captured.graph)}
    is_divided = any(each.plan.terms.joined != 1 for each in (choice, *choice.others))
    found: list[KeyStep] = []
    for other in choice.others:
        graph = other.captured.graph
        programs[other.key] = lower_plan(other.plan, graph)
        stages = stages_of(other.plan, graph)
        job = other.job if is_divided else None
        counts = Fraction(other.plan.terms.joined) / Fraction(choice.plan.terms.joined)
        found.append(KeyStep(other.captured, stages, (programs[other.key],), job, counts))
    return tuple(found), windows_of_keys(programs, find_key(choice), steps)


def windows_from(terms: TaskTerms, choice: Choice, first_step: int) -> Windows:
    """Return the windows of all steps that are left; an asynchronous one ends at checkpoints."""
    return _steps_from(terms, choice, first_step)[1]


def _steps_from(
    terms: TaskTerms, choice: Choice, first_step: int
) -> "tuple[tuple[KeyStep, ...], Windows]":
    """Return the steps of other keys, if there are any, and the windows of all that are left."""
    if choice.others:
        return steps_of_keys(choice, range(first_step, terms.num_steps))
    plan, every = choice.plan, choice.job.validate_every
    drained = [terms.every.window_steps(plan.predicted.step_s if plan.predicted else None)]
    drained += [every] if every else []
    steps = range(first_step, terms.num_steps)
    return (), windows_of(choice.captured.graph, plan, steps, drained)
