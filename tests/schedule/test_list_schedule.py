import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.program.lower import lower
from penstock.schedule import (
    Seconds,
    breadth_first,
    gpipe,
    interleaved,
    list_schedule,
    one_f_one_b,
    peak_activations,
)
from penstock.schedule.placement import loop, wave
from penstock.simulate import simulate
from penstock.timeline import draw, step_s
from tests.schedule.brute import shortest

sizes, ranks, seconds = st.integers(1, 8), st.integers(1, 4), st.integers(1, 9)
tiny = st.sampled_from(((1, 4), (2, 2), (2, 3), (3, 2), (3, 3)))


@st.composite
def unequal(draw, num_stages):
    row = st.lists(seconds, min_size=num_stages, max_size=num_stages)
    return tuple(draw(row) for _ in range(3))


def measured(schedule, times):
    """Return the seconds of a step, whole backwards, links free."""
    f, i, w = times
    return step_s(
        simulate(
            lower(schedule), lambda a: f[a.stage] if a.kind == "F" else i[a.stage] + w[a.stage]
        )
    )


@given(tiny, st.integers(1, 5), st.data())
def test_step_is_near_the_shortest_there_is_for_the_tiniest_sizes(size, limit, data):
    times = data.draw(unequal(size[0]))
    ours = measured(list_schedule(*size, seconds=Seconds(*times), limit=limit), times)
    assert ours <= 1.25 * shortest(*size, times, limit=limit, split=False)


@given(sizes, sizes, st.data())
def test_step_is_never_longer_than_those_of_1f1b_and_gpipe(num_stages, m, data):
    times = data.draw(unequal(num_stages))
    ours = measured(list_schedule(num_stages, m, seconds=Seconds(*times)), times)
    for builder in (one_f_one_b, gpipe):
        assert ours <= measured(builder(num_stages, m), times)


@given(sizes, sizes, ranks, st.data())
def test_nor_on_a_loop_than_those_of_interleaved_and_breadth_first(num_stages, m, num_ranks, data):
    times = data.draw(unequal(num_stages))
    made = list_schedule(num_stages, m, num_ranks=num_ranks, seconds=Seconds(*times))
    for builder in (interleaved, breadth_first):
        assert measured(made, times) <= measured(builder(num_stages, m, num_ranks=num_ranks), times)


@given(sizes, sizes, ranks, st.sampled_from((loop, wave)), st.integers(0, 3))
def test_stages_live_where_the_placement_says_within_the_limit(
    num_stages, m, num_ranks, placement, room
):
    limit = -(-num_stages // num_ranks) + room
    made = list_schedule(
        num_stages, m, num_ranks=num_ranks, placement=placement.__name__, limit=limit
    )
    assert (placement(num_stages, num_ranks) == made.ranks.T).all()
    assert max(peak_activations(made)) <= limit


def test_limit_below_the_stages_of_a_rank_is_refused():
    with pytest.raises(ScheduleError, match="may hold 1 activations, and has 2 stages"):
        list_schedule(4, 2, num_ranks=2, limit=1)


def test_picture_in_the_docstring_is_what_runs():
    made = list_schedule(3, 4, seconds=Seconds((1, 2, 1), (1, 2, 1), (1, 2, 1)))
    took = {"F": 1, "B": 2}
    drawn = draw(simulate(lower(made), lambda a: took[a.kind] * (1 + (a.stage == 1))))
    indented = "".join(f"    {line}\n" for line in drawn.splitlines())
    assert indented in sys.modules[list_schedule.__module__].__doc__
