"""Assigned: as little as scipy's, and as all orders of few; what can never be is not taken."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.members.assigned import least_assigned

SIZES = st.integers(1, 6)


@st.composite
def tables(draw, sizes=SIZES):
    """Draw costs; half of them with a way that is free of those that are infinite."""
    count = draw(sizes)
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    costs = random.integers(0, draw(st.sampled_from([2, 10, 10**12])), (count, count)).astype(float)
    costs[random.random(costs.shape) < draw(st.sampled_from([0.0, 0.5]))] = math.inf
    way = random.permutation(count)
    costs[np.arange(count), way] = random.integers(0, 10**12, count)
    return costs


def total(costs, columns) -> float:
    return float(sum(costs[row, column] for row, column in enumerate(columns)))


@given(tables())
def test_costs_are_the_least_of_all_orders(costs):
    columns = least_assigned(costs)
    assert sorted(columns) == list(range(len(costs)))
    every = permutations(range(len(costs)))
    assert total(costs, columns) == min(total(costs, columns) for columns in every)


@given(tables(st.integers(7, 40)))
def test_costs_are_those_of_scipy(costs):
    optimize = pytest.importorskip("scipy.optimize", reason="an extra: penstock[solvers]")
    rows, columns = optimize.linear_sum_assignment(costs)
    assert total(costs, least_assigned(costs)) == costs[rows, columns].sum()


def test_where_every_way_costs_infinity_there_is_none():
    with pytest.raises(ValueError, match="infinity"):
        least_assigned(np.array([[1.0, math.inf], [1.0, math.inf]]))
