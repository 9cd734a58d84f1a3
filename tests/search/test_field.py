"""The field: its front, what became of its plans, and a search whose time is over."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.plan import plan_by_hand
from penstock.search import Fixed, JobNeeds, search
from penstock.search.field import Effort
from penstock.search.judge import Judge
from penstock.search.polish import polish
from tests.draws import examples
from tests.search.chains import SIX, SIX_PROFILE, SLOW, chains, cluster_of, figures

micro_batches = st.sampled_from([1, 2, 4, 6])


@examples(10)
@given(
    chains(2, 5),
    st.integers(1, 3),
    micro_batches,
    st.sampled_from([SLOW, Link(0.0, 1e12)]),
    st.booleans(),
    st.sampled_from([10**9, 400, 250]),
)
def test_front_is_what_no_simulated_plan_beats(
    pair, ranks: int, count: int, link: Link, priced: bool, memory_bytes: int
) -> None:
    graph, profile = pair
    cluster = cluster_of(ranks, link=link, usd_per_hour=3.0 * priced, memory_bytes=memory_bytes)
    fronts, tallies = [], []
    for prune in (True, False):
        try:
            found = search(
                graph, profile, cluster, micro_batches=count, prune=prune, with_front=True
            )
        except PlanError:
            return
        usable = {figures(each) for each in found.candidates if not each.refused}
        front = [figures(each) for each in found.front]
        least = {each for each in usable if not any(beats(other, each) for other in usable)}
        assert front == sorted(least)
        tallies.append(found.tally)
        fronts.append(front)
    assert fronts[0] == fronts[1]
    pruned, whole = tallies
    assert pruned.simulated + pruned.slower == whole.simulated
    assert (pruned.late, whole.slower, whole.late) == (0, 0, 0)


def beats(other, own) -> bool:
    return other != own and all(a <= b for a, b in zip(other, own, strict=True))


def test_search_without_time_returns_the_first_plan_that_can_be_used() -> None:
    cluster = cluster_of(3, link=SLOW)
    found = search(SIX, SIX_PROFILE, cluster, micro_batches=6, is_over=lambda: True)
    assert found.tally.simulated == 1
    assert found.tally.late > 50
    assert found.tally.slower == 0
    assert f"{found.tally.late} not tried for lack of time" in str(found.tally)
    assert found.plan.predicted.step_s == found.candidates[0].step_s
    whys = {d.what: d.why for d in found.plan.decisions}
    assert whys["schedule"] == "none was found in time"
    assert found.cut_short


def test_without_time_nothing_is_polished() -> None:
    judge = Judge(SIX, SIX_PROFILE, cluster_of(3, link=SLOW))
    start = judge.candidate(plan_by_hand(SIX, (0, 1), "one_f_one_b", num_micro_batches=6))
    assert polish(judge, start, "time", Effort(is_over=lambda: True)) == start
    assert polish(judge, start, "time", Effort()).step_s < start.step_s


def test_all_that_was_polished_counts_for_the_front() -> None:
    about = {
        "micro_batches": 6,
        "with_front": True,
        "fixed": Fixed(needs=JobNeeds(state_stays=True)),
    }
    found = search(SIX, SIX_PROFILE, cluster_of(3, link=SLOW), **about)
    usable = {figures(each) for each in found.candidates if not each.refused}
    assert len(found.candidates) == found.tally.simulated + 3
    assert not any(beats(other, figures(each)) for each in found.front for other in usable)


def test_search_with_more_time_finds_no_worse() -> None:
    cluster, best = cluster_of(3, link=SLOW), []
    for calls in (1, 5, 20, 80, 10**6):
        ticks = iter(range(10**9))
        found = search(
            SIX,
            SIX_PROFILE,
            cluster,
            micro_batches=6,
            prune=True,
            is_over=lambda calls=calls, ticks=ticks: next(ticks) >= calls,
        )
        best.append(found.plan.predicted.step_s)
    assert best == sorted(best, reverse=True)
    assert best[-1] == search(SIX, SIX_PROFILE, cluster, micro_batches=6).plan.predicted.step_s
