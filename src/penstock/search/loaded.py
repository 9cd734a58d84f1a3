"""Loaded: a forward pipeline of a model that is larger than its devices.

Weights wait in far memory and are loaded stage by stage, once for all batches of a window, which
go through one stage before the next (schedule/forward_only.py).  Stages are units of a block, or
as small as they can be, in turn on the ranks; loaded at their use, or one or two stages ahead.  Of
those that fit the fastest is taken; then stages are kept near, one after the other, while there is
room and that is no slower.  What counts is always the simulation.

Source:  COMPASS, arXiv:2501.06780 (weights loaded for all micro-batches at once).
"""

from collections.abc import Iterator

from penstock.cluster.cluster import Cluster
from penstock.graph.cut_points import block_ends
from penstock.graph.graph import Graph
from penstock.plan.plan import Decision, Plan, plan_by_hand
from penstock.profile.kinds import Profiles
from penstock.schedule.forward_only import forward_only
from penstock.search.candidate import Candidate
from penstock.search.judge import Judge

_WINDOW = 8  # batches for which weights are loaded once
_AHEAD = 0, 1, 2  # stages


def fastest_loaded(
    graph: Graph, profiles: Profiles, cluster: Cluster, most: int
) -> Candidate | None:
    """Return the fastest on at most `most` ranks, seconds of a window; None where none fits."""
    judge = Judge(graph, profiles, cluster)
    found = [judge.candidate(plan) for plan in _plans(graph, most)]
    fits = [each for each in found if not each.refused]
    if not fits:
        return None
    best = min(fits, key=lambda each: (each.step_s, max(each.peak_bytes)))
    for stage in range(best.plan.num_stages):
        made = judge.candidate(_near(best.plan, stage))
        if not made.refused and made.step_s <= best.step_s:
            best = made
    return best


def loaded_decisions(plan: Plan, why: str) -> tuple[Decision, ...]:
    """Return the decisions of such a plan; `why` is what no plan without far memory can."""
    ahead = max(plan.ahead)
    value = f"weights of {len(plan.far)} of {plan.num_stages} stages"
    value += f", loaded {ahead} ahead" if ahead else ", loaded at their use"
    ranks = f"{plan.num_ranks}, {plan.num_micro_batches} batches through a stage at once"
    return (
        Decision("offload", value, "search", why),
        Decision("ranks", ranks, "search", "the fastest that fit"),
    )


def _plans(graph: Graph, most: int) -> Iterator[Plan]:
    """Yield the plans with all weights in far memory."""
    for cuts in dict.fromkeys((tuple(block_ends(graph)), tuple(range(len(graph.cut_points))))):
        stages = len(cuts) + 1
        for ranks in range(1, min(most, stages) + 1):
            bare = plan_by_hand(
                graph, cuts, forward_only.__name__, num_micro_batches=_WINDOW, num_ranks=ranks
            )
            for ahead in _AHEAD if stages > 1 else (0,):
                yield bare.changed(offload=("weights",) * stages, prefetch=ahead)


def _near(plan: Plan, stage: int) -> Plan:
    """Return the plan with the weights of a stage near."""
    words = list(plan.offload)
    words[stage] = "none"
    some = any(word != "none" for word in words)
    return plan.changed(offload=words, prefetch=plan.overlap.prefetch if some else 0)
