import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Action, breadth_first, bubble, gpipe, interleaved, peak_activations
from tests.schedule.oracle import orders_of_torch
from tests.schedule.toy import costs, picture, step

sizes, ranks, seconds = st.integers(1, 12), st.integers(1, 5), st.integers(1, 9)


@given(st.integers(1, 4), ranks, st.integers(0, 9), seconds, seconds)
def test_bubble_is_that_of_gpipe_divided_by_the_stages_per_rank(per_rank, num_ranks, more, f, b):
    m = num_ranks + more
    measured = step(breadth_first(per_rank * num_ranks, m, num_ranks=num_ranks), costs(f, b, 0))
    assert measured == per_rank * m * (f + b) + (num_ranks - 1) * (f + b)
    assert step(gpipe(num_ranks, m), costs(f, b, 0)) == (m + num_ranks - 1) * (f + b)


@pytest.mark.parametrize("num_ranks", range(1, 6))
def test_bubble_of_rank_0_is_the_closed_form_for_every_size(num_ranks):
    for num_stages, m in itertools.product(range(1, 12), range(1, 9)):
        made = breadth_first(num_stages, m, num_ranks=num_ranks)
        rounds, more = divmod(num_stages - 1, num_ranks)
        idle = bubble(made, forward_s=2.0, input_s=5.0)
        assert idle[0] == (rounds * max(0, num_ranks - m) + more) * (2 + 6)


@given(sizes, sizes, st.one_of(st.none(), ranks))
def test_rank_holds_every_activation_of_its_stages(num_stages, m, num_ranks):
    made = breadth_first(num_stages, m, num_ranks=num_ranks)
    homes = [rank for (rank,) in made.stage_ranks]
    assert homes == [stage % made.num_ranks for stage in range(num_stages)]
    assert peak_activations(made) == tuple(m * homes.count(r) for r in range(made.num_ranks))


@given(sizes, sizes)
def test_stage_is_done_with_before_the_next_one_begins(num_stages, m):
    for order in breadth_first(num_stages, m).orders:
        changes = [key for key, _ in itertools.groupby((kind, stage) for kind, stage, _ in order)]
        assert len(changes) == len(set(changes))


@pytest.mark.parametrize(("num_ranks", "per_rank", "m"), [(2, 2, 4), (3, 2, 6), (4, 3, 8)])
def test_order_is_that_of_torch_but_for_its_backwards_from_the_last_micro_batch(
    num_ranks, per_rank, m
):
    def turned(action):
        mirrored = action.kind != "F"
        return action._replace(micro_batch=m - 1 - action.micro_batch) if mirrored else action

    made = breadth_first(num_ranks * per_rank, m, num_ranks=num_ranks)
    ours = [[turned(Action(*action)) for action in order] for order in made.orders]
    assert ours == orders_of_torch("LoopedBFS", num_ranks, per_rank, m)


@given(st.integers(1, 12), sizes, ranks)
def test_one_group_of_all_micro_batches_does_the_forwards_of_interleaved(num_stages, m, num_ranks):
    """So the two schedules are the ends of one scale, the size of the group."""
    wide = interleaved(num_stages, m, num_ranks=num_ranks, group=m)
    ours = breadth_first(num_stages, m, num_ranks=num_ranks)
    for mine, other in zip(ours.orders, wide.orders, strict=True):
        forwards = [[a for a in order if a.kind == "F"] for order in (mine, other)]
        assert forwards[0] == forwards[1]


def test_less_than_one_rank_is_refused():
    with pytest.raises(ScheduleError, match="and 0 ranks"):
        breadth_first(2, 3, num_ranks=0)


def test_picture_in_the_docstring_is_what_runs():
    doc = sys.modules[breadth_first.__module__].__doc__
    assert picture(breadth_first(4, 2), costs(1, 1, 0), stages=True) in doc
