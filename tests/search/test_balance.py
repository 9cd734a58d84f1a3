"""Balanced cuts against all cuts there are."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.search.balance import balanced_cuts, balanced_cuts_on
from tests.search.chains import chain, chains, profile_of


def stage_seconds(graph: Graph, op_s: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """Return the seconds of the forward and backward segments of each stage."""
    stages = cut(graph, cuts).stages
    return [sum(op_s[i] for i in (*s.forward.ops, *s.backward.ops)) for s in stages]


@given(chains(), st.integers(1, 4))
def test_balanced_cuts_are_the_best_of_all(pair, num_stages: int) -> None:
    graph, profile = pair
    points = graph.cut_points
    if num_stages > len(points) + 1:
        return

    def cost(cuts: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        crossing = sum(points[c].forward_bytes for c in cuts)
        return max(stage_seconds(graph, profile.op_s, cuts)), crossing, cuts

    everything = itertools.combinations(range(len(points)), num_stages - 1)
    assert balanced_cuts(graph, profile.op_s, num_stages) == min(map(cost, everything))[2]


@given(chains(2), st.data())
def test_balanced_cuts_on_unlike_devices_are_the_best_of_all(pair, data: st.DataObject) -> None:
    graph, profile = pair
    points = graph.cut_points
    num_stages = data.draw(st.integers(1, len(points) + 1))
    op_s = [[s * k for s in profile.op_s] for k in (1, 2, 5)]
    kinds = st.sets(st.integers(0, 2), min_size=1, max_size=2).map(sorted)
    devices = [data.draw(kinds) for _ in range(num_stages)]
    portions = [data.draw(st.sampled_from([1.0, 0.5, 0.25])) for _ in range(num_stages)]

    def cost(cuts: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        by_kind = [stage_seconds(graph, seconds, cuts) for seconds in op_s]
        parts = enumerate(zip(devices, portions, strict=True))
        slowest = max(part * by_kind[k][stage] for stage, (row, part) in parts for k in row)
        return slowest, sum(points[c].forward_bytes for c in cuts), cuts

    everything = itertools.combinations(range(len(points)), num_stages - 1)
    assert balanced_cuts_on(graph, op_s, devices, portions) == min(map(cost, everything))[2]


def test_more_stages_than_cut_points_allow_are_refused() -> None:
    graph = chain([1, 1, 1], [1, 1, 1])
    profile = profile_of(graph, [1, 1, 1])
    assert balanced_cuts(graph, profile.op_s, 3) == (0, 1)
    with pytest.raises(PlanError, match="4 stages need 3 cut points; the model has 2") as caught:
        balanced_cuts(graph, profile.op_s, 4)
    assert caught.value.hint == "use at most 3 stages"
