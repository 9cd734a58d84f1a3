"""Polish: one thing changed at a time, while that makes a candidate better.

What cannot be better by its bound (bounds.py) is not simulated.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

from penstock.graph.graph import Graph
from penstock.plan.plan import Plan
from penstock.schedule.recipe import has_window
from penstock.schedule.schedule import Schedule
from penstock.search.candidate import Candidate, Objective
from penstock.search.field import Effort
from penstock.search.judge import Judge
from penstock.search.turns import other_turns
from penstock.simulate.suited import bare

_ALL_CUTS = 2000  # ways to cut, of which all are considered
_MOST = 32  # of them that are simulated


def with_cuts(graph: Graph, plan: Plan, cuts: Iterable[int]) -> Plan:
    """Return `plan` cut elsewhere, into as many stages."""
    row = tuple(cuts)
    return plan.changed(cuts=row, cut_names=tuple(graph.cut_points[c].name for c in row))


def polish(judge: Judge, best: Candidate, objective: Objective, effort: Effort) -> Candidate:
    """Change one thing at a time while that makes the candidate better, and there is time.

    That is a cut, to a neighbouring cut point, or a stage that need not be recomputed, or the
    micro-batches of replicas, or of the ranks of a stage, on unlike devices; at last the schedule,
    to that for equal seconds.
    """
    improved = True
    while improved:
        improved = False
        relaxed = _relaxed(best.plan) if effort.rescues else iter(())
        near, others = _neighbours(judge.graph, best.plan), other_shares(judge, best.plan)
        for plan in itertools.chain(near, relaxed, others, other_turns(judge, best.plan)):
            if effort.is_over():
                return best
            if effort.prune and not judge.may_beat(plan, best, objective):
                continue
            other = judge.candidate(plan)
            if not other.refused and other.score(objective) < best.score(objective):
                best, improved = other, True
                break
    plan = bare(best.plan) if judge.suits else best.plan
    if plan == best.plan:
        return best
    return _better(best, judge.candidate(plan, as_said=True), objective)


def recut(judge: Judge, start: Candidate, objective: Objective, effort: Effort) -> Candidate:
    """Return the best candidate that other cuts of `start` give; refused where none was found.

    Where there are not too many ways to cut, all are simulated whose bound is not above the best,
    32 at most; then single cuts are moved: while the plan does not fit, so that it lacks less
    memory, then as `polish` does.
    """
    best, graph = start, judge.graph
    count = len(start.plan.cuts)
    if math.comb(len(graph.cut_points), count) <= _ALL_CUTS:
        ways = itertools.combinations(range(len(graph.cut_points)), count)
        plans = [with_cuts(graph, start.plan, cuts) for cuts in ways]
        rows = sorted((judge.rough(plan, objective), at) for at, plan in enumerate(plans))
        for bound, at in rows[:_MOST]:
            if effort.is_over() or (not best.refused and bound > best.score(objective)[0]):
                break
            if effort.prune and not (best.refused or judge.may_beat(plans[at], best, objective)):
                continue
            best = _better(best, judge.candidate(plans[at]), objective)
    if best.refused and not effort.is_over():
        best = _fitted(judge, best)
    return best if best.refused else polish(judge, best, objective, effort)


def _better(best: Candidate, other: Candidate, objective: Objective) -> Candidate:
    if other.refused:
        return best
    is_better = bool(best.refused) or other.score(objective) < best.score(objective)
    return other if is_better else best


def _fitted(judge: Judge, best: Candidate) -> Candidate:
    """Move one cut at a time while fewer bytes lack; refused still where that does not end at 0."""
    lacking = judge.lacking_bytes(best)
    improved = True
    while lacking and improved:
        improved = False
        for plan in _neighbours(judge.graph, best.plan):
            other = judge.candidate(plan)
            if other.peak_bytes and judge.lacking_bytes(other) < lacking:
                best, lacking, improved = other, judge.lacking_bytes(other), True
                break
    return best


def _relaxed(plan: Plan) -> Iterator[Plan]:
    """Yield the plans that keep the activations of one stage more."""
    for stage, again in enumerate(plan.recompute):
        if again:
            row = (*plan.recompute[:stage], False, *plan.recompute[stage + 1 :])
            yield plan.changed(recompute=row)


def _neighbours(graph: Graph, plan: Plan) -> Iterator[Plan]:
    for at in range(len(plan.cuts)):
        for by in (-1, 1):
            cuts = list(plan.cuts)
            cuts[at] += by
            if 0 <= cuts[at] < len(graph.cut_points) and cuts == sorted(set(cuts)):
                yield with_cuts(graph, plan, cuts)


def other_shares(judge: Judge, plan: Plan) -> Iterator[Plan]:
    """Yield the plans that move micro-batches between replicas on unlike devices, many first.

    Unlike are those of other kinds, or with other memory.
    """
    if isinstance(plan.schedule, Schedule) or has_window(plan.schedule) or plan.averages:
        return
    places, grid = judge.places(plan.place.hosts, plan.total_ranks), plan.grid
    room_of = judge.cluster_of(plan.place.hosts).memory_of
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for replica in range(grid.replicas):
        kinds = tuple((places[rank], room_of(rank)) for rank in grid.ranks_of(replica))
        alike.setdefault(kinds, []).append(replica)
    for exponent in range(max(grid.shares).bit_length() - 1, -1, -1):
        for group, other in itertools.permutations(alike.values(), 2):
            giver = max(group, key=grid.shares.__getitem__)
            taker = min(other, key=grid.shares.__getitem__)
            moves = [([giver], [taker])]
            moves += [(group, other)] * (len(group) > 1)  # of which all may be the slowest
            for givers, takers in moves:
                shares = [*grid.shares]
                for replica in givers:
                    shares[replica] -= 2**exponent
                    shares[min(takers, key=shares.__getitem__)] += 2**exponent
                if min(shares) > 0:
                    yield plan.changed(shares=tuple(shares), num_micro_batches=max(shares))
