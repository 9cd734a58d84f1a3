"""Annealing shortens what can be shortened, and never holds more or takes longer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    SCHEDULES,
    Seconds,
    bubble_fraction,
    double_buffered,
    dual_pipe_v,
    gpipe,
    interleaved,
    peak_activations,
    zb_h1,
    zb_v,
)
from penstock.schedule.anneal import annealed
from tests.draws import examples
from tests.search.test_shortest import played_s

DRAINING = [m for m in SCHEDULES if not m(1, 1).has_updates and m.__name__ != "forward_only"]


def step_s(schedule, f=1.0, i=1.0, w=1.0) -> float:
    _, ends_s = schedule.play((f, i + w, i, w, 0.0))
    return float(ends_s.max())


@examples(20)
@given(st.sampled_from(DRAINING), st.integers(1, 5), st.integers(1, 7), st.sampled_from([0, 1, 4]))
def test_step_and_activations_never_grow(make, num_stages, m, message_s):
    before = make(num_stages, m)
    weights_s = tuple(9.0 if stage % 2 else 0.5 for stage in range(num_stages))
    seconds = Seconds((2.0,) * (num_stages - 1) + (5.0,), 3.0, weights_s, message_s)
    after = annealed(before, seconds=seconds, moves=200)
    assert played_s(after, seconds) <= played_s(before, seconds) + 1e-9
    assert max(peak_activations(after)) <= max(peak_activations(before))
    assert after.stage_ranks == before.stage_ranks
    for one, other in zip(before.orders, after.orders, strict=True):
        assert sorted(map(str, one)) == sorted(map(str, other))


def test_whole_backwards_beside_split_ones_stay_what_they_are():
    before, slow = dual_pipe_v(4, 6), Seconds(message_s=1.0)
    assert {action.kind for order in before.orders for action in order} == set("FBIW")
    after = annealed(before, seconds=slow, moves=5_000)
    assert played_s(after, slow) < played_s(before, slow)


def test_whole_backwards_take_the_seconds_of_both_halves():
    before, seconds = interleaved(6, 6), Seconds(1.0, 1.0, (0.5, 9.0) * 3, 0.5)
    assert played_s(before, seconds) == 123
    assert played_s(annealed(before, seconds=seconds, moves=20_000), seconds) <= 119


def test_messages_are_shortened_too():
    before, slow = zb_v(6, 6), Seconds(message_s=1.0)
    assert played_s(annealed(before, moves=40_000), slow) == played_s(before, slow) == 48
    assert played_s(annealed(before, seconds=slow, moves=40_000), slow) <= 47


def test_gpipe_with_less_memory_is_refused_and_with_as_much_stays_as_short():
    with pytest.raises(ScheduleError, match="a rank holds 6 activations of 5"):
        annealed(gpipe(2, 6), limit=5)
    assert step_s(annealed(gpipe(2, 6), moves=500)) == step_s(gpipe(2, 6))


def test_same_seed_gives_the_same_schedule():
    one, other = (annealed(zb_h1(3, 4), moves=3000, seed=7) for _ in range(2))
    assert one == other
    assert bubble_fraction(one) <= bubble_fraction(zb_h1(3, 4))


def test_schedule_that_does_not_drain_is_refused():
    with pytest.raises(ScheduleError, match="double_buffered is of several steps"):
        annealed(double_buffered(2, 2))
