"""Volatile ranks: exact expectations, the bound against SGD, bids against all bids and futures."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FleetError
from penstock.fleet.volatile import (
    Descent,
    Prices,
    bids_of,
    cheapest_growth,
    expected_inverse,
    grown,
    idle_factor,
    inverse_of,
    single_bid,
    two_bids,
)

chances = st.fractions(min_value=Fraction(1, 50), max_value=1)


def binomial(ranks: int, chance: Fraction) -> list[Fraction]:
    gone = 1 - chance
    return [math.comb(ranks, y) * chance**y * gone ** (ranks - y) for y in range(ranks + 1)]


@given(st.integers(1, 60), chances)
def test_inverse_is_that_of_the_binomial_in_fractions(ranks, chance):
    shares = binomial(ranks, chance)
    exact = sum(share / y for y, share in enumerate(shares) if y) / (1 - shares[0])
    assert expected_inverse(ranks, float(chance)) == pytest.approx(float(exact), rel=1e-12)
    assert inverse_of([float(share) for share in shares]) == pytest.approx(float(exact), rel=1e-12)
    assert idle_factor(ranks, float(chance)) == pytest.approx(float(1 / (1 - shares[0])), rel=1e-12)


@given(st.integers(1, 3000), st.floats(1e-9, 1.0))
def test_inverse_is_within_its_limits_for_any_size(ranks, chance):
    """Jensen: never below 1 / E[y | y > 0], and never above one rank's."""
    inverse = expected_inverse(ranks, chance)
    mean = ranks * chance * idle_factor(ranks, chance)
    assert 1 / mean * (1 - 1e-9) <= inverse <= 1 + 1e-12


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_rank_is_refused(ranks):
    with pytest.raises(FleetError, match="train nothing"):
        expected_inverse(ranks, 0.5)


@pytest.mark.parametrize("chance", [0.0, -0.1, 1.1, math.nan])
def test_what_is_no_chance_is_refused(chance):
    with pytest.raises(FleetError, match="chance"):
        idle_factor(3, chance)


@pytest.mark.parametrize("chances", [[], [1.0], [1.0, 0.0], [0.5, -0.1, 1.0]])
def test_what_is_no_distribution_of_ranks_is_refused(chances):
    with pytest.raises(FleetError, match="no number of ranks"):
        inverse_of(chances)


# the error


def test_error_is_the_sum_of_the_paper():
    descent, inverses = Descent(3.0, 0.9, 0.2), [1.0, 0.5, 0.25, 0.5]
    steps = len(inverses)
    terms = [0.9 ** (steps - j) * inverse for j, inverse in enumerate(inverses, 1)]
    assert descent.error(inverses) == pytest.approx(0.9**steps * 3.0 + 0.2 * sum(terms))


@given(st.floats(0.5, 0.99), st.floats(0.0, 0.1), st.floats(0.1, 1.0), st.floats(0.01, 1.2))
def test_steps_are_the_fewest_that_reach_the_target(beta, noise, inverse, target):
    descent = Descent(1.0, beta, noise)
    if descent.floor(inverse) >= min(target, 1.0) * 0.999:
        return
    steps = descent.steps(target, inverse)
    assert descent.error([inverse] * steps) <= target * (1 + 1e-9)
    assert steps == 0 or descent.error([inverse] * (steps - 1)) > target * (1 - 1e-9)


def test_target_below_the_floor_is_refused_with_the_floor():
    with pytest.raises(FleetError, match=r"stays above 0\.5"):
        Descent(1.0, 0.9, 0.1).steps(0.4, 0.5)


@pytest.mark.parametrize("wrong", [(0, 0.9, 0), (1, 1.0, 0), (1, 0.0, 0), (1, 0.9, -1)])
def test_what_is_no_descent_is_refused(wrong):
    with pytest.raises(FleetError, match="no descent"):
        Descent(*wrong)


def test_sgd_over_ranks_that_come_and_go_meets_error_and_deadline():
    """G = |w|^2 / 2 (c = L = 1), a rank's gradient is w + noise; beta = 1 - rate * (2 - rate)."""
    rate, dims, ranks, chance, target = 0.05, 20, 8, 0.6, 0.15
    descent = Descent(0.5 * dims, (1 - rate) ** 2, rate**2 * dims / 2)
    steps = descent.steps(target, expected_inverse(ranks, chance))
    deadline = 1.05 * steps * idle_factor(ranks, chance)
    draw, ends = np.random.default_rng(7), []
    w, tries = np.ones((4000, dims)), np.zeros(4000)
    for _ in range(steps):
        there = draw.binomial(ranks, chance, len(w))
        tries += 1
        while (none := there == 0).any():
            there[none] = draw.binomial(ranks, chance, none.sum())
            tries[none] += 1
        w -= rate * (w + draw.standard_normal(w.shape) / np.sqrt(there)[:, None])
        ends.append(0.5 * (w**2).sum(1).mean())
    assert ends[-1] == pytest.approx(target, rel=0.03)
    assert ends[-2] > 0.98 * target
    assert (tries <= deadline).mean() > 0.95
    assert tries.mean() == pytest.approx(steps * idle_factor(ranks, chance), rel=1e-3)


# more ranks


def test_ranks_grow_by_the_factor_and_are_whole():
    assert grown(2, 1.5, 4) == (2, 3, 5, 7)
    assert grown(3, 1.0, 3) == (3, 3, 3)
    with pytest.raises(FleetError, match="cannot grow"):
        grown(2, 0.9, 3)


@given(st.floats(0.3, 1.0), st.floats(0.05, 0.5))
def test_growth_costs_no_more_than_the_best_fixed_number(chance, target):
    descent, most = Descent(1.0, 0.9, 0.05), 12
    fixed = []
    for ranks in range(1, most + 1):
        inverse = expected_inverse(ranks, chance)
        if descent.floor(inverse) < target and (steps := descent.steps(target, inverse)) <= 60:
            fixed.append(ranks * steps)
    found = cheapest_growth(descent, target, survival=chance, most_steps=60, most_ranks=most)
    assert (found is None) <= (not fixed)
    if found is not None:
        counts = grown(found.first, found.factor, found.steps)
        assert sum(counts) == found.rank_steps <= min(fixed, default=math.inf)
        assert max(counts) <= most
        assert descent.error(expected_inverse(n, chance) for n in counts) <= target


def test_growth_beats_a_fixed_number_where_noise_matters_last():
    found = cheapest_growth(
        Descent(1.0, 0.95, 0.05), 0.1, survival=0.8, most_steps=200, most_ranks=40
    )
    assert found is not None
    assert found.factor > 1


# bids

price = st.integers(1, 9).map(lambda tenth: tenth / 10)
histories = st.lists(st.tuples(price, st.integers(1, 5)), min_size=1, max_size=8)


@given(histories, st.integers(1, 5), st.floats(0.2, 1.1), st.floats(1.0, 3.0))
def test_two_bids_are_the_cheapest_of_all_pairs(history, ranks, busy, more):
    prices, busy_s, inverse = Prices.of(history), busy * 3600, more / ranks
    best = math.inf
    for first in range(1, ranks + 1):
        for high in prices.usd_per_hour:
            for low in (0.0, *prices.usd_per_hour):
                if low <= high and (first < ranks or low == high):
                    one = bids_of(prices, (high, low), first=first, ranks=ranks, busy_s=busy_s)
                    if one.inverse <= inverse + 1e-9 and one.seconds <= 3600 * (1 + 1e-9):
                        best = min(best, one.usd)
    found = two_bids(prices, ranks, inverse, busy_s=busy_s, deadline_s=3600.0)
    assert (math.inf if found is None else found.usd) == pytest.approx(best)
    if found is not None:
        assert found.inverse <= inverse + 1e-9
        assert found.seconds <= 3600 * (1 + 1e-9)


@given(histories, st.integers(1, 5), st.floats(0.2, 1.1))
def test_single_bid_is_the_lowest_that_meets_the_deadline(history, ranks, busy):
    prices = Prices.of(history)
    found = single_bid(prices, ranks, busy_s=busy * 3600, deadline_s=3600.0)
    in_time = [p for p in prices.usd_per_hour if busy <= prices.share(p) + 1e-9]
    assert (None if found is None else found.high_usd) == min(in_time, default=None)


def test_closed_forms_of_bids_are_those_of_many_futures():
    """A future: each step waits, hour by hour, for a price at or below the higher bid."""
    draw, steps, ranks, first = np.random.default_rng(3), 40, 6, 2
    levels, weights = np.array([0.2, 0.3, 0.5, 0.9]), np.array([0.3, 0.3, 0.2, 0.2])
    prices = Prices.of(zip(levels, weights * 3600, strict=True))
    one = bids_of(prices, (0.5, 0.3), first=first, ranks=ranks, busy_s=steps * 3600.0)
    seen = draw.choice(levels, p=weights, size=(4000, 200))
    runs = seen <= 0.5
    is_step = runs & (runs.cumsum(1) <= steps)
    assert is_step.sum(1).min() == steps
    there = np.where(seen <= 0.3, ranks, first)
    ends = is_step.shape[1] - is_step[:, ::-1].argmax(1)
    assert one.seconds / 3600 == pytest.approx(ends.mean(), rel=0.01)
    assert one.usd == pytest.approx((seen * there * is_step).sum(1).mean(), rel=0.01)
    assert one.inverse == pytest.approx((1 / there)[is_step].mean(), rel=0.01)


@given(histories)
def test_inverse_of_a_share_is_the_lowest_bid(history):
    prices = Prices.of(history)
    for bid in prices.usd_per_hour:
        assert prices.least(prices.share(bid)) == bid
    assert prices.least(0.0) == prices.usd_per_hour[0]
    assert prices.paid(1.0) == pytest.approx(
        sum(p * s for p, s in history) / sum(s for _, s in history)
    )


@pytest.mark.parametrize(
    "wrong", [((), ()), ((0.2, 0.1), (0.5, 0.5)), ((-0.1,), (1.0,)), ((0.1, 0.2), (0.5, 0.6))]
)
def test_what_is_no_distribution_of_prices_is_refused(wrong):
    with pytest.raises(FleetError):
        Prices(*wrong)


def test_bids_in_another_order_or_below_every_price_are_refused():
    prices = Prices.of([(0.3, 1.0)])
    with pytest.raises(FleetError, match="no two groups"):
        bids_of(prices, (0.3, 0.4), first=1, ranks=2, busy_s=1.0)
    with pytest.raises(FleetError, match="below every price"):
        bids_of(prices, (0.2, 0.1), first=1, ranks=2, busy_s=1.0)
    with pytest.raises(FleetError, match=r"a price of -0\.3 dollars"):
        Prices.of([(-0.3, 1.0)])
