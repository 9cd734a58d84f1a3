"""Steady: seconds per step without a barrier, beside steps unrolled one after the other."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    SCHEDULES,
    Schedule,
    Seconds,
    find,
    one_f_one_b,
    steady_s,
    zb_h1,
    zb_h2,
)
from penstock.schedule.asynchronous import pipedream
from tests.draws import examples
from tests.schedule.toy import UNIT, Action, actions, needs, simulated

ONE_STEP = [
    builder.__name__
    for builder in SCHEDULES
    if builder.__name__ != "forward_only" and not builder(2, 2).has_updates
]
times = st.integers(0, 9)
TURNS = 12  # a multiple of every number of ranks of a cycle, where there are at most four


def repeated(schedule, num_steps):
    """Return so many steps of `schedule`, which is one step, as a window that lists the updates."""
    rows = []
    for order in schedule.orders:
        stages, window = sorted({action.stage for action in order}), []
        for step in range(num_steps):
            first = step * schedule.num_micro_batches
            window += [Action(kind, stage, first + m) for kind, stage, m in order]
            window += [Action("U", stage, step) for stage in stages]
        rows.append(tuple(window))
    return replace(schedule, orders=tuple(rows), num_steps=num_steps)


def unrolled(schedule, seconds, message_s, steps):
    """Return when all ranks have ended so many steps: the longest path, action by action."""
    f, i, w = (np.broadcast_to(row, schedule.num_stages) for row in seconds)
    table = {"F": f, "I": i, "W": w, "B": i + w, "U": 0 * f}
    orders, per_step = list(schedule.orders), schedule.num_micro_batches
    home = {action: rank for rank, order in enumerate(orders) for action in order}
    needed = {action: needs(action, orders, per_step) for order in orders for action in order}
    last = {
        (a.stage, rank): a for rank, order in enumerate(orders) for a in order if a.kind in "BW"
    }
    ended, begins, totals = {}, [0] * len(orders), []
    for _ in range(steps):
        ended.clear()
        clocks, at = list(begins), [0] * len(orders)
        while any(place < len(order) for place, order in zip(at, orders, strict=True)):
            for rank, order in enumerate(orders):
                while at[rank] < len(order) and all(n in ended for n in needed[order[at[rank]]]):
                    action = order[at[rank]]
                    for other in needed[action]:
                        is_sent = home[other] != rank and action.kind != "U"
                        clocks[rank] = max(clocks[rank], ended[other] + message_s * is_sent)
                    clocks[rank] += int(table[action.kind][action.stage])
                    ended[action] = clocks[rank]
                    at[rank] += 1
        begins = clocks
        for stage, homes in enumerate(schedule.stage_ranks):
            for rank in homes if len(homes) > 1 and not schedule.has_updates else ():
                sums = [ended[last[stage, other]] for other in homes if (stage, other) in last]
                begins[rank] = max([begins[rank], *sums])
        totals.append(max(begins))
    return totals


@functools.cache
def small(builder, stages, m):
    made = find(builder)(stages, m)
    return made if made.num_ranks <= 4 else find(builder)(4, m)


@examples(20)
@given(
    st.sampled_from([builder.__name__ for builder in SCHEDULES]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.tuples(times, times, times),
    st.integers(0, 3),
)
def test_seconds_per_step_are_those_of_steps_unrolled(name, stages, m, fiw, message_s):
    made = small(name, stages, m)
    totals = unrolled(made, fiw, message_s, 12 * TURNS)
    expected = (totals[-1] - totals[-1 - TURNS * 5]) / (TURNS * 5)
    assert steady_s(made, Seconds(*fiw, message_s)) == pytest.approx(expected / made.num_steps)


@pytest.mark.parametrize("name", [*ONE_STEP])
def test_simulator_takes_as_long_for_a_step_of_many(name):
    made = find(name)(4, 6)
    message_s = 0.5 * all(len(ranks) == 1 for ranks in made.stage_ranks)  # sums take messages too
    ends = [simulated(repeated(made, steps), UNIT, message_s=message_s) for steps in (6, 12)]
    assert steady_s(made, Seconds(message_s=message_s)) == (ends[1] - ends[0]) / 6


def test_two_ranks_in_turn_may_be_slower_than_any_alone():
    """Each works for two seconds; the first F of each goes to the other, which does it last."""
    made = Schedule(2, 2, (actions("F0.0 F1.1"), actions("F0.1 F1.0")))
    assert [steady_s(made, Seconds(message_s=s)) for s in (0, 5)] == [2, 7]


def test_mean_is_over_the_ranks_of_the_cycle():
    """Rank 1 does a third micro-batch: 9 seconds from rank 0 to it, 7 back."""
    orders = ("F0.0 F1.1", "F0.1 F1.0 F0.2 F1.2")
    assert steady_s(Schedule(2, 3, tuple(map(actions, orders))), Seconds(message_s=5)) == 8


def test_equally_long_paths_do_not_hide_the_cycle():
    """From rank 1 to 3 it is 4 + 4 + 2 seconds, back 4 + 2."""
    orders = ("F0.1", "F0.0 F2.1", "F1.0", "F1.1 F2.0")
    made = Schedule(3, 2, tuple(map(actions, orders)))
    assert steady_s(made, Seconds((0, 0, 2), message_s=4)) == 8


@st.composite
def passed_around(draw):
    """Return forwards whose micro-batches take any way over four ranks, each in any order."""
    ways = draw(st.lists(st.permutations(range(4)), min_size=2, max_size=4))
    cells = [(s, m, way[s]) for m, way in enumerate(ways) for s in range(4)]
    cells = draw(st.permutations(cells))
    orders = tuple(
        tuple(Action("F", s, m) for s, m, at in cells if at == rank) for rank in range(4)
    )
    try:
        return Schedule(4, len(ways), orders)
    except ScheduleError:  # some wait for each other
        return None


@examples(50)
@given(passed_around(), st.lists(times, min_size=4, max_size=4), st.integers(0, 9))
def test_cycles_over_many_ranks_are_found(made, forward_s, message_s):
    if made is not None:
        totals = unrolled(made, (forward_s, [0] * 4, [0] * 4), message_s, 14 * TURNS)
        expected = (totals[-1] - totals[-1 - 5 * TURNS]) / (5 * TURNS)
        assert steady_s(made, Seconds(forward_s, message_s=message_s)) == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(0, 6), times, times, times)
def test_1f1b_and_h1_keep_their_bubble_and_h2_has_what_the_paper_counts(s, more, f, i, w):
    w = min(f, i, w)
    m, work = 2 * s - 1 + more, f + i + w
    seconds = Seconds(f, i, w)
    assert steady_s(one_f_one_b(s, m), seconds) == m * work + (s - 1) * work
    assert steady_s(zb_h1(s, m), seconds) == m * work + (s - 1) * (f + i - w)
    assert steady_s(zb_h2(s, m), seconds) == m * work + (s - 1) * max(0, f + i - 2 * w)


def test_window_of_several_steps_is_one_long_step():
    assert steady_s(pipedream(3, 4, num_steps=5)) == (3 * 4 * 5 + 3 * 2) / 5


def test_seconds_below_zero_are_refused():
    with pytest.raises(ScheduleError, match="message_s is -1"):
        steady_s(zb_h1(2, 2), Seconds(message_s=-1))


def test_stage_that_lives_twice_waits_for_both_gradients():
    """Rank 0 could go on after B0.0: F0.0 F1.0 B1.0 B0.0 take six seconds."""
    orders = ("F0.0 B0.0", "F0.1 B0.1", "F1.0 B1.0 F1.1 B1.1")
    assert steady_s(Schedule(2, 2, tuple(map(actions, orders)))) == 1 + 1 + 2 + 1 + 2 + 2
