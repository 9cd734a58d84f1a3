"""The bench of the exact optimum: the same cases each time, and rows that say what is known."""

import itertools

from bench.exact import LARGE, cases, row


def test_cases_are_the_same_each_time_and_end_with_the_large_ones():
    assert list(cases(5)) == list(cases(5))
    assert [case[:2] for case in cases(5)][5:] == [LARGE] * 3
    assert all(case[3] >= case[0] for case in cases(50))


def test_ratio_is_of_the_optimum_where_it_is_proved():
    for case in itertools.islice(cases(6), 6):
        figures = row(case, 5.0)
        assert figures["bound"] <= figures["exact"] <= figures["greedy"]
        assert figures["proved"]
        assert 1 <= figures["ratio"] == figures["greedy"] / figures["exact"] <= 1.017
        assert figures["greedy_ms"] > 0


def test_large_cases_are_only_timed():
    *_, large = cases(0)
    assert set(row(large, 5.0)) == {
        "stages", "micro_batches", "seconds", "limit", "greedy_ms", "greedy"
    }  # fmt: skip
