"""Replicas: a job that has no plan, trained by plain data parallelism on ranks.

They are processes of this host, or such that torchrun, or `penstock train` itself, has started: on
accelerators there are no others.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.choose.same_start import agree, start_facts
from penstock.choose.settle import NO_CHECK, in_one_process
from penstock.errors import RunError
from penstock.examine.eager_memory import check_memory
from penstock.runtime.stop import Stopped, stopping
from penstock.training import audited_run
from penstock.training.begin import Begin
from penstock.training.examination import compare_with_before, examine_job, tell_of_step
from penstock.training.local_ranks import unplanned
from penstock.training.run_folder import begun_from, clear_after, set_aside_earlier, words_to_resume
from penstock.training.run_steps import awaits, run_steps
from penstock.typed import typed

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.examine.examine import Examined
    from penstock.runtime.eager import EagerTask
    from penstock.runtime.rank import StepResult
    from penstock.runtime.run import Outcome
    from penstock.training.rendezvous import Rendezvous
    from penstock.training.results import Trained
    from penstock.training.session import Launch, Session
    from penstock.training.torchrun import TorchrunLaunch

WITHOUT_ELASTIC = "leave out elastic: after a loss, resume=True goes on from the last checkpoint"
_FOUND, _PROVED = "penstock/found", "penstock/replicas proved"


def train_replicas(
    session: "Session", rendezvous: "Rendezvous", launch: "TorchrunLaunch"
) -> "Trained | None":
    """Train as the replica that this rank of a torchrun job is; return what rank 0 returns.

    launch:   runs ranks of the job.
    Raises:   RunError: replicas train something else, or not so many do, and whoever has started
              them is not told so.  PlanError: a replica has no room.
    """
    from penstock.checkpoints.control import StoreBoard
    from penstock.examine.rank_inputs import agree_on_data
    from penstock.runtime.launch import under

    count = rendezvous.num_ranks
    agree(rendezvous, "the start", start_facts(session.job, session.alike()))
    begin = begun_from(session)
    agree(rendezvous, "the first step", {"first step": str(begin.step)})
    found = _examined(session, rendezvous, begin.checkpoint)
    why = session.learned.untraced or found.no_plan or "it is trained eagerly"
    check_memory(session.job, session.fixed.memory, count, why)
    if session.care.check:
        agree_on_data(rendezvous, session.author, begin.step * session.author.micro_batches)
        session.was_checked(_proved(session, rendezvous, found, begin, launch))
    else:
        session.was_checked(NO_CHECK)
    board = StoreBoard(under(rendezvous.store, "board"))
    steps = range(begin.step, session.num_steps)
    launch = launch.of(steps, awaits=partial(awaits, session))
    own, leads = Replicas(found, count, begin), rendezvous.rank == 0
    outcome = run_eagerly(session, own, launch, board=board, leads=leads)
    return None if outcome is None else session.finished(outcome, None)


def _examined(session: "Session", rendezvous: "Rendezvous", checkpoint: Path | None) -> "Examined":
    """Return what rank 0 has found of the job, on every rank.

    Raises:   RunError: not so many replicas train it.
    """
    from penstock.examine.examine import Examined
    from penstock.runtime.eager import replicas_of

    if rendezvous.rank == 0:
        found = examine_job(session, checkpoint)
        rendezvous.put(_FOUND, json.dumps(found.to_json()))
        set_aside_earlier(session)
        tell_of_step(session, None)
        compare_with_before(session, found, None, checkpoint)
    else:
        found = typed(Examined, json.loads(rendezvous.take(_FOUND)))
    count = rendezvous.num_ranks
    most = 1 if found.one_process else replicas_of(session.job, count, found.laws)
    if most < count:
        message = (
            f"{count} ranks are there, and {most} share the job's micro-batches without a plan"
        )
        raise _ends(session, RunError(found.one_process or message, hint=f"start {most}"), most)
    return found.settled(None)


def _proved(
    session: "Session",
    rendezvous: "Rendezvous",
    found: "Examined",
    begin: Begin,
    launch: "TorchrunLaunch",
) -> str:
    """Compare the first steps with the plain loop, which rank 0 runs; return how that was.

    Raises:   RunError: they differ.
    """
    from penstock.prove.plain_side import Case
    from penstock.prove.prove import (
        apart_judged,
        owners_of_replicas,
        run_replicas,
        steps_to_prove,
    )

    count, folder = rendezvous.num_ranks, session.folder / ".proof"
    steps = steps_to_prove(begin.step, session.num_steps)
    case = Case(session.job, steps, begin.checkpoint, owners=owners_of_replicas(session.job, count))
    own = launch.of(steps, name="proof")
    if rendezvous.rank != 0:
        run_replicas(case, count, folder, found.laws, own)
        words, problem = json.loads(rendezvous.take(_PROVED))
    else:
        with session.listener.busy("comparing two steps with the plain loop"):
            try:
                run_replicas(case, count, folder, found.laws, own)
                proof = apart_judged(case, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        words, problem = str(proof), proof.problem
        rendezvous.put(_PROVED, json.dumps([words, problem]))
        session.listener.say(words)
    if problem:
        raise _ends(session, RunError(f"{count} replicas would train something else: {words}"))
    return words


def _ends(session: "Session", problem: RunError, most: int = 1) -> RunError:
    """Return what ends this rank; whoever has started it may go on with at most so many."""
    return (None if session.care.strict else unplanned(problem, most)) or problem


class Replicas(NamedTuple):
    """So many ranks that train a job without a plan, and from where on.

    found:    what the job is found to be.
    """

    found: "Examined"
    num_ranks: int
    begin: Begin


def run_eagerly(
    session: "Session",
    own: Replicas,
    launch: "Launch",
    *,
    board: "Board | None" = None,
    leads: bool = True,
) -> "Outcome | None":
    """Train as so many replicas; return what that gave, where this process leads.

    board:    what the ranks see; None: they are threads or children of this process.
    Raises:   Stopped: a signal ended it.  DiffersError: an audit has found a difference.
    """
    from penstock.runtime.eager import work_eagerly

    with stopping(board, tells=leads) as board:
        session.heed(board)
        run = partial(work_eagerly, _task(session, own, board))
        if not leads:
            launch(run, own.num_ranks, _unheard)
            return None
        session.folder.mkdir(parents=True, exist_ok=True)
        clear_after(session, own.begin)
        for name in ("plan.json", "predicted.trace.json"):  # of an older run that had a plan
            (session.folder / name).unlink(missing_ok=True)
        with audited_run.eagerly_audited(session, own.num_ranks, board, own.begin.step):
            outcome = run_steps(session, run, own.num_ranks, None, own.begin.step, launch)
        audited_run.check(session, own.begin)
        if outcome is None:
            raise Stopped(board.asked(), words_to_resume(session))
    return outcome


def _task(session: "Session", own: Replicas, board: "Board") -> "EagerTask":
    from penstock.checkpoints.saver import SavePolicy
    from penstock.runtime.eager import EagerTask

    every = session.asked.every
    return EagerTask(
        in_one_process(session.job) if own.found.one_process else session.job,
        own.begin.step,
        session.num_steps - own.begin.step,
        own.begin.checkpoint,
        laws=own.found.laws,
        board=board,
        policy=SavePolicy(
            session.folder / "checkpoints",
            every.steps,
            session.job.validate_every or 0,
            every.seconds,
            session.asked.keep,
            every.mtbf_s,
        ),
        audits=None if own.num_ranks == 1 else audited_run.audits_of(session, None),
        forgets=session.care.forget,
        turns=session.asked.turns,
        profiled=session.asked.profiled(session.folder),
    )


def _unheard(step: "StepResult") -> None:
    """Let a report pass: another rank listens."""
