"""The estimates of the noise scale: unbiased, and what they say of other batches."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProfileError
from penstock.profile.noise import (
    GradientNoise,
    NoiseTold,
    gain,
    noise_of,
    pooled_scale,
    steps_needed,
)


@given(st.integers(2, 8), st.integers(1, 5), st.floats(0.1, 10), st.floats(0.0, 10))
def test_expected_squares_give_gradient_and_variance_back(count, samples, gradient_sq, variance):
    small, large = (gradient_sq + variance / n for n in (samples, count * samples))
    found = GradientNoise(3, count, samples, small, large)
    assert found.gradient_sq == pytest.approx(gradient_sq)
    assert found.variance == pytest.approx(variance, abs=1e-6)
    assert found.scale == pytest.approx(variance / gradient_sq, abs=1e-6)
    assert found.batch == count * samples


def test_estimates_have_no_bias():
    """Mean over 20,000 steps of 3 micro-batches of 2 samples, of gradients with known moments."""
    draw = np.random.default_rng(5)
    g = 0.5 + 2.0 * draw.standard_normal((20_000, 3, 2, 4))
    each = g.mean(2)
    small, large = (each**2).sum(2).mean(1), (each.mean(1) ** 2).sum(1)
    found = noise_of([NoiseTold(tuple(small), tuple(large))], 3, 2)
    assert found.gradient_sq == pytest.approx(4 * 0.25, rel=0.03)
    assert found.variance == pytest.approx(4 * 4.0, rel=0.03)


def test_parts_of_ranks_add_up_and_odd_steps_are_left_out():
    told = [
        NoiseTold((1.0, math.inf, 3.0), (0.5, 1.0, 1.0)),
        NoiseTold((1.0, 1.0, 1.0), (0.0,) * 3),
    ]
    found = noise_of(told, 2, 1)
    assert (found.steps, found.small, found.large) == (2, 3.0, 0.75)


@pytest.mark.parametrize(
    ("told", "count"),
    [
        ([], 2),
        ([NoiseTold()], 2),
        ([NoiseTold((1.0,), (1.0,)), NoiseTold()], 2),
        ([NoiseTold((1.0,), (1.0,))], 1),
        ([NoiseTold((math.nan,), (1.0,))], 2),
    ],
)
def test_too_little_tells_nothing(told, count):
    assert noise_of(told, count, 4) is None


def test_gradient_below_the_noise_has_no_scale():
    assert GradientNoise(1, 2, 1, 4.0, 1.0).scale == math.inf


def test_batches_far_above_the_scale_gain_no_steps_and_far_below_all():
    assert steps_needed(100, 1e6, 10.0, other=2e6) == pytest.approx(100, rel=1e-4)
    assert steps_needed(100, 1e-3, 10.0, other=2e-3) == pytest.approx(50, rel=1e-3)
    assert steps_needed(100, 8, math.inf, other=16) == 50
    assert steps_needed(100, 10.0, 10.0, other=20.0) == pytest.approx(75)


@pytest.mark.parametrize("wrong", [(0, 2, 1), (1, 1, 1), (1, 2, 0)])
def test_counts_that_tell_nothing_are_refused(wrong):
    with pytest.raises(ProfileError, match="tell nothing"):
        GradientNoise(*wrong, 1.0, 1.0)


@given(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0.0, 1e6))
def test_gain_is_how_many_steps_one_replaces(batch, other, scale):
    """A target of n steps without noise takes n (1 + scale / B) with B samples."""
    worth = gain(batch, other, scale)
    assert worth == pytest.approx((1 + scale / batch) / (1 + scale / other))
    assert min(1.0, other / batch) * 0.999 <= worth <= max(1.0, other / batch) * 1.001
    assert gain(batch, other, math.inf) == pytest.approx(other / batch)


def test_pooled_scale_is_that_of_pooled_squares():
    """Of unlike micro-batches, exact moments: |g|^2 = 2 and S = 30; one is watched more often."""
    found = [
        GradientNoise(5, 4, 3, 2 + 30 / 3, 2 + 30 / 12),
        GradientNoise(50, 2, 8, 2 + 30 / 8, 2 + 30 / 16),
    ]
    assert pooled_scale(found) == pytest.approx(15.0)
    one, other = GradientNoise(1, 2, 1, 4.0, 3.0), GradientNoise(3, 2, 1, 8.0, 5.0)
    assert pooled_scale([one, other]) == pytest.approx((1 * 2 + 3 * 6) / (1 * 2 + 3 * 2))
    assert math.isnan(pooled_scale([]))
    assert math.isinf(pooled_scale([GradientNoise(1, 2, 1, 4.0, 1.0)]))
