"""Settle: what a job is found to be, and the proof of what was chosen, before a run begins."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import AloneError, JobError, RunError
from penstock.job import Job
from penstock.listener import Listener
from penstock.plan.plan import Decision, Plan
from penstock.search.shapes import Fixed

if TYPE_CHECKING:
    from penstock.examine.examine import Examined
    from penstock.graph.trace import Capture
    from penstock.prove.proof import Proof
    from penstock.prove.prove import Planned

NO_CHECK = "left out, as asked"
_NOT_ASKED = "`penstock train` without plan, schedule and strict"


class UnlikeError(RunError):
    """A plan would train something else than the plain loop does."""


class NoPlanError(JobError):
    """No plan trains a job, as was found of it, and one is required; replicas without one would."""

    def __init__(self, message: str, found: "Examined", *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.found = found


class CheckOptions(NamedTuple):
    """How to treat a job that cannot be trained by a plan as its author wrote it.

    check:   whether it is examined and proved at all.
    strict:  whether it is refused then; else it is trained in a correct way.
    eager:   whether it is trained without a plan in any case.
    trial:   whether the best few plans take some steps before one of them is run.
    replan:  whether the plan is made again during the run where that pays.
    forget:  whether a run goes on without the state of the job that no checkpoint holds.
    """

    check: bool = True
    strict: bool = False
    eager: bool = False
    trial: bool = True
    replan: bool = True
    forget: bool = False


def examined(
    job: Job, text: str, care: CheckOptions, listener: Listener, *, num_steps: int = 0
) -> "Examined":
    """Return what the job is found to be, and say by what it is trained where no plan is.

    text, num_steps:  as of `found_of`.
    Raises:   JobError: it can be trained only by the plain loop, and that is not wanted; or only in
              the process that has loaded it.
    """
    found = found_of(job, text, care, listener, num_steps=num_steps)
    heed(found, job, care, listener)
    return found


def found_of(
    job: Job, text: str, care: CheckOptions, listener: Listener, *, num_steps: int = 0
) -> "Examined":
    """Return what the job is found to be; what was found before is not examined again.

    text:       how the job was named; "": it was not, and nothing is kept.
    num_steps:  of the run, where that goes on beyond the job's own.
    Raises:   JobError: it can be trained only in the process that has loaded it.
    """
    from penstock.choose.store import keep, kept, key_of
    from penstock.examine.data_check import check_here
    from penstock.examine.examine import Examined, examine

    longer = replace(job, num_steps=max(job.num_steps, num_steps))
    key = key_of(job, text, f"checked: {care.check}, for {longer.num_steps} steps")
    found = kept(Examined, key, "examined")
    if found is None:
        with listener.busy("examining the job"):
            found = examine(longer, check=care.check)
            if found.begins:
                check_here(job, found.begins)
        if not found.failed:
            keep(key, "examined", found.to_json())
    return found


def heed(found: "Examined", job: Job, care: CheckOptions, listener: Listener) -> None:
    """Say by what a job is trained where no plan is.

    Raises:   JobError: it can be trained only by the plain loop, and that is not wanted.
              NoPlanError: a plan is wanted.
    """
    if found.one_process:
        if care.strict:
            hint = "fix that, or leave strict out: then the plain loop trains it, in one process"
            raise JobError(f"a plan would train something else: {found.one_process}", hint=hint)
        listener.say(f"a plan would train something else: {found.one_process}")
        listener.say("training it by the plain loop instead, in one process")
    elif found.no_plan:
        if care.strict:
            hint = f"{found.mend}, or leave strict out"
            raise NoPlanError(f"no plan can be made: {found.no_plan}", found, hint=hint)
        listener.say(f"no plan can be made: {found.no_plan}")
        if found.mend:
            listener.say(f"hint: {found.mend}")
        how = " with plain data parallelism" if job.micro_batches > 1 else ""
        listener.say(f"training it eagerly{how} instead")


def bounded(
    job: Job,
    text: str,
    captured: "Capture",
    found: "Examined",
    fixed: Fixed,
    listener: Listener,
) -> tuple[Fixed, tuple[Decision, ...]]:
    """Return what the job leaves of `fixed`, and the decisions that follow.

    text:     how the job was named.
    Raises:   JobError: the job cannot be trained as requested, or its optimizer not at all.
    """
    from penstock.choose.store import keep, kept, key_of
    from penstock.examine import examine

    key = key_of(job, text, captured.graph.digest)
    before = kept(_Optimizer, key, "kind of optimizer")
    if before is None:
        with listener.busy("examining the optimizer"):
            before = _Optimizer(*examine.examine_optimizer(job, captured))
        keep(key, "kind of optimizer", asdict(before))
    fixed = fixed.needing(state_stays=before.is_own)
    return examine.bounded(job, found, before.whole, fixed)


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """Why the optimizer has to stay whole, empty if it need not; whether it is of its own kind."""

    whole: str
    is_own: bool


class Checked(NamedTuple):
    """How a run was compared with the plain loop, in words; and what differs, if anything."""

    words: str
    problem: str = ""

    def __str__(self) -> str:
        return self.words

    def check(self, *, strict: bool) -> None:
        """Raise where something differs and a plan is required.

        Raises:   UnlikeError.
        """
        if self.problem and strict:
            raise self.error()

    def error(self) -> UnlikeError:
        """Return what ends a run where something differs and a plan is required."""
        return UnlikeError(self.words, hint=_NOT_ASKED)


def proved(
    planned: "Planned",
    text: str,
    steps: range,
    care: CheckOptions,
    prove: "Callable[[tuple[int, ...]], Proof]",
    listener: Listener,
) -> Checked:
    """Return what comparing a plan with the plain loop finds at two of `steps`, or found before.

    text:     how the job was named.
    prove:    compares the steps of these numbers; called at most once.
    Raises:   RunError: they differ, and that is not wanted.
    """
    from penstock.choose.store import keep, kept, key_of
    from penstock.graph.waiting import waits, why_waits
    from penstock.prove.proof import Proof
    from penstock.prove.prove import lacks_memory, steps_to_prove

    if not care.check:
        return Checked(NO_CHECK)
    graph = planned.captured.graph.digest
    key = key_of(planned.job, text, graph, _decisions_of(planned.plan))
    before = kept(Proof, key, "proof")
    if before is not None:
        return _told(f"{before}, as was found before", listener)
    if short := lacks_memory(planned):
        return _told(f"left out: {short}", listener)
    if waits(planned.captured.model):
        listener.say(f"the plain loop: {why_waits(planned.captured.model)}")
    with listener.busy("comparing two steps with the plain loop"):
        own = planned.plan.averages
        proof = prove(steps_to_prove(steps.start, steps.stop, averages=own))
    if not proof.problem:
        keep(key, "proof", proof.to_json())
        return _told(str(proof), listener)
    message = f"this plan would train something else: {proof}"
    checked = Checked(message, proof.problem)
    checked.check(strict=care.strict)
    listener.say(message)
    return checked


def proved_eager(  # noqa: PLR0913 - what there is to run, and how much is wanted of it
    job: Job,
    found: "Examined",
    most: int,
    steps: range,
    resume: Path | None,
    care: CheckOptions,
    listener: Listener,
) -> tuple[int, str]:
    """Return on how many ranks the job is trained eagerly, one by the plain loop itself; and how
    that was checked.
    """
    from penstock.prove.prove import prove_eager, steps_to_prove
    from penstock.runtime.eager import replicas_of, why_alone
    from penstock.runtime.launch import local_launcher

    if found.one_process:
        return 1, _alone(found.one_process)
    ranks = replicas_of(job, most, found.laws)
    if ranks == 1:
        return 1, _told(_alone(why_alone(job, most, found.laws)), listener).words
    if not care.check:
        return ranks, NO_CHECK
    try:
        with listener.busy("comparing two steps with the plain loop"):
            numbers = steps_to_prove(steps.start, steps.stop)
            proof = prove_eager(
                job, ranks, numbers, resume=resume, laws=found.laws, launcher=local_launcher(ranks)
            )
    except AloneError as problem:
        words = problem.message
    else:
        if not proof.problem:
            return ranks, str(_told(str(proof), listener))
        words = str(proof)
    message = f"{ranks} replicas would train something else: {words}"
    if care.strict:
        raise RunError(message, hint="leave out strict, and one process trains it")
    listener.say(message)
    return 1, _alone(message)


def _alone(why: str) -> str:
    return f"one process, the plain loop itself: {why}"


def _told(words: str, listener: Listener) -> Checked:
    listener.say(words)
    return Checked(words)


def _decisions_of(plan: Plan) -> str:
    """Return all that a plan decides, as text, without reasons and predictions."""
    return json.dumps(replace(plan, decisions=(), predicted=None).to_json())


def in_one_process(job: Job) -> Job:
    """Return `job` as the plain loop has it, in one process, wherever a run goes on.

    Data is read from its beginning, and the rate of each step is asked for, once and in order.
    """
    from penstock.batches.in_order import InOrder
    from penstock.state.optimizer.rates import ReplayedRate

    rate = job.learning_rate
    if rate is not None and not isinstance(rate, ReplayedRate):
        rate = ReplayedRate(rate)
    return replace(job, data=InOrder(job.data), learning_rate=rate)
