import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.program.lower import lower
from penstock.schedule import dapple, one_f_one_b, peak_activations
from penstock.simulate import simulate
from penstock.timeline import draw, step_s
from tests.schedule.toy import costs, picture, simulated, step

sizes, seconds = st.integers(1, 8), st.integers(1, 9)
policies = st.sampled_from(("A", "B"))


@given(sizes, sizes, seconds, seconds, policies)
def test_bubble_is_that_of_1f1b(num_stages, m, f, b, policy):
    measured = step(dapple(num_stages, m, policy=policy), costs(f, b, 0))
    assert measured == m * (f + b) + (num_stages - 1) * (f + b)


@given(sizes, sizes)
def test_policy_a_is_1f1b(num_stages, m):
    assert dapple(num_stages, m, policy="A").orders == one_f_one_b(num_stages, m).orders


@given(sizes, sizes)
def test_rank_holds_its_warm_up(num_stages, m):
    behind = range(num_stages, 0, -1)
    assert peak_activations(dapple(num_stages, m)) == tuple(min(2 * k - 1, m) for k in behind)


@given(sizes, sizes, sizes, st.sampled_from("AB"))
def test_no_rank_holds_more_than_the_limit(num_stages, m, limit, policy):
    free = peak_activations(dapple(num_stages, m, policy=policy))
    held = peak_activations(dapple(num_stages, m, policy=policy, limit=limit))
    assert held == tuple(min(limit, each) for each in free)


def test_limit_of_none_is_refused():
    with pytest.raises(ScheduleError, match="the limit is 0 activations"):
        dapple(2, 2, limit=0)


@given(sizes, sizes, st.integers(0, 9))
def test_more_warm_up_is_never_slower_whatever_messages_take(num_stages, m, message_s):
    slower = simulated(one_f_one_b(num_stages, m), message_s=message_s)
    assert simulated(dapple(num_stages, m), message_s=message_s) <= slower


@given(sizes, sizes, seconds, seconds, st.integers(0, 9))
def test_steps_with_messages_are_bapipe_s_closed_forms(n, m, f, b, message_s):
    """AS <= SNO as we run it <= SNO where computes wait for messages; SO is exact, if they fit."""
    work = (m + n - 1) * (f + b)
    waits = simulated(one_f_one_b(n, m), costs(f, b, 0), message_s=message_s)
    assert work <= waits <= work + 2 * (m + n - 2) * message_s
    hides = simulated(dapple(n, m), costs(f, b, 0), message_s=message_s)
    assert hides >= work + 2 * (n - 1) * message_s
    if 2 * message_s <= f + b:
        assert hides == work + 2 * (n - 1) * message_s


def test_picture_in_the_docstring_is_what_runs():
    assert picture(dapple(3, 5)) in sys.modules[dapple.__module__].__doc__

    def seconds(action):
        return (2 - action.stage) * (1 if action.kind == "F" else 2)

    drawn = draw(simulate(lower(dapple(2, 4, ranks="2-1")), seconds), unit_s=1.0)
    assert textwrap.indent(drawn, "    ") in sys.modules[dapple.__module__].__doc__


@st.composite
def several(draw):
    """Return the turns of each stage, and micro-batches enough for all ranks to have one."""
    turns = draw(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4)
    )
    return turns, draw(st.integers(max(map(sum, turns)), 24))


@given(several(), policies)
def test_ranks_of_a_stage_take_their_parts_of_every_turn(pair, policy):
    turns, m = pair
    words = "-".join("+".join(map(str, turn)) if len(turn) > 1 else "1" for turn in turns)
    made = dapple(len(turns), m, ranks=words, policy=policy)  # a Schedule: it can run
    first = 0
    for stage, turn in enumerate(turns):
        for end in range(0, m + 1, sum(turn)):
            own = (made.ranks[stage, :end] - first).tolist()
            assert [own.count(at) * sum(turn) for at in range(len(turn))] == [p * end for p in turn]
        first += len(turn)
    assert made.num_ranks == first


@given(st.integers(1, 4), st.integers(1, 5), seconds, seconds, policies)
def test_ranks_of_one_stage_share_its_work(ranks, rounds, f, b, policy):
    """What takes `ranks` times as long, on so many ranks, keeps the other stage busy."""
    made = dapple(2, ranks * rounds, ranks=ranks, policy=policy)

    def seconds_of(action):
        return (1 if action.stage else ranks) * (f if action.kind == "F" else b)

    took = step_s(simulate(lower(made), seconds_of))
    most = (2 * ranks + 1) * (f + b)  # to fill, to drain, and a round in which they wait in turn
    assert ranks * rounds * (f + b) <= took <= ranks * rounds * (f + b) + most
    assert len({*made.ranks[0].tolist()}) == ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ("2-0", "the stages are on '2-0' ranks"),
        ("1-1-1", "ranks 1-1-1 of 3 stages, of 2"),
        ("9+1-1", "4 micro-batches leave a rank of 2 without one"),
    ],
)
def test_ranks_that_cannot_be_are_refused(ranks, words):
    with pytest.raises(ScheduleError, match=words):
        dapple(2, 4, ranks=ranks)
