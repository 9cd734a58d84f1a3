"""Plans whose schedule is built for the seconds of their own stages; the search makes them so."""

import itertools
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan import plan_by_hand, schedule_of
from penstock.schedule import Seconds, find
from penstock.schedule.recipe import Recipe
from penstock.search import Fixed, evaluate, search
from penstock.search import judge as judges
from penstock.search.judge import Judge
from penstock.simulate.suited import bare
from tests.draws import examples
from tests.search.chains import SIX, SIX_PROFILE, SLOW, chain, cluster_of, profile_of

LAYERS_S = (0.0101234, 0.05, 0.02, 0.03, 0.04, 0.01)
GRAPH = chain([1] * 6, [1] * 6)
PROFILE = profile_of(GRAPH, LAYERS_S)
MESSAGE_S = SLOW.latency_s + 1 / SLOW.bytes_per_s  # of one byte
TAKERS = ["zb_greedy", "zb_v", "list_schedule"]


def seconds_of(cuts, *, split: bool) -> Seconds:
    """Return what stages of the chain take: both gradients of a layer as long as its F.

    But layer 0 has none of its input, and stage 0 nothing to hand back: all it does is W.
    """
    ends = [0, *(cut + 1 for cut in cuts), 6]
    forward = [sum(LAYERS_S[a:b]) for a, b in itertools.pairwise(ends)]
    first, third = list(forward), list(forward)
    first[0], third[0] = 0.0, 2 * forward[0] - LAYERS_S[0]
    if not split:
        whole = [a + b for a, b in zip(first, third, strict=True)]
        return Seconds(forward, whole, 0.0, MESSAGE_S)
    return Seconds(forward, first, third, MESSAGE_S)


@given(
    st.sampled_from(TAKERS),
    st.sets(st.integers(0, 4), min_size=1),
    st.integers(1, 4),
)
def test_candidate_is_built_for_the_seconds_of_its_stages_to_three_digits(
    name: str, cuts, count: int
) -> None:
    stages = len(cuts) + 1
    plan = plan_by_hand(GRAPH, sorted(cuts), name, num_micro_batches=count)
    found = Judge(GRAPH, PROFILE, cluster_of(6, link=SLOW)).candidate(plan).plan
    wanted = seconds_of(sorted(cuts), split=name != "list_schedule")
    assert isinstance(found.schedule, Recipe)
    for row, given_row in zip(wanted, found.schedule.seconds, strict=True):
        assert given_row == pytest.approx(row, rel=5e-3)
    texts = map(repr, found.schedule.seconds[0])
    assert all(len(text.replace("0.", "").lstrip("0")) <= 3 for text in texts)
    assert bare(found) == plan
    more = {} if name == "zb_greedy" else {"num_ranks": stages}
    assert schedule_of(found) == find(name)(stages, count, seconds=found.schedule.seconds, **more)


def test_stages_that_recompute_take_longer_in_the_backward_pass() -> None:
    plan = plan_by_hand(GRAPH, [2], "zb_greedy", num_micro_batches=2, recompute=(False, True))
    found = Judge(GRAPH, PROFILE, cluster_of(2)).candidate(plan).plan
    keeps = seconds_of([2], split=True)
    assert found.schedule.seconds.forward_s == pytest.approx(keeps.forward_s, rel=5e-3)
    assert found.schedule.seconds.input_s[1] > 1.5 * keeps.input_s[1]


@pytest.mark.parametrize("name", TAKERS)
def test_found_plan_says_for_which_seconds_and_is_simulated_as_it_says(name: str) -> None:
    fixed = Fixed(schedule=name, ranks=3)
    found = search(GRAPH, PROFILE, cluster_of(3), micro_batches=6, fixed=fixed)
    assert any(each.plan.schedule.seconds is not None for each in found.candidates)
    for candidate in found.candidates:
        assert evaluate(GRAPH, PROFILE, cluster_of(3), candidate.plan)[0] == candidate
    (why,) = [each for each in found.plan.decisions if each.what == "schedule"]
    suited = found.plan.schedule.seconds is not None
    assert why.value == f"{name}{', built for the seconds of its stages' * suited}"
    assert search(GRAPH, PROFILE, cluster_of(3), micro_batches=6, fixed=fixed).plan == found.plan


def test_seconds_that_are_asked_for_are_kept() -> None:
    asked = Recipe("zb_greedy", (("limit", 4),), Seconds(1.0, 3.0, 1.0))
    found = search(GRAPH, PROFILE, cluster_of(3), micro_batches=6, fixed=Fixed(schedule=asked))
    assert {each.plan.schedule for each in found.candidates if each.plan.num_ranks > 1} == {asked}


def test_found_plan_is_no_slower_than_with_the_schedule_for_equal_seconds() -> None:
    for name, ranks in itertools.product(TAKERS, (2, 3)):
        fixed = Fixed(schedule=name, ranks=ranks)
        plan = search(GRAPH, PROFILE, cluster_of(3, link=SLOW), micro_batches=4, fixed=fixed).plan
        alike, _ = evaluate(GRAPH, PROFILE, cluster_of(3, link=SLOW), bare(plan))
        assert plan.predicted.step_s <= alike.step_s


def test_search_builds_each_schedule_once() -> None:
    built = []

    def counting(plan, **more):
        sizes = plan.num_stages, plan.num_micro_batches, plan.num_ranks
        built.append((plan.schedule, *sizes, *more.values()))
        return schedule_of(plan, **more)

    with patch.object(judges, "schedule_of", counting):
        search(SIX, SIX_PROFILE, cluster_of(3), micro_batches=6, with_front=True)
    assert len(built) == len(set(built))


@examples(5)
@given(st.integers(1, 9), st.integers(1, 3))
def test_written_schedule_is_planned_with_its_own_sizes(count: int, replicas: int) -> None:
    schedule = replace(find("zb_h2")(2, count), name="mine")
    fixed = Fixed(schedule=schedule)
    total = count * replicas
    found = search(GRAPH, PROFILE, cluster_of(6), micro_batches=total, fixed=fixed).plan
    assert schedule_of(found) == schedule
    assert (found.replicas, found.num_ranks, found.num_micro_batches) == (replicas, 2, count)


@pytest.mark.parametrize(
    ("micro_batches", "more", "hint"),
    [
        (9, {}, "write it out for 9 micro-batches, or a number that divides them"),
        (16, {}, "4 replicas of it are 8 ranks: give ranks=8"),
        (4, {"ranks": 3}, "1 replica of it is 2 ranks: give ranks=2"),
        (4, {"stages": 3}, "it is of 2 stages; the step is 1 replica of it"),
    ],
)
def test_written_schedule_that_does_not_fit_is_refused(micro_batches, more, hint) -> None:
    fixed = Fixed(schedule=find("zb_h1")(2, 4), **more)
    with pytest.raises(Exception, match=r"no plan fits .*zb_h1 \(2 stages and 4 micro") as caught:
        search(GRAPH, PROFILE, cluster_of(6), micro_batches=micro_batches, fixed=fixed)
    assert caught.value.hint == hint


def test_schedule_on_one_rank_can_be_written() -> None:
    schedule = find("interleaved")(3, 2, num_ranks=1)
    found = search(GRAPH, PROFILE, cluster_of(2), micro_batches=2, fixed=Fixed(schedule=schedule))
    assert (found.plan.num_stages, found.plan.total_ranks) == (3, 1)


@pytest.mark.parametrize("name", TAKERS)
def test_schedule_of_units_is_built_for_the_seconds_of_whole_stages(name: str) -> None:
    """Units of stage 0 hand gradients on inside it: what was W of the stage is I of those."""
    plan = plan_by_hand(GRAPH, [1], name, num_micro_batches=3)
    judge = Judge(GRAPH, PROFILE, cluster_of(2, link=SLOW))
    own, cut = (judge.candidate(each).plan.schedule for each in (plan, plan.refined(GRAPH)))
    assert isinstance(own, Recipe)
    assert isinstance(cut, Recipe)
    assert cut.units == (2, 4)
    plain, found = own.seconds, cut.seconds
    assert plain is not None
    assert found is not None
    assert found[0] == pytest.approx(plain[0], rel=1e-2)
    assert found.message_s == plain.message_s
    whole, other = (np.add(*np.broadcast_arrays(each[1], each[2])) for each in (plain, found))
    assert other == pytest.approx(whole, rel=1e-2)
