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


def promised(usd, stretches, job, in_order=()):
    order = np.array(in_order, float)
    return promise_of(usd, order, past(stretches * DAY_S), job, deadline_s=DAY_S)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_eight_in_ten_that_come_are_inside(seed, stretches):
    """As many stretches as the past has, and one more: from one distribution."""
    random = np.random.default_rng(seed)
    kept = []
    for _ in range(200):
        seen, comes = random.uniform(20, 60, stretches), random.uniform(20, 60)
        one = promised(seen, stretches, plain_job(50))
        kept.append(one.low_usd <= comes <= one.high_usd)
    assert np.mean(kept) > SHARE - 0.12


def test_one_stretch_promises_no_less_than_what_the_work_can_cost():
    job = plain_job(100)
    one = promised(np.array([50.0]), 1, job)
    assert one.stretches == 1
    assert one.low_usd == pytest.approx(4 * 1.0 * 10)
    assert one.high_usd == pytest.approx(4 * 3.0 * (10 + 0.1))
    assert one.low_usd < one.mean_usd < one.high_usd


def test_a_long_past_promises_what_it_was():
    usd = np.linspace(10, 20, 1001)
    one = promised(usd, 1e5, plain_job(50))
    assert (one.low_usd, one.mean_usd, one.high_usd) == pytest.approx((11, 15, 19), rel=1e-3)


def test_quarters_that_differ_widen_what_is_promised():
    usd = np.linspace(40, 44, 1001)
    calm = promised(usd, 1e5, plain_job(100), np.tile([41.0, 43.0], 20))
    drifts = promised(usd, 1e5, plain_job(100), np.repeat([40.0, 44.0, 48.0, 52.0], 10))
    assert (calm.low_usd, calm.high_usd) == pytest.approx((40.4, 43.6), abs=0.01)
    assert drifts.high_usd == pytest.approx(43.6 + 1.638 * 5.164 * 1.118, abs=0.01)
    assert drifts.low_usd == 40  # the work cannot cost less
