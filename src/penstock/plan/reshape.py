"""Reshape: the same plan for other counts of stages, ranks and replicas.

Whatever changes how many stages or ranks there are goes through here, so that what a job or a user
has decided - bits of sums and messages, clipping, the micro-batches that are joined - is carried
over, and nothing is forgotten on the way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from penstock.graph.graph import Graph
from penstock.graph.stages import Recompute
from penstock.plan.agreement import Agreement
from penstock.plan.overlap import Prefetch, most_of
from penstock.plan.placement import placed
from penstock.plan.plan import Plan
from penstock.plan.stage import stage_plans
from penstock.plan.terms import Buffers
from penstock.program.instructions import Guarding
from penstock.program.passes.offload import Offloaded
from penstock.program.passes.shard import Sharding
from penstock.schedule.recipe import AnySchedule

_Word = TypeVar("_Word")


class Counts(NamedTuple):
    """How many stages and ranks a plan has, in which order they work, and who takes what of a step.

    cuts:    cut points of the graph, one fewer than stages.
    ranks:   of one replica.
    shares:  micro-batches of a step, by replica.
    """

    cuts: tuple[int, ...]
    schedule: AnySchedule
    ranks: int
    shares: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.cuts) + 1

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return len(self.shares)


def reshaped(plan: Plan, graph: Graph, counts: Counts) -> Plan:
    """Return `plan` with other counts; nothing is predicted of it.

    What is said of each stage is kept where as many stages are left, or where it was the same for
    all of them.  Else stages keep what they compute, near and whole.  State is divided among
    replicas as long as there are several, and is where weights of all of them go to far memory.
    The order of hosts, parts and a guard are those of as many ranks.
    Raises:   PlanError: the plan cannot have these counts.
    """
    total, replicas = counts.ranks * counts.replicas * plan.tensor, counts.replicas
    same_ranks = (total, replicas) == (plan.total_ranks, plan.replicas)
    offload: tuple[Offloaded, ...] = _by_stage(plan.offload, counts.stages, "none")
    shard = _sharded(plan, counts, offload)
    is_divided = any(word != "replicate" for word in shard)
    fetches = is_divided or any(word in ("weights", "all") for word in offload)
    return Plan(
        graph=plan.graph,
        stages=stage_plans(
            counts.cuts,
            tuple(graph.cut_points[cut].name for cut in counts.cuts),
            recompute=_recomputed(plan, counts),
            offload=offload,
            shard=shard,
        ),
        schedule=counts.schedule,
        place=placed(
            counts.ranks,
            max(counts.shares),
            replicas,
            shares=counts.shares,
            parts=plan.place.parts if same_ranks and is_divided else (),
            hosts=plan.place.hosts if total == plan.total_ranks else (),
            tensor=plan.tensor,
            context=plan.place.context,
        ),
        terms=replace(plan.terms, buffers=_buffers(plan, replicas)),
        overlap=replace(
            plan.overlap,
            prefetch=_ahead(plan, counts.stages) if fetches else 0,
            beside=plan.overlap.beside and any(word != "none" for word in offload),
        ),
        agreement=_agreed(plan, counts, same_ranks=same_ranks, is_divided=is_divided),
        decisions=plan.decisions,
    )


def _by_stage(row: Sequence[_Word], stages: int, default: _Word) -> tuple[_Word, ...]:
    """Return what is said of each stage, once there are so many."""
    if not row or len(row) == stages:
        return tuple(row)
    return (row[0] if all(word == row[0] for word in row) else default,) * stages


def _ahead(plan: Plan, stages: int) -> Prefetch:
    """Return how early stages are gathered: of another number of them, as the earliest was."""
    own = plan.overlap.prefetch
    return own if stages == plan.num_stages else most_of(own)


def _recomputed(plan: Plan, counts: Counts) -> tuple[Recompute, ...]:
    """Return what each stage repeats: single ops only where the stages are the same."""
    if plan.cuts == counts.cuts:
        return plan.recompute
    whole = [again if isinstance(again, bool) else False for again in plan.recompute]
    return _by_stage(whole, counts.stages, default=False)


def _sharded(plan: Plan, counts: Counts, offload: Sequence[Offloaded]) -> tuple[Sharding, ...]:
    """Return what is divided among the replicas, if there are several."""
    if counts.replicas == 1:
        return ()
    shard: tuple[Sharding, ...] = _by_stage(plan.shard, counts.stages, "replicate")
    if not any(word in ("weights", "all") for word in offload):
        return shard
    row: tuple[Sharding, ...] = shard or ("replicate",) * counts.stages
    pairs = zip(row, offload, strict=True)
    return tuple(
        "shard" if word == "replicate" and away in ("weights", "all") else word
        for word, away in pairs
    )


def _agreed(plan: Plan, counts: Counts, *, same_ranks: bool, is_divided: bool) -> Agreement:
    """Return how ranks agree; sums of parts go no other way than a transport's own."""
    return replace(
        plan.agreement,
        topology=None if is_divided else plan.agreement.topology,
        guard=_guard(plan, counts) if same_ranks else None,
        post_validation=plan.agreement.post_validation and counts.ranks > 1,
    )


def _guard(plan: Plan, counts: Counts) -> Guarding | None:
    """Return the guard for as many ranks; which stages are kept besides is of as many stages."""
    if plan.agreement.guard is None or counts.stages == plan.num_stages:
        return plan.agreement.guard
    return plan.agreement.guard._replace(shared=())


def _buffers(plan: Plan, replicas: int) -> Buffers:
    """Return which values buffers have: several replicas have no one copy, one has no others."""
    impossible = "one copy" if replicas > 1 else "per replica"
    return "exact" if plan.terms.buffers == impossible else plan.terms.buffers
