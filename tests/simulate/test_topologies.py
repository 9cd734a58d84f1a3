"""Topologies: a step takes its computes and the rounds of its sum, by the formulas of the docs."""

import pytest

from penstock.cluster import Link
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.program.program import Program
from penstock.search import Fixed, RankExchange, search
from penstock.search.judge import Judge
from tests.search.chains import chain, cluster_of, profile_of

MB, LATENCY_S, RATE = 10**6, 1e-3, 1e9
ROUNDS = {  # of 4 ranks: rounds, and the numbers that the busiest sends or takes in all
    "ring": (6, 6 / 4),
    "tree": (4, 4 / 2),
    "halving": (4, 6 / 4),
    "doubling": (2, 2),
    "direct": (2, 6 / 4),
    "server": (2, 6),
    "server:2": (2, 3),
    "hierarchical:2": (4, 6 / 4),
}


def plan_of(graph, **words):
    return plan_by_hand(graph, [], "gpipe", num_micro_batches=2, replicas=4).changed(**words)


def judge_of(graph, latency_s=LATENCY_S):
    cluster = cluster_of(4, link=Link(latency_s, RATE))
    return Judge(graph, profile_of(graph, [0.01]), cluster)


@pytest.mark.parametrize("word", ROUNDS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_step_takes_its_computes_and_the_rounds_of_its_sum(word, pieces):
    size = pieces * 2**22
    graph = chain([size], [1])
    judge = judge_of(graph)
    rounds, share = ROUNDS[word]
    free = judge_of(graph, 0.0).candidate(plan_of(graph, sums="local:1000000")).step_s
    found = judge.candidate(plan_of(graph, topology=word)).step_s
    sums_s = pieces * rounds * LATENCY_S + share * size / RATE
    assert found == pytest.approx(free + sums_s, rel=1e-3)


def test_an_average_goes_along_it_too():
    graph = chain([MB], [1])
    judge = judge_of(graph)
    base = judge.candidate(plan_of(graph, sums="local:4")).step_s
    found = judge.candidate(plan_of(graph, sums="local:4", topology="doubling")).step_s
    ring_s, found_s = 6 * (LATENCY_S + MB / 4 / RATE), 2 * (LATENCY_S + MB / RATE)
    assert base - found == pytest.approx((ring_s - found_s) / 4, rel=1e-2)


def test_a_program_says_it_and_is_read(tmp_path):
    graph = chain([MB], [1])
    program = lower_plan(plan_of(graph, topology="hierarchical:2"), graph)
    assert "sums by hierarchical:2" in str(program)
    program.save(tmp_path / "program.json")
    read = Program.load(tmp_path / "program.json")
    assert read.end == program.end
    assert [read.end.topology_of(word) for word in ("replicas", "norm")] == ["hierarchical:2", ""]


@pytest.mark.parametrize(("size", "wanted"), [(1000, "direct"), (100 * MB, None)])
def test_the_fastest_is_taken_where_it_is_faster_than_the_transports_own(size, wanted):
    """Few bytes by few rounds; of many pieces few rounds gain less than is predicted wrongly."""
    graph = chain([size], [1])
    profile, cluster = profile_of(graph, [0.01]), cluster_of(4, link=Link(0.01, RATE))
    fixed = Fixed(ranks=4, replicas=4, stages=1, exchange=RankExchange(topology="fastest"))
    plan = search(graph, profile, cluster, micro_batches=8, fixed=fixed).plan
    assert plan.agreement.topology == wanted
    told = [each for each in plan.decisions if each.what == "topology"]
    assert [each.value for each in told] == ([wanted] if wanted else [])


def test_the_search_keeps_what_is_asked_for():
    graph = chain([MB], [1])
    profile, cluster = profile_of(graph, [0.01]), cluster_of(4, link=Link(LATENCY_S, RATE))
    fixed = Fixed(ranks=4, replicas=4, exchange=RankExchange(topology="server:2"))
    plan = search(graph, profile, cluster, micro_batches=8, fixed=fixed).plan
    assert plan.agreement.topology == "server:2"
    assert not plan.shards
