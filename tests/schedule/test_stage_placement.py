import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.schedule.stage_placement
from penstock.errors import ScheduleError
from penstock.schedule.stage_placement import loop, mirror, one_way, ranks_for, vee, wave

sizes, ranks = st.integers(1, 20), st.integers(1, 6)


@given(sizes, ranks)
def test_loop_and_wave_use_every_rank_as_often_as_they_can(num_stages, num_ranks):
    for place in (loop, wave):
        homes = np.bincount(place(num_stages, num_ranks), minlength=num_ranks)
        assert homes.max() - homes.min() <= 1


@given(sizes, ranks)
def test_neighbours_on_a_wave_are_neighbours_or_share_a_rank(num_stages, num_ranks):
    homes = wave(num_stages, num_ranks)
    hops = np.abs(np.diff(homes))
    turns = np.arange(1, num_stages) % num_ranks == 0
    assert (hops == ~turns).all()


@given(sizes, ranks, st.integers(1, 9))
def test_mirror_turns_odd_micro_batches_round(num_stages, num_ranks, m):
    one, both = (
        one_way(wave(num_stages, num_ranks), m),
        mirror(wave(num_stages, num_ranks), m, num_ranks),
    )
    assert (both[:, ::2] == one[:, ::2]).all()
    assert (both[:, 1::2] == num_ranks - 1 - one[:, 1::2]).all()


def test_v_is_a_wave_that_turns_once():
    assert vee(6, 3).tolist() == wave(6, 3).tolist() == [0, 1, 2, 2, 1, 0]
    assert vee(5, 3).tolist() == [0, 1, 2, 2, 1]
    with pytest.raises(ScheduleError, match="a V of 7 stages does not fit on 3 ranks") as caught:
        vee(7, 3)
    assert caught.value.hint == "give 4 ranks or more, or take hanayo or list_schedule"


def test_ranks_are_those_asked_for_or_the_fewest_that_hold_the_stages():
    assert ranks_for(5, 1, None) == 3
    assert ranks_for(5, 1, None, per_rank=4) == 2
    assert ranks_for(5, 1, 7) == 7
    for sizes in ((0, 1, None), (1, 0, None), (1, 1, 0)):
        with pytest.raises(ScheduleError, match="make no schedule"):
            ranks_for(*sizes)


def test_picture_in_the_docstring_is_what_the_functions_return():
    doc = penstock.schedule.stage_placement.__doc__
    for name in (loop, wave):
        assert f"{name.__name__:22} rank   {' '.join(map(str, name(6, 3)))}\n" in doc
    both = mirror(loop(3, 3), 2, 3)
    assert "and ".join(" ".join(map(str, both[:, m])) for m in (0, 1)) == "0 1 2and 2 1 0"
    assert "rank   0 1 2 . . .   and 2 1 0" in doc
