"""Server parts: a row of parameters in runs, the largest as small as can be."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import GraphError
from penstock.graph.server_parts import in_runs, server_parts
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import stages_of
from tests.search.chains import chain


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_no_other_runs_have_a_smaller_largest_one(sizes, count):
    count, many = min(count, len(sizes)), range(1, len(sizes))
    ends = in_runs(sizes, count)
    runs = [sizes[a:b] for a, b in pairwise((0, *ends))]
    assert all(runs)
    assert [size for run in runs for size in run] == sizes
    assert len(runs) == count
    every = (pairwise((0, *inner, len(sizes))) for inner in combinations(many, count - 1))
    assert max(map(sum, runs)) == min(max(sum(sizes[a:b]) for a, b in each) for each in every)


def test_every_parameter_has_one_server_and_bytes_are_theirs():
    graph = chain([10, 30, 20, 40], [1] * 4)
    plan = plan_by_hand(graph, [1], "breadth_first", num_micro_batches=2, num_ranks=1)
    stages = stages_of(plan, graph).stages
    parts = server_parts(graph, stages, 3)
    assert set(parts.owners.values()) == {0, 1, 2}
    held = [(s.index, p) for s in stages for p in s.parameters]
    assert sorted(parts.owners) == sorted(held)
    for server, size in enumerate(parts.size_bytes):
        own = [p for (_, p), owner in parts.owners.items() if owner == server]
        assert size == sum(map(graph.kept_bytes, own))
    with pytest.raises(GraphError, match=r"9 servers for 4 parameters"):
        server_parts(graph, stages, 9)
