"""Of plans that are predicted to be as fast, the simplest is taken."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.plan.plan import divided, plan_by_hand
from penstock.search.judge import Judge
from penstock.search.search import search
from penstock.search.shapes import Fixed
from penstock.search.simplest import ERROR, simplest
from tests.draws import examples
from tests.search.chains import chain, chains, cluster_of, profile_of


def messages(plan, judge):
    """Return the messages of a step: each boundary that is crossed, there and back."""
    home = {}
    schedule = judge.schedule(judge.suited(plan))
    for rank, order in enumerate(schedule.orders):
        home |= {(one.stage, one.micro_batch): rank for one in order if one.kind == "F"}
    crossed = sum(home[s, m] != home.get((s + 1, m), home[s, m]) for s, m in home)
    return 2 * crossed * plan.replicas


@examples(12)
@given(chains(3, 6), st.integers(2, 4), st.sampled_from([0.02, 0.05, 0.5]), st.booleans())
def test_plan_has_fewest_messages_of_those_that_are_close(pair, ranks, error, slow):
    graph, profile = pair
    cluster = cluster_of(ranks, link=Link(0.5 if slow else 1e-6, 1e3 if slow else 1e9))
    fast = search(graph, profile, cluster, micro_batches=4)
    found = search(graph, profile, cluster, micro_batches=4, error=error)
    judge = Judge(graph, profile, cluster)
    best, chosen = fast.candidates[0], found.candidates[0]
    assert chosen.plan == replace(found.plan, decisions=(), predicted=None)
    assert chosen.step_s <= best.step_s * (1 + error) * (1 + 1e-12)
    sizes = {
        (messages(each.plan, judge), each.plan.num_stages)
        for each in found.candidates
        if not each.refused and each.step_s <= best.step_s * (1 + error)
    }
    assert (messages(chosen.plan, judge), chosen.plan.num_stages) == min(sizes)
    told = [each for each in found.plan.decisions if each.what == "simplest"]
    assert bool(told) == (chosen.plan != best.plan)


def test_the_reason_names_what_it_was_taken_instead_of():
    graph = chain([4] * 4, [4] * 4)
    profile, cluster = profile_of(graph, [1.0, 1.0, 1.0, 0.97]), cluster_of(2)
    plain = search(graph, profile, cluster, micro_batches=8)
    found = search(graph, profile, cluster, micro_batches=8, error=0.5)
    (why,) = [each for each in found.plan.decisions if each.what == "simplest"] or [None]
    if plain.plan.num_stages > 1:
        assert why is not None
        assert "messages a step" in why.why
        assert "less than the prediction error" in why.why
    assert found.plan.num_stages == 1


def test_units_are_not_woven_for_less_than_the_error():
    graph = chain([4] * 4, [4] * 4)
    judge = Judge(graph, profile_of(graph, [1.0] * 4), cluster_of(1))
    whole = plan_by_hand(graph, [], "one_f_one_b", num_micro_batches=4)
    plain = divided(whole, graph, range(len(graph.cut_points)))
    woven = plain.changed(schedule=replace(plain.schedule, woven=True))
    one, other = map(judge.candidate, (plain, woven))
    assert simplest(judge, other, [one], "time", ERROR) is one
    assert simplest(judge, one, [other], "time", ERROR) is one


@pytest.mark.parametrize(("objective", "error"), [("memory", 0.5), ("time", 0.0)])
def test_bytes_are_exact_and_no_error_means_the_best(objective, error):
    graph = chain([4] * 4, [4] * 4)
    judge = Judge(graph, profile_of(graph, [1.0] * 4), cluster_of(2))
    found = search(graph, profile_of(graph, [1.0] * 4), cluster_of(2), micro_batches=4)
    best, others = found.candidates[-1], found.candidates
    assert simplest(judge, best, others, objective, error) is best


@pytest.mark.parametrize(
    ("copy_s", "cores", "beside"), [(0.01, 2, True), (1e-5, 2, False), (0.01, 1, False)]
)
def test_copies_run_beside_computes_where_that_gains_and_there_are_cores(copy_s, cores, beside):
    graph = chain([100] * 4, [50] * 4)
    profile = profile_of(graph, [1] * 4, state_bytes_per_byte=2.0, far_s_per_byte=copy_s)
    cluster = cluster_of(1)
    cluster = replace(cluster, hosts=(replace(cluster.hosts[0], cores=cores),))
    fixed = Fixed(ranks=1, offload="state")
    plan = search(graph, profile, cluster, micro_batches=4, error=ERROR, fixed=fixed).plan
    assert plan.overlap.beside == beside
    (said,) = (each for each in plan.decisions if each.what == "copies")
    assert said.value == ("beside computes" if beside else "between computes")
    if cores == 1:
        assert said.why == "no rank has a core more than it computes with"
