"""search.knapsack: equal to trying everything, and its bounds are bounds."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from penstock.search.choices.knapsack import cheapest, relaxed, total

ROWS = 7
seeds = st.integers(0, 10**6)


def problem(seed):
    """Return costs that fall as sizes grow, some options absent, and a room between both ends."""
    draw = np.random.default_rng(seed)
    size = np.sort(draw.integers(0, 60, (ROWS, 3)), axis=1)
    cost = 60 - size + draw.integers(-6, 7, (ROWS, 3)) if seed % 3 else 60.0 - size
    cost = cost.astype(np.float64)
    cost[draw.random((ROWS, 3)) < 0.1] = np.inf
    cost[:, 0] = np.where(np.isfinite(cost[:, 0]), cost[:, 0], 99.0)
    room = int(draw.integers(size[:, 0].sum() - 5, size[:, 2].sum() + 5))
    return cost, size, room


def brute_force(cost, size, room):
    choices = np.array(list(itertools.product(range(3), repeat=ROWS)))
    rows = np.arange(ROWS)
    costs, sizes = cost[rows, choices].sum(axis=1), size[rows, choices].sum(axis=1)
    return costs[sizes <= room].min(initial=np.inf)


@given(seeds)
def test_cheapest_equals_brute_force(seed):
    cost, size, room = problem(seed)
    expected = brute_force(cost, size, room)
    found = cheapest(cost, size, room, below=np.inf, most_states=10**6)
    assert (found.choice is None) == (expected == np.inf)
    if found.choice is not None:
        assert total(size, found.choice) <= room
        assert total(cost, found.choice) == expected
        assert found.bound == pytest.approx(expected)
        not_below = cheapest(cost, size, room, below=expected, most_states=10**6)
        assert not_below.choice is None
        assert not_below.bound == pytest.approx(expected)


@given(seeds, st.sampled_from([2, 8]))
def test_bound_holds_where_choices_were_dropped(seed, most):
    cost, size, room = problem(seed)
    expected = brute_force(cost, size, room)
    found = cheapest(cost, size, room, below=np.inf, most_states=most)
    if found.choice is not None:
        assert found.bound <= expected + 1e-9
        assert expected <= total(cost, found.choice)
        assert total(size, found.choice) <= room


@given(seeds)
def test_relaxed_bound_and_price_are_those_of_linear_programming(seed):
    cost, size, room = problem(seed)
    found = relaxed(cost, size, room)
    flat = [(row, k) for row in range(ROWS) for k in range(3) if np.isfinite(cost[row, k])]
    solved = linprog(
        [cost[each] for each in flat],
        A_ub=[[float(size[each]) for each in flat]],
        b_ub=[float(room)],
        A_eq=[[float(row == at) for row, _ in flat] for at in range(ROWS)],
        b_eq=[1.0] * ROWS,
    )
    assert (found is None) == (solved.status == 2)
    if found is not None:
        assert found.bound == pytest.approx(solved.fun)
        assert total(size, found.choice) <= room
        assert total(cost, found.choice) >= found.bound - 1e-9
        assert found.price >= 0
