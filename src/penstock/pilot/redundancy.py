"""Redundancy: where else what a rank holds is, so that no step is lost with it, and its price.

replicas   hold the same: nothing has to be done
a guard    another rank has a copy of what a rank holds alone (members/guard.py), or what the ranks
           of one host do, where that costs a step little
turns      ranks are dealt to hosts by turns, where all replicas of a stage were on one host
nothing    the run goes back to its last checkpoint
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from penstock.choose.choose import Joining, decided, predicted
from penstock.cluster.cluster import Cluster
from penstock.cluster.order import placed
from penstock.graph.whole_optimizer import whole_optimizer
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.plan import Decision, Plan, Prediction
from penstock.profile.kinds import places_of
from penstock.program.alone import alone, guarded
from penstock.program.instructions import Guarding
from penstock.program.program import Program
from penstock.simulate.guards import GuardCost, guard_costs, guards_s
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch import nn

_LOGS = 1, 2, 4, 8, 16  # steps of which gradients may be kept
_WORTH = 0.002  # of a step: what more memory has to gain
_HOST_WORTH = 0.05  # of a step: what the state of a whole host may cost to be on another one, too

_BACK = "the run goes back to its last checkpoint"

_plain: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


class _GuardWay(NamedTuple):
    """One way to guard: what it costs each rank, and a step."""

    guard: Guarding
    rows: Sequence[GuardCost]
    seconds: float

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the rank that keeps most."""
        return max(row.kept_bytes for row in self.rows)

    def __str__(self) -> str:
        sent = max(row.sent_bytes for row in self.rows)
        sizes = f"{format_bytes(sent)} sent, {format_bytes(self.kept_bytes)} held a rank"
        return f"{self.guard}: {format_seconds(self.seconds)} a step, {sizes}"


def safe(plan: Plan, way: Joining, cluster: Cluster) -> Plan:
    """Return a plan whose steps commit, with guards where they are needed and fit, predicted.

    Of the ways to guard the one that costs a step least; those that hold less before those that
    gain next to nothing.  A decision, "redundancy", says what is survived, and what that costs.
    """
    graph = way.captured.graph
    bare = predicted(plan, graph, way.profiles, cluster)
    program = lower_plan(bare, graph)
    if program.num_ranks == 1:
        return bare
    hosts = placed(cluster, plan.place.hosts)
    assert bare.predicted is not None, "it was simulated"
    price = ""
    if shared := _of_one_host(program, hosts):
        is_copied = not (plan.far or plan.terms.split)
        kept = _with_hosts(bare, program, way, cluster, shared) if is_copied else ""
        made = _by_turns(bare, way, cluster, kept)
        if isinstance(made, Plan):
            return made
        price = made
    if not any(alone(program)):
        return _told(bare, "replicas", f"any rank: {_apart(program, hosts, None)}{price}")
    if plan.far:
        return _told(bare, "checkpoint", "no rank: weights in far memory are in no other place")
    if plan.terms.split:
        return _told(bare, "checkpoint", "no rank: slices of parameters are in no other place")
    ways = list(_ways(bare, program, way, cluster))
    if (best := _best(ways, bare.predicted, cluster)) is None:
        least = min(ways, key=lambda one: one.kept_bytes)
        words = f"no rank: there is no memory for a copy of what one alone has ({least})"
        return _told(bare, "checkpoint", words)
    made = predicted(bare.changed(guard=best.guard), graph, way.profiles, cluster)
    others = "; ".join(str(one) for one in ways if one is not best)
    survived = f"any rank: {_apart(program, hosts, best.guard)}{price}"
    return _told(made, f"guard: {best.guard}", f"{survived}; {best}; alternatives: {others}")


def _best(ways: Sequence[_GuardWay], bare: Prediction, cluster: Cluster) -> _GuardWay | None:
    """Return the way that costs a step least, or as little with less memory; None: none fits."""
    fit = [one for one in ways if _fits(one, bare.peak_bytes, cluster)]
    limit_s = min((one.seconds for one in fit), default=0.0) + _WORTH * bare.step_s
    near = (one for one in fit if one.seconds <= limit_s)
    return min(near, key=lambda one: one.kept_bytes, default=None)


def _of_one_host(program: Program, hosts: Cluster) -> tuple[int, ...]:
    """Return the stages that several ranks have, all of them on one of several hosts."""
    homes = [set[str]() for _ in range(program.num_stages)]
    for rank in range(program.num_ranks):
        for stage in program.stages_of(rank):
            homes[stage].add(hosts.host_of(rank).name)
    single = {stage for own in alone(program) for stage in own}
    if len(set[str]().union(*homes)) == 1:
        return ()
    return tuple(s for s, names in enumerate(homes) if len(names) == 1 and s not in single)


def _with_hosts(
    bare: Plan, program: Program, way: Joining, cluster: Cluster, shared: tuple[int, ...]
) -> Plan | str:
    """Return a plan by which any host may be lost; else what that would cost, in words.

    shared:  stages that several ranks of one host have alone.
    """
    assert bare.predicted is not None, "it was simulated"
    hosts, least_s = placed(cluster, bare.place.hosts), 0.0
    best = _best(list(_ways(bare, program, way, cluster, shared)), bare.predicted, cluster)
    if best is None:
        return "; there is no memory for a copy on another host"
    if any(alone(program)):
        usual = _best(list(_ways(bare, program, way, cluster)), bare.predicted, cluster)
        least_s = 0.0 if usual is None else usual.seconds
    more_s = best.seconds - least_s
    if more_s > _HOST_WORTH * bare.predicted.step_s:
        return f"; a copy on another host would take {format_seconds(more_s)} a step"
    made = predicted(bare.changed(guard=best.guard), way.captured.graph, way.profiles, cluster)
    survived = f"any rank: {_apart(program, hosts, best.guard)}"
    return _told(made, f"guard: {best.guard}", f"{survived}; {best}")


def _by_turns(bare: Plan, way: Joining, cluster: Cluster, kept: Plan | str) -> Plan | str:
    """Return the plan with its ranks dealt to hosts by turns, where that keeps a copy of all on
    another host for less than `kept` does, a plan or what that would cost, and for little.

    Ignores:  unlike devices: a stage is made for that of its rank.
    """
    hosts, count = placed(cluster, bare.place.hosts), bare.total_ranks
    names = [hosts.host_of(rank).name for rank in range(count)]
    kinds = {hosts.device_of(rank).name for rank in range(count)}
    rows = [[name] * names.count(name) for name in dict.fromkeys(names)]
    dealt = tuple(name for turn in zip_longest(*rows) for name in turn if name is not None)
    if len({*bare.place.hosts}) < len(bare.place.hosts) or len(kinds) > 1:
        return kept
    made = safe(bare.changed(hosts=dealt), way, cluster)
    program = lower_plan(made, way.captured.graph)
    if costly_hosts(program, dealt, made.agreement.guard):
        return kept
    assert made.predicted is not None, "it was simulated"
    assert bare.predicted is not None, "it was simulated"
    more_s = made.predicted.step_s - bare.predicted.step_s
    words = f"{format_seconds(abs(more_s))} a step {'more' if more_s > 0 else 'less'}"
    if isinstance(kept, Plan):
        assert kept.predicted is not None, "it was simulated"
        if made.predicted.step_s >= kept.predicted.step_s:
            return kept
    elif more_s > _HOST_WORTH * bare.predicted.step_s:
        return f"{kept}; ranks dealt to hosts by turns would take {words}"
    why = f"dealt by turns, so that any host may be lost: {words}"
    return decided(made, [Decision("hosts", ", ".join(dealt), "search", why)])


def _told(plan: Plan, value: str, why: str) -> Plan:
    return decided(plan, [Decision("redundancy", value, "search", f"survives the loss of {why}")])


def _ways(
    plan: Plan, program: Program, way: Joining, cluster: Cluster, shared: tuple[int, ...] = ()
) -> Iterator[_GuardWay]:
    """Yield all ways to guard, priced; `shared`: stages of several ranks that are kept, too."""
    graph, hosts = way.captured.graph, placed(cluster, plan.place.hosts)
    stages = stages_of(plan, graph)
    where = places_of(way.profiles, hosts, program.num_ranks), (graph, stages)
    apart = _furthest(program.num_ranks, hosts)
    for every in (0, *(_LOGS if _is_plain(way) else ())):
        guard = Guarding(every, apart, shared)
        rows = guard_costs(program, way.profiles, where, guard)
        yield _GuardWay(guard, rows, guards_s(rows, apart, hosts))


def _furthest(count: int, cluster: Cluster) -> int:
    """Return how many ranks further guards are: as few as bring most of them to another host."""
    names = [cluster.host_of(rank).name for rank in range(count)]

    def inside(apart: int) -> int:
        return sum(names[rank] == names[(rank + apart) % count] for rank in range(count))

    return min(range(1, count), key=inside)


def _fits(way: _GuardWay, peaks: Sequence[int], cluster: Cluster) -> bool:
    rows = enumerate(zip(peaks, way.rows, strict=True))
    return all(peak + row.kept_bytes <= cluster.memory_of(rank) for rank, (peak, row) in rows)


def _is_plain(way: Joining) -> bool:
    """Return whether the optimizer is known to update each parameter by itself.

    Only then a copy of which parts are older than others can be brought up to date.
    """
    model = way.captured.model
    if model not in _plain:
        _plain[model] = whole_optimizer(way.job, model).is_plain
    return _plain[model]


def _apart(program: Program, cluster: Cluster, guard: Guarding | None) -> str:
    """Return which hosts may be lost, each by itself, in words."""
    names = [cluster.host_of(rank).name for rank in range(program.num_ranks)]
    hosts = list(dict.fromkeys(names))
    if len(hosts) == 1:
        return "all are on one host"
    costly = costly_hosts(program, names, guard)
    lost = [name for name in hosts if name not in costly]
    if not costly:
        return "and of any host"
    rest = ", ".join(name for name in hosts if name not in lost)
    some = f"and of host {', '.join(lost)}" if lost else "but of no host"
    return f"{some}; with {rest} {_BACK}"


def at_risk(plan: Plan) -> str:
    """Return what is said before a run begins by a plan that does not survive any loss, else ""."""
    found = next((each for each in plan.decisions if each.what == "redundancy"), None)
    if found is None or (found.value != "checkpoint" and _BACK not in found.why):
        return ""
    return f"the plan {found.why}"


def costly_hosts(program: Program, names: Sequence[str], guard: Guarding | None) -> list[str]:
    """Return the hosts with which state would be lost; `names`: of each rank's."""
    return [host for host in dict.fromkeys(names) if not _survives(program, names, host, guard)]


def _survives(program: Program, names: Sequence[str], lost: str, guard: Guarding | None) -> bool:
    """Return whether all that is held on a host is somewhere else too."""
    count, own = program.num_ranks, alone(program)
    given = own if guard is None else guarded(program, guard.shared)
    here = [rank for rank in range(count) if names[rank] == lost]
    left = {stage for rank in range(count) if rank not in here for stage in program.stages_of(rank)}
    kept = set[tuple[int, int]]()  # what guards elsewhere have of what is alone: rank and stage
    for rank in here:
        if guard is not None and names[(rank + guard.apart) % count] != lost:
            kept |= {(rank, stage) for stage in own[rank]}
            left |= {stage for stage in given[rank] if stage not in own[rank]}
    return all(
        (rank, stage) in kept if stage in own[rank] else stage in left
        for rank in here
        for stage in program.stages_of(rank)
    )
