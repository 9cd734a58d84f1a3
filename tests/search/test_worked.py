"""layer_pipe on fewer ranks than stages: chosen where stages take unlike seconds, and runs so."""

from dataclasses import replace

import pytest

from penstock.cluster import Link
from penstock.plan import plan_by_hand
from penstock.search import Fixed
from penstock.search.judge import Judge
from penstock.search.search import search
from penstock.search.worked import by_work
from tests.search.chains import chain, cluster_of, profile_of

GRAPH = chain([10] * 4, [40] * 4)
UNLIKE = profile_of(GRAPH, [1.0, 8.0, 8.0, 2.0])  # no cut is even on three ranks
FREE = cluster_of(3, link=Link(0.0, 1e9))


def test_long_stages_are_divided_among_ranks_where_no_cut_is_even():
    fixed = Fixed(ranks=3, replicas=1)
    plan = search(GRAPH, UNLIKE, FREE, micro_batches=8, fixed=fixed).plan
    assert plan.schedule.name.startswith("layer_pipe(processors=3, work=")
    for other in ("dapple", "zb_greedy", "one_f_one_b"):
        whole = search(GRAPH, UNLIKE, FREE, micro_batches=8, fixed=replace(fixed, schedule=other))
        assert plan.predicted.step_s < 0.99 * whole.plan.predicted.step_s


@pytest.mark.parametrize("name", ["layer_pipe", "dapple"])
def test_a_schedule_that_divides_ranks_is_asked_for_by_its_name_alone(name):
    graph = GRAPH if name == "layer_pipe" else chain([10] * 2, [40] * 2)
    profile = profile_of(graph, [1.0, 8.0, 8.0, 2.0][: len(graph.cut_points) + 1])
    fixed = Fixed(ranks=3, replicas=1, schedule=name)
    plan = search(graph, profile, cluster_of(3), micro_batches=6, fixed=fixed).plan
    assert (plan.schedule.builder, plan.num_ranks) == (name, 3)
    assert {"ranks", "work"} & dict(plan.schedule.arguments).keys()


def test_work_is_the_seconds_of_stages_unless_it_is_said():
    judge = Judge(GRAPH, UNLIKE, FREE)
    for name in ("layer_pipe(processors=3, work=1-1-1-1)", "layer_pipe", "gpipe"):
        plan = plan_by_hand(GRAPH, [0, 1, 2], name, num_micro_batches=4)
        assert by_work(judge, plan) == plan
    plan = plan_by_hand(GRAPH, [0, 1, 2], "layer_pipe(processors=3)", num_micro_batches=4)
    work = dict(by_work(judge, plan).schedule.arguments)["work"]
    assert work == "8-99-99-25"
