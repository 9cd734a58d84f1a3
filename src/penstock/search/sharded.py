"""Sharded: where memory is short, plans whose replicas divide stages among them.

Of plans with replicas that lack memory, each is tried with all its stages in shards, as it is and
in units of one block each; then stages that cost most to gather, for what they would take, are
kept whole for a step, or for good, while there is room.

Source:  selective unsharding by gain over bytes, DeepCompile, arXiv:2504.09983; per operator, OSDP,
         arXiv:2209.13258.
"""

from collections.abc import Iterator
from dataclasses import replace

from penstock.graph.cut_points import block_ends
from penstock.plan import Plan, Sharding, is_asynchronous
from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.recipe import Recipe
from penstock.search.candidate import Candidate
from penstock.search.field import Field
from penstock.search.judge import Judge

_MOST_PLANS = 3
_AHEAD = 0, 1, 2  # stages before its use that a gather begins
_MORE: tuple[Sharding, ...] = ("replicate", "shard_keep")  # than "shard", of memory and of speed


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
            made = field.judge.candidate(plan)
            if best is None or _order(field, made) < _order(field, best):
                best = made
        if best is not None:
            yield best if best.refused else _kept_whole(field, best)


def _may_share(judge: Judge, candidate: Candidate) -> bool:
    """Return whether replicas of a plan can divide its stages among them."""
    plan = candidate.plan
    synchronous = not is_asynchronous(plan) and not plan.post_validation
    alone = all(len(ranks) == 1 for ranks in judge.holders(plan))
    return plan.replicas > 1 and not plan.shares and synchronous and alone


def _ways(judge: Judge, plan: Plan) -> Iterator[Plan]:
    """Yield the plan, and the plan in units, with all in shards that are gathered early or late."""
    for each in dict.fromkeys((plan, _in_units(judge, plan))):
        for ahead in _AHEAD if each.num_stages > 1 else (0,):
            made = replace(each, shard=("shard",) * each.num_stages, prefetch=ahead)
            if not judge.rules.broken(made, judge.graph):
                yield made


def _in_units(judge: Judge, plan: Plan) -> Plan:
    """Return the plan in units of a block; one alone takes all micro-batches through each."""
    graph = judge.graph
    if plan.num_ranks > 1 or plan.num_stages > 1:
        return plan.refined(graph)
    ends = tuple(end for end in block_ends(graph) if end not in judge.rules.forbidden)
    if not ends:
        return plan
    stages = len(ends) + 1
    return replace(
        plan,
        cuts=ends,
        cut_names=tuple(graph.cut_points[end].name for end in ends),
        schedule=Recipe(breadth_first.__name__),
        recompute=plan.recompute[:1] * stages,
        offload=plan.offload[:1] * stages,
    )


def _kept_whole(field: Field, best: Candidate) -> Candidate:
    """Return the candidate with stages kept whole while that is faster, and fits."""
    judge, plan = field.judge, best.plan
    held = judge.price(plan).held[0].whole[0]
    for stage in sorted(range(plan.num_stages), key=held.__getitem__):
        for word in _MORE:
            if field.is_over():
                return best
            row = list(best.plan.shard)
            row[stage] = word
            if all(each == "replicate" for each in row):
                continue
            other = replace(best.plan, shard=tuple(row))
            if judge.rules.broken(other, judge.graph):
                continue
            made = judge.candidate(other)
            if not made.refused and made.score(field.objective) < best.score(field.objective):
                best = made
                break
    return best


def _order(field: Field, candidate: Candidate) -> tuple[float, ...]:
    """Return what to compare candidates by: those that fit first."""
    if not candidate.refused:
        return (0.0, *candidate.score(field.objective))
    lacks = field.judge.lacking_bytes(candidate) if candidate.peak_bytes else float("inf")
    return (1.0, lacks)
