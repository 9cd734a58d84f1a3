import contextlib
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    Action,
    Schedule,
    Seconds,
    one_f_one_b,
    peak_activations,
    steady_s,
    zb_greedy,
    zb_h1,
    zb_h2,
)
from penstock.schedule.zb_greedy import best_of_rules
from tests.draws import examples
from tests.schedule.brute import shortest
from tests.schedule.toy import costs, picture, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)
times = st.tuples(seconds, seconds, seconds)


def all_orders(num_stages, m, limit, share):
    """Return every order of a rank that keeps micro-batches in order and holds no more."""
    found = []

    def extend(order, f, i, w):
        if len(order) == 3 * m:
            found.append(tuple(order))
        held = (f - i) + share * (i - w)
        for kind, at, ok in (
            ("F", f, f < m and held + 1 <= limit),
            ("I", i, i < f),
            ("W", w, w < i),
        ):
            if ok:
                extend(
                    [*order, (kind, at)], f + (kind == "F"), i + (kind == "I"), w + (kind == "W")
                )

    extend([], 0, 0, 0)
    return found


@examples(8)
@given(
    st.sampled_from(((1, 3), (2, 2), (3, 2))),
    times,
    st.integers(1, 3),
    st.sampled_from((0, 0.5, 1)),
)
def test_step_is_the_shortest_there_is_for_the_tiniest_sizes(size, fiw, limit, share):
    num_stages, m = size
    seconds, least = Seconds(*fiw), float("inf")
    for orders in itertools.product(all_orders(*size, limit, share), repeat=num_stages):
        named = [[Action(k, s, at) for k, at in order] for s, order in enumerate(orders)]
        with contextlib.suppress(ScheduleError):  # some wait forever
            least = min(least, steady_s(Schedule(*size, tuple(map(tuple, named))), seconds))
    made = zb_greedy(num_stages, m, seconds=seconds, limit=limit, weight_share=share)
    assert steady_s(made, seconds) == pytest.approx(least)


@given(sizes, st.integers(1, 16), times, st.integers(0, 3), st.integers(0, 7))
def test_step_is_never_longer_than_those_of_1f1b_h1_and_h2_within_their_memory(
    num_stages, m, fiw, message_s, more
):
    limit, seconds = num_stages + more, Seconds(*fiw, message_s)
    ours = steady_s(zb_greedy(num_stages, m, seconds=seconds, limit=limit), seconds)
    for builder in (one_f_one_b, zb_h1, zb_h2):
        if max(peak_activations(builder(num_stages, m))) <= limit:
            assert ours <= steady_s(builder(num_stages, m), seconds) * (1 + 1e-12)
    alike = zb_greedy(num_stages, m, limit=limit)
    assert ours <= steady_s(alike, seconds) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("size", "seconds", "limit", "most_s"),
    [
        ((8, 24), Seconds(), 16, 72),  # that of ZB-H2, which holds 15
        ((5, 11), Seconds(1, 7, 6, message_s=2), 5, 198),  # that of ZB-H1
    ],
)
def test_step_is_no_longer_where_the_rules_for_a_free_rank_find_less(size, seconds, limit, most_s):
    assert steady_s(zb_greedy(*size, seconds=seconds, limit=limit), seconds) <= most_s


@pytest.mark.parametrize(
    ("size", "seconds", "limit", "finds"),
    [
        ((5, 11), Seconds(1, 7, 6, message_s=2), 5, False),
        ((6, 14), Seconds(2, 3, 1), 11, False),
        ((5, 4), Seconds(8, 6, (5, 4, 8, 8, 4), 2), 3, True),
    ],
)
def test_it_is_promised_even_where_what_searches_finds_nothing(
    monkeypatch, size, seconds, limit, finds
):
    module = sys.modules[zb_greedy.__module__]
    monkeypatch.setattr(module, "lay", lambda *_: None)
    monkeypatch.setattr(module, "improve", lambda result, *_, **__: result)
    if not finds:
        monkeypatch.setattr(module, "greedy_few", lambda *_: [])
    module._alike.cache_clear()
    ours = steady_s(zb_greedy(*size, seconds=seconds, limit=limit), seconds)
    known = [builder(*size) for builder in (one_f_one_b, zb_h1, zb_h2)]
    known = [each for each in known if max(peak_activations(each)) <= limit]
    known.append(zb_greedy(*size, limit=limit))
    module._alike.cache_clear()
    assert ours <= min(steady_s(each, seconds) for each in known) * (1 + 1e-12)


@given(sizes, st.integers(1, 16), times, st.integers(1, 12), st.integers(0, 4))
def test_rank_holds_no_more_than_the_limit(num_stages, m, fiw, limit, message_s):
    made = zb_greedy(num_stages, m, seconds=Seconds(*fiw, message_s), limit=limit)
    assert max(peak_activations(made)) <= limit


@given(sizes, st.integers(1, 12), times, st.integers(1, 9), st.sampled_from((0, 0.25, 0.5)))
def test_rank_holds_no_more_where_w_needs_a_part_of_an_activation(s, m, fiw, limit, share):
    made = zb_greedy(s, m, seconds=Seconds(*fiw), limit=limit, weight_share=share)
    change = {"F": 1, "I": share - 1, "W": -share}
    for order in made.orders:
        assert max(itertools.accumulate(change[action.kind] for action in order)) <= limit


@given(sizes, st.integers(1, 16))
def test_without_other_word_it_is_as_good_as_h1_in_the_memory_of_1f1b(num_stages, m):
    made = zb_greedy(num_stages, m)
    assert max(peak_activations(made)) <= num_stages
    assert steady_s(made) == steady_s(zb_h1(num_stages, m))


@pytest.mark.parametrize("share", [-0.5, 1.5, float("nan")])
def test_part_of_an_activation_is_from_none_to_all(share):
    with pytest.raises(ScheduleError, match="weight_share is"):
        zb_greedy(2, 2, weight_share=share)


@given(st.sampled_from(((1, 4), (2, 2), (2, 3), (3, 2))), times, st.integers(1, 5))
def test_step_that_drains_is_the_shortest_there_is_for_the_tiniest_sizes(size, fiw, limit):
    rows = [(each,) * size[0] for each in fiw]
    found = best_of_rules(*size, Seconds(*fiw), limit)
    assert found.step_s == shortest(*size, rows, limit=limit, split=True)


@pytest.mark.parametrize(
    ("size", "fiw", "limit", "least_s"),
    [
        ((3, 5), (11, 10, 9), 2, 216),
        ((4, 7), (11, 14, 10), 3, 330),
        ((6, 7), (12, 12, 11), 3, 465),
        ((6, 9), (10, 15, 10), 5, 425),  # from the second or third best start
    ],
)
def test_step_that_drains_is_the_shortest_with_less_memory_than_1f1b(size, fiw, limit, least_s):
    """Where the groups of `limit` micro-batches do not come out even."""
    found = best_of_rules(*size, Seconds(*fiw), limit)
    assert step(Schedule(*size, found.orders), costs(*fiw)) == found.step_s == least_s


def test_no_activation_at_all_is_refused():
    with pytest.raises(ScheduleError, match="rank 0 may hold 0 activations, and has 1 stages"):
        zb_greedy(2, 2, limit=0)


def test_picture_in_the_docstring_is_what_runs():
    made = zb_greedy(3, 4, seconds=Seconds(1, 2, 1))
    assert picture(made, costs(1, 2, 1)) in sys.modules[zb_greedy.__module__].__doc__
