"""Choose: which weights ranks hold in slices, and along which dim.

A weight of products, look-ups or convolutions is whole, or sliced along its first or its second
dim; all else follows (placed.py).  Blocks that are repeated choose alike: weights whose names
differ in numbers only are one choice.  Choices are made for pairs of neighbours at a time, until
no pair has a better one: a column of one weight pays with a row of the next.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import inf
from typing import NamedTuple, TypeAlias

from penstock.errors import GraphError
from penstock.graph.cut import cut
from penstock.graph.tensor.cuts import collect_points
from penstock.graph.tensor.divided import divided
from penstock.graph.tensor.placed import Held, Layout, Placing, RankSpeed
from penstock.graph.tensor.value_placement import Slices, fits
from penstock.graph.trace import Capture

_RUNS = 1, 2, 3  # equal runs of a first dim: as gate and up in one, or query, key and value
_STARTS = 2  # choices of few weights from which the others are changed, too
Option: TypeAlias = Slices | None  # None: whole


class AlikeWeights(NamedTuple):
    """Weights that are placed alike: their names, and the ways to place them."""

    names: tuple[str, ...]
    options: tuple[Option, ...]


class OpDivision(NamedTuple):
    """The step of rank 0 of those that divide its ops, and the weights that it has in slices.

    spread:   what is per token between two collects may be divided by tokens.
    """

    held: Held
    capture: Capture
    spread: bool = False


def by_tensor(capture: Capture, ranks: int, prices: RankSpeed | None = None) -> Capture:
    """Return the step of rank 0 of `ranks` that divide the ops of `capture`; of 1, itself.

    What is sliced is what costs least; where all whole would cost less still, what costs least of
    what divides anything, for that is what was requested.  A weight stays whole where the step
    could not be cut at its collects.
    Raises:   GraphError: no op can be divided.
    """
    return capture if ranks == 1 else division(capture, ranks, prices).capture


def division(capture: Capture, ranks: int, prices: RankSpeed | None = None) -> OpDivision:
    """Return the step of rank 0 of 2 `ranks` or more, and what it holds in slices; see `by_tensor`.

    Raises:   GraphError: no op can be divided.
    """
    placing = Placing(capture, ranks, prices or RankSpeed())
    groups = groups_of(placing)
    problem: GraphError | None = None
    for layout in _from_cheapest(placing, groups):
        try:
            made = divided(capture, layout, layout.held, ranks)
            cut(made.graph, collect_points(made.graph))
        except GraphError as why:
            problem = why
        else:
            return OpDivision(layout.held, made, layout.spread)
    message = f"no weight of the model can be divided among {ranks} ranks"
    message += f": {problem.message}" if problem else ""
    raise GraphError(message, hint="take 1 tensor rank; replicas and pipelines divide other things")


def _from_cheapest(placing: Placing, groups: Sequence[AlikeWeights]) -> Iterator[Layout]:
    """Yield the cheapest layout, then that without one weight in slices after another."""
    stay = set[int]()
    while True:
        open_groups = [
            g if k not in stay else g._replace(options=(None,)) for k, g in enumerate(groups)
        ]
        picked = chosen(placing, open_groups)
        if picked is None:
            return
        yield from layouts_of(placing, groups, picked)
        sliced = [k for k, way in enumerate(picked) if way is not None]
        costs = {k: _cost(placing, groups, _without(picked, k), {}) for k in sliced}
        stay.add(min(sliced, key=costs.__getitem__))


def layouts_of(
    placing: Placing, groups: Sequence[AlikeWeights], picked: list[Option]
) -> list[Layout]:
    """Return the layouts of a choice of weights, the cheapest first.

    One has sums whole on every rank; in the other they are spread: what is per token between two
    collects is divided by tokens, and weights are chosen anew for that.
    """
    other = Placing(placing.capture, placing.ranks, placing.prices, spread=True)
    found = _descended(other, groups, picked, {})
    spread = found if any(found) else picked
    rows = placing.layout(held_by(groups, picked)), other.layout(held_by(groups, spread))
    return sorted(rows, key=lambda layout: layout.seconds)


def _without(picked: Sequence[Option], at: int) -> list[Option]:
    return [None if k == at else way for k, way in enumerate(picked)]


def groups_of(placing: Placing) -> list[AlikeWeights]:
    """Return the weights of a step that may be placed alike, in the order of their first use."""
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for row in placing.rows.values():
        if row.kind == "parameter" and len(row.shape) > 1 and placing.is_used(row.name):
            key = re.sub(r"\d+", "*", row.name), row.shape
            found.setdefault(key, []).append(row.name)
    groups: list[AlikeWeights] = []
    for (_, shape), names in found.items():
        ways = [Slices(0, runs) for runs in _RUNS] + [Slices(1)]
        able = [way for way in ways if fits(way, shape, placing.ranks)]
        groups.append(AlikeWeights(tuple(names), (None, *_pruned(placing, names, able))))
    return [group for group in groups if len(group.options) > 1]


def _pruned(placing: Placing, names: Sequence[str], ways: Sequence[Slices]) -> list[Slices]:
    """Return of the ways that differ in their runs the one that is cheapest alone."""
    best: dict[int, tuple[float, Slices]] = {}
    for way in ways:
        cost = placing.layout(dict.fromkeys(names, way)).seconds
        if cost < best.get(way.dim, (inf, way))[0]:
            best[way.dim] = cost, way
    return [way for _, way in best.values()]


def chosen(placing: Placing, groups: Sequence[AlikeWeights]) -> list[Option] | None:
    """Return the cheapest way to place the weights of a step that was found; at least one sliced.

    None where no weight can be.
    """
    whole: list[Option] = [None] * len(groups)
    known: dict[tuple[Option, ...], float] = {}
    few = [row for move in _moves(groups) for row in _changed(groups, whole, move) if any(row)]
    few.sort(key=lambda row: _cost(placing, groups, row, known))
    ends = [_descended(placing, groups, start, known) for start in (whole, *few[:_STARTS])]
    best = min(
        (row for row in (*ends, *few[:1]) if any(row)),
        key=lambda row: known[tuple(row)],
        default=None,
    )
    return None if best is None or known[tuple(best)] == inf else best


def _moves(groups: Sequence[AlikeWeights]) -> list[tuple[int, ...]]:
    """Return the weights whose choices are changed together: each alone, and neighbours."""
    own = range(len(groups))
    return [*((at,) for at in own), *pairwise(own)]


def _changed(
    groups: Sequence[AlikeWeights], picked: Sequence[Option], move: Sequence[int]
) -> Iterator[list[Option]]:
    """Yield the choices that differ in the weights of a move."""
    for ways in product(*(groups[at].options for at in move)):
        other = list(picked)
        for at, way in zip(move, ways, strict=True):
            other[at] = way
        yield other


def held_by(groups: Sequence[AlikeWeights], picked: Sequence[Option]) -> Held:
    """Return the parameters that are held in slices, by name."""
    pairs = zip(groups, picked, strict=True)
    return {name: way for group, way in pairs if way is not None for name in group.names}


def _cost(
    placing: Placing,
    groups: Sequence[AlikeWeights],
    picked: Sequence[Option],
    known: dict[tuple[Option, ...], float],
) -> float:
    key = tuple(picked)
    if key not in known:
        known[key] = placing.layout(held_by(groups, picked)).seconds
    return known[key]


def _descended(
    placing: Placing,
    groups: Sequence[AlikeWeights],
    picked: list[Option],
    known: dict[tuple[Option, ...], float],
) -> list[Option]:
    """Return the choices that no other one of a weight, or of two neighbours, makes cheaper."""
    least, stale, moves = _cost(placing, groups, picked, known), 0, _moves(groups)
    while stale < len(moves):
        for move in moves:
            stale += 1
            for other in _changed(groups, picked, move):
                if (cost := _cost(placing, groups, other, known)) < least * (1 - 1e-12):
                    picked, least, stale = other, cost, 0
    return picked
