"""The curve of a loss: a known one is followed to its target, and what cannot be told is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.curve import LossPoint, steps_to
from tests.draws import examples


@examples(25)
@given(st.floats(0.0, 2.0), st.floats(0.5, 5.0), st.sampled_from([0.1, 0.3, 0.7, 1.0]), st.data())
def test_target_of_a_known_curve_is_found(floor, scale, power, data):
    """Loss floor + scale (t + 1)^-power, to a point up to five times as far as what is known."""
    points = [LossPoint(t, floor + scale * (t + 1) ** -power, 4) for t in range(120)]
    until = data.draw(st.integers(130, 600))
    target = floor + scale * (until + 1) ** -power
    assert steps_to(points, target) == pytest.approx(until, rel=0.1)


def test_what_is_below_the_floor_or_hardly_begun_is_not_told():
    points = [LossPoint(t, 1.0 + (t + 1) ** -1.0, 4) for t in range(100)]
    assert steps_to(points, 0.5) is None
    assert steps_to(points[:7], 1.5) is None


def test_loss_that_rises_is_not_told():
    assert steps_to([LossPoint(t, 1.0 + t / 10, 4) for t in range(30)], 0.5) is None


def test_more_micro_batches_count_for_more():
    """Two curves at the same steps: the one that is of a hundred times as many is followed."""
    one = [LossPoint(t, 3.0 * (t + 1) ** -0.5, 1000) for t in range(60)]
    other = [LossPoint(t, 9.0 * (t + 1) ** -0.1, 1) for t in range(60)]
    mixed = [point for pair in zip(other, one, strict=True) for point in pair]
    assert steps_to(mixed, 3.0 * 101**-0.5) == pytest.approx(100, rel=0.15)
