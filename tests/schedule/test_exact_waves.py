"""The exact schedule of stages in waves is the shortest of all that there are."""

import itertools

import pytest

from penstock.schedule import steady_s
from penstock.schedule.exact_waves import TickCounts, exact_waves
from penstock.schedule.placement import wave
from tests.schedule import brute
from tests.schedule.toy import is_valid, peak, step


def shortest(homes, m, limit):
    """Return the fewest ticks of a step, by every way to go on from every tick.

    What is counted: F and I of each stage, and W of each rank, that are done.
    """
    stages, ranks = len(homes), max(homes) + 1
    own = [[s for s in range(stages) if homes[s] == r] for r in range(ranks)]

    def ways(done, rank):
        f, i, w = done
        held = sum(f[s] for s in own[rank]) - w[rank]
        yield None
        for s in own[rank]:
            if f[s] < (m if s == 0 else f[s - 1]) and held < limit:
                yield "F", s
            if i[s] < (f[s] if s == stages - 1 else i[s + 1]):
                yield "I", s
        if w[rank] < sum(i[s] for s in own[rank]):
            yield "W", rank

    now, ticks = {((0,) * stages, (0,) * stages, (0,) * ranks)}, 0
    end = (m,) * stages, (m,) * stages, tuple(m * len(each) for each in own)
    while end not in now:
        after = set()
        for done in now:
            for moves in itertools.product(*(list(ways(done, rank)) for rank in range(ranks))):
                counts = [list(each) for each in done]
                for move in moves:
                    if move is not None:
                        counts["FIW".index(move[0])][move[1]] += 1
                after.add(tuple(map(tuple, counts)))
        now, ticks = after, ticks + 1
    return ticks


SIZES = ((2, 3, 2, 1), (2, 3, 2, 2), (3, 3, 2, 2), (4, 2, 2, 2), (4, 2, 2, 3), (4, 2, 2, 4))


@pytest.mark.parametrize(("stages", "m", "ranks", "limit"), [*SIZES, (4, 3, 2, 3), (6, 1, 3, 2)])
def test_drained_step_is_the_shortest_of_all(stages, m, ranks, limit):
    found = exact_waves(stages, m, ranks, limit=limit)
    homes = wave(stages, ranks).tolist()
    assert found.is_proved
    assert found.step_s == step(found.schedule) == shortest(homes, m, limit)
    orders = list(found.schedule.orders)
    assert is_valid(orders, stages, m)
    assert max(map(peak, orders)) <= limit
    assert found.schedule.stage_ranks == tuple((home,) for home in homes)


def in_a_row(orders, steps, m):
    return [
        tuple((kind, k * m + number) for k in range(steps) for kind, number in order)
        for order in orders
    ]


@pytest.mark.parametrize(("stages", "m", "limit"), [(2, 2, 1), (2, 2, 2), (2, 3, 2)])
def test_steady_one_is_the_fastest_long_run_of_all_orders(stages, m, limit):
    ones = ((1.0,) * stages,) * 3
    every = itertools.product(brute._orders(m, limit, True), repeat=stages)
    fastest = min(
        (brute.seconds_of(in_a_row(o, 8, m), ones) - brute.seconds_of(in_a_row(o, 4, m), ones)) / 4
        for o in every
        if brute.seconds_of(o, ones) < float("inf")
    )
    found = exact_waves(stages, m, stages, limit=limit, objective="steady")
    assert found.is_proved
    assert found.step_s == steady_s(found.schedule) == fastest
    assert max(map(peak, found.schedule.orders)) <= limit


@pytest.mark.parametrize(
    ("ranks", "limit", "least"), [(3, 4, 41), (3, 5, 39), (4, 4, 59), (4, 5, 56), (4, 6, 53)]
)
def test_no_schedule_in_a_v_beats_the_published_ones(ranks, limit, least):
    counts = TickCounts(wave(2 * ranks, ranks), 2 * ranks, limit, "drained")
    assert counts.relaxed(99) == least  # the bound alone says so


def test_zb_v_without_a_barrier_is_found_where_drawn_patterns_miss_it():
    found = exact_waves(8, 8, 4, objective="steady")
    assert (found.step_s, found.is_proved) == (48, True)


def test_where_time_is_short_the_best_known_is_given_with_its_bound():
    found = exact_waves(12, 6, 3, limit=8, time_limit_s=0.0)
    assert not found.is_proved
    assert found.bound_s < found.step_s == step(found.schedule)
