"""The speed of a cluster: sums, caps, the slowest, the law of scaling; and the whole run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EstimateError
from penstock.fleet.together import ClusterMember, Course, Scaling, detect, scaling, together

seconds = st.floats(0.01, 10.0)
members = st.lists(
    st.builds(
        lambda ranks, s, less, more: ClusterMember("d", ranks, s, s * less, s * more),
        st.integers(1, 9), seconds, st.floats(0.5, 1.0), st.floats(1.0, 2.0),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@given(members)
def test_members_add_up(of):
    speed = together(of, {})
    each = [1 / one.seconds for one in of for _ in range(one.ranks)]
    assert speed.steps_per_s == pytest.approx(math.fsum(each))
    assert speed.low <= speed.steps_per_s <= speed.high
    assert (speed.held_by, speed.alone) == ("members", speed.steps_per_s)


@given(members)
def test_with_equal_shares_all_wait_for_the_slowest(of):
    slowest = max(one.seconds for one in of)
    count = sum(one.ranks for one in of)
    speed = together(of, {}, equal_shares=True)
    assert speed.steps_per_s == pytest.approx(count / slowest)
    assert speed.steps_per_s <= together(of, {}).steps_per_s * (1 + 1e-9)


@given(members, st.floats(0.1, 1000), st.floats(0.1, 1000))
def test_least_cap_holds_what_is_faster(of, server, loader):
    alone = together(of, {}).steps_per_s
    speed = together(of, {"server": server, "loader": loader})
    assert speed.steps_per_s == pytest.approx(min(alone, server, loader))
    least = "server" if server <= loader else "loader"
    assert speed.held_by == (least if min(server, loader) < alone else "members")
    assert speed.high <= min(server, loader) * (1 + 1e-9)


def test_speed_inside_the_interval_is_as_predicted():
    speed = together([ClusterMember("k80", 4, 0.1, 0.08, 0.125)], {"server": 36.0})
    found = detect(speed, 35.0)
    assert (found.as_predicted, found.held_by) == (True, "server")
    assert "add a server" in found.mend


def test_speed_below_the_interval_is_held_by_something_else():
    speed = together([ClusterMember("k80", 4, 0.1, 0.08, 0.125)], {})
    found = detect(speed, 20.0)
    assert (found.as_predicted, found.held_by, found.ratio) == (False, "something else", 0.5)
    assert "penstock train" in found.mend


def test_faster_than_predicted_is_no_fault():
    assert detect(together([ClusterMember("k80", 4, 0.1, 0.1, 0.1)], {}), 99.0).as_predicted


@given(seconds, st.floats(0, 0.3), st.floats(0, 0.02))
def test_law_of_scaling_is_found_from_its_own_points(first, contention, crosstalk):
    law = Scaling(first, contention, crosstalk)
    found = scaling({n: law.speed(n) for n in (1, 2, 3, 4)})
    for ranks in (1, 4, 8, 20):
        assert found.speed(ranks) == pytest.approx(law.speed(ranks), rel=1e-6)


def test_law_lowers_the_sum_of_members():
    law = Scaling(10.0, 0.1, 0.0)
    speed = together([ClusterMember("k80", 5, 0.1, 0.1, 0.1)], {}, law=law)
    assert speed.steps_per_s == pytest.approx(50 / 1.4)


@pytest.mark.parametrize(
    "points", [{}, {1: 5.0}, {2: 5.0, 3: 6.0}, {1: 5.0, 2: 0.0}, {0: 1.0, 1: 2}]
)
def test_points_that_are_no_scaling_are_refused(points):
    with pytest.raises(EstimateError, match="are no scaling"):
        scaling(points)


def test_run_is_steps_checkpoints_and_losses():
    course = Course(1000, checkpoint_s=4.0, every=300, losses=2, replace_s=100.0, stays=0.75)
    assert course.seconds(10.0) == pytest.approx(100 + 4 * 4 + 2 * 0.25 * 100)
    assert Course(1000).seconds(10.0) == 100.0


@pytest.mark.parametrize("wrong", [(-1,), (1, -1.0), (1, 0.0, -1), (1, 0.0, 0, 0.0, 0.0, 1.5)])
def test_run_that_cannot_be_is_refused(wrong):
    with pytest.raises(EstimateError, match="no run has"):
        Course(*wrong)


def test_no_member_no_cap_and_no_speed_are_refused():
    with pytest.raises(EstimateError, match="no rank"):
        together([], {})
    with pytest.raises(EstimateError, match="cap of the link is 0"):
        together([ClusterMember("k80", 1, 1, 1, 1)], {"link": 0.0})
    with pytest.raises(EstimateError, match="observed speed is 0"):
        detect(together([ClusterMember("k80", 1, 1, 1, 1)], {}), 0.0)
