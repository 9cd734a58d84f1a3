"""Choose: the plan to train by: given, that of the run to resume, or found by the search."""

import functools
import math
import operator
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.choose.degrees import DegreeSearch, as_asked, decision
from penstock.choose.fuse import known, usable
from penstock.choose.joined_counts import (
    MOST_JOINED,
    in_words,
    ways_to_divide,
    ways_to_fit,
    ways_to_join,
    ways_to_weave,
    with_joined,
)
from penstock.choose.prepare import joined_step, machines, profiled_here
from penstock.choose.sliced import SliceSearch, reason
from penstock.cluster.cluster import Cluster
from penstock.cluster.order import placed
from penstock.errors import GraphError, MemoryShortError, PlanError
from penstock.graph.graph import Graph
from penstock.job import Job
from penstock.keyed import only_key
from penstock.listener import SILENT, Listener, Move
from penstock.plan.plan import Decision, Plan, Prediction, Units, check_fits, decide
from penstock.processes.errand import Errands
from penstock.profile.kinds import save_profiles
from penstock.program.passes.receive_early import early_on
from penstock.rules.rewrite import rewritten
from penstock.rules.rule import Rule
from penstock.rules.ruled import ruled
from penstock.schedule.compiled import is_kept
from penstock.schedule.recipe import Recipe, name_of
from penstock.search.candidate import Candidate, Objective
from penstock.search.cut_units import in_best_units
from penstock.search.field import Tally, front_of
from penstock.search.judge import Judge
from penstock.search.search import SearchResult, evaluate, search
from penstock.search.shapes import Fixed
from penstock.search.simplest import ERROR
from penstock.simulate import kernel
from penstock.taken import Taken
from penstock.units import format_seconds

COMPILES = "a first search takes longer: its loops run as Python until compiling them would pay"
_WORTH = 0.02  # of a step: what units have to gain where nobody asked for them
_LITTLE = "the job's micro-batches cannot be joined, or little would be gained"
_BRIEF = "brief"  # what is decided of the search for a short run
_WAY_S = 1.0  # that a run lasts for another way to be traced, measured and searched

if TYPE_CHECKING:
    from penstock.graph.trace import Capture
    from penstock.profile.profile import Profile

    Profiling = Callable[[Capture, Job, Cluster, Listener], tuple[Profile, ...]]


class PlannedKey(NamedTuple):
    """The step of one more shape of a job, its plan, and the share of all steps that have it.

    job:     of all shapes, its micro-batches divided as those of this one.
    """

    key: Hashable
    share: float
    captured: "Capture"
    plan: Plan
    job: Job


class Choice(NamedTuple):
    """A plan with all that it was made from; the job's micro-batches joined as it says.

    key:     of the steps that it was made for, where those of the job have several.
    others:  the same stages on the same ranks for those of other keys.
    """

    job: Job
    captured: "Capture"
    plan: Plan
    key: Hashable = None
    others: tuple[PlannedKey, ...] = ()

    def way(self, profiles: "Sequence[Profile]") -> "Joining":
        """Return the way in which its micro-batches are joined; the profiles are of its step."""
        return Joining(self.plan.terms.joined, self.job, self.captured, tuple(profiles))


class SearchAim(NamedTuple):
    """What a search is to find.

    objective:   what is to be small.
    limit_s:     of searching, all ways of joining micro-batches together, tracing and measuring
                 aside; then the best so far is taken.
    with_front:  whether to find the front too.
    num_steps:   of the run: what is left out of a short one takes longer than all of its steps.
    """

    objective: Objective = "time"
    limit_s: float | None = None
    with_front: bool = False
    num_steps: float = math.inf

    def is_brief(self, step_s: float) -> bool:
        """Return whether all steps are over before another way has been traced and measured."""
        return step_s * self.num_steps < _WAY_S


FASTEST = SearchAim()


class Joining(NamedTuple):
    """One way of joining micro-batches: how many, the job, its step, and the step's profiles.

    joined:  as in a plan: below 1 they are divided.
    Of one way there may be several steps, in which other parameters are in slices, or whose ops
    several ranks divide.
    """

    joined: Taken
    job: Job
    captured: "Capture"
    profiles: "tuple[Profile, ...]"

    def is_of(self, plan: Plan) -> bool:
        """Return whether a plan is one of this step."""
        graph = self.captured.graph
        own = self.joined, graph.slices, graph.tensor, graph.context
        return own == (plan.terms.joined, plan.terms.split, plan.tensor, plan.place.context)

    def choice(self, plan: Plan) -> Choice:
        """Return a plan of this step with what it was made from."""
        return Choice(self.job, self.captured, plan)


def joining_of(ways: Iterable[Joining], plan: Plan) -> Joining:
    """Return the way whose step a plan is of.

    Raises:   LookupError: none is.
    """
    for way in ways:
        if way.is_of(plan):
            return way
    raise LookupError(f"no way joins {plan.terms.joined} micro-batches as the plan does")


class Option(NamedTuple):
    """What was found with one way of joining micro-batches, and the seconds that took."""

    way: Joining
    found: SearchResult
    seconds: float = 0.0

    @property
    def best(self) -> Candidate:
        """Return the candidate of the plan."""
        return self.found.candidates[0]

    @property
    def choice(self) -> Choice:
        """Return the best plan with what it was made from."""
        return self.way.choice(self.found.plan.changed(joined=self.way.joined))


class Searched(NamedTuple):
    """What a search found: the best plan, what it was measured with, and what else there is.

    front:    see `search`; of all ways of joining micro-batches.
    tally:    what became of the plans.
    options:  the best of each way of joining micro-batches.
    """

    choice: Choice
    profiles: "tuple[Profile, ...]"
    front: tuple[Candidate, ...]
    tally: Tally
    options: tuple[Option, ...]

    def ways(self, tensor: int) -> tuple[Joining, ...]:
        """Return the ways of joining micro-batches of the steps whose ops so many ranks divide."""
        ways = (option.way for option in self.options)
        return tuple(way for way in ways if way.captured.graph.tensor == tensor)

    def profiles_of(self, choice: Choice) -> "tuple[Profile, ...]":
        """Return the profiles of the step of a choice from among the options."""
        return joining_of((option.way for option in self.options), choice.plan).profiles


class Machines(NamedTuple):
    """Where to train, None for this machine; what measures a step on its devices; who listens.

    hands:    searches that may go on beside each other, in processes of their own; 1: none.
    """

    cluster: Cluster | None = None
    profile: "Profiling" = profiled_here
    listener: Listener = SILENT
    hands: int = 1


class Rewrites(NamedTuple):
    """What is changed of a plan that is given: units of its stages, and what rules say."""

    units: Units | None = None
    rules: tuple[Rule, ...] = ()


def given(
    job: Job,
    plan: Plan,
    folder: Path,
    captured: "Capture",
    there: Machines,
    wanted: Rewrites = Rewrites(),  # noqa: B008 - a frozen record
) -> Choice:
    """Return `plan`, predicted for the machines that are there, saved in `folder`.

    Where it is for hosts that are not, its ranks are on those that are, as these are numbered.
    Raises:   PlanError: it is for another model, or for another number of micro-batches; a rule
              that cannot be.
    """
    cluster = there.cluster or machines(None, plan.total_ranks, there.listener)
    plan = replace(usable(on_hosts_of(plan, cluster)), predicted=None)
    joined, captured = for_plan(job, plan, captured, there.listener)
    profiles = there.profile(captured, joined, cluster, there.listener)
    plan = predicted(plan, captured.graph, profiles, cluster)
    choice = in_units(Choice(joined, captured, plan), wanted.units, profiles, cluster, wanted.rules)
    if choice.plan.terms.compiled:
        profiles = known(joined, captured, choice.plan, profiles)
        plan = predicted(choice.plan, captured.graph, profiles, cluster)
        choice = choice._replace(plan=plan)
    save(folder, captured, choice.plan, profiles, cluster)
    return choice


def in_units(
    choice: Choice,
    units: Units | None,
    profiles: "Sequence[Profile]",
    cluster: Cluster,
    rules: Sequence[Rule] = (),
) -> Choice:
    """Return a choice with its stages in such units (None: as they are) and by rules, predicted.

    A schedule that is built for the seconds of the stages is built for those of their units.

    Raises:   PlanError: the job's optimizer stays whole.
    """
    plan, graph = choice.plan, choice.captured.graph
    cut = plan if units is None else plan.refined(graph, units)
    cut = rewritten(cut, graph, rules) if rules else cut
    whole = next((each for each in plan.decisions if each.what == "optimizer"), None)
    if whole is not None and cut.num_stages > 1:
        message = f"the optimizer cannot be divided into units: {whole.why}"
        raise PlanError(message, hint="leave units and rules out, or fix the optimizer")
    if replace(cut, decisions=(), predicted=None) == replace(plan, decisions=(), predicted=None):
        return choice._replace(plan=replace(cut, predicted=plan.predicted)) if rules else choice
    if isinstance(cut.schedule, Recipe) and cut.schedule.seconds is not None:
        cut = Judge(graph, profiles, cluster).suited(cut)
    cut = replace(cut, predicted=plan.predicted)
    return choice._replace(plan=predicted(cut, graph, profiles, cluster))


def found_in_units(
    choice: Choice,
    units: Units | None,
    fixed: Fixed,
    *,
    profiles: "Sequence[Profile]",
    cluster: Cluster,
) -> Choice:
    """Return a choice of the search in such units, predicted; None: as is best.

    That is in units that hide the sums of its replicas, where the simulator says that the step is
    shorter then by `_WORTH` of it.  Stages and schedules that somebody asked for stay as they are.
    Raises:   as `in_units`.
    """
    plan, graph = choice.plan, choice.captured.graph
    is_whole = any(each.what == "optimizer" for each in plan.decisions)
    is_asked = units is not None or fixed.schedule is not None or fixed.stages is not None
    if is_asked or is_whole or plan.replicas == 1 or plan.tensor > 1:
        return in_units(choice, units, profiles, cluster, fixed.rules)
    judge = Judge(graph, profiles, cluster, rules=ruled(fixed.rules, graph))
    found, before_s = in_best_units(judge, plan), evaluate(graph, profiles, cluster, plan)[0].step_s
    if found is None or found.candidate.step_s > (1.0 - _WORTH) * before_s:
        return choice
    cut = found.candidate.plan
    usual = (f"{name} {format_seconds(each)}" for name, each in found.usual_s.items())
    why = f"sums beside the backward pass: {format_seconds(found.candidate.step_s)}; "
    is_usual = found.setting != "searched"
    value = found.setting if is_usual else f"{cut.num_stages} in place of {plan.num_stages} stages"
    made = (*plan.decisions, Decision("units", value, "search", why + ", ".join(usual)))
    cut = replace(cut, decisions=made, predicted=plan.predicted)
    return choice._replace(plan=predicted(cut, graph, profiles, cluster))


def predicted(plan: Plan, graph: Graph, profiles: "Sequence[Profile]", cluster: Cluster) -> Plan:
    """Return `plan` with what the simulation says of it."""
    candidate, _ = evaluate(graph, profiles, cluster, plan)
    beside = plan.predicted.tried if plan.predicted else ()
    prediction = Prediction(candidate.step_s, candidate.peak_bytes, candidate.usd, beside)
    return decide(plan, plan.decisions, prediction)


def on_hosts_of(plan: Plan, cluster: Cluster | None) -> Plan:
    """Return `plan` for the hosts of `cluster`: in their own order, where it names others.

    Receives are posted as early as gloo asks for between them, and NCCL does not.
    """
    from penstock.device import here

    names = set[str]() if cluster is None else {host.name for host in cluster.hosts}
    plan = plan if names.issuperset(plan.place.hosts) else plan.changed(hosts=())
    if cluster is None or cluster.num_ranks < plan.total_ranks:
        return plan
    is_cpu = here().is_cpu
    early = early_on(placed(cluster, plan.place.hosts), plan.total_ranks) if is_cpu else 0
    return plan.changed(early=early)


def for_plan(
    job: Job, plan: Plan, captured: "Capture", listener: Listener
) -> "tuple[Job, Capture]":
    """Return the job joined as the plan says, and its trace, with slices as the plan says.

    Raises:   PlanError: the plan does not fit the job.
    """
    from penstock.examine.buffer_terms import check_chosen

    planned = plan.job_micro_batches
    if planned != job.micro_batches:
        hint = "make a new plan for this job"
        message = f"the plan is for {planned} micro-batches a step; the job has {job.micro_batches}"
        raise PlanError(message, hint=hint)
    try:
        as_planned = plan.terms.joined, plan.terms.split, listener, plan.place.axis
        joined, captured = joined_step(job, captured, *as_planned)
    except GraphError as problem:
        joins = (
            f"whose micro-batches are {plan.terms.joined} of the job's; those of this job cannot be"
        )
        message = f"the plan is for graph {plan.graph}, {joins}: {problem.message}"
        raise PlanError(message, hint="make a new plan for this job") from problem
    check_fits(plan, captured.graph)
    check_chosen(plan, job, captured.graph)
    return joined, captured


def was_brief(plan: Plan, num_steps: int) -> bool:
    """Return whether a plan was searched for a short run, and so many steps are none."""
    step_s = 0.0 if plan.predicted is None else plan.predicted.step_s
    is_brief = any((each.what, each.value) == ("search", _BRIEF) for each in plan.decisions)
    return is_brief and not SearchAim(num_steps=num_steps).is_brief(step_s)


def decided(plan: Plan, decisions: Sequence[Decision]) -> Plan:
    """Return `plan` with `decisions` in place of its own about the same things."""
    names = {decision.what for decision in decisions}
    others = (each for each in plan.decisions if each.what not in names)
    return replace(plan, decisions=(*others, *decisions))


def best(
    job: Job, fixed: Fixed, captured: "Capture", there: Machines, aim: SearchAim = FASTEST
) -> Searched:
    """Return the best plan for the cluster there, and what else was found.

    Raises:   PlanError: nothing fits what is fixed, or the memory.
    """
    if not is_kept(kernel.run):
        there.listener.say(COMPILES)
    is_long = math.isinf(aim.num_steps)  # else what one way takes says whether others are tried
    with Errands(there.hands if is_long else 1) as errands:
        tried = _tried(job, captured, _Searching(fixed, there, aim, errands))
    return _best_of_tried(tried, captured, _Searching(fixed, there, aim, errands))


class _FoundWays(NamedTuple):
    """What was found with each way, in slices too, and why others cannot be.

    rows:     of the ways of joining micro-batches, what is whole.
    """

    rows: "list[tuple[Joining, Option | PlanError]]"
    whole: list[GraphError]
    options: list[Option]
    degrees: DegreeSearch


def _tried(job: Job, captured: "Capture", searching: "_Searching") -> _FoundWays:
    """Return what is found with all ways that are worth a search."""
    fixed, there, aim, errands = searching
    start, rows = time.perf_counter(), list(_options(job, captured, searching))
    tried = [(way, row) for way, row in rows if not isinstance(row, GraphError)]
    whole = [row for _, row in rows if isinstance(row, GraphError)]
    options = [option for _, option in tried if not isinstance(option, PlanError)]
    is_over = _over(start, aim.limit_s)
    cut = partial(searching.begun_of, is_over=is_over)
    # else steps of other shapes would have to be cut alike
    about = tried if only_key(job.data) is None else [], fixed, aim.objective
    slices = SliceSearch(*about, cut, errands.hands)
    degrees = DegreeSearch(tried, fixed, there.cluster, searching.found_of, is_over)
    divided = degrees.options(aim.objective)
    if errands.hands > 1:  # while what is in slices is searched
        divided = iter([*divided])
    options += slices.options(is_over)
    if not any(aim.is_brief(option.best.step_s) for option in options):
        options += divided
    return _FoundWays(tried, whole, options, degrees)


def _best_of_tried(made: _FoundWays, captured: "Capture", searching: "_Searching") -> Searched:
    """Return the best of what was tried, with the reasons.

    Raises:   PlanError: there is none.
    """
    fixed, _, aim, _ = searching
    tried, whole, options, degrees = made
    problems = [option for _, option in tried if isinstance(option, PlanError)]
    if not options:
        raise problems[0]
    first = min(options, key=lambda option: option.best.score(aim.objective))
    others = [(o.way.joined, o.best) for o in options if o.way.joined != first.way.joined]
    why = "the run is short" if aim.is_brief(first.best.step_s) else _LITTLE
    plan = _with_reason(first.choice.plan, others, [*problems, *whole], why)
    plan = with_joined(plan, first, options)
    plan = decided(plan, (*plan.decisions, *_why_not_fastest(first, options, aim.objective)))
    if first.way.captured.graph.slices != captured.graph.slices:
        plan = decided(plan, (*plan.decisions, reason(first, tried, aim.objective)))
    plan = decided(plan, decision(first, options, degrees.rows, fixed.tensor))
    tally = functools.reduce(operator.add, (option.found.tally for option in options))
    plan = replace(plan, decisions=(*plan.decisions, *_left_out(first, options, aim, tally)))
    front = front_of([_joined(option, each) for option in options for each in option.found.front])
    choice = first.choice._replace(plan=plan)
    return Searched(choice, first.way.profiles, front, tally, tuple(options))


def _left_out(
    first: Option, options: Sequence[Option], aim: SearchAim, tally: Tally
) -> Iterator[Decision]:
    """Yield why the search has not tried everything, where it has not."""
    if aim.limit_s is not None and any(option.found.cut_short for option in options):
        value = f"stopped after {format_seconds(aim.limit_s)}"
        yield Decision("search", value, "user", str(tally))
    elif aim.is_brief(first.best.step_s):
        run = f"{aim.num_steps:,} steps take {format_seconds(aim.num_steps * first.best.step_s)}"
        why = f"{run}, trying more plans takes longer; `penstock plan` tries them"
        yield Decision("search", _BRIEF, "search", why)


class _Searching(NamedTuple):
    """How ways are searched: what is fixed, where, for what, and by whom."""

    fixed: Fixed
    there: Machines
    aim: SearchAim
    errands: Errands

    def begun(self, way: Joining, is_over: Callable[[], bool]) -> Callable[[], Option]:
        """Return what waits for the search of a way, which goes on meanwhile if there is a hand.

        Raises (what waits):   PlanError: nothing fits what is fixed, or the memory.
        """
        about = way, self.fixed, self.there, self.aim, is_over
        errand = self.errands.begin(partial(_found, *about))

        def awaited() -> Option:
            with self.there.listener.progress("searching") as update:
                return Option(way, *errand.result(update))

        return awaited

    def begun_of(
        self, way: Joining, captured: "Capture", *, is_over: Callable[[], bool]
    ) -> Callable[[], Option]:
        """Return the same of the step of a way with other ops, each part of the time at most."""
        there, limit_s = self.there, self.aim.limit_s
        assert there.cluster is not None, "a search is of some machines"
        profiles = there.profile(captured, way.job, there.cluster, there.listener)
        is_late = _over(None, None if limit_s is None else limit_s / MOST_JOINED)
        cut = way._replace(captured=captured, profiles=profiles)
        beside = self.errands.hands > 1
        return self.begun(cut, lambda: is_late() or (beside and is_over()))

    def found_of(self, way: Joining, captured: "Capture") -> Option:
        """Return what a search of such a step finds, in this process.

        Raises:   PlanError: nothing fits what is fixed, or the memory.
        """
        here = self._replace(errands=Errands(1))
        return here.begun_of(way, captured, is_over=lambda: False)()

    def way(self, job: Job, captured: "Capture", count: Taken) -> Joining | GraphError:
        """Return the way that joins so many micro-batches, measured; or why they stay whole."""
        there, cluster = self.there, self.there.cluster
        assert cluster is not None, "a search is of some machines"
        pair = (job, captured) if count == 1 else _joined_job(job, captured, count, there)
        if isinstance(pair, GraphError):
            return pair
        pair = as_asked(*pair, self.fixed.axis, there.listener)
        return Joining(count, *pair, there.profile(pair[1], pair[0], cluster, there.listener))

    def begun_ways(
        self, job: Job, captured: "Capture", counts: Sequence[Taken]
    ) -> "dict[Taken, tuple[Joining | GraphError, Callable[[], Option]]]":
        """Return all ways, and what waits for the search of each; nothing where there are no hands.

        Those that are searched one after another have the same part of the time.
        """
        found: dict[Taken, tuple[Joining | GraphError, Callable[[], Option]]] = {}
        limit_s, turns = self.aim.limit_s, self.errands.turns(len(counts))
        for count in counts if self.errands.hands > 1 else ():
            way = self.way(job, captured, count)
            is_over = _over(None, None if limit_s is None else limit_s / turns)
            begun = _nothing if isinstance(way, GraphError) else self.begun(way, is_over)
            found[count] = way, begun
        return found


def _nothing() -> Option:
    raise LookupError("no search of a way that cannot be was begun")


def _options(
    job: Job, captured: "Capture", searching: _Searching
) -> "Iterator[tuple[Joining, Option | PlanError | GraphError]]":
    """Yield for each way of joining micro-batches what the search finds, or why they stay whole.

    Each has the same part of the time that is left, and none is begun without any.  None are joined
    in a brief run.  Where nothing fits the memory they are divided until something does.
    """
    fixed, there, aim, _ = searching
    cluster, left_s = there.cluster, aim.limit_s
    assert cluster is not None, "a search is of some machines"
    ranks = cluster.num_ranks if fixed.ranks is None else fixed.ranks
    sizes, smaller = _sizes(job, fixed, captured.graph.samples, ranks)
    short, fits, is_brief = False, False, False
    ahead = searching.begun_ways(job, captured, sizes)
    for at, count in enumerate((*sizes, *smaller)):
        if at >= len(sizes) and (fits or not short):
            return
        if at and left_s is not None and left_s <= 0 and count not in ahead:
            way = Joining(count, job, captured, ())
            yield way, PlanError("the time limit was reached")
            return
        if count > 1 and is_brief:
            continue
        way, awaited = ahead.get(count) or (searching.way(job, captured, count), _nothing)
        if isinstance(way, GraphError):
            if count < 1:
                yield Joining(count, job, captured, ()), way
            continue
        start = time.perf_counter()
        if count not in ahead:
            part_s = None if left_s is None else left_s / max(1, len(sizes) - at)
            awaited = searching.begun(way, _over(None, part_s))
        try:
            yield way, (option := awaited())
            fits, is_brief = True, aim.is_brief(option.best.step_s)
        except PlanError as problem:
            yield way, problem
            short = short or isinstance(problem, MemoryShortError)
        left_s = None if left_s is None else left_s - (time.perf_counter() - start)


def _sizes(job: Job, fixed: Fixed, samples: int, ranks: int) -> tuple[list[Taken], list[Taken]]:
    """Return the sizes of micro-batches to try, and those to try where nothing fits."""
    across = ranks // (fixed.tensor or 1)
    sizes = [*ways_to_join(job), *ways_to_divide(job, fixed, samples, across)]
    if (fixed.tensor or 1) > 1:
        sizes += [k for k in ways_to_weave(job, fixed, samples, across) if k not in sizes]
    return sizes, [k for k in ways_to_fit(job, fixed, samples) if k not in sizes]


def _found(
    way: Joining,
    fixed: Fixed,
    there: Machines,
    aim: SearchAim,
    is_over: Callable[[], bool],
    update: Move,
) -> tuple[SearchResult, float]:
    """Return what the search finds with one way of joining micro-batches, and its seconds.

    Raises:   PlanError: nothing fits what is fixed, or the memory.
    """
    assert there.cluster is not None, "a search is of some machines"
    start, far = time.perf_counter(), (0, 0)

    def tell(done: int, total: int) -> None:
        nonlocal far
        far = done, total
        update(*far)

    def is_late() -> bool:  # asked while plans are polished, too
        update(*far)
        return is_over()

    found = search(
        way.captured.graph,
        way.profiles,
        there.cluster,
        micro_batches=way.job.micro_batches,
        objective=aim.objective,
        error=ERROR,
        clip=way.job.awaits_all,
        fixed=fixed.as_in(way.job),
        with_front=aim.with_front,
        is_over=is_late,
        num_steps=aim.num_steps,
        progress=tell,
    )
    return found, time.perf_counter() - start


def best_like(found: Searched, fixed: Fixed, there: Machines) -> Choice:
    """Return the fastest plan with other decisions fixed, by what `found` was measured with.

    It divides ops among as many ranks as are fixed, or among none.
    Raises:   PlanError: nothing fits what is fixed, or the memory.
    """
    return best_of(found.ways(fixed.tensor or 1), fixed, there)


def best_of(
    ways: Sequence[Joining], fixed: Fixed, there: Machines, limit_s: float | None = None
) -> Choice:
    """Return the fastest plan of these ways of joining micro-batches, by their profiles.

    limit_s:  of searching, all ways together; then the best so far is taken.
    Raises:   PlanError: nothing fits what is fixed, or the memory; nothing was found in time.
    """
    options: list[Option] = []
    problem, start = PlanError("nothing was found before"), time.perf_counter()
    searching = _Searching(fixed, there, FASTEST, Errands(1))
    for at, way in enumerate(ways, 1):
        part_s = None if limit_s is None else limit_s * at / len(ways)
        try:
            options.append(searching.begun(way, _over(start, part_s))())
        except PlanError as why:
            problem = why
    if not options:
        raise problem
    return min(options, key=lambda option: option.best.step_s).choice


def _joined(option: Option, candidate: Candidate) -> Candidate:
    return replace(candidate, plan=candidate.plan.changed(joined=option.way.joined))


def _over(start: float | None, part_s: float | None) -> Callable[[], bool]:
    """Return what says whether so many seconds are over; from its first call on without a start.

    A search asks when its plans are listed and the first one is judged.
    """
    began = start

    def is_over() -> bool:
        nonlocal began
        began = time.perf_counter() if began is None else began
        return part_s is not None and time.perf_counter() - began >= part_s

    return is_over


def _joined_job(
    job: Job, captured: "Capture", count: Taken, there: Machines
) -> "tuple[Job, Capture] | GraphError":
    """Return the job with so many micro-batches joined to one, and its trace; or why it cannot."""
    try:
        return joined_step(job, captured, count, captured.graph.slices, there.listener)
    except GraphError as problem:
        return problem


def _with_reason(
    plan: Plan,
    others: Sequence[tuple[Taken, Candidate]],
    problems: Sequence[PlanError | GraphError],
    why: str,
) -> Plan:
    """Return the plan with the reason for its size of micro-batch.

    others, problems:  what was found with the other sizes that were possible; `why` where none was.
    """
    own = plan.share_words
    if plan.terms.joined != 1:
        own += f", {in_words(plan.terms.joined)}"
    if problems:
        why = f"every other size was refused: {problems[0].message}"
    if others:
        ways = ((in_words(k), c) for k, c in others)
        times = (f"{format_seconds(c.step_s)} with {way}" for way, c in ways)
        why = "best alternative: " + ", ".join(times)
    decisions = tuple(
        Decision("micro-batches", own, "search", why) if d.what == "micro-batches" else d
        for d in plan.decisions
    )
    return replace(plan, decisions=decisions)


def _why_not_fastest(
    first: Option, options: Sequence[Option], objective: Objective
) -> tuple[Decision, ...]:
    """Return why a faster plan with micro-batches of another size is not taken, if there is one.

    Of those micro-batches a simpler plan was, which is slower than the best of all, `first`.
    """
    simplest = any(decision.what == "simplest" for decision in first.choice.plan.decisions)
    rows = [(o, each) for o in options for each in o.found.candidates[:2] if not each.refused]
    if simplest or objective == "memory":
        return ()
    option, fastest = min(rows, key=lambda row: row[1].score(objective))
    if fastest.score(objective) >= first.best.score(objective):
        return ()
    more = first.best.score(objective)[0] / fastest.score(objective)[0] - 1
    why = (
        f"the fastest, {name_of(fastest.plan.schedule)} with {in_words(option.way.joined)}, is "
        f"predicted at {format_seconds(fastest.step_s)} with more messages or stages; "
        f"{more:.1%} is less than the prediction error"
    )
    return (Decision("simplest", first.best.plan.share_words, "search", why),)


def save(
    folder: Path, captured: "Capture", plan: Plan, profiles: "Sequence[Profile]", cluster: Cluster
) -> None:
    """Write the plan and all that its prediction was made from."""
    _, timeline = evaluate(captured.graph, profiles, cluster, plan)
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    captured.graph.save(folder / "graph.json")
    save_profiles(profiles, folder / "profile.json")
    placed(cluster, plan.place.hosts).save(folder / "cluster.toml")
    timeline.save(folder / "predicted.trace.json")
