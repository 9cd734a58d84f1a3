"""What holds for every built-in schedule and every size."""

import doctest
import itertools
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.schedule
from penstock.errors import ScheduleError
from penstock.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    bubble,
    find,
    interleaved,
    peak_activations,
    versions,
)
from tests.schedule.toy import costs, is_valid, peak, run, step

sizes, seconds = st.integers(1, 9), st.integers(1, 9)
builders = st.sampled_from(SCHEDULES)


@given(builders, sizes, sizes)
def test_schedule_is_complete_and_runs_to_its_end(builder, num_stages, m):
    schedule = builder(num_stages, m)
    orders = list(schedule.orders)
    computes = [[action for action in order if action.kind != "U"] for order in orders]
    assert is_valid(computes, num_stages, m * schedule.num_steps)
    updates = [action for order in orders for action in order if action.kind == "U"]
    steps = range(schedule.num_steps if schedule.has_updates else 0)
    copies = [len(ranks) for ranks in schedule.stage_ranks]
    wanted = {Action("U", s, step): copies[s] for s in range(num_stages) for step in steps}
    assert Counter(updates) == wanted
    assert run(orders, m)[1]


@pytest.mark.parametrize("builder", SCHEDULES)
def test_every_small_size_builds(builder):
    """And to build is to be verified."""
    for num_stages, m in itertools.product(range(1, 17), range(1, 17)):
        assert builder(num_stages, m).num_stages == num_stages


@given(builders, sizes, sizes)
def test_every_stage_does_its_micro_batches_in_order(builder, num_stages, m):
    """So gradients are summed in the order of a plain loop."""
    for order in builder(num_stages, m).orders:
        for stage in {action.stage for action in order}:
            for kind in "FBIWU":
                done = [a.micro_batch for a in order if a.stage == stage and a.kind == kind]
                assert done == sorted(done)


@given(builders, sizes, sizes, seconds, seconds, seconds)
def test_compiled_clock_agrees_with_the_slow_one(builder, num_stages, m, f, i, w):
    schedule = builder(num_stages, m)
    spans, _ = run(list(schedule.orders), m, costs(f, i, w))
    ends = [rank[-1].end if rank else 0 for rank in spans]
    assert schedule.play((f, i + w, i, w, 0))[1].tolist() == ends
    busy = [sum(span.end - span.start for span in rank) for rank in spans]
    idle = bubble(schedule, forward_s=f, input_s=i, weights_s=w)
    assert list(idle) == [max(ends) - each for each in busy]


@given(builders, sizes, sizes, st.tuples(seconds, seconds, seconds), st.integers(0, 2))
def test_slower_action_never_shortens_the_step(builder, num_stages, m, times, slower):
    schedule = builder(num_stages, m)
    more = [time + (place == slower) for place, time in enumerate(times)]
    assert step(schedule, costs(*more)) >= step(schedule, costs(*times))


@given(builders, sizes, sizes)
def test_activations_are_those_counted_action_by_action(builder, num_stages, m):
    schedule = builder(num_stages, m)
    assert list(peak_activations(schedule)) == [
        peak(order, schedule.together) for order in schedule.orders
    ]


@given(builders, sizes, sizes)
def test_schedule_without_updates_has_one_version(builder, num_stages, m):
    schedule = builder(num_stages, m)
    if not schedule.has_updates:
        assert versions(schedule).alive == (1,) * num_stages
        assert schedule.num_steps == 1


@given(builders, sizes, sizes)
def test_schedule_reads_back_from_text_and_from_json(builder, num_stages, m):
    schedule = builder(num_stages, m)
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize("builder", SCHEDULES)
def test_schedule_bears_the_name_of_its_function_and_is_found_by_it(builder):
    assert builder(2, 2).name == builder.__name__
    assert find(builder.__name__) is builder


@pytest.mark.parametrize("builder", SCHEDULES)
@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-3, 2)])
def test_no_stage_or_no_micro_batch_is_refused(builder, sizes):
    with pytest.raises(ScheduleError, match=r"num_stages|num_micro|stages") as caught:
        builder(*sizes)
    assert "1 or more" in caught.value.hint


def test_more_ranks_than_stages_leaves_ranks_with_nothing_to_do():
    schedule = interleaved(2, 3, num_ranks=4)
    assert schedule.num_ranks == 4
    assert [len(order) for order in schedule.orders] == [6, 6, 0, 0]
    assert Schedule.parse(str(schedule)) == schedule
    assert peak_activations(schedule)[2:] == (0, 0)
    assert bubble(schedule, forward_s=1, input_s=1, weights_s=0)[3] == 8


def test_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(ScheduleError, match="there is no schedule '1f1b'") as caught:
        find("1f1b")
    names = [builder.__name__ for builder in SCHEDULES]
    assert caught.value.hint.endswith(f"there are: {', '.join(names)}")


def test_example_in_the_docstring_is_what_runs():
    assert doctest.testmod(penstock.schedule).failed == 0


def test_importing_the_room_loads_no_torch():
    program = "import sys, penstock.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
