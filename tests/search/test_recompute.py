"""Recompute as needed: where memory is short, and no more than that."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.plan import Plan, plan_by_hand
from penstock.search import Fixed, search
from penstock.search.balance import balanced_cuts
from penstock.search.field import Effort, Field
from penstock.search.judge import Judge
from penstock.search.recompute import as_needed
from tests.draws import examples
from tests.search.chains import (
    chain,
    chains,
    cluster_of,
    profile_of,
)


def test_recompute_rescues_a_plan_that_does_not_fit() -> None:
    graph = chain([1] * 8, [100] * 8)
    profile = profile_of(graph, [1] * 8)
    sizes = []
    for recompute in (False, True):
        fixed = Fixed(ranks=2, stages=2, recompute=recompute, schedule="gpipe")
        plan, *_ = search(graph, profile, cluster_of(2), micro_batches=8, fixed=fixed)
        sizes.append(max(plan.predicted.peak_bytes))
    keeping, again = sizes
    assert again < keeping
    tight = cluster_of(2, memory_bytes=keeping - 1)
    fixed = Fixed(ranks=2, stages=2, schedule="gpipe")
    plan, found, *_ = search(graph, profile, tight, micro_batches=8, fixed=fixed)
    assert plan.recompute == (False, (15,))  # rank 0 has room: its stage lacks the loss
    assert [c.plan.recompute for c in found if c.refused] == [(False, False)]
    (reason,) = [d for d in plan.decisions if d.what == "recompute"]
    assert reason.value == "stages 1 in part"
    assert reason.why.startswith("keeps 604 B of 704 B of activations a micro-batch, for 1.00 s")
    assert "; best alternative (1 x 2 stages, gpipe, recompute): " in reason.why
    none = cluster_of(2, memory_bytes=again)
    plan, *_ = search(graph, profile, none, micro_batches=8, fixed=fixed)
    assert max(plan.predicted.peak_bytes) <= again
    assert all(plan.recompute)
    whole = replace(fixed, recompute=True)
    slower, *_ = search(graph, profile, none, micro_batches=8, fixed=whole)
    assert plan.predicted.step_s < slower.predicted.step_s


@examples(20)
@given(
    chains(2, 6),
    st.sampled_from([("gpipe", 1), ("one_f_one_b", 1), ("zb_h1", 1), ("interleaved", 2)]),
    st.integers(2, 3),
    st.floats(0, 1),
)
def test_as_few_seconds_are_recomputed_as_memory_allows(pair, shape, ranks: int, part) -> None:
    """No other choice of stages fits and takes its ranks less time again."""
    graph, profile = pair
    name, per_rank = shape
    stages = ranks * per_rank
    if stages > len(graph.cut_points) + 1:
        return
    judge = Judge(graph, profile, cluster_of(ranks))
    plan = plan_by_hand(
        graph,
        balanced_cuts(graph, profile.op_s, stages),
        name,
        num_micro_batches=2 * ranks,
        num_ranks=ranks,
    )
    ways = [plan.changed(recompute=row) for row in itertools.product((False, True), repeat=stages)]
    made = [judge.candidate(way) for way in ways]
    peaks = [max(each.peak_bytes) for each in made]
    cap = int(min(peaks) + part * (peaks[0] - min(peaks)))
    tight = Judge(graph, profile, cluster_of(ranks, memory_bytes=cap))
    found = as_needed(tight, plan)
    forward_s = tight.price(plan).costs.action_s[0].max(axis=1)

    def again_s(way: Plan) -> float:
        return sum(s for s, does in zip(forward_s, way.recompute, strict=True) if does)

    fits = [way for way, peak in zip(ways, peaks, strict=True) if peak <= cap]
    least = min(map(again_s, fits))
    if found is None:
        assert plan in fits or [all(way.recompute) for way in fits] == [True]
    else:
        assert found in fits
        assert again_s(found) == least


@examples(20)
@given(chains(4, 6), st.integers(2, 3), st.floats(0, 1))
def test_plans_recomputed_as_needed_are_among_those_that_recompute(pair, ranks: int, part) -> None:
    graph, profile = pair
    cuts = balanced_cuts(graph, profile.op_s, ranks)
    plans = [
        plan_by_hand(graph, cuts, name, num_micro_batches=2 * ranks, recompute=(again,) * ranks)
        for name in ("gpipe", "one_f_one_b", "zb_h1")
        for again in (False, True)
    ]
    judge = Judge(graph, profile, cluster_of(ranks))
    peaks = [max(judge.candidate(plan).peak_bytes) for plan in plans]
    cap = int(min(peaks) + part * (max(peaks) - min(peaks)))
    tight = Judge(graph, profile, cluster_of(ranks, memory_bytes=cap))
    everything = Field(tight, plans, "time", Effort(prune=False)).simulated
    again = [c for c in everything if not c.refused and any(c.plan.recompute)]
    found = Field(tight, plans, "time", Effort()).best(1, lambda plan: any(plan.recompute))
    assert [c.score("time") for c in found] == sorted(c.score("time") for c in again)[:1]
