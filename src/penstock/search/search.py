"""Search: try every (hosts, replicas, depth, schedule, recompute), balance the cuts, simulate.

Of all candidates those that can be the best are lowered to a Program and simulated exactly; the
cuts of the best ones are then moved while that helps (move.py).  Deterministic.  A decision's
reason is the best candidate that decides differently.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.cluster.cluster import Cluster
from penstock.cluster.regions import regions_of
from penstock.errors import MemoryShortError, PlanError
from penstock.extras import has, hint_of
from penstock.graph.graph import Graph
from penstock.graph.tensor.cuts import apart_only, collect_points
from penstock.plan.plan import Plan, Prediction, decide, divided, plan_by_hand, why_not_woven
from penstock.profile.kinds import Profiles
from penstock.program.passes.offload import Offloaded
from penstock.program.passes.receive_early import early_on
from penstock.program.passes.shard import Sharding
from penstock.rules.rewrite import made_to_keep
from penstock.rules.rule import Rule
from penstock.rules.ruled import ASKED, Ruled, ruled
from penstock.schedule.recipe import Recipe, any_schedule, check_trains, name_of
from penstock.search.balance import ANYWHERE, StageEnds, balanced_cuts_on
from penstock.search.candidate import Candidate, Objective
from penstock.search.copied import with_copies
from penstock.search.dealt import dealt
from penstock.search.far_memory import with_far
from penstock.search.fastest_topology import with_topology
from penstock.search.field import Effort, Field, Tally, front_of
from penstock.search.judge import Judge
from penstock.search.less_kept import with_less_kept
from penstock.search.moves import MayMove, with_moves
from penstock.search.polish import polish, recut, with_cuts
from penstock.search.reasons import reasons
from penstock.search.shapes import Fixed, Shape, nothing_fits, shapes
from penstock.search.sharded import with_shards
from penstock.search.simplest import exactest, simplest, why_simplest
from penstock.search.tried_kinds import tried_beside
from penstock.search.turns import by_speed
from penstock.search.worked import by_work
from penstock.timeline.timeline import Timeline
from penstock.units import KiB, format_bytes

_Floats = tuple[float, ...]

_POLISHED = 3  # candidates whose cuts are moved
_POLISHED_UNLIKE = 8  # of unlike devices


class SearchResult(NamedTuple):
    """What a search found.

    plan        the best, with its reasons and what is predicted of it
    candidates  those of all plans that were simulated, and before them the best ones polished;
                first that of `plan`
    front       those that no other beats in seconds, bytes of the fullest rank and dollars, by
                seconds; empty unless asked for
    tally       what became of the plans that were to be tried
    cut_short   whether the time was over before `plan` was sure to be the best
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    tally: Tally
    cut_short: bool


def search(  # noqa: PLR0913 - what there is, and one for each request
    graph: Graph,
    profiles: Profiles,
    cluster: Cluster,
    *,
    micro_batches: int,
    objective: Objective = "time",
    clip: bool = False,
    fixed: Fixed = Fixed(),  # noqa: B008 - a frozen record
    error: float = 0.0,
    prune: bool = True,
    with_front: bool = False,
    is_over: Callable[[], bool] = lambda: False,
    num_steps: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Return the best plan with its reasons, and what else was found.

    profiles:       one for all devices, or one for each kind.
    micro_batches:  per step over all replicas, which share them, if need be by unlike parts; so
                    every candidate computes the same step.
    error:          share of the best step within which the simplest plan is taken (simplest.py).
    prune:          whether candidates that cannot be the best by their busiest rank are left
                    unsimulated; the plan is the same.
    with_front:     whether to find the front too; then those are simulated that may be of it.
    is_over:        whether the time for searching is over.  Then the best so far is returned, as
                    soon as there is a usable one.
    num_steps:      of the run; moves of single stages are tried as long as they take a tenth of it.
    Asynchronous schedules change the mathematics: they are tried only where `fixed` names one.
    Raises:   PlanError: nothing fits what is fixed, or the memory.
              ScheduleError: `fixed` names a schedule that does not exist.
              ProfileError: a profile is of another graph, or none is of some device.
    """
    suits, rules = not _has_seconds(fixed), _ruled(fixed, graph)
    judge = Judge(graph, profiles, cluster, suits=suits, rules=rules)
    cutter, plans = _Cutter(judge, clip=clip), list[Plan]()
    for shape in shapes(graph, cluster, micro_batches, fixed):
        plans += cutter.plans(shape, fixed)
        if progress is not None:
            progress(len(plans), 0)
    if not plans:
        raise cutter.problem or nothing_fits(graph, cluster, micro_batches, fixed)
    rescues = not any(plan.offloads for plan in plans)
    effort = Effort(prune, rescues, is_over, progress, num_steps)
    field = Field(judge, plans, objective, effort)
    (best, *others), cut_short = _polished(field, cutter, fixed, error), field.was_cut_short
    why = reasons(best, field, judge, fixed, cutter.devices(best.plan))
    chosen = _plainest(field, best, others, fixed, error)
    if chosen is not best:
        why = reasons(chosen, field, judge, fixed, cutter.devices(chosen.plan))
    if chosen.plan.changed(wire=best.plan.terms.wire) != best.plan:
        why = (*why, why_simplest(judge, chosen, best))
    front = front_of([best, *others, *field.front()]) if with_front else ()
    candidates = *((chosen,) if chosen is not best else ()), best, *others, *field.simulated
    tried = tried_beside(judge, chosen, candidates, micro_batches)
    plan = decide(chosen.plan, why, Prediction(chosen.step_s, chosen.peak_bytes, chosen.usd, tried))
    return SearchResult(plan, candidates, front, field.tally(), cut_short)


def _ruled(fixed: Fixed, graph: Graph) -> Ruled:
    """Return what rules say, and of each piece whether it is recomputed where that is fixed."""
    rules = ruled(fixed.rules, graph)
    if fixed.recompute is None:
        return rules
    rule = Rule("recompute", "*", "yes" if fixed.recompute else "no", ASKED)
    return rules.with_rest("recompute", rule, graph)


def _plainest(
    field: Field, best: Candidate, others: Sequence[Candidate], fixed: Fixed, error: float
) -> Candidate:
    """Return the simplest candidate within `error` of the best, its messages as exact as can be."""
    judge, objective = field.judge, field.objective
    found = simplest(judge, best, [*others, *field.simulated], objective, error)
    limit = best.score(objective)[0] * (1 + error)
    return exactest(judge, found, fixed.exchange.wire, objective, limit)


def _has_seconds(fixed: Fixed) -> bool:
    """Return whether `fixed` says for which seconds the schedule is to be built.

    Raises:   PlanError: it names a schedule that does not train.
    """
    if fixed.schedule is None:
        return False
    asked = any_schedule(fixed.schedule)
    check_trains(asked)
    return isinstance(asked, Recipe) and asked.seconds is not None


def _polished(field: Field, cutter: "_Cutter", fixed: Fixed, error: float) -> list[Candidate]:
    """Return the best candidates of the field, polished, and those with copies, the best first.

    Raises:   PlanError: none can be used.
    """
    judge, objective, cluster = field.judge, field.objective, field.judge.cluster
    placed = [] if fixed.needs.as_placed else dealt(field)
    if judge.graph.tensor > 1:  # of such plans nothing else is moved
        if usable := [*field.best(_POLISHED), *placed]:
            return sorted(usable, key=lambda candidate: candidate.score(objective))
        raise _none_fits(field.simulated)
    kinds = ((cluster.device_of(r).name, cluster.memory_of(r)) for r in range(cluster.num_ranks))
    if len({*kinds}) > 1 or len(regions_of(cluster)) > 1:
        tried = [*field.best(_POLISHED_UNLIKE), *_best_of_each(field)]
        tried = [*dict.fromkeys([*tried, *placed]), *field.overfull(_POLISHED_UNLIKE)]
        change = recut
    else:
        tried, change = [*field.best(_POLISHED), *placed], polish
    effort = replace(field.effort, is_over=field.is_over)
    moved = [change(judge, each, objective, effort) for each in tried]
    copied = with_copies(field, cutter.copies_beside)
    sharded = [] if fixed.needs.state_stays else [*with_shards(field)]
    may = {"moves_state": not fixed.needs.state_stays, "may_cut": fixed.stages is None}
    far = with_far(field, cutter.copies_beside, **may)
    others = [*moved, *copied, *sharded, *far]
    if fixed.recompute is None:
        others += with_less_kept(field, others, [each for each in sharded if each.refused])
    others += with_moves(field, others, cutter.copies_beside, _may_move(judge, fixed), error)
    usable = [candidate for candidate in others if not candidate.refused]
    if not usable:
        raise _none_fits((*field.simulated, *others))
    return sorted(usable, key=lambda candidate: candidate.score(objective))


def _best_of_each(field: Field) -> Iterator[Candidate]:
    """Yield the best candidate with each number of replicas: equal shares hide what it can do."""
    for replicas in sorted({plan.replicas for plan in field.plans} - {1}):
        yield from field.best(1, lambda plan, count=replicas: plan.replicas == count)


def _may_move(judge: Judge, fixed: Fixed) -> MayMove:
    """Return what the search may decide of each stage."""
    far = all(profile.copying.far_s_per_byte for profile in judge.profiles)
    state = not fixed.needs.state_stays
    cuts = fixed.stages is None and fixed.schedule is None
    shards = state and not fixed.needs.whole
    return MayMove(
        again=fixed.recompute is None, far=far, state=state, shards=shards, beside=True, cuts=cuts
    )


def evaluate(
    graph: Graph, profiles: Profiles, cluster: Cluster, plan: Plan
) -> tuple[Candidate, Timeline]:
    """Return what the exact simulation of `plan` says, and its timeline.

    Seconds are those that one more step adds to a long run.  The timeline is of one step of it; for
    an asynchronous schedule, of a window of 8 steps.
    Raises:   ProfileError: a profile is of another graph, or none is of some device.
              ClusterError: the cluster lacks a host of the plan.
    """
    return Judge(graph, profiles, cluster).simulated(plan, spans=True)


def drained_s(graph: Graph, profiles: Profiles, cluster: Cluster, plan: Plan) -> float:
    """Return the seconds of one step of `plan` alone, from its first start to its last end.

    Of an asynchronous schedule, of a window of 8 steps.
    """
    return Judge(graph, profiles, cluster).drained_s(plan)


class _Cutter:
    """Cuts shapes into plans, each so that its slowest stage is as fast as can be."""

    def __init__(self, judge: Judge, *, clip: bool) -> None:
        self.judge, self.clip = judge, clip
        self.problem: PlanError | None = None  # why no plan of some shape keeps the rules
        self._cuts: dict[
            tuple[tuple[tuple[int, ...], ...], tuple[float, ...]], tuple[int, ...] | None
        ] = {}

    def plans(self, shape: Shape, fixed: Fixed) -> Iterator[Plan]:
        """Yield the plans of a shape, with recompute and without, with messages packed and not.

        None where no cuts of so many stages are as rules say.
        """
        exchange = fixed.exchange
        bare = plan_by_hand(
            self.judge.graph,
            range(shape.stages - 1),
            shape.schedule,
            num_micro_batches=max(shape.shares),
            num_ranks=shape.num_ranks,
            replicas=shape.replicas,
            clip=self.clip,
            post_validation=self.clip and exchange.post_validation,
            shares=shape.shares,
        )
        bare = bare.changed(buffers=fixed.needs.buffers, sums=exchange.sums)
        bare = by_speed(self.judge, bare, shape)
        if (cuts := self._cut(bare, shape)) is None:
            return
        early = early_on(self.judge.cluster_of(shape.hosts), bare.total_ranks)
        try:
            bare = self._offloading(bare.changed(hosts=shape.hosts, early=early), fixed.offload)
            bare = with_topology(self.judge, bare, exchange.topology)
        except PlanError as problem:  # not with this schedule
            self.problem = self.problem or problem
            return
        plan = by_work(self.judge, with_cuts(self.judge.graph, bare, cuts))
        packed = [exchange.wire] if shape.num_ranks > 1 and plan.tensor == 1 else []
        wires = dict.fromkeys([plan.terms.wire, *packed])
        for recompute, wire in itertools.product(self._choices(fixed), wires):
            again = plan.changed(recompute=(recompute,) * shape.stages, wire=wire)
            try:
                again = made_to_keep(again, self.judge.graph, self.judge.rules)
            except PlanError as problem:  # not with this schedule, or these replicas
                self.problem = self.problem or problem
                continue
            again = divided(again, self.judge.graph, collect_points(self.judge.graph))
            yield from self._in_turn(again, asked=exchange.woven)
            if any(word != "none" for word in again.offload) and self.copies_beside(again):
                yield again.changed(beside=True)
                if again.far and again.num_stages > again.num_ranks:
                    yield again.changed(beside=True, prefetch=1)

    def _in_turn(self, plan: Plan, *, asked: bool) -> Iterator[Plan]:
        """Yield a plan and, where ranks divide ops, the one that collects beside computes.

        asked:  of those only that one is wanted.
        """
        asked, recipe, why = asked and plan.tensor > 1, plan.schedule, why_not_woven(plan)
        if not asked:
            yield plan
        if why is None and isinstance(recipe, Recipe):
            yield plan.changed(schedule=replace(recipe, woven=True))
        elif asked:
            self.problem = self.problem or why

    def _offloading(self, bare: Plan, what: Offloaded | None) -> Plan:
        """Return the plan with what is asked for in far memory; parts of weights, if any.

        Raises:   PlanError: its weights cannot be there.
        """
        if what is None:
            return bare
        shard: tuple[Sharding, ...] = ()
        if what in ("weights", "all"):
            shard = ("shard",) * bare.num_stages if bare.replicas > 1 else ()
            if any(len(ranks) > 1 for ranks in self.judge.holders(bare)):
                message = f"{name_of(bare.schedule)} puts a stage on several ranks"
                hint = "take another schedule, or offload the state only"
                raise PlanError(f"{message}, and its weights into far memory of each", hint=hint)
        return bare.changed(offload=(what,) * bare.num_stages, shard=shard)

    def _choices(self, fixed: Fixed) -> tuple[bool, ...]:
        """Return what is tried of recompute, where no rule says something."""
        if fixed.recompute is not None:
            return (fixed.recompute,)
        pieces = range(len(self.judge.graph.cut_points) + 1)
        is_said = all(self.judge.rules.said("recompute", piece) for piece in pieces)
        return (False,) if is_said else (False, True)

    def copies_beside(self, plan: Plan) -> bool:
        """Return whether every rank is known to have what copies beside its computes.

        That is a copy engine, or a core more than it computes with.
        """
        cluster = self.judge.cluster_of(plan.place.hosts)
        ranks = [r for r in range(plan.total_ranks) if not cluster.device_of(r).copy_engine]
        used = Counter(map(cluster.host_number, range(plan.total_ranks)))
        asked = {cluster.host_number(rank) for rank in ranks}
        return all(cluster.hosts[host].cores >= 2 * used[host] for host in asked)

    def devices(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """Return for each stage the kinds of device that it runs on: places of profiles."""
        places = self.judge.places(plan.place.hosts, plan.total_ranks)
        if len(set(places)) == 1:
            return (places[:1],) * plan.num_stages
        holders = self.judge.holders(plan)
        column_of = plan.grid.column_of
        return tuple(
            tuple(sorted({places[there] for rank in ranks for there in column_of(rank)}))
            for ranks in holders
        )

    def _cut(self, bare: Plan, shape: Shape) -> tuple[int, ...] | None:
        """Return the cuts; those that rules require too, if there are enough stages for them."""
        there = bare.changed(hosts=shape.hosts)
        devices, portions = self.devices(there), tuple[float, ...]()
        if longest := self.judge.portions(there):
            devices, portions = tuple((kind,) for kind, _ in longest), tuple(p for _, p in longest)
        if (devices, portions) not in self._cuts:
            op_s, rules = [profile.op_s for profile in self.judge.profiles], self.judge.rules
            required = rules.required if len(rules.required) < shape.stages else frozenset[int]()
            ends = StageEnds(required, rules.forbidden | apart_only(self.judge.graph))
            try:
                found = balanced_cuts_on(self.judge.graph, op_s, devices, portions, ends)
            except PlanError:
                if ends == ANYWHERE:
                    raise
                found = None
            self._cuts[devices, portions] = found
        return self._cuts[devices, portions]


def _none_fits(found: Sequence[Candidate]) -> PlanError:
    """Return what to raise where no candidate can be used: how much the smallest lacks."""
    hint = "use more ranks, or a smaller micro-batch"
    full = [candidate for candidate in found if candidate.peak_bytes]
    if not full:
        reasons = sorted({candidate.refused for candidate in found})
        return PlanError("no plan is possible: " + "; ".join(reasons[:3]), hint=hint)
    least = min(full, key=lambda candidate: max(candidate.peak_bytes))
    message = f"no plan is possible: {least.refused}, the least of {len(full)} that were tried"
    if not has("scipy"):
        hint += f", or {hint_of('solvers')}: parts of a stage could be repeated"
    allowed = format_bytes(1.01 * max(least.peak_bytes) + 8 * KiB)  # some is left free
    return MemoryShortError(message, hint=f"allow {allowed} or more, {hint}")
