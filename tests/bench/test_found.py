"""bench.found gives what its docstring says."""

from bench.found import cases, row_of
from penstock.schedule import v_half, zb_v


def test_found_is_never_longer_than_published_nor_shorter_than_can_be():
    for published in (v_half(6, 6), zb_v(6, 6)):
        row = row_of(published, moves=2000, seeds=2)
        assert row["least"] <= row["found"] <= row["step"]
        assert bool(row["orders"]) == (row["found"] < row["step"])
    assert row["step"] == row["least"]  # ZB-V: nothing is shorter


def test_cases_are_of_three_to_six_ranks():
    assert {case.num_ranks for case in cases()} == {3, 4, 5, 6}
