"""Asynchronous schedules: what they hold, send and wait for."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.program.codes import SEND
from penstock.program.lower import lower
from penstock.schedule import (
    Schedule,
    asynchronous,
    bubble,
    find,
    made_in_passing,
    num_messages,
    peak_activations,
    versions,
    weight_copies,
)
from penstock.schedule.asynchronous import (
    ASYNCHRONOUS,
    delayed_gradients,
    pipedream,
    pipelined_backprop,
    pipemare,
    round_robin,
    spec_train,
    timeprest,
    vertical_sync,
    weight_prediction,
    x_pipe,
)
from penstock.simulate import simulate
from penstock.timeline import draw, step_s
from tests.draws import examples
from tests.schedule.toy import picture

sizes, steps, seconds = st.integers(1, 6), st.integers(1, 6), st.integers(1, 9)
ONE_BY_ONE = [make for make in ASYNCHRONOUS if make not in (round_robin, timeprest)]


def test_picture_of_round_robin_is_what_runs():
    def seconds(action):
        return {"F": 1, "B": 2, "U": 0}[action.kind] * (2 - action.stage)

    drawn = draw(simulate(lower(round_robin(2, 2, num_steps=3)), seconds)).splitlines()
    assert all(line[:80].rstrip() in asynchronous.__doc__ for line in drawn)


def test_picture_in_the_page_is_what_runs():
    drawn = picture(pipedream(2, 1, num_steps=3), {"F": 1, "B": 2, "U": 1})
    assert drawn in asynchronous.__doc__


@pytest.mark.parametrize("make", ASYNCHRONOUS)
@given(sizes, sizes, steps)
def test_every_size_builds_under_its_own_name(make, num_stages, m, num_steps):
    made = make(num_stages, m, num_steps=num_steps)
    assert (made.name, made.num_steps, find(made.name)) == (make.__name__, num_steps, make)


@pytest.mark.parametrize("make", ONE_BY_ONE)
@given(sizes, sizes, steps)
def test_bubble_without_a_flush_is_one_filling_and_draining(make, num_stages, m, num_steps):
    made = make(num_stages, m, num_steps=num_steps)
    assert bubble(made) == ((num_stages - 1) * 3.0,) * num_stages


@given(st.integers(1, 6), st.integers(0, 6))
def test_versions_of_one_micro_batch_a_step_are_those_of_the_papers(num_stages, more):
    num_steps = 2 * num_stages + more
    expected = {
        pipedream: range(num_stages, 0, -1),
        vertical_sync: [num_stages] * num_stages,
        delayed_gradients: range(2 * num_stages - 1, 0, -2),
        pipelined_backprop: [1] * num_stages,
        timeprest: [1] * num_stages,
    }
    for make, alive in expected.items():
        assert versions(make(num_stages, 1, num_steps=num_steps)).alive == tuple(alive)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(2, 6))
def test_activations_are_the_micro_batches_in_flight(num_stages, m, num_steps):
    window = m * num_steps
    as_1f1b = tuple(min(num_stages - rank, window) for rank in range(num_stages))
    twice = tuple(min(2 * (num_stages - rank) - 1, window) for rank in range(num_stages))
    assert peak_activations(pipedream(num_stages, m, num_steps=num_steps)) == as_1f1b
    assert peak_activations(pipelined_backprop(num_stages, m, num_steps=num_steps)) == twice


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 9))
def test_stages_of_round_robin_take_turns(ranks, m, num_steps):
    """Micro-batch m of a stage is on its (m % n)-th rank; all its ranks update in every step."""
    words = "-".join(map(str, ranks))
    made = round_robin(len(ranks), m, num_steps=num_steps, ranks=words)
    firsts = list(itertools.accumulate(ranks, initial=0))
    assert made.num_ranks == firsts[-1]
    for stage, (first, own) in enumerate(zip(firsts, ranks, strict=False)):
        assert made.stage_ranks[stage] == tuple(range(first, first + own))
        for number in range(m * num_steps):
            assert made.rank_of(stage, number) == first + number % own
    assert Schedule.parse(str(made)) == made
    assert lower(made).stages_of(made.num_ranks - 1) == (len(ranks) - 1,)


@examples(15)
@given(
    st.lists(st.tuples(st.integers(1, 3), seconds, seconds), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_round_robin_in_full_flight_never_waits(stages, m):
    """A micro-batch takes what the busiest stage needs for it, its ranks taken together."""
    ranks = [own for own, _, _ in stages]
    assert long_run(ranks, stages, m, "full") == max((f + b) / own for own, f, b in stages)


@pytest.mark.parametrize(
    ("ranks", "stages", "noam"),
    [
        ((2, 1), [(1, 2), (1, 2)], 3.0),  # the busier one is not replicated; once took 4
        ((2, 1), [(2, 4), (1, 2)], 3.0),  # the paper's figure: the first stage takes twice as long
        ((15, 1), [(15, 30), (1, 2)], 3.0),
        ((2, 1, 1), [(2, 4), (1, 2), (1, 2)], 4.5),  # a round waits for the next stage's ranks
    ],
)
def test_seconds_of_a_micro_batch_with_as_many_in_flight_as_the_paper_has(ranks, stages, noam):
    rows = [(own, *each) for own, each in zip(ranks, stages, strict=True)]
    assert long_run(ranks, rows, 1, "noam") == noam
    assert long_run(ranks, rows, 1, "full") == 3.0


def long_run(ranks, stages, m: int, depth: str) -> float:
    """Return the seconds that one more micro-batch takes, when the pipeline is full."""

    def took(steps: int) -> float:
        words = "-".join(map(str, ranks))
        made = round_robin(len(ranks), m, num_steps=steps, ranks=words, depth=depth)
        cost = {"F": 1, "B": 2}
        return step_s(
            simulate(lower(made), lambda a: stages[a.stage][cost[a.kind]] if a.kind in cost else 0)
        )

    unit = math.lcm(m, *ranks) // m
    return (took(16 * unit) - took(8 * unit)) / (8 * unit * m)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ("2-0", "the stages are on 2-0 ranks"),
        ("a", "the stages are on 'a' ranks"),
        ("1-1-2", "2 stages on 1-1-2 ranks"),
    ],
)
def test_ranks_that_are_none_are_refused(ranks, why):
    with pytest.raises(ScheduleError, match=why):
        round_robin(2, 1, ranks=ranks)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))
def test_timeprest_reads_the_newest_weights_and_states_their_difference(num_stages, m, num_steps):
    table = versions(timeprest(num_stages, m, num_steps=num_steps))
    for stage in range(num_stages):
        for number in range(m * num_steps):
            step = number // m
            assert table.backward[stage, number] == step
            early = (num_stages - 1 - stage) * min(2, m)
            assert table.forward[stage, number] == max(0, (number - early) // m)


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (find("gpipe"), 2 * 3 * 5),
        (find("forward_only"), 3 * 5),
        (find("hanayo"), 2 * 2 * 5),
        (pipedream, 4 * 2 * 3 * 5),
    ],
)
def test_messages_are_those_between_ranks(make, messages):
    """Hanayo folds four stages on two ranks: from stage 1 to 2 nothing is sent."""
    assert num_messages(make(4, 5)) == messages
    program = lower(make(4, 5))
    assert num_messages(make(4, 5)) == int((program.code.op == SEND).sum())


@given(st.integers(0, 3), st.integers(1, 6))
def test_gradients_that_wait_for_an_earlier_update_are_copies_of_weights(more, m):
    """Where a step ends inside a round, ranks have gradients of the next one before its update."""
    made = round_robin(2, m, num_steps=8 + more, ranks="3")
    parked = int(m % 3 > 0)
    assert weight_copies(made) == (versions(made).alive[0] + parked, 1)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_copies_of_weights_are_versions_predictions_and_what_these_are_made_from(stages, m, steps):
    assert weight_copies(pipedream(stages, m, num_steps=steps)) == (
        versions(pipedream(stages, m, num_steps=steps)).alive
    )
    late = [stage < stages - 1 for stage in range(stages)]
    kept = weight_copies(weight_prediction(stages, 1, num_steps=steps))
    assert list(kept) == [1 + one for one in late]


def test_a_prediction_is_kept_only_where_the_version_that_it_is_made_from_is_replaced():
    assert weight_copies(spec_train(4, 1, num_steps=6)) == (1, 1, 1, 1)
    assert made_in_passing(spec_train(3, 1, num_steps=6)) == {
        ("F", 0),
        ("F", 1),
        ("F", 2),
        ("B", 2),
    }
    assert weight_copies(x_pipe(4, 4, num_steps=6)) == (2, 2, 2, 1)
    assert made_in_passing(pipedream(3, 1)) == frozenset()


def test_pipemare_keeps_one_version_and_one_average():
    assert weight_copies(pipemare(4, 4, num_steps=6)) == (2, 2, 2, 1)
    assert weight_copies(pipemare(4, 1, num_steps=6)) == (2, 2, 2, 1)
    assert made_in_passing(pipemare(4, 1, num_steps=6)) == {("B", 0), ("B", 1), ("B", 2)}


def nf1b_s(early: tuple[int, ...], m: int, b: int) -> float:
    """Return the forwards that a step of nF1B lasts when it is full.

    Stage s does m + early[s] forwards, then by turns one backward of a whole step, which is as long
    as b forwards, and m forwards.
    """
    count, now = 30, [0] * len(early)
    ends: dict[tuple[str, int, int], int] = {}
    turns = [
        [("F", n) for n in range(m + more)]
        + [each for t in range(count) for each in (("B", t), *_forwards(m + more + t * m, m))]
        for more in early
    ]
    while turns[0]:
        for stage, left in enumerate(turns):
            last, first = stage == len(early) - 1, stage == 0
            while left:
                kind, n = left[0]
                come = ("B", stage + 1, n) if kind == "B" else ("F", stage - 1, n)
                if come not in ends and not (last if kind == "B" else first):
                    break
                now[stage] = max(now[stage], ends.get(come, 0)) + (b if kind == "B" else 1)
                ends[kind, stage, n] = now[stage]
                left.pop(0)
    return (ends["B", 0, count - 1] - ends["B", 0, count - 11]) / 10


def _forwards(first: int, count: int) -> list[tuple[str, int]]:
    return [("F", n) for n in range(first, first + count)]


@pytest.mark.parametrize(
    ("stages", "m", "b"), [(2, 5, 1), (2, 1, 2), (2, 4, 2), (3, 1, 1), (3, 3, 1), (3, 2, 4)]
)
def test_timeprest_begins_as_few_forwards_early_as_nf1b_can_without_idling(stages, m, b):
    """All numbers of forwards, simulated: the first that does not idle is min(1 + b, m) a stage."""
    most = range((stages - 1) * m + 1)
    tried = [(*each, 0) for each in itertools.product(most, repeat=stages - 1)]
    tried = [each for each in tried if list(each) == sorted(each, reverse=True)]
    full = [each for each in tried if nf1b_s(each, m, b) == m + b]
    fewest = min(full, key=sum)
    assert fewest == tuple((stages - 1 - s) * min(1 + b, m) for s in range(stages))
    made = timeprest(stages, m, num_steps=2 * stages, backward_slots=b)
    assert peak_activations(made) == tuple(m + each for each in fewest)
    assert made.together == m


def test_timeprest_of_a_whole_backward_is_one_action_and_one_message():
    made = timeprest(3, 4, num_steps=2)
    assert sum(action.kind == "B" for order in made.orders for action in order) == 3 * 2
    assert num_messages(made) == 2 * (8 + 2)
    assert num_messages(made) == int((lower(made).code.op == SEND).sum())
    for sizes, message in (
        ((2, 3, 0), "as long as 0 forwards"),
        ((2, 3, 10**9), "as long as 10000"),
    ):
        with pytest.raises(ScheduleError, match=message):
            timeprest(*sizes[:2], backward_slots=sizes[2])
