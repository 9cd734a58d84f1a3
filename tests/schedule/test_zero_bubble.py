import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import Schedule, one_f_one_b, peak_activations, zb_h1, zb_h2
from tests.schedule.oracle import orders_of_torch
from tests.schedule.toy import costs, picture, run, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)


@given(sizes, sizes, seconds, seconds, seconds)
def test_bubble_is_the_closed_form(num_stages, m, f, i, w):
    w = min(f, i, w)
    measured = step(zb_h1(num_stages, m), costs(f, i, w))
    saved = (min(num_stages, m) - 1) * w
    assert measured == m * (f + i + w) + (num_stages - 1) * (f + i) - saved


@given(sizes, st.integers(0, 9), seconds, seconds, seconds)
def test_bubble_is_two_w_per_rank_less_than_that_of_1f1b(num_stages, more, f, i, w):
    m, w = num_stages + more, min(f, i, w)
    ours = step(zb_h1(num_stages, m), costs(f, i, w))
    assert ours == step(one_f_one_b(num_stages, m), costs(f, i, w)) - 2 * w * (num_stages - 1)


@given(sizes, sizes)
def test_every_rank_holds_as_many_activations_as_the_first_of_1f1b(num_stages, m):
    assert peak_activations(zb_h1(num_stages, m)) == (min(num_stages, m),) * num_stages


@given(sizes, sizes)
def test_weights_trail_by_one_micro_batch_per_rank(num_stages, m):
    for rank, order in enumerate(zb_h1(num_stages, m).orders):
        inputs = 0
        for action in order:
            inputs += action.kind == "I"
            if action.kind == "W":
                assert inputs == min(action.micro_batch + rank + 1, m)


@given(sizes, st.integers(0, 9), seconds, seconds, seconds)
def test_bubble_of_h2_is_the_closed_form(num_stages, more, f, i, w):
    m, w = 2 * num_stages - 1 + more, min(f, i, w)
    measured = step(zb_h2(num_stages, m), costs(f, i, w))
    assert measured == m * (f + i + w) + (num_stages - 1) * max(f, f + i - 2 * w)


@given(sizes, st.integers(0, 9), seconds, seconds, seconds)
def test_rank_of_h2_idles_little_between_its_first_action_and_its_last(num_stages, more, f, i, w):
    m, w = 2 * num_stages - 1 + more, min(f, i, w)
    spans, _ = run(list(zb_h2(num_stages, m).orders), m, costs(f, i, w))
    for rank, row in enumerate(spans):
        idle = row[-1].end - row[0].start - m * (f + i + w)
        assert idle == (num_stages - 1 - rank) * max(0, f + i - 2 * w)


@given(sizes, st.integers(1, 20), seconds, seconds, seconds)
def test_h2_is_never_slower_than_h1_nor_h1_than_1f1b(num_stages, m, f, i, w):
    times = costs(f, i, min(f, i, w))
    steps = [step(build(num_stages, m), times) for build in (zb_h2, zb_h1, one_f_one_b)]
    assert steps == sorted(steps)


@given(sizes, st.integers(1, 20))
def test_rank_of_h2_holds_nearly_twice_as_many_activations(num_stages, m):
    held = peak_activations(zb_h2(num_stages, m))
    assert max(held) <= min(2 * num_stages - 1, m)
    if m >= 2 * num_stages - 1:
        assert held == (2 * num_stages - 1,) * num_stages


@given(sizes, sizes)
def test_h2_is_h1_for_few_micro_batches(num_stages, fewer):
    m = max(1, num_stages - fewer)
    assert zb_h2(num_stages, m).orders == zb_h1(num_stages, m).orders


@pytest.mark.parametrize(("num_stages", "m"), [(2, 4), (3, 6), (4, 8), (4, 4)])
def test_h1_takes_no_longer_than_the_one_of_torch_and_holds_no_more(num_stages, m):
    """torch's interleaved zero bubble, with one stage per rank."""
    orders = orders_of_torch("InterleavedZeroBubble", num_stages, 1, m)
    theirs, ours = Schedule(num_stages, m, orders), zb_h1(num_stages, m)
    assert ours.stage_ranks == theirs.stage_ranks
    assert step(ours) <= step(theirs)
    assert max(peak_activations(ours)) <= max(peak_activations(theirs))


def test_pictures_in_the_docstring_are_what_runs():
    doc = sys.modules[zb_h1.__module__].__doc__
    assert picture(zb_h1(3, 4)) in doc
    assert picture(zb_h2(3, 5)) in doc
