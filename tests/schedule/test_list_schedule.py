import itertools
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
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
from penstock.schedule.greedy import Rules, greedy, script
from penstock.schedule.stage_placement import loop, wave
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


# -- links and sums -------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of F, of B, of messages to the next stage and back, and of sums."""

    forward: list[int]
    backward: list[int]
    there: list[int]
    back: list[int]
    sums: list[int]

    def asked(self) -> Seconds:
        nothing = [0] * len(self.forward)
        return Seconds(self.forward, self.backward, nothing, 0.0, self.there, self.back, self.sums)


@st.composite
def all_unlike(draw, num_stages):
    lengths = num_stages, num_stages, num_stages - 1, num_stages - 1, num_stages
    return Times(*(draw(st.lists(seconds, min_size=n, max_size=n)) for n in lengths))


def took(orders: Sequence[Sequence[tuple[str, int]]], times: Times) -> float:
    """Return when all sums are done; orders[stage] are ("F" or "B", micro-batch).

    Each way between two stages one message goes at a time, in the order in which they are made.
    """
    last, there, clock = len(orders) - 1, {}, [0.0] * len(orders)
    free, at = {}, [0] * len(orders)
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        before = list(at)
        for stage, order in enumerate(orders):
            if at[stage] == len(order):
                continue
            kind, m = order[at[stage]]
            ready = there.get((kind, stage, m), 0.0 if (kind, stage) == ("F", 0) else None)
            if (kind, stage) == ("B", last):
                ready = clock[stage]
            if ready is None:
                continue
            at[stage] += 1
            row = times.forward if kind == "F" else times.backward
            clock[stage] = max(clock[stage], ready) + row[stage]
            to = stage + 1 if kind == "F" else stage - 1
            if 0 <= to <= last:
                link = times.there[stage] if kind == "F" else times.back[to]
                leaves = max(clock[stage], free.get((stage, to), 0.0))
                free[stage, to] = there[kind, to, m] = leaves + link
        if before == at:
            return math.inf
    return max(end + more for end, more in zip(clock, times.sums, strict=True))


def took_by(schedule, times: Times) -> float:
    return took([[(a.kind, a.micro_batch) for a in order] for order in schedule.orders], times)


@given(sizes, sizes, st.data())
def test_links_and_sums_never_make_it_longer_than_1f1b_and_gpipe(num_stages, m, data):
    times = data.draw(all_unlike(num_stages))
    ours = took_by(list_schedule(num_stages, m, seconds=times.asked()), times)
    for builder in (one_f_one_b, gpipe):
        made = builder(num_stages, m)
        assert ours <= took_by(made, times)
        rules = Rules(script(made.orders, made.ranks.shape), np.full(num_stages, m), in_order=True)
        same = greedy(made.ranks.astype(np.int64), times.asked(), [rules], split=False)
        assert same.step_s == took_by(made, times)


@given(st.sampled_from(((2, 2), (2, 3), (3, 2), (3, 3))), st.data())
def test_step_with_links_and_sums_is_near_the_shortest_of_all(size, data):
    num_stages, m = size
    times = data.draw(all_unlike(num_stages))
    ways = [
        [("F" if is_forward else "B", sum(way[:at].count(x) for x in [is_forward]))
         for at, is_forward in enumerate(way)]
        for way in itertools.product((True, False), repeat=2 * m)
        if all(way[:at].count(False) <= way[:at].count(True) for at in range(2 * m + 1))
        and way.count(True) == m
    ]  # fmt: skip
    shortest = min(took(orders, times) for orders in itertools.product(ways, repeat=num_stages))
    ours = took_by(list_schedule(num_stages, m, seconds=times.asked()), times)
    assert shortest <= ours <= 1.2 * shortest


def test_links_that_are_not_one_for_each_stage_but_the_last_are_refused():
    with pytest.raises(ScheduleError, match=r"there_s is \[1\], for 3 stages"):
        list_schedule(3, 2, seconds=Seconds(there_s=[1]))
    with pytest.raises(ScheduleError, match="sums_s is"):
        list_schedule(2, 2, seconds=Seconds(sums_s=[1, -1]))
