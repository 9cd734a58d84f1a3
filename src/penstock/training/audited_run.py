"""Audited run: how a run of the main job is audited, and what becomes of it where a step differs.

It goes back to the last audited checkpoint, and on by what is right: the same plan not compiled,
or with no micro-batches joined; else eager replicas, if they make the step that differs as the
plain loop does; else the plain loop itself.  That one begins anew where the step follows from more
than the state that is kept: a counter in Python, say, which nobody but an unbroken run has.
"""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from penstock.checkpoints import checkpoint
from penstock.choose.unjoined import unjoined_choice
from penstock.choose.update_memory import forgets
from penstock.device import here
from penstock.errors import AloneError, CheckpointError, PenstockError, RunError
from penstock.files import finite, write_text
from penstock.plan.plan import Plan, is_asynchronous
from penstock.processes.child import can_fork
from penstock.prove.audit import HIDDEN, auditing, why_not
from penstock.prove.audit_checkpoint import back_to_audited, keep_audited
from penstock.prove.audit_pace import AuditBasis, used_s
from penstock.prove.audits import ALONE, KEPT, Audit, Audited, audit_rows
from penstock.runtime.audited import MOST_STEPS, Audits
from penstock.schedule.recipe import trains
from penstock.sums import sums_way
from penstock.training.audit_anew import begun_anew, seat_for
from penstock.training.begin import Begin

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.choose.choose import Choice
    from penstock.examine.examine import Examined
    from penstock.prove.audit import Anew
    from penstock.prove.plain_side import Case
    from penstock.training.chronicle import Stop
    from penstock.training.results import Trained
    from penstock.training.session import Session

Ran = TypeVar("Ran", bound="Trained | Stop | None")
_COPIES = 7  # of the weights: with two moments each, before and after, and gradients


class DiffersError(RunError):
    """A step of a run was found to differ from the plain loop's."""

    def __init__(self, audit: Audit, folder: Path) -> None:
        message = f"step {audit.step + 1} is not what the plain loop makes of it: {audit.problem}"
        hint = f"{folder / KEPT} holds what was kept; resume=True goes on from where it is proved"
        super().__init__(message, hint=hint)
        self.audit = audit
        self.back = Begin()  # where to go on


def audits_of(session: "Session", plan: "Plan | None") -> Audits | None:
    """Return what all ranks of a run have alike of audits; None: they keep no step.

    plan:     None: they are eager replicas.
    """
    if not session.asked.audit.share or not session.care.check or _changes_much(session):
        return None
    if plan is not None and not trains(plan.schedule):
        return None
    return Audits(session.folder / HIDDEN, lambda: _affords(session))


def _changes_much(session: "Session") -> bool:
    """Return whether what a step is may change with the ranks that are there."""
    is_rounded = bool(session.job.sums) or session.job.wire_bits is not None
    follows = session.job.batch_by_ranks or sums_way(session.job.sums).served
    return follows or (session.elastic and is_rounded)


def _affords(session: "Session") -> bool:
    return session.auditor is not None and session.auditor.desk.affords()


@contextmanager
def audited(
    session: "Session",
    case: "Case",
    board: "Board",
    basis: AuditBasis,
    first_step: int,
    anew: "Callable[[], Anew | str]",
) -> Generator[None]:
    """Audit what runs meanwhile, where it can be; what was found is then `session.audited`.

    anew:     where it runs on accelerators: how the process is begun that audits, or why none is.
    """
    basis = basis._replace(before_s=used_s() - session.begun_s, spent_s=session.audited.cpu_s)
    why = "check is off" if not session.care.check else ""
    if _changes_much(session):
        why = "what its steps are follows the ranks that are there"
    if sums_way(session.job.sums).served:
        why = "what its updates are follows who comes first, as decisions.jsonl says"
    why = why or why_not(case, session.asked.audit, session.folder, basis)
    begun = None if why or can_fork() else anew()
    if why := why or (begun if isinstance(begun, str) else ""):
        session.was_audited(Audited(left_out=why))
        yield
        return
    case = replace(case, forgets=partial(forgets, case.job, session.key))
    keep_audited(session.folder / "checkpoints", first_step)
    begins = None if isinstance(begun, str) else begun
    with auditing(case, session.folder, board, session.asked.audit, basis, begins) as auditor:
        session.audited_by(auditor)
        try:
            yield
            with session.listener.busy("auditing the last step"):
                session.was_audited(auditor.finish())
        finally:
            session.audited_by(None)


@contextmanager
def audited_by_plan(
    session: "Session", choice: "Choice", board: "Board", first_step: int
) -> Generator[None]:
    """Audit a plan's run meanwhile."""
    from penstock.prove.prove import Planned, case_of, plain_bytes

    plan = choice.plan
    step_s = plan.predicted.step_s if plan.predicted else 0.0
    weights = sum(p.numel() * p.element_size() for p in choice.captured.model.parameters())
    steps, copies = session.num_steps - first_step, _COPIES
    if is_asynchronous(plan):
        copies += 2 * MOST_STEPS
    basis = AuditBasis(plan.total_ranks, step_s, steps, copies * weights)
    basis = _begun(session, basis)
    if is_asynchronous(plan):
        basis = basis._replace(window=MOST_STEPS)
    case = case_of(Planned(session.author, choice.captured, plan), (0,), begun=True)
    held = plan.predicted.peak_bytes if plan.predicted else ()

    def anew() -> "Anew | str":
        return _anew(session, plan, plan.total_ranks, held, plain_bytes(choice.captured))

    with audited(session, case, board, basis, first_step, anew):
        yield


@contextmanager
def eagerly_audited(
    session: "Session", ranks: int, board: "Board", first_step: int
) -> Generator[None]:
    """Audit eager replicas that run meanwhile; how long a step of theirs takes nobody knows."""
    from penstock.graph.trace import build_model
    from penstock.prove.plain_side import Case
    from penstock.prove.prove import owners_of_replicas

    if ranks == 1:
        session.was_audited(Audited(left_out=ALONE))
        yield
        return
    parameters = dict(build_model(session.author).named_parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters.values())
    case = Case(session.author, (0,), owners=owners_of_replicas(session.author, ranks))
    steps = session.num_steps - first_step
    basis = _begun(session, AuditBasis(ranks, 0.0, steps, _COPIES * weights))

    def anew() -> "Anew | str":
        most = here().peak_bytes  # the proof has made a step of the replica and of the plain loop
        return _anew(session, None, ranks, [most] * ranks, most)

    with audited(session, case, board, basis, first_step, anew):
        yield


def _begun(session: "Session", basis: AuditBasis) -> AuditBasis:
    """Return a basis with what beginning anew takes, as this process took it until now."""
    return basis if can_fork() else basis._replace(begin_s=session.begun_s)


def _anew(
    session: "Session", plan: "Plan | None", ranks: int, held: Sequence[int], plain: int
) -> "Anew | str":
    """Return how the process is begun that audits beside accelerators, or why none is.

    held, plain:  bytes that each rank, and the plain loop, are expected to hold.
    """
    if not session.is_command:
        return "a script of your own is not begun anew beside its run; `penstock train` is"
    seat = seat_for(held or [here().peak_bytes] * ranks, plain)
    if not seat.room_bytes:
        return f"the plan leaves no memory on {seat.device.place} for the plain loop"
    session.listener.say(str(seat))
    return begun_anew(session, seat, plan, ranks)


def check(session: "Session", begin: Begin) -> None:
    """Raise where an audit has found a difference that ends the run; what is left is proved.

    begin:    of the run, which goes back there where no checkpoint is audited.
    Raises:   DiffersError.
    """
    problem = session.audited.problem
    if problem is None:
        return
    if session.asked.audit.otherwise == "warn":
        session.listener.say(f"warning: {DiffersError(problem, session.folder).message}")
        return
    session.listener.say(DiffersError(problem, session.folder).message)
    error = DiffersError(problem, session.folder)
    error.back = gone_back(session, begin)
    raise error


def with_audits(session: "Session", ran: Ran, begin: Begin) -> Ran:
    """Return how an elastic run ended, with what audits have found in its summary.

    Raises:   DiffersError: as `check`.  Then nothing is left to go on with but what is proved.
              AloneError: by which one process can go on, as the job's code has changed its model.
    """
    from penstock.training.results import Trained

    if isinstance(ran, Trained):
        summary = {**ran.summary, **audit_rows(session.audited, session.num_steps)}
        ran = cast(Ran, ran._replace(summary=summary))
        text = json.dumps(finite(json.loads(json.dumps(summary))), indent=2, allow_nan=False)
        write_text(session.folder / "summary.json", f"{text}\n")
    try:
        check(session, begin)
    except DiffersError as problem:
        if problem.audit.is_late and session.asked.audit.otherwise != "stop":
            raise AloneError(problem.message, hint=problem.hint) from problem
        raise
    return ran


# -- going back -----------------------------------------------------------------------------------


def gone_back(session: "Session", first: Begin) -> Begin:
    """Go back to the last audited checkpoint; return where that is.

    first:    where the run began; it goes back there where there is no such checkpoint.
    """
    checkpoints = session.folder / "checkpoints"
    step, place = back_to_audited(checkpoints) or first
    for aside in checkpoint.set_aside(checkpoints, step, "unproved"):
        session.listener.say(f"what is not proved is kept as {aside}")
    rewind(session.folder, step)
    whence = f"the audited checkpoint {place}" if place else "the first step"
    session.listener.say(f"going back to {whence}")
    return Begin(step, place)


def rewind(folder: Path, step: int) -> None:
    """Forget the rows of steps after so many."""
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    kept = [row for row in rows if row.endswith("}") and json.loads(row)["step"] <= step]
    write_text(metrics, "".join(f"{row}\n" for row in kept))


def go_on(
    session: "Session",
    choice: "Choice | None",
    found: "Examined",
    problem: DiffersError,
    *,
    is_new: bool,
) -> "Trained":
    """Go on by what is right from where it is proved; return what that gave.

    choice:   the plan that differed; None: eager replicas did.
    is_new:   whether the run began with its first step.
    Raises:   DiffersError: that is not wanted, or nobody knows how to go on.
    """
    begin, why = problem.back, problem.audit.problem
    session.was_audited(Audited(cpu_s=session.audited.cpu_s, back=(problem.audit,)))
    if session.asked.audit.otherwise == "stop" or session.care.strict:
        raise problem
    planned = None if problem.audit.is_late else choice
    if planned is not None and planned.plan.terms.compiled:
        other = session.without_compiling(planned, why)
        return session.train_on(other, begin, found)
    if planned is not None and (apart := unjoined_choice(session, planned, found, why)):
        return session.train_on(apart, begin, found)
    if planned is not None and is_right_eagerly(session, found, problem):
        return session.train_eagerly(begin, found)
    if not is_new:  # what it had in Python then is gone
        raise problem
    session.listener.say("its state is not all that the step follows from: beginning anew")
    session.follows_from(problem.message)
    gone_back_to_start(session)
    return session.train_eagerly(Begin(), replace(found, one_process=problem.message))


def gone_back_to_start(session: "Session") -> None:
    """Forget all steps of the run."""
    for aside in checkpoint.set_aside(session.folder / "checkpoints", 0, "unproved"):
        session.listener.say(f"what is not proved is kept as {aside}")
    rewind(session.folder, 0)


def is_right_eagerly(session: "Session", found: "Examined", problem: DiffersError) -> bool:
    """Return whether eager replicas make the step that differed as the plain loop does.

    From what was kept of it; where that is damaged, from where the run goes back to.
    """
    from penstock.cluster.cluster import Cluster
    from penstock.prove.prove import prove_eager
    from penstock.runtime.eager import replicas_of
    from penstock.runtime.launch import run_processes

    most = session.fixed.ranks or Cluster.here().num_ranks
    ranks = replicas_of(session.job, most, found.laws)
    step, before = _whence(session, problem)
    about = session.job, ranks, (step,)
    try:
        with session.listener.busy("looking for what makes that step right"):
            proof = prove_eager(*about, resume=before, laws=found.laws, launcher=run_processes)
    except PenstockError:  # only one process can, or none
        return False
    return not proof.problem


def _whence(session: "Session", problem: DiffersError) -> Begin:
    step = problem.audit.step
    kept = checkpoint.folder_of(session.folder / KEPT / "before", step)
    try:
        checkpoint.load(kept)
    except CheckpointError:
        return problem.back
    return Begin(step, kept)
