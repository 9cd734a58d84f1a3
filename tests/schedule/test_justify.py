"""Justifying keeps a pattern legal and within its limit, and never makes it longer."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import found, v_half, zb_h1
from penstock.schedule.justify import justify, orders_of, ticks_of


def waits(shape):
    """Yield every action with one that it waits for, as (kind, stage, micro-batch)."""
    _, stages, numbers = shape
    for s, m in itertools.product(range(stages), range(numbers)):
        yield ("I", s, m), ("F", s, m)
        yield ("W", s, m), ("I", s, m)
        if s > 0:
            yield ("F", s, m), ("F", s - 1, m)
        if s + 1 < stages:
            yield ("I", s, m), ("I", s + 1, m)


def at(ticks, action):
    kind, stage, m = action
    return int(ticks["FIW".index(kind), stage, m])


def most_held(ticks, homes):
    """Return the most activations of a rank, from the tick of F until after that of W."""
    most = 0
    for rank, now in itertools.product(set(homes), range(int(ticks.min()), int(ticks.max()) + 1)):
        mine = np.array(homes) == rank
        most = max(most, int(((ticks[0, mine] <= now) & (ticks[2, mine] >= now)).sum()))
    return most


@st.composite
def patterns(draw):
    """Return ticks of actions done one at a time in some order, and the rank of each stage."""
    stages, numbers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    homes = draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    homes = [sorted(set(homes)).index(home) for home in homes]
    shape = (3, stages, numbers)
    needs: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}
    for action, other in waits(shape):
        needs.setdefault(action, set()).add(other)
    for kind, s, m in itertools.product("FI", range(stages), range(1, numbers)):
        needs.setdefault((kind, s, m), set()).add((kind, s, m - 1))
    left = list(itertools.product("FIW", range(stages), range(numbers)))
    ticks, done = np.zeros(shape, np.int64), set()
    while left:
        free = [action for action in left if needs.get(action, set()) <= done]
        kind, s, m = draw(st.sampled_from(free))
        ticks["FIW".index(kind), s, m] = 2 * len(done)  # and as many ticks idle
        done.add((kind, s, m))
        left.remove((kind, s, m))
    return ticks, np.array(homes)


@given(patterns(), st.integers(0, 2))
def test_it_stays_legal_and_within_its_limit_and_gets_no_longer(pattern, more):
    ticks, homes = pattern
    limit = most_held(ticks, homes.tolist()) + more
    made = justify(ticks, homes, limit)
    assert made.min() == 0
    assert made.max() <= ticks.max() - ticks.min()
    assert all(at(made, action) > at(made, other) for action, other in waits(ticks.shape))
    assert (np.diff(made[:2], axis=2) > 0).all()
    for rank in set(homes.tolist()):
        mine = made[:, homes == rank].ravel()
        assert len(set(mine.tolist())) == mine.size
    assert most_held(made, homes.tolist()) <= limit


@given(patterns())
def test_single_rank_is_left_without_a_pause(pattern):
    ticks, homes = pattern
    assert justify(ticks, 0 * homes, ticks.size).max() + 1 == ticks.size


def test_a_w_that_frees_the_room_for_an_f_is_done_in_time():
    ticks = np.array([[[0, 9]], [[4, 12]], [[6, 14]]])  # one stage, two micro-batches
    assert justify(ticks, np.array([0]), 1).tolist() == [[[0, 3]], [[1, 4]], [[2, 5]]]


@given(st.integers(1, 4), st.integers(1, 5))
def test_ticks_of_a_schedule_are_those_of_playing_it_and_give_its_orders(ranks, m):
    for made in (v_half(2 * ranks, m), zb_h1(ranks, m), found(3 * ranks, m, num_ranks=ranks)):
        ticks = ticks_of(made)
        assert orders_of(ticks, made.ranks[:, 0], made.num_ranks) == made.orders
        ends = [int(ticks[:, made.ranks[:, 0] == rank].max()) + 1 for rank in range(ranks)]
        assert (made.play((1.0, 2.0, 1.0, 1.0, 0.0))[1] == ends).all()
        assert all(at(ticks, action) > at(ticks, other) for action, other in waits(ticks.shape))
