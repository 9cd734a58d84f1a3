"""Elastic driver: the main job's ranks as members that may be lost, and may come."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.choose.choose import Choice, save
from penstock.choose.keys import with_keys
from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError, RunError, UnlikeShapesError
from penstock.listener import Listener
from penstock.members.encrypted import new_token
from penstock.members.in_process import run_inside
from penstock.members.launch_members import (
    Here,
    NobodyLeftError,
    Places,
    Report,
    Scribe,
    Start,
    run_members,
)
from penstock.members.member import START
from penstock.members.mesh import anybody_at
from penstock.members.words import View
from penstock.pilot.by_ranks import cursors_in, plans_by_ranks
from penstock.pilot.losses import PlanBasis, committing, plans_ahead
from penstock.pilot.redundancy import at_risk
from penstock.plan.plan import Plan
from penstock.processes.child import can_fork
from penstock.profile.kinds import load_profiles
from penstock.runtime.calls import StepResult
from penstock.runtime.stop import Stopped, stopping
from penstock.search.shapes import Fixed
from penstock.training.addresses import RunTerms, addresses_in, write_addresses
from penstock.training.at_work import ENDED
from penstock.training.audited_run import audited_by_plan, audits_of, with_audits
from penstock.training.begin import Begin
from penstock.training.chronicle import (
    Chronicle,
    RunAbout,
    ended,
    row_of,
    sizes,
    sizes_by_ranks,
)
from penstock.training.elastic_run import (
    ElasticRun,
    RunPilot,
    check_elastic,
    follower_in,
    text_of,
)
from penstock.training.ending import tell_members
from penstock.training.generation_news import Happenings
from penstock.training.key_session import sizes_by_step
from penstock.training.misfits import stopped_alone
from penstock.training.results import Trained, explained
from penstock.training.run_folder import clear_after, follow_policy, tell_newest, words_to_resume
from penstock.training.run_steps import awaits, heard_by

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.job import Job
    from penstock.runtime.worker import Task
    from penstock.training.chronicle import Stop
    from penstock.training.session import Session

_LOOK_S, _PATIENCE_S = (
    1.0,
    10.0,
)  # of a run that others go on with: until none is there
SEARCH_S = 2.0  # for the plan of each number of ranks that may be left


def ways_of(folder: Path, choice: Choice, fixed: Fixed) -> PlanBasis:
    """Return what plans for other numbers of ranks are made from.

    folder:  of the run, where profiles and machines are.
    Micro-batches are joined as the plan has them: a newcomer knows no other way.
    """
    profiles = load_profiles(folder / "profile.json")
    cluster = Cluster.load(folder / "cluster.toml")
    free = replace(fixed, ranks=None, replicas=None, stages=None)
    free = replace(free, exchange=fixed.exchange._replace(post_validation=False))
    return PlanBasis((choice.way(profiles),), cluster, free.needing(as_placed=True))


def planned(folder: Path, ways: PlanBasis, choice: Choice, listener: Listener) -> dict[int, Plan]:
    """Return a plan for each number of ranks that may be left; that of all is written to `folder`.

    Raises:   PlanError: the plan is asynchronous.
    """
    check_elastic(choice.plan)
    most = choice.plan.total_ranks
    if choice.job.batch_by_ranks:
        with listener.busy("planning for fewer ranks with a share each"):
            plans = plans_by_ranks(choice.plan, ways)
        save_predicted(folder, choice._replace(plan=plans[most]))
        return plans
    with listener.busy("planning for the loss of ranks"):
        plan = committing(choice.plan, ways)
        plans = {**plans_ahead(ways, most, SEARCH_S), most: plan}
    if words := at_risk(plan):
        listener.say(words)
    save_predicted(folder, choice._replace(plan=plan))
    return plans


def save_predicted(folder: Path, choice: Choice) -> None:
    """Write a plan by which a run begins, or has ended, and its predicted step."""
    (way,) = (ways := ways_of(folder, choice, Fixed())).ways
    save(folder, choice.captured, choice.plan, way.profiles, ways.cluster)


def keyed(session: "Session", ways: PlanBasis, plans: Mapping[int, Plan]) -> dict[int, Choice]:
    """Return by number of ranks the plans of all shapes of a session; nothing where it has one.

    Raises:   UnlikeShapesError: there is none for all ranks.
    """
    shapes, found = session.learned.shapes, dict[int, Choice]()
    there, (way, *_) = session.there._replace(cluster=ways.cluster), ways.ways
    for count, plan in sorted(plans.items(), reverse=True) if shapes else ():
        try:
            choice = way.choice(plan)
            found[count] = with_keys(choice, session.job, shapes, there, ways.cluster)
        except PlanError:
            if not found:
                raise
    return found


def planned_alike(session: "Session", ways: PlanBasis, choice: Choice) -> "Plans":
    """Return the plans for all numbers of ranks that may be left, of all shapes.

    Raises:   PlanError: the plan is asynchronous.  UnlikeShapesError: it is for one shape only.
    """
    if choice.others:
        ways = replace(ways, fixed=replace(ways.fixed, stages=1))
    plans = planned(session.folder, ways, choice, session.listener)
    of_all = keyed(session, ways, plans)
    if any(each.plan.agreement.guard is not None for each in of_all.values()):
        message = "steps have several shapes, and a rank holds what another has to keep a copy of"
        raise UnlikeShapesError(message, hint="let all have one shape, or leave out elastic")
    if of_all:
        plans = {count: each.plan for count, each in of_all.items()}
        save_predicted(session.folder, choice._replace(plan=plans[choice.plan.total_ranks]))
    return Plans(plans, of_all)


class Plans(NamedTuple):
    """Plans by number of ranks; `keyed`, where steps have several shapes: those of all."""

    plans: Mapping[int, Plan]
    keyed: Mapping[int, Choice]


def run_of(
    session: "Session",
    ways: PlanBasis,
    made: Plans,
    begin: Begin,
    board: "Board",
) -> ElasticRun:
    """Return what members of a run have alike; its token is new."""
    plans = made.plans

    def task(choice: Choice, begin: Begin) -> "Task":
        return session.task(choice, begin, board)

    goal = None if session.goal is None else session.goal.goal
    audits = audits_of(session, plans[max(plans)]) is not None
    terms = RunTerms(
        every=session.asked.every,
        keep=session.asked.keep,
        checked=session.checked,
        until=goal,
        mirror=session.asked.mirror,
        audits=audits,
        forgets=session.care.forget,
        job=session.job_terms.from_anywhere(),
        validate_every=session.job.validate_every or 0,
        noise_every=session.noise_every,
    )
    about = plans, begin, session.num_steps, session.folder
    cursors = cursors_in(session.folder) if begin.checkpoint is not None else ()
    by_ranks = session.job.batch_by_ranks, cursors
    token = new_token(is_encrypted=session.asked.tls)
    return ElasticRun(ways, task, *about, token, terms, *by_ranks, made.keyed)


def train(session: "Session", choice: Choice, begin: Begin) -> Trained:
    """Run all steps by processes of this host that may be lost; return what those left gave.

    Raises:   PlanError: the plan is asynchronous.  RunError: the job fails, or nobody is left.
    """
    ways = ways_of(session.folder, choice, session.fixed)
    with stopping(None) as board:
        session.heed(board)
        plans = planned_alike(session, ways, choice)
        run = run_of(session, ways, plans, begin, board)
        clear_after(session, begin)
        follow_policy(session, resume=begin.checkpoint is not None, here=True)
        follower = follower_in(session.folder, session.num_steps)
        pools = [""] * choice.plan.total_ranks
        while True:
            if follower is not None:
                pools = follower.first_machines(run.begin.step, board, session.listener)
            audits = audited_by_plan(session, choice, board, run.begin.step)
            with stopped_alone(session, board, run.begin), audits:
                trained = _lived_here(session, choice, run, pools[: len(plans)], board)
            assert trained is not None, "it has ended"
            trained = with_audits(session, trained, run.begin)
            if trained != "stopped" or board.asked() or follower is None:
                break
            run = _going_on(session, run)  # no machine was wanted for a while
        if trained == "stopped":
            raise Stopped(board.asked() or signal.SIGTERM, words_to_resume(session))
        if follower is not None:
            session.listener.say(follower.ended(session.num_steps))
    return trained


def _lived_here(
    session: "Session", choice: Choice, run: ElasticRun, pools: Sequence[str], board: "Board"
) -> "Trained | Stop":
    """Return how a run ended that begins with a machine of each of these pools, all of them here.

    Raises:   RunError: the job fails, or nobody is left.
    """
    members = tuple(range(len(pools)))
    start = start_of(run, members, board, partial(_told, run))
    here = Here(pools=dict(enumerate(pools)))
    trained = lived(session, choice, run.begin.step, start, here)
    if trained is None:
        wait_for_end(session.folder, session.listener, board)
        trained = ended(session.folder, session.followed)
        assert trained is not None, "it has ended"
    return trained


def _going_on(session: "Session", run: ElasticRun) -> ElasticRun:
    """Return a run that was stopped as it goes on from its newest checkpoint."""
    from penstock.checkpoints import checkpoint

    (session.folder / ENDED).unlink()
    found = checkpoint.newest_whole(session.folder / "checkpoints", session.listener.say)
    if found is None:
        return run
    cursors = cursors_in(session.folder) if run.by_ranks else ()
    return replace(run, begin=Begin(found[1], found[0]), cursors=cursors)


def start_of(
    run: ElasticRun,
    members: tuple[int, ...],
    board: "Board",
    meet: Callable[[Places], Places],
) -> Start:
    """Return how the members of a run begin, by its plan for as many; each has lowered all plans.

    members:  by rank of the plan.
    """
    pilot = RunPilot(run)
    pilot.prepare()
    first_step, checkpoint = run.begin
    resume = START if checkpoint is None else str(checkpoint)
    plan = run.plans[len(members)]
    cursors = run.cursors_from(run.cursors, first_step, plan)
    view = View(1, first_step, text_of(plan), members, resume=resume, cursors=cursors)
    return Start(view, run.token, lambda: pilot, board.asked, meet=meet)


def _told(run: ElasticRun, where: Places) -> Places:
    """Write down where members listen, all of which are here."""
    write_addresses(run.addresses, where)
    return where


def _ended_by(session: "Session") -> Choice:
    """Return the choice by which a run has ended; its predicted step is written."""
    found = session.followed()
    save_predicted(session.folder, found)
    return found


def run_here() -> Callable[[Start, Report, Scribe, Here], bool]:
    """Return what runs the members of this process: forks, or on an accelerator itself."""
    return run_members if can_fork() else run_inside


def _awaited(job: "Job", micro_batches: int) -> int:
    """Return of how many micro-batches a step has reports; 0: of as many as its ranks have."""
    return 0 if job.batch_by_ranks else micro_batches


def _about(session: "Session", choice: Choice) -> RunAbout:
    """Return what rows and summary tell of a run."""
    samples, tokens, *_ = sizes(session.job, choice)
    sizes_of = sizes_by_step((session.job, session.learned.shapes), choice, samples, tokens)
    return RunAbout(session.num_steps, samples, tokens, session.checked, sizes_of)


def lived(
    session: "Session",
    choice: Choice,
    first_step: int,
    start: Start,
    here: Here,
    *,
    calls: bool = True,
) -> "Trained | Stop | None":
    """Run the members that are here; return how the run ended, None where others go on.

    calls:    whether this process calls the job's writers, and what else hears of steps.
    Raises:   RunError: the job fails, or nobody is left.
    """
    from penstock.checkpoints.checkpoint import discard
    from penstock.runtime.run import Steps

    *_, micro_batches, predicted = sizes(session.job, choice)
    about = _about(session, choice)
    own = Chronicle(session.folder, session.job, about, partial(_ended_by, session), session.goal)
    look = Happenings(session.folder, session.listener).hear
    heard = (*(heard_by(session, micro_batches) if calls else ()), look)
    with session.listener.steps(first_step, session.num_steps, predicted) as show:

        def done(step: StepResult) -> None:
            row = row_of(step, *sizes_by_ranks(session.job, step, *about.sizes(step.step)))
            for hear in (show, *heard):
                hear(row)

        steps = Steps(_awaited(session.job, micro_batches), done, partial(awaits, session))
        try:
            run_here()(start, steps.add, Scribe(own.report, own.finish), here)
        except KeyboardInterrupt:
            tell_newest(session)
            raise
        except NobodyLeftError as problem:
            if not anybody_at(addresses_in(session.folder).members.values()):
                raise explained(session.folder, choice.job, problem, session.listener) from None
        except RunError as problem:
            discard(session.folder / "checkpoints")
            told = explained(session.folder, choice.job, problem, session.listener)
            raise told from problem.__cause__
        steps.flush()
    look({})
    return _ended(session)


def _ended(session: "Session") -> "Trained | Stop | None":
    """Return how a run has ended, once no process writes for dead ranks; None: it has not."""
    from penstock.checkpoints.folders import discard

    found = ended(session.folder, session.followed)
    if found is not None:
        discard(session.folder / "checkpoints")
    return found


def wait_for_end(folder: Path, listener: Listener, board: "Board") -> None:
    """Return when a run has ended that other ranks go on with; a signal ends it, as it would here.

    Raises:   RunError: none of them is left.  Stopped: none of them hears of a signal; a second one
              came.
    """
    listener.say(f"the ranks of this process are gone; others go on: penstock watch {folder}")
    alive_s, is_asked = time.monotonic(), False
    while not (folder / ENDED).exists():
        if board.asked() and not is_asked:
            is_asked = True
            if not tell_members(folder):
                raise Stopped(board.asked(), "waiting for the other ranks was interrupted")
            listener.say("the other ranks end after the step under way, with a checkpoint")
        if anybody_at(addresses_in(folder).members.values()):
            alive_s = time.monotonic()
        elif time.monotonic() - alive_s > _PATIENCE_S:
            hint = "resume=True continues from the last checkpoint"
            raise RunError(f"no rank of the run in {folder} is left", hint=hint)
        time.sleep(_LOOK_S)
