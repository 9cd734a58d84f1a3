"""bench.found gives what its docstring says."""

import math

import pytest

from bench.found import LIMITS, Case, cases, row_of
from bench.published import V_CODE, v_shaped
from penstock.schedule import Schedule, peak_activations, steady_s


def test_rows_are_within_their_limits_and_above_their_bounds():
    for per_rank in (2, 4):
        row = row_of(Case(3, 4, per_rank), tries=8, within_s=0.5)
        made = Schedule.parse(row["orders"])
        assert max(peak_activations(made)) <= 4 * per_rank / 2
        assert steady_s(made) * 2 / per_rank == row["steady"]
        assert row["drained_bound"] <= row["drained"] <= row["drained_code"] == 41
        assert row["steady_bound"] <= row["steady"] <= row["steady_code"] == 41


def test_without_time_to_prove_the_bound_is_the_work():
    row = row_of(Case(4, 3, 2), tries=8, within_s=0.0)
    assert (row["drained_bound"], row["steady_bound"]) == (51, 48)
    assert row["drained_code"] is None  # below V-Min


def test_cases_are_of_four_to_sixteen_ranks_at_the_published_limits_and_between():
    assert {case.ranks for case in cases(LIMITS)} == {4, 6, 8, 16}
    for ranks, limits in LIMITS.items():
        half, third = ranks + 1 + (ranks % 2 == 0), 2 * ((ranks + 4) // 3)
        assert {third, half, 2 * ranks} <= set(limits)
        assert set(limits) & V_CODE[ranks].keys() >= {third, half, 2 * ranks}


@pytest.mark.long
def test_nothing_is_longer_than_the_authors_codes():
    rows = list(v_shaped())
    assert all(math.isfinite(row.ours) and row.ours <= row.published for row in rows)
    assert {row.schedule for row in rows} == {"v_half", "v_min", "found"}
