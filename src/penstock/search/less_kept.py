"""Less kept: where memory is short, stages that keep less for their backward, and repeat the rest.

Of plans that lack memory a few are taken, those with the least bounds: as they are, with what
crosses the ends of blocks kept, and in units of a block.  Each stage has cuts (min_cut.py), from
keeping all to repeating all of F, and the price of a byte from which each of them pays.  A rank
that lacks memory pays as much as it has to, the same for all its stages; between the last two
prices their budgets are halved a few times.  What counts is always the simulation.

Source:  arXiv:1910.02653 (Checkmate: what to keep, by its cost, under a budget).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import ceil, floor
from typing import NamedTuple

from penstock.extras import lacks
from penstock.graph.cut_points import block_ends
from penstock.graph.keeping import Keeping, keepings_of
from penstock.graph.stages import Recompute
from penstock.plan.plan import Plan
from penstock.schedule.figures import reads_alike
from penstock.search.candidate import Candidate
from penstock.search.field import Field
from penstock.search.judge import Judge
from penstock.search.min_cut import Repeats, corners, within
from penstock.search.recompute import keeping_all

_MOST_PLANS = 2
_MOST_PRICES = 12
_HALVINGS = 3


class _Way(NamedTuple):
    """What a stage repeats, the bytes that it then keeps, and the price from which that pays."""

    again: Recompute
    held_bytes: int
    s_per_byte: float


def with_less_kept(
    field: Field, known: Sequence[Candidate], more: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Yield plans that repeat some of F, for those that lack memory or repeat all in some stages.

    These are the best of `known`, some of the field, and `more`; for the objective memory, those
    that hold least.  One that keeps all and is yet slower than another that fits is left out.
    """
    if not field.effort.rescues:
        return
    judge, objective, found = field.judge, field.objective, _Found()
    usable = sorted((c for c in known if not c.refused), key=lambda c: c.score(objective))
    limit = usable[0].score(objective) if usable else (float("inf"),)
    if objective == "memory":
        every = (c for c in (*known, *field.simulated) if c.peak_bytes)
        chosen = sorted(every, key=lambda c: c.score(objective))[:_MOST_PLANS]
    else:
        again = [each for each in usable if any(each.plan.recompute)][:_MOST_PLANS]
        chosen = [*again, *field.short(_MOST_PLANS), *more]
    if not chosen or lacks("scipy", "solvers", "plans that repeat parts of a stage"):
        return
    for plan in dict.fromkeys(keeping_all(judge, each.plan) for each in chosen):
        for form, ends in _forms(judge, plan):
            if field.is_over():
                return
            start = judge.candidate(form)
            if objective == "memory" or start.score(objective) < limit:
                for made in _Form(field, form, ends, found).candidates(start):
                    limit = limit if made.refused else min(limit, made.score(objective))
                    yield made


def _forms(judge: Judge, plan: Plan) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """Yield the plan, with the cut points inside its stages that are kept; and in units."""
    yield plan, ()
    inside = tuple(end for end in block_ends(judge.graph) if end not in plan.cuts)
    if inside:
        yield plan, inside
        units = plan.refined(judge.graph)
        if not judge.rules.broken(units, judge.graph):
            yield units, ()


class _Form:
    """A plan that keeps all, and what its stages may repeat instead."""

    def __init__(self, field: Field, plan: Plan, ends: Sequence[int], found: "_Found") -> None:
        self.field, self.judge, self.plan = field, field.judge, plan
        self.holders = [
            {there for rank in ranks for there in plan.grid.column_of(rank)}
            for ranks in self.judge.holders(plan)
        ]
        self.op_s = [max(row) for row in zip(*(p.op_s for p in self.judge.profiles), strict=True)]
        self.keepings = keepings_of(self.judge.graph, plan.cuts, ends)
        self.in_part = reads_alike(self.judge.schedule(plan))
        said = self.judge.rules.of_stages("recompute", plan, self.judge.graph)
        own = plan.recompute
        self.ways = [
            self._ways(found.corners(keeping, self.op_s), all_of_it=not ends)
            if word is None
            else [_Way(again, 0, 0.0)]
            for keeping, again, word in zip(self.keepings, own, said, strict=True)
        ]

    def candidates(self, start: Candidate) -> Iterator[Candidate]:
        """Yield what fits; for the objective memory, all that was tried.

        start:   what the plan gives as it is.
        """
        last = len(self._prices) - 1
        if self.field.objective == "memory":
            every = range(self.plan.total_ranks)
            yield from (self._made(dict.fromkeys(every, at)) for at in range(1, last + 1))
            return
        lacks = dict.fromkeys(self._full(start), 0.0)
        fits = dict.fromkeys(lacks, float(last))
        made = self._made(fits)
        if made.refused:
            return
        yield made
        for least in (1.0, 0.5**_HALVINGS if self.in_part else 1.0):
            while (apart := self._apart(fits, lacks, least)) and not self.field.is_over():
                full = self._full(self._made({**fits, **apart}))
                for rank, level in apart.items():
                    (lacks if rank in full else fits)[rank] = level
            made = self._made(fits)
            if not made.refused:
                yield made

    def _apart(
        self, fits: Mapping[int, float], lacks: Mapping[int, float], least: float
    ) -> dict[int, float]:
        """Return what to try next, between levels at which a rank fits and lacks memory."""
        middles = {
            rank: (high + lacks[rank]) / 2
            for rank, high in fits.items()
            if high - lacks[rank] > least
        }
        return {rank: int(m) if least == 1 else m for rank, m in middles.items()}

    def _ways(self, found: Sequence[Repeats], *, all_of_it: bool) -> list[_Way]:
        """Return the ways of a stage, from little to all."""
        if not self.in_part:
            found = [found[0], *found[1:][-1:]]
        ways = [_Way(False, found[0].held_bytes, 0.0)]
        for left, right in itertools.pairwise(found):
            saved = left.held_bytes - right.held_bytes
            price = (right.again_s - left.again_s) / saved
            ways.append(_Way(right.again, right.held_bytes, max(price, ways[-1].s_per_byte)))
        if len(ways) > 1 and (all_of_it or not self.in_part):
            ways[-1] = ways[-1]._replace(again=True)
        return ways

    @cached_property
    def _prices(self) -> list[float]:
        """Return some of the prices at which a stage changes, from 0 to the highest."""
        found = sorted({way.s_per_byte for ways in self.ways for way in ways})
        step = max(1.0, (len(found) - 1) / _MOST_PRICES)
        rows = [round(step * k) for k in range(int((len(found) - 1) / step) + 1)]
        return [found[k] for k in sorted({*rows, len(found) - 1})]

    def _at(self, stage: int, level: int) -> _Way:
        """Return the last way of a stage that pays at a price."""
        limit = self._prices[level]
        return next(way for way in reversed(self.ways[stage]) if way.s_per_byte <= limit)

    def _made(self, levels: Mapping[int, float]) -> Candidate:
        """Return the plan with what pays at the prices of the ranks; others keep all.

        A level is the number of a price, or is between two of them.
        """
        own = [max(levels.get(rank, 0) for rank in ranks) for ranks in self.holders]
        again = tuple(self._again(stage, level) for stage, level in enumerate(own))
        return self.judge.candidate(self.plan.changed(recompute=again))

    def _again(self, stage: int, level: float) -> Recompute:
        less = self._at(stage, ceil(level))
        more = self._at(stage, floor(level))
        if more == less:
            return less.again
        budget = less.held_bytes + int((ceil(level) - level) * (more.held_bytes - less.held_bytes))
        cut = within(self.keepings[stage], self.op_s, budget)
        return less.again if cut is None else cut.again or False

    def _full(self, made: Candidate) -> set[int]:
        """Return the ranks that lack memory."""
        there = self.judge.cluster_of(made.plan.place.hosts)
        rows = enumerate(made.peak_bytes)
        return {rank for rank, peak in rows if peak > there.memory_of(rank)}


class _Found:
    """Corners that are known, of stages that can choose among the same."""

    def __init__(self) -> None:
        self._known: dict[object, list[Repeats]] = {}

    def corners(self, keeping: Keeping, op_s: Sequence[float]) -> list[Repeats]:
        tables = (keeping.made, keeping.reads, keeping.memory)
        key = keeping.asked, tuple(frozenset(table.items()) for table in tables)
        if key not in self._known:
            self._known[key] = corners(keeping, op_s)
        return self._known[key]
