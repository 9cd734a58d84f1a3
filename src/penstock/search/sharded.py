"""Sharded: where memory is short, plans whose replicas divide stages among them.

Of plans with replicas that lack memory, each is tried with all its stages in shards, as it is and
in units of one block each; then stages that cost most to gather, for what they would take, are
kept whole for a step, or for good, while there is room.

Where equal parts do not fit every rank, a rank keeps as much as it has room for and the others the
rest, all as much as can be: the largest part says how long a gather takes.  What a rank keeps has
nothing to do with how many micro-batches it takes: on unlike devices these are moved to where they
make the step shorter, or leave room, and parts are fitted to that.

Source:  parts by memory, shares by speed: Cephalo, arXiv:2411.01075; selective unsharding by gain
         over bytes: DeepCompile, arXiv:2504.09983; per operator: OSDP, arXiv:2209.13258.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from penstock.graph.cut_points import block_ends
from penstock.plan.plan import Plan, is_asynchronous
from penstock.plan.reshape import Counts, reshaped
from penstock.program.passes.shard import Sharding
from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.recipe import Recipe
from penstock.search.candidate import Candidate
from penstock.search.field import Field
from penstock.search.judge import Judge
from penstock.search.polish import other_shares

_MOST_PLANS = 3
_MOST_TIMES = 4  # that parts are fitted: what a part holds changes in the course of a step
_GRAIN = 1000  # parts of a stage add up to this
_AHEAD = 0, 1, 2  # stages before its use that a gather begins
_WORDS: tuple[Sharding, ...] = ("replicate", "shard_keep", "shard")


def with_shards(field: Field) -> Iterator[Candidate]:
    """Yield plans with stages in shards, for those of the field that lack memory.

    Some may lack it still.
    """
    if field.objective == "memory" or not field.effort.rescues:
        return
    lacking = [each for each in field.overfull(8 * _MOST_PLANS) if _may_share(field.judge, each)]
    for each in lacking[:_MOST_PLANS]:
        best: Candidate | None = None
        for plan in _ways(field.judge, each.plan):
            if field.is_over():
                break
            made = _fitted(field.judge, plan)
            if best is None or order(field, made) < order(field, best):
                best = made
        if best is not None:
            yield _kept_whole(field, _shared(field, best))


def _may_share(judge: Judge, candidate: Candidate) -> bool:
    """Return whether replicas of a plan can divide its stages among them."""
    return candidate.plan.replicas > 1 and lets_go(judge, candidate.plan)


def lets_go(judge: Judge, plan: Plan) -> bool:
    """Return whether ranks of a plan may be without what a stage holds while it is not used.

    They may where it updates at the end of a step, for good, and has one copy in a replica; and
    where no sum holds back what only whole gradients can be added to, and no weights are averaged,
    and sums go as the transport makes them.
    """
    if plan.holds_back or plan.averages or plan.topology:
        return False
    synchronous = not is_asynchronous(plan) and not plan.agreement.post_validation
    return synchronous and all(len(ranks) == 1 for ranks in judge.holders(plan))


def _ways(judge: Judge, plan: Plan) -> Iterator[Plan]:
    """Yield the plan, and the plan in units, with all in shards that are gathered early or late."""
    for each in dict.fromkeys((plan, in_units(judge, plan))):
        for ahead in _AHEAD if each.num_stages > 1 else (0,):
            made = each.changed(shard=("shard",) * each.num_stages, prefetch=ahead)
            if not judge.rules.broken(made, judge.graph):
                yield made


def in_units(judge: Judge, plan: Plan) -> Plan:
    """Return the plan in units of a block; one alone takes all micro-batches through each."""
    graph = judge.graph
    if plan.num_ranks > 1 or plan.num_stages > 1:
        return plan.refined(graph)
    ends = tuple(end for end in block_ends(graph) if end not in judge.rules.forbidden)
    if not ends:
        return plan
    counts = Counts(ends, Recipe(breadth_first.__name__), plan.num_ranks, plan.grid.shares)
    return reshaped(plan, graph, counts)


def _fitted(judge: Judge, plan: Plan) -> Candidate:
    """Return the candidate of a plan, its parts equal, or as memory says where that lacks."""
    best = made = judge.candidate(plan.changed(parts=()))
    before: Candidate | None = None
    for _ in range(_MOST_TIMES if made.refused and made.peak_bytes else 0):
        parts = made.plan.grid.uneven(_parts(judge, made, before))
        if parts == made.plan.place.parts:
            break
        before, made = made, judge.candidate(made.plan.changed(parts=parts))
        best = min(best, made, key=lambda each: _unfit(judge, each))
    return best


def _unfit(judge: Judge, candidate: Candidate) -> tuple[int, float]:
    """Return what is to be small of parts: the bytes that lack, then the largest."""
    grid, parts = candidate.plan.grid, candidate.plan.place.parts
    largest = max(grid.part_of(rank, parts) for rank in range(candidate.plan.total_ranks))
    return judge.lacking_bytes(candidate), float(largest)


def _parts(judge: Judge, candidate: Candidate, before: Candidate | None) -> tuple[int, ...]:
    """Return parts that should fit the ranks' memory, or if none do lack least on each.

    A rank holds its part besides all else at every moment of the step, its gradients at some: so
    its peak goes with the part at a rate between the two, or as it did from the one `before`.
    """
    plan, grid = candidate.plan, candidate.plan.grid
    room_of, held = judge.cluster_of(plan.place.hosts).memory_of, judge.price(plan).held
    places, homes = judge.places(plan.place.hosts, plan.total_ranks), judge.holders(plan)
    parts = [1] * plan.total_ranks
    for first in grid.ranks_of(0):
        ranks, most = grid.column_of(first), list[float]()
        own = [stage for stage, home in enumerate(homes) if first in home]
        for rank in ranks:
            each = held[places[rank]]
            rates = [sum(each.divided[stage] for stage in own)]
            rates += [rates[0] + sum(each.whole[1][stage] for stage in own)]
            more = room_of(rank) - candidate.peak_bytes[rank]
            part, rate = float(grid.part_of(rank, plan.place.parts)), float(rates[more > 0])
            was = part if before is None else float(grid.part_of(rank, before.plan.place.parts))
            if before is not None and was != part:
                seen = (candidate.peak_bytes[rank] - before.peak_bytes[rank]) / (part - was)
                rate = min(max(seen, rates[0]), rates[1])
            most.append(max(0.0, part + more / rate) if rate else 1.0)
        for rank, part in zip(ranks, shared_out(most), strict=True):
            parts[rank] = part
    return tuple(parts)


def shared_out(most: Sequence[float]) -> list[int]:
    """Return whole numbers that add up to 1000, as equal as can be: none above 1000 * `most`.

    Where all together are less than 1, each gets what it is of their sum.
    """
    total = sum(most)
    if total <= 1:
        wanted = [each / total if total else 1 / len(most) for each in most]
    else:
        left, wanted = 1.0, [0.0] * len(most)
        for count, at in enumerate(sorted(range(len(most)), key=most.__getitem__)):
            wanted[at] = min(most[at], left / (len(most) - count))
            left -= wanted[at]
    parts = [math.floor(_GRAIN * each + 1e-9) for each in wanted]
    spare = max(range(len(most)), key=lambda at: most[at] - wanted[at])
    parts[spare] += _GRAIN - sum(parts)
    return parts


def _shared(field: Field, best: Candidate) -> Candidate:
    """Return the candidate with micro-batches moved between unlike replicas while that is better.

    While it does not fit, so that it lacks less.
    """
    improved = True
    while improved:
        improved = False
        for plan in other_shares(field.judge, best.plan):
            if field.is_over():
                return best
            made = _fitted(field.judge, plan)
            if order(field, made) < order(field, best):
                best, improved = made, True
                break
    return best


def _kept_whole(field: Field, best: Candidate) -> Candidate:
    """Return the candidate with stages kept whole while that is better, the smallest first.

    While it does not fit, so that it lacks less: of a large stage without optimizer state the parts
    and what is gathered take more than the whole.
    """
    judge, before = field.judge, None
    held = judge.price(best.plan).held[0].whole[0]
    stages = sorted(range(best.plan.num_stages), key=held.__getitem__)
    while best is not before:
        before = best
        for change in itertools.chain(itertools.product(stages, _WORDS), _AHEAD):
            if field.is_over():
                return best
            other = _changed(best.plan, change)
            if other == best.plan or judge.rules.broken(other, judge.graph):
                continue
            made = _fitted(judge, other)
            if order(field, made) < order(field, best):
                best = made
    return best


def _changed(plan: Plan, change: tuple[int, Sharding] | int) -> Plan:
    """Return the plan with another word for one stage, or gathers as many stages ahead."""
    if isinstance(change, int):
        return plan.changed(prefetch=change)
    row = list(plan.shard)
    row[change[0]] = change[1]
    return plan if all(each == "replicate" for each in row) else plan.changed(shard=tuple(row))


def order(field: Field, candidate: Candidate) -> tuple[float, ...]:
    """Return what to compare candidates by: those that fit first, then those that lack least."""
    if not candidate.refused:
        return (0.0, *candidate.score(field.objective))
    lacks = field.judge.lacking_bytes(candidate) if candidate.peak_bytes else float("inf")
    return (1.0, lacks, candidate.step_s)
