"""Recompute: on which stages, so that each rank has room and little is recomputed."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.plan.plan import Plan, is_asynchronous
from penstock.schedule.orders import F
from penstock.search.judge import Judge
from penstock.simulate.memory import most_held
from penstock.simulate.price import DeviceMemory, ways_of

_MOST = 8  # stages of a rank of which all subsets are tried; of more: the cheapest ones


def as_needed(judge: Judge, plan: Plan) -> Plan | None:
    """Return `plan` with recompute on the stages for which its ranks lack memory.

    Of the stages of such a rank those that leave room and take least seconds again, of more than
    eight the first ones by their seconds.  What rules say of a stage stays.  None where
    no rank lacks memory, or recompute does not help, or all stages need it.
    Ignores:  messages that wait; that a stage which is recomputed for one of its ranks makes room
              on another one.
    """
    if is_asynchronous(plan):
        return None
    schedule, count = judge.schedule(judge.suited(plan)), plan.num_stages
    orders, ways = schedule.orders, ways_of(schedule)
    said = judge.rules.of_stages("recompute", plan, judge.graph)
    keeps = judge.price(plan.changed(recompute=tuple(s == "yes" for s in said)), ways=ways)
    again = judge.price(plan.changed(recompute=tuple(s != "no" for s in said)), ways=ways)
    forward_s = keeps.costs.action_s[F].max(axis=1)
    free = {stage for stage, value in enumerate(said) if value is None}
    ranks = [orders.stages[a:b] for a, b in itertools.pairwise(orders.offsets.tolist())]
    ways = [_ways(sorted(free & {*stages.tolist()}), forward_s) for stages in ranks]
    caps, at = judge.caps(plan), [0] * len(ways)
    sources = np.array([edge.source for edge in keeps.stages.edges], np.int64)
    while True:
        chosen = {stage for rank, way in enumerate(ways) for stage in way[at[rank]]}
        mask = np.array([stage in chosen for stage in range(count)])
        rows = zip(keeps.held, again.held, strict=True)
        mixed = [_mixed(one, other, mask, mask[sources]) for one, other in rows]
        peaks = most_held(schedule, keeps.stages.edges, mixed)
        full = [
            rank
            for rank, row in enumerate(caps)
            if any(peaks[rank, kind] > cap for kind, cap in row)
        ]
        if not full:
            break
        if any(at[rank] + 1 == len(ways[rank]) for rank in full):
            return None
        for rank in full:
            at[rank] += 1
    if len(chosen) in (0, len(free)):
        return None
    row = tuple(stage in chosen or value == "yes" for stage, value in enumerate(said))
    return plan.changed(recompute=row)


def keeping_all(judge: Judge, plan: Plan) -> Plan:
    """Return the plan with nothing repeated but what rules say."""
    said = judge.rules.of_stages("recompute", plan, judge.graph)
    return plan.changed(recompute=tuple(word == "yes" for word in said))


def keeps_all(judge: Judge, plan: Plan) -> bool:
    """Return whether no stage recomputes but where a rule says so."""
    if not any(plan.recompute):
        return True
    said = judge.rules.of_stages("recompute", plan, judge.graph)
    pairs = zip(plan.recompute, said, strict=True)
    return all(value == "yes" for again, value in pairs if again)


def _ways(stages: Sequence[int], forward_s: NDArray[np.float64]) -> list[tuple[int, ...]]:
    """Return sets of stages to recompute, in the order of their seconds."""
    if len(stages) > _MOST:
        cheapest = sorted(stages, key=lambda stage: (forward_s[stage], stage))
        return [tuple(cheapest[:size]) for size in range(len(stages) + 1)]
    sizes = range(len(stages) + 1)
    ways = [way for size in sizes for way in itertools.combinations(stages, size)]
    return sorted(ways, key=lambda way: (sum(forward_s[stage] for stage in way), way))


def _mixed(
    keeps: DeviceMemory, again: DeviceMemory, mask: NDArray[np.bool_], of_edges: NDArray[np.bool_]
) -> DeviceMemory:
    """Return the bytes of stages that recompute where `mask` says so.

    of_edges:  what that says of the source of each edge.
    """
    return replace(
        keeps,
        transient=np.where(mask, again.transient, keeps.transient),
        net=np.where(mask, again.net, keeps.net),
        waiting=tuple(np.where(of_edges, again.waiting, keeps.waiting).tolist()),
    )
