import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.program.lower import lower
from penstock.schedule import layer_pipe, one_f_one_b, peak_activations
from penstock.schedule.layer_pipe import placed
from penstock.simulate import simulate
from penstock.timeline import step_s
from tests.schedule.brute import seconds_of
from tests.schedule.toy import costs, picture, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)


@given(sizes, sizes, seconds, seconds, seconds)
def test_bubble_is_the_closed_form(num_stages, m, f, i, w):
    measured = step(layer_pipe(num_stages, m), costs(f, i, w))
    assert measured == m * (f + i + w) + (num_stages - 1) * (f + i)


@given(sizes, sizes)
def test_rank_holds_one_activation_more_than_with_1f1b(num_stages, m):
    held = tuple(min(num_stages - rank + 1, m) for rank in range(num_stages))
    assert peak_activations(layer_pipe(num_stages, m)) == held


@given(sizes, sizes)
def test_gradient_of_the_weights_waits_for_one_forward(num_stages, m):
    for order in layer_pipe(num_stages, m).orders:
        words = "".join(action.kind for action in order)
        assert words.replace("IFW", "").replace("IW", "").strip("F") == ""


@given(st.data(), sizes, sizes)
def test_step_is_never_longer_than_with_whole_backwards_whatever_stages_take(data, num_stages, m):
    row = st.lists(seconds, min_size=num_stages, max_size=num_stages)
    times = data.draw(st.tuples(row, row, row))
    ours, whole = (
        [tuple((action.kind, action.micro_batch) for action in order) for order in made.orders]
        for made in (layer_pipe(num_stages, m), one_f_one_b(num_stages, m))
    )
    assert seconds_of(ours, times) <= seconds_of(whole, times)


KIND_S = {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0}
works = st.lists(st.integers(1, 9), min_size=2, max_size=6)


def whole_s(work: list[int], m: int, processors: int) -> float:
    """Return the least seconds of 1F1B with whole stages on processors, over all divisions."""
    orders = [
        tuple((action.kind, action.micro_batch) for action in order)
        for order in one_f_one_b(processors, m).orders
    ]
    ways = itertools.combinations(range(1, len(work)), processors - 1)
    rows = [[sum(work[a:b]) for a, b in itertools.pairwise((0, *cuts, len(work)))] for cuts in ways]
    busiest = min(map(max, rows))
    return min(seconds_of(orders, (row,) * 3) for row in rows if max(row) == busiest)


@given(works, st.integers(2, 4), st.integers(1, 9))
def test_divided_stages_take_no_longer_than_whole_ones_with_whole_backwards(work, processors, m):
    processors = min(processors, len(work))
    made = layer_pipe(len(work), m, work="-".join(map(str, work)), processors=processors)
    assert made.num_ranks == processors
    program = lower(made)
    measured = step_s(simulate(program, lambda action: work[action.stage] * KIND_S[action.kind]))
    assert measured <= whole_s(work, m, processors)
    assert measured >= m * 3 * sum(work) / processors


@given(works, st.integers(1, 4), st.integers(1, 30))
def test_each_processor_has_equal_work_but_for_one_micro_batch_of_its_stages(work, processors, m):
    processors = min(processors, len(work))
    ranks = placed(np.array(work), m, processors)
    assert (np.diff(ranks, axis=0) >= 0).all(), "a micro-batch goes from rank to rank"
    for rank in range(processors):
        own = sum(each * int((row == rank).sum()) for each, row in zip(work, ranks, strict=True))
        assert abs(own - m * sum(work) / processors) <= 2 * max(work)


def test_no_processor_is_idle():
    rows = [(14, 15, 15, 99), *itertools.product((1, 3, 20), repeat=4)]
    for work, processors, m in itertools.product(rows, (2, 3), (1, 2)):
        made = layer_pipe(4, m, work="-".join(map(str, work)), processors=processors)
        assert all(len(order) for order in made.orders), f"{work} on {processors}"


def test_a_stage_at_the_border_is_divided():
    made = layer_pipe(2, 6, work="9-1", processors=2)
    assert made.stage_ranks == ((0, 1), (1,))
    assert [made.rank_of(0, m) for m in range(6)].count(1) in (2, 3)
    for options, message in (
        ({"work": "1-2-3"}, "the work is 1-2-3, of 2 stages"),
        ({"work": "1-0"}, "the work is 1-0, of 2 stages"),
        ({"processors": 3}, "2 stages on 3 processors"),
    ):
        with pytest.raises(ScheduleError, match=message):
            layer_pipe(2, 6, **options)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(layer_pipe(3, 4)) in sys.modules[layer_pipe.__module__].__doc__
