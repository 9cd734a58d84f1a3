import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import double_buffered, one_f_one_b, peak_activations, versions
from tests.schedule.toy import costs, picture, step

sizes, steps, seconds = st.integers(1, 7), st.integers(1, 5), st.integers(1, 9)
PRIME = 2**31 - 1


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_two_versions_are_alive_on_every_stage_for_every_size(num_steps):
    for num_stages, m in itertools.product(range(1, 14), range(1, 14)):
        schedule = double_buffered(num_stages, m, num_steps=num_steps)
        assert versions(schedule).alive == (2,) * num_stages


@given(sizes, sizes, steps)
def test_step_reads_the_weights_of_one_step_ago(num_stages, m, num_steps):
    table = versions(double_buffered(num_stages, m, num_steps=num_steps))
    for stage in range(num_stages):
        for micro_batch in range(m * num_steps):
            number = micro_batch // m
            assert table.forward[stage, micro_batch] == number - 1
            assert table.backward[stage, micro_batch] == number - 1
            assert table.step[stage, micro_batch] == number


@given(sizes, st.integers(0, 5), steps, seconds, seconds)
def test_window_fills_and_drains_once(num_stages, more, num_steps, f, b):
    m = max(1, num_stages - 1 + more)
    measured = step(double_buffered(num_stages, m, num_steps=num_steps), costs(f, b, 0))
    assert measured == (num_steps * m + num_stages - 1) * (f + b)


@given(sizes, sizes, steps)
def test_rank_holds_what_the_docstring_says(num_stages, m, num_steps):
    ahead = min(num_stages, m + 1)
    held = tuple(
        min(-(-(num_stages - rank) * ahead // num_stages), m * num_steps)
        for rank in range(num_stages)
    )
    schedule = double_buffered(num_stages, m, num_steps=num_steps)
    assert peak_activations(schedule) == held


@given(sizes, st.integers(1, 9))
def test_one_step_does_the_forwards_and_backwards_of_1f1b(num_stages, more):
    m = num_stages + more
    orders = double_buffered(num_stages, m, num_steps=1).orders
    without = tuple(tuple(a for a in order if a.kind != "U") for order in orders)
    assert without == tuple(one_f_one_b(num_stages, m).orders)


@given(sizes, sizes, steps)
def test_update_follows_the_last_backward_of_its_step_at_once(num_stages, m, num_steps):
    for rank, order in enumerate(double_buffered(num_stages, m, num_steps=num_steps).orders):
        words = list(map(str, order))
        for number in range(num_steps):
            update = words.index(f"U{rank}.{number}")
            assert words[update - 1] == f"B{rank}.{(number + 1) * m - 1}"


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, PRIME - 1))
def test_weights_are_those_of_the_rule_written_in_one_line(num_stages, m, num_steps, seed):
    """Stage s multiplies by its weight, so its gradient is what comes in times what comes back."""
    inputs = [seed * (n + 1) % PRIME for n in range(m * num_steps)]
    start = [(seed + 7 * stage) % PRIME for stage in range(num_stages)]

    def gradient(weights: list[int], number: int) -> list[int]:
        batch, whole = inputs[number * m : (number + 1) * m], [1] * num_stages
        for stage in range(num_stages):
            for other in set(range(num_stages)) - {stage}:
                whole[stage] = whole[stage] * weights[other] % PRIME
        return [each * sum(batch) % PRIME for each in whole]

    history = [start, start]  # W(-1) and W(0)
    for number in range(num_steps):
        old = gradient(history[-2], number)
        history.append([(w - g) % PRIME for w, g in zip(history[-1], old, strict=True)])

    assert _train(double_buffered(num_stages, m, num_steps=num_steps), inputs, start) == history[-1]


def _train(schedule, inputs, start):
    """Return the weights after the window, its actions done in an order that ranks allow."""
    table, per_step = versions(schedule), schedule.num_micro_batches
    weights = [{-1: w, 0: w} for w in start]
    sums = [[0] * schedule.num_steps for _ in start]
    forward = {(-1, n): x for n, x in enumerate(inputs)}
    backward = {(schedule.num_stages, n): 1 for n in range(len(inputs))}
    orders = [list(order) for order in schedule.orders]
    while any(orders):
        for order in orders:
            while order:
                kind, s, n = order[0]
                if kind == "U":
                    weights[s][n + 1] = (weights[s][n] - sums[s][n]) % PRIME
                elif kind == "F" and (s - 1, n) in forward:
                    forward[s, n] = forward[s - 1, n] * weights[s][table.forward[s, n]] % PRIME
                elif kind == "B" and (s + 1, n) in backward:
                    sums[s][n // per_step] += forward[s - 1, n] * backward[s + 1, n]
                    backward[s, n] = backward[s + 1, n] * weights[s][table.backward[s, n]] % PRIME
                else:
                    break
                order.pop(0)
    return [each[schedule.num_steps] for each in weights]


def test_window_of_no_step_is_refused():
    with pytest.raises(ScheduleError, match="num_steps is 0"):
        double_buffered(2, 2, num_steps=0)


def test_picture_in_the_docstring_is_what_runs():
    doc = sys.modules[double_buffered.__module__].__doc__
    assert picture(double_buffered(2, 2, num_steps=2), costs(1, 1, 1, u=1)) in doc
