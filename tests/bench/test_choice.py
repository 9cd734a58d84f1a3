"""bench.choice: regret of each way to choose, and a neighbour that goes away."""

import multiprocessing

from bench import choice as bench
from penstock.choose.choose import Choice, Joining, Option, Searched
from penstock.plan import plan_by_hand
from penstock.search import Candidate, SearchResult, Tally
from tests.search.chains import chain

GRAPH = chain([4] * 4, [4] * 4)
ONE = plan_by_hand(GRAPH, [], "one_f_one_b", num_micro_batches=4)
TWO = plan_by_hand(GRAPH, [1], "gpipe", num_micro_batches=4)


def searched(*ways):
    """Return what a search found: for each way of joining, candidates of these seconds."""
    options = []
    for joined, rows in ways:
        made = tuple(Candidate(plan, seconds, (1,), 0.0) for plan, seconds in rows)
        found = SearchResult(made[0].plan, made, (), Tally(len(made), 0, 0, 0, 0), False)
        options.append(Option(Joining(joined, None, None, ()), found))
    first = options[0].choice
    return Searched(first, (), (), options[0].found.tally, tuple(options))


def test_fastest_predicted_is_of_all_ways_of_joining():
    found = bench.fastest_predicted(searched((1, [(ONE, 2.0), (TWO, 1.5)]), (2, [(ONE, 1.4)])))
    assert found.plan == ONE.changed(joined=2)


def test_steps_are_timed_by_turns_there_and_back():
    asked = []

    def timer(choice, steps):
        asked.append(choice.plan.num_stages)
        return [float(choice.plan.num_stages)] * steps

    choices = [Choice(None, None, plan) for plan in (ONE, TWO)]
    assert bench.measured_s(choices, timer, 3) == [1.0, 2.0]
    assert asked == [1, 2, 2, 1, 1, 2]


def test_summary_has_a_row_for_each_way_with_and_without_a_neighbour():
    rows = [
        {"neighbour": busy, "way": way, "regret": regret}
        for busy, regret in (("no", 0.0), ("no", 0.2), ("yes", 0.1))
        for way in bench.WAYS
    ]
    found = bench.summary(rows)
    assert [(row["neighbour"], row["way"]) for row in found] == [
        (busy, way) for busy in ("no", "yes") for way in bench.WAYS
    ]
    assert (found[0]["runs"], found[0]["mean"], found[0]["worst"]) == (2, 0.1, 0.2)


def test_a_neighbour_is_gone_afterwards():
    with bench.neighbour(1, disturbs=True):
        assert len(multiprocessing.active_children()) == 1
    assert not multiprocessing.active_children()
    with bench.neighbour(1, disturbs=False):
        assert not multiprocessing.active_children()
