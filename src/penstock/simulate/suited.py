"""Suited: a plan whose schedule is built for the seconds that its stages take."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.graph.graph import Graph
from penstock.graph.stages import Stages
from penstock.graph.wire import summed_bytes
from penstock.plan.plan import Plan, schedule_of
from penstock.schedule.greedy import Seconds
from penstock.schedule.orders import KINDS, B, F, I, W
from penstock.schedule.recipe import Recipe
from penstock.schedule.schedule import Schedule
from penstock.simulate.costs import Costs

_DIGITS = 3  # so that a plan can be read, and stays the same where a measurement hardly changes


def takes_seconds(plan: Plan) -> bool:
    """Return whether the builder of the plan's schedule arranges actions for seconds."""
    return isinstance(plan.schedule, Recipe) and plan.schedule.takes_seconds


def bare(plan: Plan) -> Plan:
    """Return `plan` without the seconds that its schedule is built for."""
    if not isinstance(plan.schedule, Recipe) or plan.schedule.seconds is None:
        return plan
    return replace(plan, schedule=replace(plan.schedule, seconds=None))


class Setting(NamedTuple):
    """What the stages of a plan take: their costs, and for each rank of all replicas its device.

    cluster:        None where messages take no time.
    graph:          of which the stages are; their weights are what replicas sum.
    message_bytes:  of each edge, where messages are packed; empty: of their values.
    """

    graph: Graph
    stages: Stages
    costs: Costs
    places: Sequence[int]
    cluster: Cluster | None
    message_bytes: Sequence[int] = ()


def suited(plan: Plan, setting: Setting, *, alike: Schedule | None = None) -> Plan:
    """Return `plan` with its schedule built for the seconds of its stages, if it takes any.

    A stage takes as long as on the slowest of the devices that it runs on, a message as long as
    the mean of all that the first replica sends for a micro-batch, or, if the builder minds links,
    as the longest between neighbouring stages in any replica, each way; a sum then as all ranks of
    a stage take.  Where the builder does not split B, all its seconds count as I.
    alike:    the schedule of `bare(plan)`, if already built: stages live where it puts them.
    Ignores:  the update; what a message costs its ends.
    Raises:   ScheduleError, PlanError: the schedule cannot be built for these sizes.
    """
    recipe = plan.schedule
    if not isinstance(recipe, Recipe) or not recipe.takes_seconds:
        return plan
    made = schedule_of(bare(plan)) if alike is None else alike
    rows: list[list[float]] = [[] for _ in KINDS]
    for stage, ranks in enumerate(made.stage_ranks):
        kinds = {setting.places[there] for rank in ranks for there in plan.grid.column_of(rank)}
        for kind, row in enumerate(rows):
            row.append(
                max(_rounded(float(setting.costs.action_s[kind, stage, at])) for at in kinds)
            )
    units = recipe.units or (1,) * len(rows[F])  # of the builder's own stages
    forward, whole, first, second = (_together(rows[kind], units) for kind in (F, B, I, W))
    if (made.orders.kinds == B).any():
        first, second = whole, 0.0
    seconds = Seconds(forward, first, second, _rounded(_message_s(made, setting)))
    if recipe.takes_links and setting.cluster is not None:
        seconds = _with_links(plan, made, setting, seconds)
    return replace(plan, schedule=replace(recipe, seconds=seconds))


def _together(seconds: Sequence[float], units: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds of stages that are cut into so many units each."""
    if set(units) == {1}:
        return tuple(seconds)
    ends = np.cumsum(units).tolist()
    parts = (seconds[end - count : end] for end, count in zip(ends, units, strict=True))
    return tuple(_rounded(sum(part)) for part in parts)


def _message_s(made: Schedule, setting: Setting) -> float:
    """Return the mean seconds of the messages of a micro-batch, 0 where there are none."""
    if (cluster := setting.cluster) is None:
        return 0.0
    lives = [ranks[0] for ranks in made.stage_ranks]
    sizes = setting.message_bytes or [edge.size_bytes for edge in setting.stages.edges]
    each = zip(setting.stages.edges, sizes, strict=True)
    ends = ((lives[e.source], lives[e.target], size) for e, size in each)
    found = [cluster.message_s(a, b, size) for a, b, size in ends if a != b]
    return sum(found) / max(1, len(found))


def _with_links(plan: Plan, made: Schedule, setting: Setting, seconds: Seconds) -> Seconds:
    """Return `seconds` with the seconds of links and sums added, where they differ or are not 0."""
    cluster, stages = setting.cluster, setting.stages
    assert cluster is not None, "the caller has asked"
    lives = [[plan.grid.column_of(rank) for rank in ranks] for ranks in made.stage_ranks]
    sizes = setting.message_bytes or [edge.size_bytes for edge in stages.edges]
    ways = np.zeros((2, len(lives) - 1))
    for edge, size in zip(stages.edges, sizes, strict=True):
        if abs(edge.source - edge.target) == 1:
            ends = zip(lives[edge.source][0], lives[edge.target][0], strict=True)
            longest_s = max(cluster.message_s(a, b, size) if a != b else 0.0 for a, b in ends)
            at = int(edge.target < edge.source), min(edge.source, edge.target)
            ways[at] = max(ways[at], _rounded(longest_s))
    ranks = [[there for column in own for there in column] for own in lives]
    own_units = plan.schedule.units if isinstance(plan.schedule, Recipe) else ()
    ends = np.cumsum(own_units or (1,) * len(lives))
    weights = [
        summed_bytes(
            setting.graph,
            s.parameters,
            plan.agreement.sums,
            ranks=len(own),
            shared=stages.shared,
        )
        for s, own in zip(stages.stages, ranks, strict=True)
    ]
    sums = [
        _rounded(cluster.sum_s(size, own, plan.topology)) if len(own) > 1 else 0.0
        for size, own in zip(weights, ranks, strict=True)
    ]
    links = ways[:, ends[:-1] - 1]
    parts = np.split(np.array(sums), ends[:-1])
    return seconds._replace(
        there_s=tuple(links[0].tolist()) if np.ptp(ways) > 0 else (),
        back_s=tuple(links[1].tolist()) if np.ptp(ways) > 0 else (),
        sums_s=tuple(_rounded(float(part.sum())) for part in parts) if any(sums) else (),
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")
