"""bench.latency gives what its docstring says."""

import pytest

from bench import latency
from penstock.profile.latency import NUM_PARTS, TimedSegment, learned


def test_errors_are_of_segments_of_their_sum_and_of_what_is_covered():
    one, two = (1.0,) + (0.0,) * (NUM_PARTS - 1), (0.0, 1.0) + (0.0,) * (NUM_PARTS - 2)
    tested = [TimedSegment(one, 2.0), TimedSegment(two, 0.5)]
    mape, step, covered = latency.errors(learned([]), tested)
    assert (mape, covered) == (pytest.approx((0.5 + 1.0) / 2), 1.0)
    assert step == pytest.approx(2.0 / 2.5 - 1 + 0.4)


def test_rows_leave_out_the_model_that_is_predicted():
    """Each of two models has another speed, so only with its own samples is it predicted well."""
    parts = (1.0,) * NUM_PARTS
    found = {"a": [TimedSegment(parts, 7.0)] * 3, "b": [TimedSegment(parts, 28.0)] * 3}
    rows = {row["samples"]: row for row in latency.rows("d", found, 2)}
    assert list(rows) == list(latency.COUNTS)
    assert rows[0]["mape"] == pytest.approx((0.0 + 0.75) / 2)
    assert rows[32]["mape"] == pytest.approx((3.0 + 0.75) / 2, rel=0.05)
