"""The exact schedule of stages in waves is the shortest of all that there are."""

import itertools
from functools import partial

import pytest

from penstock.schedule import found, steady_s
from penstock.schedule.exact_waves import TickCounts, exact_waves
from penstock.schedule.stage_placement import wave
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
    made = exact_waves(stages, m, ranks, limit=limit)
    homes = wave(stages, ranks).tolist()
    assert made.is_proved
    assert made.step_s == step(made.schedule) == shortest(homes, m, limit)
    orders = list(made.schedule.orders)
    assert is_valid(orders, stages, m)
    assert max(map(peak, orders)) <= limit
    assert made.schedule.stage_ranks == tuple((home,) for home in homes)


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
    made = exact_waves(stages, m, stages, limit=limit, objective="steady")
    assert made.step_s == steady_s(made.schedule) == fastest
    assert fastest - 1 < made.bound_s <= fastest
    assert max(map(peak, made.schedule.orders)) <= limit


@pytest.mark.parametrize(
    ("ranks", "limit", "least"), [(3, 4, 41), (3, 5, 39), (4, 4, 59), (4, 5, 56), (4, 6, 53)]
)
def test_no_schedule_in_a_v_beats_the_published_ones(ranks, limit, least):
    counts = TickCounts(wave(2 * ranks, ranks), 2 * ranks, limit, "drained")
    assert counts.relaxed(99) == least  # the bound alone says so


def test_no_long_run_is_faster_than_zb_v():
    made = exact_waves(8, 8, 4, objective="steady")
    assert (made.step_s, made.is_proved) == (48, True)


def test_where_time_is_short_the_best_known_is_given_with_its_bound():
    made = exact_waves(12, 6, 3, limit=8, time_limit_s=0.0)
    assert not made.is_proved
    assert made.bound_s < made.step_s == step(made.schedule)


def test_what_is_shorter_than_what_was_found_is_given(monkeypatch):
    """Nothing small is: so what is found is made worse."""
    monkeypatch.setattr("penstock.schedule.exact_waves.found", partial(found, tries=1))
    assert step(found(6, 6, num_ranks=3, limit=4, tries=1)) == 42
    made = exact_waves(6, 6, 3, limit=4)
    assert (made.step_s, made.bound_s, step(made.schedule)) == (41, 41, 41)
    assert max(map(peak, made.schedule.orders)) == 4


def test_what_the_solver_does_not_know_is_no_bound(monkeypatch):
    counts = TickCounts(wave(6, 3), 6, 4, "drained")
    monkeypatch.setattr("penstock.schedule.exact_waves.solve", lambda *_: (None, 0.0))
    assert counts.shortest(41, 60.0) == (3 * 2 * 6 + 2, None)  # the work, and when it can begin


def test_long_run_is_bounded_by_a_mean_over_ranks():
    made = exact_waves(6, 6, 3, limit=5, objective="steady")
    assert (made.step_s, made.bound_s) == (39, 38 + 1 / 3)
