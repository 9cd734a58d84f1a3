"""Copies listed among the actions of a rank: read, refused, counted, lowered, and how long a step.

What is held is counted here from the words alone.
"""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.program.codes import NUM_COSTS
from penstock.program.lower import lower
from penstock.schedule import Schedule, Seconds, gpipe, peak_activations, refine
from penstock.schedule.exact_offload import Copies, exact_offload
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate
from tests.draws import examples
from tests.program.lowering import lower_schedule

ONE = "rank 0  F0.0 F0.0>far F0.1 F0.1>far F0.0<<far B0.0 F0.1<<far B0.1"
BEHIND = (
    "rank 0  F0.0 F0.1 F0.0>far F0.2 I0.1 F0.0<<far W0.1 I0.0 W0.0 I0.2 W0.2\n"
    "rank 1  F1.0 F1.1 I1.1 W1.1 I1.0 W1.0 F1.2 I1.2 W1.2"
)


def held(words):
    """Return the most activations that a rank holds, by the words of its order."""
    change = {"F": 1, "B": -1, "W": -1, "I": 0}
    now = most = 0
    for word in words.split()[2:]:
        now += {">far": -1, "<<far": 1}.get(re.sub(r".*\d", "", word), change[word[0]])
        most = max(most, now)
    assert now == 0
    return most


def costs(stages, times):
    """Return seconds of F, I, W, copies there and copies back by stage, for the simulator."""
    rows = np.zeros((NUM_COSTS, stages, 1))
    rows[[0, 2, 3, 5, 8], :, 0] = times
    return Costs(rows)


@pytest.mark.parametrize("text", [ONE, BEHIND])
def test_text_and_file_hold_them(text):
    made = Schedule.parse(text)
    assert str(made).partition("\n")[2] == text
    assert Schedule.parse(str(made)) == Schedule.from_json(made.to_json()) == made
    assert made != dataclasses.replace(made, far=())
    assert peak_activations(made) == tuple(map(held, text.splitlines()))


def test_what_is_held_between_two_copies_counts():
    made = Schedule.parse("rank 0  F0.0 F0.0>far F0.1 F0.0<<far F0.1>far F0.1<<far B0.0 B0.1")
    assert peak_activations(made) == (2,)
    swapped = Schedule.parse("rank 0  F0.0 F0.0>far F0.1 F0.1>far F0.0<<far B0.0 F0.1<<far B0.1")
    assert peak_activations(swapped) == (1,)


REFUSED = {
    "rank 0  F0.0>far F0.0 B0.0": "of a forward which is not done there before",
    "rank 0  F0.0 F0.0<<far B0.0": "of a forward which is not away",
    "rank 0  F0.0 F0.0>far F0.0>far B0.0": "of a forward which is away already",
    "rank 0  F0.0 F0.0>far F0.0<<far F0.0<<far B0.0": "of a forward which was there already",
    "rank 0  F0.0 F0.0>far F0.0<<far F0.0>far B0.0": "of a forward which was away already",
    "rank 0  F0.0 F0.0>far B0.0": "does B0.0 while what F0.0 keeps is in far memory",
    "rank 0  F0.0 F0.0>far I0.0 W0.0": "does I0.0 while what F0.0 keeps is in far memory",
    "rank 0  F0.0 I0.0 F0.0>far W0.0": "of a forward whose backward has begun",
    "rank 0  F0.0 F0.0>far": "what F0.0 keeps stays in far memory",
    "rank 0  F0.0 B0.0 F0.0>far": "of a forward whose backward has begun",
    "rank 0  F0.0 F1.0>far B0.0": "of a forward which is not done there before",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(ScheduleError, match=REFUSED[text]) as caught:
        Schedule.parse(text)
    assert caught.value.hint


def test_they_stand_behind_the_messages_of_what_comes_before_them():
    words = [" ".join(map(str, code)) for code in lower(Schedule.parse(BEHIND)).code]
    assert words[0] == (
        "F0.0 F0.0>r1e0s0 F0.0>>far F0.1 F0.1>r1e0s1 F0.0>far F0.2 F0.2>r1e0s2 I1.1<r1e1s0 I0.1"
        " F0.0<<far W0.1 I1.0<r1e1s0 F0.0<far I0.0 W0.0 I1.2<r1e1s0 I0.2 W0.2 U0.0"
    )
    assert "far" not in words[1]


def test_each_replica_has_those_of_its_own_schedule_and_a_joint_backward_all_it_needs():
    made = Schedule.parse(ONE)
    code = lower_schedule([made, gpipe(1, 2)]).code
    assert [sum("far" in str(one) for one in row) for row in code] == [8, 0]
    head = "schedule: stages 1, micro-batches 2, steps 1, weights synchronous, together 2\n"
    joint = f"{head}rank 0  F0.0 F0.1 F0.1>far F0.0>far F0.1<<far F0.0<<far B0.0"
    assert "F0.0<far F0.1<far B0.0" in " ".join(map(str, lower(Schedule.parse(joint)).code[0]))
    with pytest.raises(ScheduleError, match=r"B0\.0 while what F0\.1 keeps is in far memory"):
        Schedule.parse(joint.replace("F0.1<<far ", ""))


def test_units_of_a_stage_go_and_come_with_it():
    made = refine(Schedule.parse(BEHIND), (2, 1))
    assert str(made).splitlines()[1] == (
        "rank 0  F0.0 F1.0 F0.1 F1.1 F0.0>far F1.0>far F0.2 F1.2 I1.1 I0.1 F1.0<<far F0.0<<far"
        " W1.1 W0.1 I1.0 I0.0 W1.0 W0.0 I1.2 I0.2 W1.2 W0.2"
    )
    assert lower(made).num_stages == 3


sizes = st.tuples(st.integers(1, 4), st.integers(1, 7))
seconds = st.integers(1, 12)


@given(sizes, st.integers(1, 3), st.data())
@examples(8)
def test_found_ones_hold_the_limit_whatever_copies_take_and_last_what_is_told(size, limit, data):
    stages = size[0]
    times = [[data.draw(seconds) for _ in range(stages)] for _ in range(5)]
    both = Copies(*times[3:])
    found = exact_offload(*size, both, seconds=Seconds(*times[:3]), limit=limit, time_limit_s=0)
    made = found.schedule
    assert all(held(line) <= limit for line in str(made).splitlines()[1:])
    assert len(made.far) == 2 * len(found.copies)
    program = lower(made)
    assert simulate(program, costs(stages, times)).totals.step_s == found.run_s >= found.step_s
    slow = [*times[:3], *([10 * each for each in row] for row in times[3:])]
    assert simulate(program, costs(stages, slow)).totals.step_s >= found.run_s
