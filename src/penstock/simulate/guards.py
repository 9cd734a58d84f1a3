"""Guards: what a step costs where ranks have copies of what others hold alone: seconds and bytes.

A copy is either updated as the original is, or kept as it was: with the summed gradients since, and
renewed piece by piece (`Plan.agreement.guard`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.graph.graph import Graph
from penstock.graph.stages import Stages
from penstock.profile.profile import Profile
from penstock.program.alone import guarded
from penstock.program.instructions import Guarding
from penstock.program.program import Program
from penstock.simulate.arrays import exchange_s
from penstock.simulate.costs import Costs, Memory
from penstock.simulate.price import state_bytes, trained_bytes

_COPIES = 2  # of each byte that is given, besides those of the line: into a piece, and out of it
_Priced: TypeAlias = tuple[Graph, Stages]


class GuardCost(NamedTuple):
    """What the guard of one rank costs.

    sent_bytes:  that come in a step from the rank that it guards.
    kept_bytes:  that it holds for that rank.
    busy_s:      of a step, in which it copies, and updates the copy.
    """

    sent_bytes: int
    kept_bytes: int
    busy_s: float


def guard_costs(
    program: Program,
    profiles: Sequence[Profile],
    where: tuple[Sequence[int], _Priced],
    guard: Guarding,
) -> list[GuardCost]:
    """Return by rank what it costs to guard another one.

    With G bytes of gradients and S of weights and state of the optimizer that the other has
    alone, a step takes G + S / every bytes, and S (1 + 1 / every) + G (every + 1) are held while
    they come; where the copy is updated (`every` is 0) G bytes, and S + 2 G.
    Ignores:  buffers, padding, and the numbers of an optimizer's state.
    """
    places, (graph, stages) = where
    own, found, every = guarded(program, guard.shared), list[GuardCost](), guard.every
    for rank, place in enumerate(places):
        ward, profile = (rank - guard.apart) % program.num_ranks, profiles[place]
        gradients = state = 0.0
        for index in own[ward] if program.num_ranks > 1 else ():
            stage = stages.stages[index]
            part = float(program.part_of(ward)) if index in program.sharded else 1.0
            trained = part * trained_bytes(graph, stage)
            gradients += trained
            state += trained + part * state_bytes(graph, stage, profile)
        renewed = state / every if every else 0.0
        sent = gradients + renewed
        busy_s = _COPIES * sent * profile.copying.copy_s_per_byte
        if not every and gradients:
            busy_s += profile.update.update_s + gradients * profile.update.update_s_per_byte
        kept = state + renewed + gradients * max(2, every + 1)
        found.append(GuardCost(int(sent), int(kept), busy_s))
    return found


def guards_s(rows: Sequence[GuardCost], apart: int, cluster: Cluster | None) -> float:
    """Return the seconds of a step in which each rank gives its guard what it alone has."""
    sizes, busy_s = [row.sent_bytes for row in rows], max(row.busy_s for row in rows)
    return exchange_s(sizes, busy_s, cluster, apart)


def with_guards(
    costs: Costs,
    memory: Memory,
    program: Program,
    profiles: Sequence[Profile],
    where: tuple[Sequence[int], _Priced],
) -> tuple[Costs, Memory]:
    """Return costs and memory of a program, its guards included.

    where:    for each rank the place of its profile; and the graph and stages.
    """
    if program.end.guard is None:
        return costs, memory
    rows = guard_costs(program, profiles, where, program.end.guard)
    busy_s = max(row.busy_s for row in rows)
    sent = np.array([row.sent_bytes for row in rows], np.int64)
    kept = np.array([row.kept_bytes for row in rows], np.int64)
    return (
        replace(costs, guard_s=busy_s, guard_bytes=sent),
        replace(memory, start_bytes=memory.start_bytes + kept),
    )
