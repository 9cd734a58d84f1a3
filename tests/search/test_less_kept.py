"""Stages that keep less for their backward: where memory is short, and never for the worse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.plan import plan_by_hand
from penstock.profile import Profile
from penstock.search import Fixed, search
from penstock.search.balance import balanced_cuts
from penstock.search.judge import Judge
from penstock.search.undone import undone
from tests.draws import examples
from tests.search.chains import chain, chains, cluster_of, profile_of

RANKS, COUNT = 2, 4


def by_whole_stages(pair: tuple[Graph, Profile], cap: int) -> list[float]:
    """Return the seconds of the plans that fit and repeat all of F in some stages, or in none."""
    graph, profile = pair
    judge = Judge(graph, profile, cluster_of(RANKS, memory_bytes=cap))
    cuts = balanced_cuts(graph, profile.op_s, RANKS)
    ways = ((a, b) for a in (False, True) for b in (False, True))
    plan = plan_by_hand(graph, cuts, "gpipe", num_micro_batches=COUNT)
    made = [judge.candidate(plan.changed(recompute=way)) for way in ways]
    return [each.step_s for each in made if not each.refused]


@examples(6)
@given(chains(4, 7), st.floats(0.3, 1))
def test_what_is_found_fits_and_is_no_slower_than_all_or_nothing(pair, part: float) -> None:
    graph, profile = pair
    judge = Judge(graph, profile, cluster_of(RANKS))
    cuts = balanced_cuts(graph, profile.op_s, RANKS)
    plan = plan_by_hand(graph, cuts, "gpipe", num_micro_batches=COUNT)
    cap = int(part * max(judge.candidate(plan).peak_bytes))
    fixed = Fixed(ranks=RANKS, replicas=1, stages=RANKS, schedule="gpipe")
    whole = by_whole_stages(pair, cap)
    try:
        found = search(
            graph, profile, cluster_of(RANKS, memory_bytes=cap), micro_batches=COUNT, fixed=fixed
        ).plan
    except PlanError:
        assert not whole
        return
    assert found.predicted is not None
    assert max(found.predicted.peak_bytes) <= cap
    assert found.predicted.step_s <= min(whole, default=float("inf")) * (1 + 1e-9)


def uneven() -> tuple[Graph, Profile]:
    """Return layers whose large results take no time to make again, and small ones much."""
    graph = chain([1] * 8, [9, 90] * 4)
    return graph, profile_of(graph, [9, 1] * 4)


def test_a_stage_repeats_the_ops_that_give_most_bytes_for_a_second() -> None:
    graph, profile = uneven()
    fixed = Fixed(ranks=1, replicas=1, stages=1, schedule="gpipe")
    free = search(graph, profile, cluster_of(1), micro_batches=COUNT, fixed=fixed).plan
    assert free.recompute == (False,)
    assert free.predicted is not None
    cap = free.predicted.peak_bytes[0] - COUNT * 200
    tight = cluster_of(1, memory_bytes=cap)
    found = search(graph, profile, tight, micro_batches=COUNT, fixed=fixed).plan
    again = [op for ops in found.recompute if not isinstance(ops, bool) for op in ops]
    assert {graph.nodes[op].size_bytes for op in again} == {90}
    assert found.predicted is not None
    assert found.predicted.step_s == free.predicted.step_s + COUNT * len(again)
    (why,) = [d.why for d in found.decisions if d.what == "recompute"]
    assert why.startswith(
        "keeps 40 B of 310 B of activations a micro-batch, for 3.00 s of repeated"
    )
    judge = Judge(graph, profile, tight)
    others = {each.what: each.candidate.plan.recompute for each in undone(judge, found)}
    assert not any(others["recompute"])


def test_for_memory_no_plan_of_whole_stages_holds_less() -> None:
    graph, profile = uneven()
    held = []
    for again in (None, True):
        fixed = Fixed(ranks=2, replicas=1, stages=2, schedule="one_f_one_b", recompute=again)
        found = search(
            graph, profile, cluster_of(2), micro_batches=COUNT, objective="memory", fixed=fixed
        ).plan
        assert found.predicted is not None
        held.append(max(found.predicted.peak_bytes))
    assert held[0] < held[1]


@pytest.mark.parametrize(
    ("schedule", "less", "in_part"), [("pipedream", 20, True), ("timeprest", 100, False)]
)
def test_asynchronous_stages_repeat_ops_only_with_the_weights_that_f_read(
    schedule: str, less: int, in_part: bool
) -> None:
    graph, profile = uneven()
    fixed = Fixed(ranks=2, replicas=1, stages=2, schedule=schedule)
    free = search(graph, profile, cluster_of(2), micro_batches=COUNT, fixed=fixed).plan
    assert free.predicted is not None
    tight = cluster_of(2, memory_bytes=max(free.predicted.peak_bytes) - less)
    found = search(graph, profile, tight, micro_batches=COUNT, fixed=fixed).plan
    assert any(not isinstance(again, bool) for again in found.recompute) == in_part
