import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Schedule, bubble, interleaved, peak_activations
from tests.schedule.oracle import orders_of_torch
from tests.schedule.toy import costs, picture, step

sizes, ranks, seconds = st.integers(1, 12), st.integers(1, 5), st.integers(1, 9)

TORCH_CSV = Path(__file__).parent / "torch_csv"  # written by torch 2.13


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_bubble_of_rank_0_is_the_closed_form_for_every_size(num_ranks):
    for num_stages, m in itertools.product(range(1, 14), range(1, 10)):
        idle = bubble(interleaved(num_stages, m, num_ranks=num_ranks), forward_s=2.0, input_s=5.0)
        rounds, more = divmod(num_stages - 1, num_ranks)
        assert idle[0] == (rounds * max(0, num_ranks - m) + more) * (2 + 6)


@given(st.integers(1, 4), ranks, st.integers(0, 9), seconds, seconds)
def test_bubble_is_that_of_1f1b_divided_by_the_stages_per_rank(per_rank, num_ranks, more, f, b):
    m = num_ranks + more
    measured = step(interleaved(per_rank * num_ranks, m, num_ranks=num_ranks), costs(f, b, 0))
    assert measured == per_rank * m * (f + b) + (num_ranks - 1) * (f + b)


@given(st.integers(1, 4), ranks, st.integers(0, 9))
def test_rank_holds_what_the_docstring_says(per_rank, num_ranks, more):
    m = num_ranks + more
    greatest = -(-m // (m // num_ranks))
    held = tuple(
        min(2 * (num_ranks - rank) - 1 + (per_rank - 1) * greatest, per_rank * m)
        for rank in range(num_ranks)
    )
    assert peak_activations(interleaved(per_rank * num_ranks, m, num_ranks=num_ranks)) == held


@given(sizes, sizes, st.one_of(st.none(), ranks))
def test_stage_lives_on_the_rank_that_its_number_leaves(num_stages, m, num_ranks):
    schedule = interleaved(num_stages, m, num_ranks=num_ranks)
    expected = -(-num_stages // 2) if num_ranks is None else num_ranks
    assert schedule.num_ranks == expected
    assert schedule.stage_ranks == tuple((stage % expected,) for stage in range(num_stages))


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_less_than_one_rank_is_refused(num_ranks):
    with pytest.raises(ScheduleError, match=f"2 stages, 3 micro-batches and {num_ranks} ranks"):
        interleaved(2, 3, num_ranks=num_ranks)


@given(sizes, sizes, ranks, st.integers(1, 12))
def test_groups_may_have_any_size(num_stages, m, num_ranks, group):
    """A group enters when all forwards of the one before it have been begun on rank 0."""
    made = interleaved(num_stages, m, num_ranks=num_ranks, group=group)
    number = max(1, m // max(group, num_ranks))
    starts = [k * m // number for k in range(number + 1)]
    forwards = [action for action in made.orders[0] if action.kind == "F"]
    for first, last in itertools.pairwise(starts):
        own = range(first, last)
        places = [place for place, a in enumerate(forwards) if a.micro_batch in own]
        assert places == list(range(places[0], places[0] + len(places)))


@given(sizes, sizes, ranks)
def test_group_of_as_many_micro_batches_as_ranks_is_the_default(num_stages, m, num_ranks):
    made = interleaved(num_stages, m, num_ranks=num_ranks, group=num_ranks)
    assert made == interleaved(num_stages, m, num_ranks=num_ranks)


def test_greater_groups_hold_more_activations():
    held = [max(peak_activations(interleaved(8, 12, num_ranks=2, group=g))) for g in (2, 4, 12)]
    assert held == sorted(held)
    assert held[0] < held[-1]


def test_group_of_nothing_is_refused():
    with pytest.raises(ScheduleError, match="group is 0"):
        interleaved(2, 3, group=0)


@pytest.mark.parametrize(
    ("num_ranks", "per_rank", "m"), [(2, 2, 4), (3, 2, 9), (4, 3, 8), (2, 4, 2)]
)
def test_schedule_is_what_torch_computes(num_ranks, per_rank, m):
    theirs = orders_of_torch("Interleaved1F1B", num_ranks, per_rank, m)
    made = interleaved(num_ranks * per_rank, m, num_ranks=num_ranks)
    assert [list(order) for order in made.orders] == theirs


def test_schedule_is_the_one_of_torch():
    rows = (TORCH_CSV / "interleaved_1f1b.csv").read_text()
    assert Schedule.parse_torch_csv(rows).orders == interleaved(6, 8, num_ranks=3).orders


def test_picture_in_the_docstring_is_what_runs():
    doc = sys.modules[interleaved.__module__].__doc__
    assert picture(interleaved(4, 2), costs(1, 1, 0), stages=True) in doc
