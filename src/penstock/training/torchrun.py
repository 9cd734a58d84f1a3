"""Under torchrun: every rank runs the command; rank 0 plans, shows progress and reports.

On several hosts the ranks first measure the links between them, and the step is measured on each
kind of device that there is.  What ranks report to rank 0 (profiles, each step's loss, the
results), and it to them (the plan), goes through the store that torchrun's rendezvous gives them.
"""

import itertools
import json
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import taken
from penstock.batches.one_key import job_of_key
from penstock.choose.choose import Choice, Joining, Machines, for_plan
from penstock.choose.first_links import linked
from penstock.choose.key_plans import (
    choice_of_keys,
    key_plans,
    read_key_plans,
    text_of_key_plans,
)
from penstock.choose.prepare import joined_step, measured_as, traced
from penstock.choose.same_start import agree, run_facts, start_facts
from penstock.choose.settle import UnlikeError
from penstock.choose.told_data import ToldData, told_by_data
from penstock.choose.unjoined import unjoined_choice
from penstock.cluster.cluster import Cluster
from penstock.cluster.machine import HERE
from penstock.cluster.order import placed
from penstock.device import here
from penstock.errors import (
    BatchMisfitError,
    GraphError,
    JobError,
    PlanError,
    RankMisfitError,
    RunError,
)
from penstock.job import Job
from penstock.listener import Listener
from penstock.pilot.replan import SearchBasis
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.training.begin import Begin
from penstock.training.examination import compare_with_before, examine_job, tell_of_step
from penstock.training.job_notices import noticing
from penstock.training.key_session import each_key, traced_shapes
from penstock.training.local_ranks import are_replicas, unplanned
from penstock.training.lock import locked
from penstock.training.misfits import gone_back
from penstock.training.replicas import WITHOUT_ELASTIC, train_replicas
from penstock.training.run_folder import begun_from, set_aside_earlier
from penstock.training.run_steps import awaits
from penstock.typed import typed

if TYPE_CHECKING:
    from penstock.choose.keys import TracedKey
    from penstock.choose.settle import Checked, CheckOptions
    from penstock.examine.examine import Examined
    from penstock.graph.trace import Capture
    from penstock.runtime.launch import Groups, Work
    from penstock.runtime.rank import StepResult
    from penstock.runtime.worker import RankResult, Report
    from penstock.training.rendezvous import Rendezvous
    from penstock.training.results import Trained
    from penstock.training.session import Session
    from penstock.transport.transport import Transport

_START, _PLAN = "penstock/start", "penstock/plan {}"
_ASK, _TOLD = "penstock/measure/{}", "penstock/profile/{}/{}"  # number; number, kind of device
_PROVE, _PROVED = "penstock/{}/steps", "penstock/{}/differs"  # those to prove, if any; what does
_RUN = "run"  # the name of the steps that count
_MISFIT = "penstock/misfit"  # what a rank says of a micro-batch that does not fit its step
_WITHOUT_TORCHRUN = "`penstock train` without torchrun trains it with plain data parallelism"
_LISTEN_S = 0.02  # how often rank 0 looks whether a step is reported
_ROUNDING = 1e-6  # of a micro-batch, where ranks tell parts of one
_MORE = "penstock/data"  # what rank 0 has found of the job's data
_ENOUGH = "enough"  # in place of which step to measure: micro-batches joined, and slices


def train_under_torchrun(make: "Callable[[], Session]") -> "Trained | None":
    """Train as the rank that this process is; return what it gave on rank 0.

    Whatever fails, on whichever rank, ends all of them.
    Raises:   GraphError: the model cannot be traced (start it with `penstock train` instead).
              PlanError: the plan is for another number of ranks.
              RunError: another rank failed.
    """
    from penstock.runtime.launch import torchrun_store
    from penstock.training.rendezvous import Rendezvous

    rendezvous, session = Rendezvous(torchrun_store()), None
    is_open = False  # whether what no plan trains may be trained otherwise
    try:
        session = make()
        is_open = _is_open(session)
        rendezvous.begin(session.listener)
        if rendezvous.rank:
            return _trained(session, rendezvous)
        with locked(session.folder), session.mirrored():
            return _trained(session, rendezvous)
    except (GraphError, JobError, UnlikeError) as problem:
        if is_open and (ends := unplanned(problem, _replicas(session, rendezvous))) is not None:
            if rendezvous.rank == 0:  # another one finds that, too, and by itself
                rendezvous.fail(ends)
            raise ends from problem
        rendezvous.fail(problem)
        raise
    except BaseException as problem:
        rendezvous.fail(problem)
        raise
    finally:
        rendezvous.leave()


def _is_open(session: "Session") -> bool:
    """Return whether what no plan trains may be trained otherwise."""
    return not (session.is_strict() or session.elastic)


def _trained(session: "Session", rendezvous: "Rendezvous") -> "Trained | None":
    """Train by a plan, or as replicas without one.

    Raises:   BatchMisfitError, RunError: a later micro-batch does not fit the plan's step, and
              nobody knows how to go on.
    """
    if session.care.eager or are_replicas():
        return _as_replica(session, rendezvous)
    care, is_open = session.care, _is_open(session)
    try:
        return _train(session, rendezvous)
    except (BatchMisfitError, RunError) as failed:
        told = _misfit_told(rendezvous)
        if told is None:
            raise
        if not is_open:
            hint = "resume=True goes on from the newest checkpoint without what asks for a plan"
            raise RankMisfitError(told, hint=hint) from failed
        problem = RankMisfitError(
            told, hint="begin anew without a plan (eager=True): it keeps state in Python"
        )
        return _gone_on(session, rendezvous, care, problem)


def _as_replica(session: "Session", rendezvous: "Rendezvous") -> "Trained | None":
    launch = TorchrunLaunch(rendezvous, rendezvous.rank, session.job.micro_batches)
    return train_replicas(session, rendezvous, launch)


def _misfit_told(rendezvous: "Rendezvous") -> str | None:
    """Return what a rank tells of a micro-batch that does not fit; None: that is not what failed.

    It tells so before the others can hear from it that it has failed.
    """
    try:
        return rendezvous.take(_MISFIT) if rendezvous.is_told(_MISFIT) else None
    except RuntimeError:  # the store is gone
        return None


def _gone_on(
    session: "Session", rendezvous: "Rendezvous", care: "CheckOptions", problem: RankMisfitError
) -> "Trained | None":
    """Train on as replicas without a plan, from the newest checkpoint; every rank calls it.

    care:     of the run, as it was asked for.
    """
    from penstock.runtime.launch import under
    from penstock.training.rendezvous import Rendezvous

    again, found = Rendezvous(under(rendezvous.store, "without a plan")), session.learned.found
    try:
        again.begin(session.listener)
        session.goes_on_unplanned(care)
        if found is not None:  # rank 0
            gone_back(session, found, problem, Begin(), is_begun=True)
            session.listener.say("training it eagerly with plain data parallelism instead")
        again.meet("gone back")
        return _as_replica(session, again)
    except BaseException as failed:
        again.fail(failed)
        raise
    finally:
        again.leave()


def _train(session: "Session", rendezvous: "Rendezvous") -> "Trained | None":
    from penstock.checkpoints.control import StoreBoard
    from penstock.runtime.launch import under
    from penstock.training.elastic_hosts import train_on_hosts

    rank, world = rendezvous.rank, rendezvous.num_ranks
    # what no plan can train is not started so
    session.needs_plan()
    agree(rendezvous, "the start", start_facts(session.job, session.alike()))
    begin = begun_from(session)
    _check_start(rendezvous, begin.step, session.folder)
    found = examine_job(session, begin.checkpoint) if rank == 0 else None
    session.knows(found)
    _tell_of_data(session, rendezvous)
    _check_ranks(session.asked.given_plan, world)
    captured = _traced_alike(session, rendezvous, begin.step)
    if found is not None:
        found.refuse_failed()
    session.among(world)
    cluster = session.there.cluster or _found(rendezvous, session.listener)
    _check_kinds(session, cluster)
    about = session, rendezvous, captured, begin, cluster
    choice, launch = _settled(_Outset(*about, itertools.count()))
    if session.elastic:
        members = partial(_members, cluster, world)
        return train_on_hosts(session, rendezvous, choice, members, begin)
    board = StoreBoard(under(rendezvous.store, "board"))
    steps, count = range(begin.step, session.num_steps), session.job.micro_batches
    launch = launch.of(steps, awaits=partial(awaits, session), micro_batches=count)
    return session.train(choice, begin, launch, board=board, leader=rank == 0)


def _tell_of_data(session: "Session", rendezvous: "Rendezvous") -> None:
    """Let all ranks know of the job's data what rank 0 has found; every rank calls it."""
    if rendezvous.rank == 0:
        rendezvous.put(_MORE, json.dumps(asdict(told_by_data(session.job))))
    elif (told := typed(ToldData, json.loads(rendezvous.take(_MORE)))) != ToldData():
        session.tells_more(told.of(session.job))


def _check_kinds(session: "Session", cluster: Cluster | None) -> None:
    """Raise where steps have several shapes, and would be measured on several kinds of devices.

    Raises:   GraphError.
    """
    kinds = {} if cluster is None else _leaders(cluster)
    if session.learned.shapes and len(kinds) > 1:
        message = f"steps have several shapes, and devices are of {len(kinds)} kinds"
        raise GraphError(f"{message}, so no plan can be made", hint=_WITHOUT_TORCHRUN)


def _replicas(session: "Session | None", rendezvous: "Rendezvous") -> int:
    """Return of how many replicas without a plan a job can be trained, as rank 0 has found it."""
    from penstock.runtime.eager import replicas_of

    found = None if session is None else session.learned.found
    if session is None or found is None or found.one_process:
        return 1
    return replicas_of(session.job, rendezvous.num_ranks, found.laws)


def _members(cluster: Cluster | None, world: int, plan: Plan) -> tuple[int, ...]:
    """Return, by rank of the plan, the ranks of the job: the members of an elastic run."""
    ranks = {_plan_rank(cluster, plan, rank): rank for rank in range(world)}
    return tuple(ranks[position] for position in range(world))


def _shared_basis(session: "Session", choice: Choice, captured: "Capture") -> SearchBasis | None:
    """Return what the plan can be made again by.

    Only rank 0 has profiles and all ways of joining, and a basis only where the plan was searched
    for; the others trace a step with more joined when it is to be run.
    """
    is_divided = choice.plan.tensor > 1 or bool(choice.others)  # then the plan stays
    if session.basis is not None or session.asked.given_plan is not None or is_divided:
        return session.basis
    first = Joining(1, session.job, captured, ())
    own = Joining(choice.plan.terms.joined, choice.job, choice.captured, ())
    ways = (own,) if first.is_of(choice.plan) else (first, own)
    return SearchBasis(ways, session.fixed, session.asked.units, 0.0)


def _check_start(rendezvous: "Rendezvous", first_step: int, folder: Path) -> None:
    """Raise unless this rank begins with the step of rank 0: all see one folder."""
    if rendezvous.rank == 0:
        rendezvous.put(_START, str(first_step))
    elif (told := int(rendezvous.take(_START))) != first_step:
        message = f"rank 0 continues after step {told}; {folder} as seen here, after {first_step}"
        raise PlanError(message, hint="give a folder that all hosts see")


class _Outset(NamedTuple):
    """What a rank begins with.

    numbers:  of what is measured, in one order on all ranks.
    """

    session: "Session"
    rendezvous: "Rendezvous"
    captured: "Capture"
    begin: Begin
    cluster: Cluster | None
    numbers: Iterator[int]


def _settled(start: _Outset) -> "tuple[Choice, TorchrunLaunch]":
    """Return the plan on which all ranks have agreed, and what runs its ranks; every rank calls it.

    One that joins micro-batches and differs from the plain loop gives way to one that joins none.
    Raises:   RunError: it differs from the plain loop.
    """
    choice, launch, checked = _tried(start, None, 0)
    if not checked.problem:
        return choice, launch
    session, apart = start.session, None
    if session.learned.found is None:
        session.may_replan_by(None)  # rank 0 tries another plan
    else:
        apart = unjoined_choice(session, choice, session.learned.found, checked.problem)
        checked.check(strict=apart is None)
    choice, launch, checked = _tried(start, apart, 1)
    checked.check(strict=True)
    return choice, launch


def _tried(
    start: _Outset, choice: Choice | None, number: int
) -> "tuple[Choice, TorchrunLaunch, Checked]":
    """Return a plan on all ranks, what runs its ranks, and how it compares with the plain loop.

    choice:   of rank 0; None: it is to choose.  The others take its plan.
    number:   of the plan.
    """
    session, rendezvous, captured, begin, cluster, numbers = start
    if session.learned.found is not None:
        choice = choice or _led(start, session.learned.found)
        text = text_of_key_plans(key_plans(choice)) if choice.others else None
        text = text or json.dumps(choice.plan.to_json())
        rendezvous.put(_PLAN.format(number), text)
        rendezvous.put(_ASK.format(next(numbers)), _ENOUGH)
    else:
        _serve(start)
        choice = _taken(session, captured, rendezvous.take(_PLAN.format(number)))
    session.may_replan_by(_shared_basis(session, choice, captured))
    _check_ranks(choice.plan, rendezvous.num_ranks)
    windows = session.windows(choice, begin.step)
    agree(rendezvous, f"program {number}", run_facts(choice, windows))
    own, count = _plan_rank(cluster, choice.plan, rendezvous.rank), choice.plan.step_micro_batches
    launch = TorchrunLaunch(rendezvous, own, count)
    return choice, launch, _prove(start, choice, launch)


def _taken(session: "Session", captured: "Capture", text: str) -> Choice:
    """Return the choice of which rank 0 has told the plan, or the plans of all shapes.

    Raises:   PlanError: it is for another job.
    """
    if session.learned.shapes:
        about = session.job, session.learned.shapes, read_key_plans(text), session.listener
        return choice_of_keys(*about)
    plan = Plan.from_text(text)
    return Choice(*for_plan(session.job, plan, captured, session.listener), plan)


def _prove(start: _Outset, choice: Choice, launch: "TorchrunLaunch") -> "Checked":
    """Return how the plan's first steps of each shape compare with the plain loop's; every rank
    calls it.

    Raises:   RunError: they differ, and the plan joins no micro-batches.
    """
    from penstock.choose.settle import Checked

    session, words = start.session, list[str]()
    if not choice.others:
        return _prove_one(start, (session.author, choice, ""), launch)
    for place, (key, own) in enumerate(each_key(choice)):
        if start.rendezvous.rank == 0:
            session.listener.say(f"steps of {key}:")
        count = own.plan.step_micro_batches
        about = job_of_key(session.author, key), own, f" of shape {place}"
        checked = _prove_one(start, about, launch.of((), micro_batches=count))
        if checked.problem:
            return checked
        words.append(f"{key}: {checked.words}")
    checked = Checked("; ".join(words))
    session.was_checked(checked.words)
    return checked


def _prove_one(start: _Outset, of: tuple[Job, Choice, str], launch: "TorchrunLaunch") -> "Checked":
    """Return how the first steps of one shape compare with the plain loop's; every rank calls it.

    Rank 0 runs that loop.
    of:       the author's job of the shape, the choice for it, and what tells it from others.
    Raises:   RunError: they differ, and the plan joins no micro-batches.
    """
    from penstock.choose.settle import Checked, proved
    from penstock.prove.plain_side import Case
    from penstock.prove.proof import Proof
    from penstock.prove.prove import Planned, apart_judged, case_of, run_planned

    session, rendezvous, begin = start.session, start.rendezvous, start.begin
    author, choice, shape = of
    planned = Planned(author, choice.captured, choice.plan)
    folder = session.folder / ".proof"  # seen by the ranks of all hosts
    name = f"proof{'' if choice.plan.terms.joined == 1 else ' of joining'}{shape}"
    asks, ends = _PROVE.format(name), _PROVED.format(name)

    def run(steps: tuple[int, ...]) -> Case:
        case = case_of(planned, steps, begin.checkpoint)
        told = case.steps if case.late is None else range(case.late.program.num_steps)
        run_planned(planned, case, folder, launch.of(told, name=name))
        return case

    def prove(steps: tuple[int, ...]) -> Proof:
        rendezvous.put(asks, json.dumps(steps))
        try:
            return apart_judged(run(steps), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    if rendezvous.rank == 0:
        care = session.care._replace(strict=choice.plan.terms.joined == 1)
        steps = range(begin.step, session.num_steps)
        text = f"{session.asked.text}{shape}" if session.asked.text else ""
        checked = proved(planned, text, steps, care, prove, session.listener)
        session.was_checked(checked.words)
        if not rendezvous.is_told(asks):  # it was proved before
            rendezvous.put(asks, "[]")
        rendezvous.put(ends, json.dumps(tuple(checked)))
        return checked
    if told := tuple(json.loads(rendezvous.take(asks))):
        run(told)
    return typed(Checked, json.loads(rendezvous.take(ends)))


def _check_ranks(plan: Plan | None, world: int) -> None:
    if plan is not None and plan.total_ranks != world:
        hint = f"start torchrun with --nproc-per-node {plan.total_ranks}, or give another plan"
        raise PlanError(
            f"the plan is for {plan.total_ranks} ranks; torchrun started {world}", hint=hint
        )


def _traced_alike(session: "Session", rendezvous: "Rendezvous", first_step: int) -> "Capture":
    """Return the step, once all ranks have traced the same one, with the same data and weights.

    Raises:   JobError, PlanError: this rank has another one.  RunError: another rank has.
    """
    from penstock.examine.rank_inputs import agree_on_data, agree_on_model

    if session.care.check:
        agree_on_data(rendezvous, session.author, first_step * session.author.micro_batches)
    with noticing() as noticed:
        hint = WITHOUT_ELASTIC if session.elastic else _WITHOUT_TORCHRUN
        captured, shapes = _traced(session, hint)
    session.traced_with(shapes, noticed)
    if rendezvous.rank == 0:
        tell_of_step(session, captured)
    graphs = [shape.captured.graph for shape in shapes] or [captured.graph]
    agree(rendezvous, "the step", {"graph": " ".join(graph.digest for graph in graphs)})
    if session.care.check:
        agree_on_model(rendezvous, captured)
    return captured


def _traced(session: "Session", hint: str) -> "tuple[Capture, tuple[TracedKey, ...]]":
    """Return the step, and those of all shapes, the first of which it is, if there are several.

    Raises:   GraphError: it cannot be traced.
    """
    try:
        shapes = traced_shapes(session)
        own = session.job, session.listener
        captured = shapes[0].captured if shapes else traced(*own, rules=session.fixed.rules)
    except GraphError as problem:
        raise GraphError(f"{problem.message}, so no plan can be made", hint=hint) from problem
    session.listener.say(str(captured.graph))
    return captured, shapes


# -- the machines that torchrun started it on -----------------------------------------------------


def _found(rendezvous: "Rendezvous", listener: Listener) -> Cluster | None:
    """Return the machines whose links are measured here, if any are; every rank calls it."""
    from penstock.runtime.launch import on_one_host

    if not on_one_host():
        return _surveyed(rendezvous, listener)
    return None if here().can_fork else linked(rendezvous, listener)


def _surveyed(rendezvous: "Rendezvous", listener: Listener) -> Cluster:
    """Return the hosts of all ranks and the links between them; every rank calls it."""
    from penstock.gauge.hosts import seat_here, survey
    from penstock.runtime.launch import join_torchrun, under

    seat = seat_here(platform.node() or "host", HERE)
    with listener.busy("measuring the links between hosts"):
        store = under(rendezvous.store, "survey")
        found = join_torchrun(lambda end: survey(end, seat), store, way=rendezvous.way)
    return found.cluster


def _led(start: _Outset, found: "Examined") -> Choice:
    """Return what rank 0 chooses."""
    session, captured, checkpoint = start.session, start.captured, start.begin.checkpoint
    compare_with_before(session, found, captured, checkpoint)
    profile = partial(_profiled, start)
    session.runs_on(Machines(start.cluster, profile, session.listener))
    set_aside_earlier(session)
    return session.choose(captured, checkpoint, found.settled(captured))


def _leaders(cluster: Cluster) -> dict[str, int]:
    """Return the first rank on each kind of device: it measures for all others."""
    leaders: dict[str, int] = {}
    for rank in range(cluster.num_ranks):
        leaders.setdefault(cluster.device_of(rank).name, rank)
    return leaders


def _profiled(
    start: _Outset, captured: "Capture", job: Job, cluster: Cluster, listener: Listener
) -> tuple[Profile, ...]:
    """Return a profile of the step for each kind of device, measured where it is; on rank 0.

    job:      with its micro-batches joined.
    """
    number, leaders, rendezvous = next(start.numbers), _leaders(cluster), start.rendezvous
    joined = Fraction(start.session.job.micro_batches, job.micro_batches)
    asked = taken.written(joined), captured.graph.slices
    rendezvous.put(_ASK.format(number), json.dumps(asked))
    own, *others = leaders
    profile = measured_as(own, captured, job, cluster, listener)
    told = ((kind, rendezvous.take(_TOLD.format(number, kind))) for kind in others)
    return (profile, *(Profile.from_json(json.loads(text), kind) for kind, text in told))


def _serve(start: _Outset) -> None:
    """Measure the step for rank 0 until it has enough, where this rank leads a kind of device."""
    rendezvous, captured, cluster = start.rendezvous, start.captured, start.cluster
    job, listener = start.session.job, start.session.listener
    leaders = {} if cluster is None else _leaders(cluster)
    own = next((kind for kind, leader in leaders.items() if leader == rendezvous.rank), None)
    for number in start.numbers:
        text = rendezvous.take(_ASK.format(number))
        if text == _ENOUGH:
            return
        if own is not None and cluster is not None:
            count, slices = typed(tuple[int | str, tuple[tuple[str, int], ...]], json.loads(text))
            joined, step = joined_step(job, captured, taken.read(count), slices, listener)
            profile = measured_as(own, step, joined, cluster, listener)
            rendezvous.put(_TOLD.format(number, own), json.dumps(profile.to_json()))


def _plan_rank(cluster: Cluster | None, plan: Plan, rank: int) -> int:
    """Return which rank of the plan runs where torchrun has `rank`: the plan may reorder hosts."""
    if cluster is None:
        return rank
    own, there = cluster.host_of(rank), placed(cluster, plan.place.hosts)
    return there.ranks_on(own)[cluster.ranks_on(own).index(rank)]


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TorchrunLaunch:
    """Launches what is one rank here, and others in the processes of a torchrun job.

    rank:           of the plan, that this process is.
    micro_batches:  of a step, as ranks report them.
    steps, name:    the numbers of the steps that are told, and under which name in the store.
    """

    rendezvous: "Rendezvous"
    rank: int
    micro_batches: int
    steps: Sequence[int] = ()
    name: str = _RUN
    awaits: Callable[[int], bool] = lambda step: False

    def of(self, steps: Sequence[int], **changes: Any) -> "TorchrunLaunch":
        """Return the launch of these steps."""
        return replace(self, steps=steps, **changes)

    def __call__(
        self, work: "Work", num_ranks: int, report: "Report", *, groups: "Groups" = ()
    ) -> "list[RankResult]":
        """Run this rank; return all results on torchrun's rank 0, elsewhere none."""
        from penstock.runtime.launch import as_json, from_json, run_torchrun, under

        rank, store, name = self.rendezvous.rank, self.rendezvous.store, self.name
        tell, ended = _telling(store, name), threading.Event()
        whole = _ReportedSteps(self.steps, self.micro_batches, self.awaits)
        there = under(store.clone(), f"penstock/{name}")
        listening = partial(_listen, there, whole, report, ended)
        listener = threading.Thread(target=listening, daemon=True)
        if rank == 0:
            listener.start()
        try:
            begun, way = _begun(work, self.rendezvous, name), self.rendezvous.way
            room = under(store, name)
            own = run_torchrun(begun, room, tell, groups=groups, rank=self.rank, way=way)
        finally:
            ended.set()
            if rank == 0:  # no thread is to be in the store when the interpreter ends
                listener.join()
        if rank != 0:
            store.set(f"penstock/{name}/result/{rank}", json.dumps(as_json(own)))
            return []
        names = (f"penstock/{name}/result/{other}" for other in range(1, num_ranks))
        others = (from_json(json.loads(self.rendezvous.take(each))) for each in names)
        return sorted([own, *others], key=lambda result: result.rank)


def _begun(work: "Work", rendezvous: "Rendezvous", name: str) -> "Work":
    """Return `work`, before which this rank leaves the others' vigil: all are connected then."""

    def begun(end: "Transport", report: "Report") -> "RankResult":
        if name == _RUN:
            rendezvous.leave()
        try:
            return work(end, report)
        except BatchMisfitError as problem:
            if name == _RUN:
                rendezvous.put(_MISFIT, f"rank {rendezvous.rank}: {problem.message}")
            raise

    return begun


def _telling(store: Any, name: str) -> "Report":
    told = threading.Lock()

    def tell(result: "StepResult") -> None:
        if result.loss is not None or result.validated is not None:
            with told:
                place = store.add(f"penstock/{name}/told/{result.step}", 1)
            store.set(f"penstock/{name}/step/{result.step}/{place}", json.dumps(asdict(result)))

    return tell


class _ReportedSteps(NamedTuple):
    """The steps that are reported, how many micro-batches each has, whether it is validated."""

    steps: Sequence[int]
    micro_batches: int
    awaits: Callable[[int], bool]


def _listen(store: Any, whole: _ReportedSteps, report: "Report", ended: threading.Event) -> None:
    """Pass the reports of every step on, in order, until they are of all its micro-batches.

    ended:    the last report is in the store: no more steps than those are made.
    """
    from penstock.runtime.rank import StepResult

    for step in whole.steps:
        place = told = 0
        awaits = whole.awaits(step)
        while told < whole.micro_batches - _ROUNDING or awaits:
            place += 1
            key = f"step/{step}/{place}"
            if not _comes(store, key, ended):
                return
            result = StepResult(**json.loads(store.get(key)))
            store.delete_key(key)
            told += result.micro_batches
            awaits = awaits and result.validated is None
            report(result)


def _comes(store: Any, key: str, ended: threading.Event) -> bool:
    """Return once a key is there; False if it will not come."""
    while not store.check([key]):
        if ended.is_set():
            return store.check([key])  # it may have come before the end
        time.sleep(_LISTEN_S)
    return True
