"""search.shortest: steps are those of playing the orders, and what is found is never worse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    SCHEDULES,
    Seconds,
    interleaved,
    peak_activations,
    v_half,
    v_min,
    zb_greedy,
)
from penstock.search.shortest import Requirements, anneal, built_in, least_s, timed
from tests.draws import examples

BUILDERS = [m for m in SCHEDULES if not m(2, 2).has_updates and m.__name__ != "forward_only"]


def played_s(schedule, seconds):
    """Return the end of the step: every rank in its order, every action after what it needs."""
    stages, ends = schedule.num_stages, {}
    took = {}
    for kind, value in zip("FIW", seconds[:3], strict=True):
        for stage in range(stages):
            took[kind, stage] = value[stage] if isinstance(value, tuple) else value
    for stage in range(stages):
        took["B", stage] = took["I", stage] + took["W", stage]
    left = [[(kind, stage, m) for kind, stage, m in order] for order in schedule.orders]
    clock = [0.0] * len(left)
    while any(left):
        before = len(ends)
        for rank, order in enumerate(left):
            while order:
                kind, stage, m = order[0]
                if kind == "W":
                    needs = [("I", stage, m)]
                elif kind == "F":
                    needs = [("F", stage - 1, m)] if stage else []
                else:
                    needs = [("F", stage, m)]
                    needs += [("gradient", stage + 1, m)] if stage + 1 < stages else []
                if any(need not in ends for need in needs):
                    break
                ready = [end + seconds[3] * (home != rank) for end, home in map(ends.get, needs)]
                clock[rank] = max([clock[rank], *ready]) + took[kind, stage]
                ends[order.pop(0)] = clock[rank], rank
                if kind in "IB":
                    ends["gradient", stage, m] = clock[rank], rank
        assert len(ends) > before
    return max(clock)


@st.composite
def cases(draw):
    """Return a schedule of any sort, and seconds of its stages and messages."""
    stages = draw(st.integers(1, 5))
    times = st.tuples(*[st.integers(1, 9)] * stages)
    made = draw(st.sampled_from(BUILDERS))(stages, draw(st.integers(1, 5)))
    return made, Seconds(draw(times), draw(times), draw(times), draw(st.sampled_from([0, 0.5, 3])))


@given(cases())
def test_step_is_that_of_playing_the_orders(case):
    schedule, seconds = case
    assert timed(schedule, seconds).step_s == pytest.approx(played_s(schedule, seconds))
    assert least_s(schedule, seconds) <= played_s(schedule, seconds) + 1e-9


@examples(10)
@given(cases(), st.integers(0, 2))
def test_annealed_is_no_longer_and_holds_no_more(case, more):
    start, seconds = case
    limit = max(peak_activations(start)) + more
    sizes = start.num_stages, start.num_micro_batches, start.num_ranks
    found = anneal([start], Requirements(*sizes, limit, seconds), lambda: True)
    assert found.step_s == pytest.approx(played_s(found.schedule, seconds))
    assert found.step_s <= played_s(start, seconds) + 1e-9
    assert max(peak_activations(found.schedule)) <= limit
    assert found.schedule.stage_ranks == start.stage_ranks


def test_rounds_go_on_until_it_is_over_from_each_start_in_turn():
    starts, asked = [v_half(8, 8), v_min(8, 8)], []

    def is_over():
        asked.append(1)
        return len(asked) == 2

    given_to = Requirements(8, 8, 4, 6, Seconds())
    found = anneal(starts, given_to, is_over)
    assert len(asked) == 2
    assert found.step_s <= min(played_s(start, Seconds()) for start in starts)


def test_each_start_has_a_round():
    starts = [interleaved(8, 8, num_ranks=4), v_half(8, 8)]  # the first keeps its backwards whole
    found = anneal(starts, Requirements(8, 8, 4, 11, Seconds()), lambda: True)
    assert found.schedule.stage_ranks == starts[1].stage_ranks
    assert found.step_s < played_s(starts[0], Seconds())


def test_built_in_ones_are_made_for_what_is_given_and_fit():
    seconds = Seconds((1.0, 2.0, 1.0, 3.0), 2.0, 1.0, 0.5)
    known = built_in(Requirements(4, 6, 4, 3, seconds))
    names = [each.schedule.name for each in known]
    assert [each.step_s for each in known] == sorted(played_s(e.schedule, seconds) for e in known)
    assert "gpipe" not in names  # it holds six
    assert "one_f_one_b" not in names  # it holds four
    greedy = next(each.schedule for each in known if each.schedule.name == "zb_greedy")
    assert greedy == zb_greedy(4, 6, seconds=seconds, limit=3)
    assert all(max(peak_activations(each.schedule)) <= 3 for each in known)
    halves = built_in(Requirements(8, 6, 4, 99, seconds._replace(forward_s=1.0)))
    assert {"v_half", "zb_v", "interleaved"} <= {each.schedule.name for each in halves}
    assert {each.schedule.num_ranks for each in halves} == {4}
    assert {len(r) for each in halves for r in each.schedule.stage_ranks} == {1}


def test_nothing_to_begin_with_is_said():
    with pytest.raises(ScheduleError, match="no built-in schedule holds at most 1 activations"):
        anneal([], Requirements(4, 6, 4, 1, Seconds()), lambda: True)
