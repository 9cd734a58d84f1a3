"""Bounds: seconds that no step of a long run can be below, without simulating it.

A rank computes all its actions one after another, then sums the gradients that the last one has
made, updates, and begins the next step; other sums may run beside its computes:

    computes + last sum + updates

Where every stage reads what the stage before it made, its first action has to wait for the stages
before (fill), which ranks do that have begun this step too; where backward passes hand gradients on
and are not split, those of the stages before come after its last one (drain), and the ranks that
do them begin no other step before.  So do all, where a norm of all gradients comes before updates.

    fill + computes + drain, or last sum and the least updates

Ignores:  messages, and that a rank waits between its actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.graph.owners import owners_of
from penstock.profile.profile import Profile
from penstock.schedule.orders import KINDS, B, F, I, U, W
from penstock.schedule.schedule import Schedule

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ActionCounts:
    """How many actions of each kind every rank does of each stage: number[kind, rank, stage].

    first   stage of the first action of each rank
    last    stage of the last action of each rank
    splits  whether backward passes are split
    """

    number: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    splits: bool

    @property
    def forward(self) -> NDArray[np.int64]:
        """Return the forwards [rank, stage]; what is above 0 lives there."""
        return self.number[F]


def counts_of(schedule: Schedule) -> ActionCounts:
    """Return the counts of one window: of a synchronous schedule, one step."""
    orders = schedule.orders
    number = np.zeros((len(KINDS), len(orders), schedule.num_stages), np.int64)
    ranks = np.repeat(np.arange(len(orders)), np.diff(orders.offsets))
    np.add.at(number, (orders.kinds, ranks, orders.stages), 1)
    number[U] = number[F] > 0
    first, last = (
        orders.stages[at].astype(np.int64) for at in (orders.offsets[:-1], orders.offsets[1:] - 1)
    )
    return ActionCounts(number, first, last, bool(number[I].any() or number[W].any()))


@dataclass(frozen=True, slots=True, eq=False)
class RankWork:
    """Seconds [kind, stage, kind of device] of the actions, and whether stages are in a chain."""

    action_s: Floats
    fills: bool
    drains: bool


def longest_s(
    counts: ActionCounts,
    places: Sequence[int],
    work: RankWork,
    ends_s: Floats | None = None,
    *,
    waits: bool,
) -> float:
    """Return the bound of a step, in seconds.

    places   of every rank of all replicas, the kind of its device
    ends_s   of every rank of one replica, what it waits for after its computes
    waits    whether no rank updates before all have computed
    """
    number, seconds = counts.number, work.action_s
    ranks = number.shape[1]
    computes = np.einsum("krs,ksd->rd", number[:U], seconds[:U])
    updates = np.einsum("rs,sd->rd", number[U], seconds[U])
    ends = np.zeros((ranks, 1)) if ends_s is None else ends_s[:, None]
    total, after = computes + ends + updates, np.full((ranks, 1), -np.inf)
    if waits:
        after = ends + updates.min()
    if work.drains and not counts.splits:
        after = np.maximum(after, _before(seconds[B], counts.last)[:, None])
    start = _before(seconds[F], counts.first) if work.fills else np.zeros(ranks)
    total = np.maximum(total, start[:, None] + computes + after)
    position = np.arange(len(places)) % ranks
    return float(total[position, list(places)].max())


def _before(seconds: Floats, stages: NDArray[np.int64]) -> Floats:
    """Return the seconds of all stages before each of `stages`, on the fastest kind of device."""
    return np.concatenate([[0.0], np.cumsum(seconds.min(axis=1))])[stages]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Seconds of the ops between neighbouring cut points, added up from the input on.

    before_s      [F or B, pieces before it, kind of device]
    fills, drains whether each piece reads what the one before it made, forward and backward
    """

    before_s: Floats
    fills: bool
    drains: bool

    def between(self, cuts: Sequence[int]) -> RankWork:
        """Return the work of the stages between `cuts`, each action at its least."""
        ends = [0, *(c + 1 for c in cuts), self.before_s.shape[1] - 1]
        forward, backward = np.diff(self.before_s[:, ends], axis=1)
        seconds = np.zeros((len(KINDS), *forward.shape))
        seconds[F], seconds[B], seconds[W] = forward, backward, backward  # W: that of I and W
        return self.chained(seconds)

    def chained(self, action_s: Floats) -> RankWork:
        """Return the work of stages that take `action_s`."""
        return RankWork(action_s, self.fills, self.drains)


def pieces_of(graph: Graph, profiles: Sequence[Profile]) -> Pieces:
    """Return the pieces of `graph`, with the ops that a step computes in whatever way it is cut.

    Left out are those that stages repeat for themselves, and sums of gradients of one parameter,
    which are not made where its uses are cut apart.
    """
    owners = owners_of(graph, [point.at for point in graph.cut_points])
    (whole,) = cut(graph).stages
    sums = _sums(graph)
    ops = {*whole.forward.ops, *whole.backward.ops} - sums
    ops = {op for op in ops if not owners.free[op]}
    seconds = np.zeros((2, owners.num_stages + 1, len(profiles)))
    linked = np.zeros((2, owners.num_stages), np.bool_)
    for op in sorted(ops):
        node, piece = graph.nodes[op], owners.stage_of[op]
        phase = int(node.phase == "B")
        seconds[phase, piece + 1] += [profile.op_s[op] for profile in profiles]
        towards = piece + (1 if phase else -1)
        linked[phase, piece] |= any(
            source in ops
            and owners.stage_of[source] == towards
            and graph.nodes[source].phase == node.phase
            for source in node.inputs
        )
    fills, drains = bool(linked[0, 1:].all()), bool(linked[1, :-1].all())
    return Pieces(seconds.cumsum(axis=1), fills, drains)


def _sums(graph: Graph) -> set[int]:
    found, stack = set[int](), [g for g in graph.gradients.values() if g is not None]
    while stack:
        value = stack.pop()
        node = graph.nodes[value]
        if node.target == "aten.add.Tensor" and node.phase == "B" and value not in found:
            found.add(value)
            stack.extend(node.inputs)
    return found
