"""Brief: a search for a short run tries less, and loses no more than the run pays for."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.search import search
from penstock.search.field import Effort, Field
from penstock.search.judge import Judge
from tests.draws import examples
from tests.search.chains import SIX, SIX_PROFILE, SLOW, chains, cluster_of


def plans_of(graph, profile, cluster, count: int):
    found = search(graph, profile, cluster, micro_batches=count, prune=False)
    return [each.plan for each in found.candidates]


@examples(4)
@given(
    chains(2, 4),
    st.integers(1, 2),
    st.sampled_from([2, 4]),
    st.sampled_from([SLOW, Link(0.0, 1e12)]),
    st.sampled_from([1, 5, 30, 1000, 10**6]),
)
def test_what_is_left_out_gains_less_in_all_steps_than_ten_times_simulating_it(
    pair, ranks: int, count: int, link: Link, num_steps: int
) -> None:
    graph, profile = pair
    cluster = cluster_of(ranks, link=link)
    plans = plans_of(graph, profile, cluster, count)
    brief = Field(Judge(graph, profile, cluster), plans, "time", Effort(num_steps=num_steps))
    whole = Field(Judge(graph, profile, cluster), plans, "time", Effort(prune=False))
    (found,), (best,) = brief.best(1), whole.best(1)
    assert (found.step_s - best.step_s) * num_steps * 0.1 <= 0.005
    assert len(brief.simulated) <= len(whole.simulated)


def test_a_step_has_to_gain_what_pays_ten_times_for_simulating_a_plan() -> None:
    assert Effort(num_steps=10).worth_s * 10 == pytest.approx(10 * 0.005)
    assert Effort().worth_s == 0


def test_the_shorter_the_run_the_fewer_plans_are_simulated(monkeypatch) -> None:
    cluster, counts, seconds = cluster_of(3, link=SLOW), [], []
    simulated, number = Judge.candidate, itertools.count()

    def counted(*about, **more):
        next(number)
        return simulated(*about, **more)

    monkeypatch.setattr(Judge, "candidate", counted)
    for num_steps in (1e-9, 10, math.inf):  # steps here last seconds
        found = search(SIX, SIX_PROFILE, cluster, micro_batches=6, num_steps=num_steps)
        counts.append(next(number))
        seconds.append(found.plan.predicted.step_s)
        assert not found.cut_short
    assert counts[0] < (counts[2] - counts[1]) / 2
    assert seconds[-1] == min(seconds)
    whole = search(SIX, SIX_PROFILE, cluster, micro_batches=6)
    assert whole.plan.predicted.step_s == seconds[-1]


def test_what_fits_is_found_however_short_the_run_is() -> None:
    for room in (300, 200):
        about = cluster_of(2, link=SLOW, memory_bytes=room)
        brief = search(SIX, SIX_PROFILE, about, micro_batches=2, num_steps=1e-9)
        assert max(brief.plan.predicted.peak_bytes) <= room
