"""The bench of the exact optimum: the same cases each time, and rows that say what is known."""

import itertools

import pytest

from bench.exact import LARGE, cases, offload_row, row, summary


def test_cases_are_the_same_each_time_and_hold_both_more_and_less_than_1f1b():
    assert list(cases(5, 4)) == list(cases(5, 4))
    sizes = [case[:2] for case in cases(5, 4)]
    assert sizes[5:8] == [*sizes[-2:], LARGE] == [LARGE] * 3
    assert all(case[3] >= case[0] for case in list(cases(50, 50))[:53])
    assert all(1 <= case[3] < case[0] for case in list(cases(50, 50))[53:])


@pytest.mark.long
def test_ratio_is_of_the_optimum_where_it_is_proved():
    for case in itertools.chain(itertools.islice(cases(6, 0), 0, 6, 3), list(cases(0, 8))[3:-2:3]):
        figures = row(case, 5.0)
        assert figures["bound"] <= figures["exact"] <= figures["greedy"]
        assert figures["proved"]
        assert 1 <= figures["ratio"] == figures["greedy"] / figures["exact"] <= 1.017
        assert figures["greedy_ms"] > 0


def test_large_cases_are_only_timed():
    *_, large = cases(0, 0)
    assert set(row(large, 5.0)) == {
        "stages", "micro_batches", "seconds", "limit", "greedy_ms", "greedy"
    }  # fmt: skip


def test_summary_tells_how_far_the_greedy_is_above_and_below_the_memory_of_1f1b():
    common = {"stages": 3, "greedy_ms": 1.0}
    rows = [
        {**common, "limit": 3, "ratio": 1.01, "proved": True},
        {**common, "limit": 4, "ratio": 1.5, "proved": False},
        {**common, "limit": 2, "ratio": 1.02, "proved": True},
        {**common, "limit": 3, "greedy_ms": 7.25},
    ]
    assert summary(rows).splitlines() == [
        "limits from S on: proved 1 of 2; worst ratio 1.0100",
        "limits below S: proved 1 of 1; worst ratio 1.0200",
        "greedy 7.2 ms at most",
    ]


@pytest.mark.long
def test_steps_with_offload_lie_between_those_without_it_and_without_a_limit():
    figures = offload_row((2, 4, 1), 10.0)
    steps = [figures[name] for name in ("none", "twice", "once", "half", "free")]
    assert steps == pytest.approx(sorted(steps, reverse=True))
    assert steps[0] > steps[3]
    assert figures["unproved"] == []
    assert len(figures["copies"]) == 3
