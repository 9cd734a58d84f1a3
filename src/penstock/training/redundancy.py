"""Redundancy: where else what a rank holds is, so that no step is lost with it, and its price.

replicas   hold the same: nothing has to be done
a guard    another rank has a copy of what a rank holds alone (elastic/guard.py)
nothing    the run goes back to its last checkpoint
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from penstock.cluster.cluster import Cluster
from penstock.cluster.order import placed
from penstock.graph.optimizer import whole_optimizer
from penstock.plan.lower import lower_plan, stages_of
from penstock.plan.plan import Decision, Plan
from penstock.profile.kinds import places_of
from penstock.program.alone import alone
from penstock.program.instructions import Guarding
from penstock.program.program import Program
from penstock.simulate.guards import GuardCost, guard_costs, guards_s
from penstock.training.choose import Joining, decided, predicted
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch import nn

_LOGS = 1, 2, 4, 8, 16  # steps of which gradients may be kept
_WORTH = 0.002  # of a step: what more memory has to gain

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
    hosts = placed(cluster, plan.hosts)
    if not any(alone(program)):
        return _told(bare, "replicas", f"any rank: {_apart(program, hosts, None)}")
    assert bare.predicted is not None, "it was simulated"
    if plan.far:
        return _told(bare, "checkpoint", "no rank: weights in far memory are in no other place")
    if plan.split:
        return _told(bare, "checkpoint", "no rank: slices of parameters are in no other place")
    ways = list(_ways(bare, program, way, cluster))
    peaks = bare.predicted.peak_bytes
    fit = [one for one in ways if _fits(one, peaks, cluster)]
    if not fit:
        least = min(ways, key=lambda one: one.kept_bytes)
        words = f"no rank: there is no memory for a copy of what one alone has ({least})"
        return _told(bare, "checkpoint", words)
    limit_s = min(one.seconds for one in fit) + _WORTH * bare.predicted.step_s
    best = min((one for one in fit if one.seconds <= limit_s), key=lambda one: one.kept_bytes)
    made = predicted(replace(bare, guard=best.guard), graph, way.profiles, cluster)
    others = "; ".join(str(one) for one in ways if one is not best)
    survived = f"any rank: {_apart(program, hosts, best.guard)}"
    return _told(made, f"guard: {best.guard}", f"{survived}; {best}; alternatives: {others}")


def _told(plan: Plan, value: str, why: str) -> Plan:
    return decided(plan, [Decision("redundancy", value, "search", f"survives the loss of {why}")])


def _ways(plan: Plan, program: Program, way: Joining, cluster: Cluster) -> Iterator[_GuardWay]:
    """Yield all ways to guard, priced."""
    graph, hosts = way.captured.graph, placed(cluster, plan.hosts)
    stages = stages_of(plan, graph)
    where = places_of(way.profiles, hosts, program.num_ranks), (graph, stages)
    apart = _furthest(program.num_ranks, hosts)
    for every in (0, *(_LOGS if _is_plain(way) else ())):
        guard = Guarding(every, apart)
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
    lost = [name for name in hosts if _survives(program, names, name, guard)]
    if len(lost) == len(hosts):
        return "and of any host"
    rest = ", ".join(name for name in hosts if name not in lost)
    some = f"and of host {', '.join(lost)}" if lost else "but of no host"
    return f"{some}; with {rest} the run goes back to its last checkpoint"


def _survives(program: Program, names: Sequence[str], lost: str, guard: Guarding | None) -> bool:
    """Return whether all that is held on a host is somewhere else too."""
    count, own = program.num_ranks, alone(program)
    here = [rank for rank in range(count) if names[rank] == lost]
    left = {stage for rank in range(count) if rank not in here for stage in program.stages_of(rank)}
    for rank in here:
        is_guarded = guard is not None and names[(rank + guard.apart) % count] != lost
        if own[rank] and not is_guarded:
            return False
        if {*program.stages_of(rank)} - {*own[rank]} - left:
            return False
    return True
