"""Promise: kept by stretches that come from where the past does; wide where the past is short."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.market import HOUR_S
from penstock.fleet.promise import SHARE, promise_of
from tests.fleet.markets import plain_job, slotted

DAY_S = 24 * HOUR_S


def past(lasts_s):
    market = slotted([[True], [False]])
    return type(market)(
        market.pools, market.times_s, market.machines, market.usd_h, market.gone, lasts_s
    )


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_eight_in_ten_that_come_are_inside(seed, stretches):
    """As many stretches as the past has, and one more: from one distribution."""
    random = np.random.default_rng(seed)
    kept = []
    for _ in range(200):
        seen, comes = random.uniform(20, 60, stretches), random.uniform(20, 60)
        one = promise_of(seen, past(stretches * DAY_S), plain_job(50), DAY_S)
        kept.append(one.low_usd <= comes <= one.high_usd)
    assert np.mean(kept) > SHARE - 0.12


def test_one_stretch_promises_no_less_than_what_the_work_can_cost():
    job = plain_job(100)
    one = promise_of(np.array([50.0]), past(DAY_S), job, DAY_S)
    assert one.stretches == 1
    assert one.low_usd == pytest.approx(4 * 1.0 * 10)
    assert one.high_usd == pytest.approx(4 * 3.0 * (10 + 0.1))
    assert one.low_usd < one.mean_usd < one.high_usd


def test_a_long_past_promises_what_it_was():
    usd = np.linspace(10, 20, 1001)
    one = promise_of(usd, past(1e5 * DAY_S), plain_job(50), DAY_S)
    assert (one.low_usd, one.mean_usd, one.high_usd) == pytest.approx((11, 15, 19), rel=1e-3)
