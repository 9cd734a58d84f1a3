import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import found, steady_s
from penstock.schedule.recipe import Recipe
from tests.schedule.toy import is_valid, peak, picture, run, step

# The least drained step of all building blocks of the authors' generator, M = 2 R, by the most
# activations that a rank holds.
AUTHORS = {
    3: {4: 41, 5: 39, 6: 38},
    4: {4: 59, 5: 56, 6: 53, 7: 52, 8: 51},
    5: {6: 71, 7: 68, 8: 66, 9: 65, 10: 64},
    6: {6: 89, 7: 86, 8: 83, 9: 80, 10: 79, 11: 78, 12: 77},
    8: {8: 119, 9: 116, 10: 113, 11: 110, 12: 107, 13: 106, 14: 105, 15: 104, 16: 103},
}
OBJECTIVES = ("drained", "steady")
CASES = [(ranks, limit) for ranks, row in AUTHORS.items() for limit in row]


def longest_own(schedule):
    """Return the longest time of a rank from its first action to its last, as early as can be."""
    spans, _ = run(list(schedule.orders), schedule.num_micro_batches)
    return max(rank[-1].end - rank[0].start for rank in spans)


@st.composite
def sizes(draw):
    ranks = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 4 * ranks))
    per_rank = -(-stages // ranks)
    return stages, draw(st.integers(1, 6)), ranks, per_rank + draw(st.integers(0, stages))


@given(sizes(), st.sampled_from(OBJECTIVES))
def test_it_is_legal_and_within_its_limit_on_waves(size, objective):
    stages, m, ranks, limit = size
    made = found(stages, m, num_ranks=ranks, limit=limit, objective=objective, tries=6)
    orders = list(made.orders)
    assert is_valid(orders, stages, m)
    assert max(map(peak, orders)) <= limit
    there = list(range(ranks))
    waves = (there + there[::-1]) * 4
    assert made.stage_ranks == tuple((home,) for home in waves[:stages])


@pytest.mark.parametrize(("ranks", "limit"), CASES)
def test_two_stages_a_rank_are_as_short_as_the_authors_at_every_limit(ranks, limit):
    made = found(2 * ranks, 2 * ranks, limit=limit)
    assert step(made) <= AUTHORS[ranks][limit]


@pytest.mark.parametrize(("ranks", "limit"), CASES)
def test_four_stages_a_rank_are_shorter_with_the_same_bytes(ranks, limit):
    made = found(4 * ranks, 2 * ranks, num_ranks=ranks, limit=2 * limit)
    assert step(made) < 2 * AUTHORS[ranks][limit]  # half the seconds, half the bytes


def test_steady_one_runs_faster_without_a_barrier_though_its_drained_step_is_longer():
    drained, steady = (found(16, 8, num_ranks=4, limit=12, objective=each) for each in OBJECTIVES)
    assert step(steady) > step(drained)
    assert longest_own(steady) < longest_own(drained)
    assert steady_s(steady) <= longest_own(steady)
    whole = found(16, 8, num_ranks=4, objective="steady")
    assert steady_s(whole) == 12 * 8  # all work
    assert step(whole) == 12 * 8 + 3


@pytest.mark.parametrize(("ranks", "m"), [(3, 2), (4, 3), (5, 5), (4, 8), (3, 9)])
def test_each_objective_is_shortest_in_what_it_says(ranks, m):
    drained, steady = (found(2 * ranks, m, objective=each) for each in OBJECTIVES)
    assert step(drained) <= step(steady)
    assert steady_s(steady) <= steady_s(drained)


def test_more_tries_are_never_longer():
    tried = [step(found(16, 8, num_ranks=4, limit=8, tries=tries)) for tries in (1, 10, 40, 160)]
    assert tried == sorted(tried, reverse=True)
    assert tried[-1] < tried[0]


def test_a_recipe_names_it_with_its_limit():
    recipe = Recipe.parse("found(limit=6, objective=steady)")
    assert recipe.name == "found(limit=6, objective=steady)"
    assert recipe.build(8, 8) == found(8, 8, limit=6, objective="steady")
    with pytest.raises(ScheduleError, match="objective"):
        Recipe.parse("found(objective=short)")


def test_what_cannot_be_is_refused():
    with pytest.raises(ScheduleError, match="may hold 3 activations, and has 4 stages"):
        found(16, 8, num_ranks=4, limit=3)
    with pytest.raises(ScheduleError, match="tries is 0"):
        found(4, 2, tries=0)


def test_picture_in_the_docstring_is_what_runs():
    doc = sys.modules[found.__module__].__doc__
    assert picture(found(4, 2, limit=3), stages=True) in doc
