"""Greedy: never stuck, never over a limit, never idle where it could work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import SCHEDULES, Schedule, Seconds, peak_activations
from penstock.schedule.greedy import NO_LIMIT, Rules, greedy, prefer, script
from penstock.schedule.stage_placement import loop, mirror, one_way, wave
from tests.schedule.toy import costs, run, simulated, step

sizes, ranks, seconds = st.integers(1, 8), st.integers(1, 4), st.integers(1, 9)
kinds = st.sampled_from(("FIW", "IFW", "IWF", "WIF", "FWI", "WFI"))


@st.composite
def placements(draw):
    num_stages, num_ranks, m = draw(sizes), draw(ranks), draw(sizes)
    shape = draw(st.sampled_from(("loop", "wave", "mirror", "anything")))
    if shape == "anything":
        homes = st.integers(0, num_ranks - 1)
        drawn = draw(st.lists(homes, min_size=num_stages * m, max_size=num_stages * m))
        return np.array(drawn, np.int64).reshape(num_stages, m), num_ranks
    if shape == "mirror":
        return mirror(wave(num_stages, num_ranks), m, num_ranks), num_ranks
    home = {"loop": loop, "wave": wave}[shape](num_stages, num_ranks)
    return one_way(home, m), num_ranks


def least(placement, num_ranks):
    """Return the most stages that a micro-batch has on each rank."""
    per = [[np.sum(column == rank) for column in placement.T] for rank in range(num_ranks)]
    return np.array([max(counts) for counts in per], np.int64)


@given(placements(), kinds, st.integers(0, 4), st.integers(0, 3), st.booleans(), st.data())
def test_every_placement_priority_and_limit_gives_a_schedule(
    placed, variants, room, patience, split, data
):
    """And a schedule is complete and runs to its end, or it would not exist."""
    placement, num_ranks = placed
    limit = least(placement, num_ranks) + room
    ahead = limit - data.draw(st.integers(0, room))
    rules = Rules(prefer(variants, placement.shape), limit, ahead, patience / 2)
    times = Seconds(*data.draw(st.tuples(seconds, seconds, seconds)), data.draw(st.integers(0, 3)))
    made = Schedule(*placement.shape, greedy(placement, times, [rules], split=split).orders)
    assert (made.ranks == placement).all()
    assert (np.array(peak_activations(made)) <= limit).all()
    assert all((action.kind == "B") <= (not split) for order in made.orders for action in order)


@given(placements(), kinds, seconds, seconds, seconds, st.integers(0, 5))
def test_step_is_what_the_simulator_says(placed, variants, f, i, w, message_s):
    placement, num_ranks = placed
    rules = Rules(prefer(variants, placement.shape), np.full(num_ranks, NO_LIMIT))
    result = greedy(placement, Seconds(f, i, w, message_s), [rules])
    made = Schedule(*placement.shape, result.orders)
    if all(len(ranks) == 1 for ranks in made.stage_ranks):  # else gradients are reduced as well
        assert result.step_s == simulated(made, costs(f, i, w), message_s=message_s)
    assert message_s or result.step_s == step(made, costs(f, i, w))


@given(placements(), kinds, seconds, seconds, seconds)
def test_no_rank_idles_while_it_could_start_something(placed, variants, f, i, w):
    placement, num_ranks = placed
    rules = Rules(prefer(variants, placement.shape), np.full(num_ranks, NO_LIMIT))
    made = Schedule(*placement.shape, greedy(placement, Seconds(f, i, w), [rules]).orders)
    spans, _ = run(list(made.orders), placement.shape[1], costs(f, i, w))
    ended = {span.action: span.end for rank in spans for span in rank}
    for rank in spans:
        for place, span in enumerate(rank):
            gap = rank[place - 1].end if place else 0
            if span.start > gap:  # then no stage could start its next F, I or W in the gap
                following = {later.action[:2]: later.action for later in reversed(rank[place:])}
                for action in following.values():
                    assert ready(action, ended, made.num_stages) >= span.start


def ready(action, ended, num_stages):
    kind, stage, m = action
    before = {"F": ("F", stage - 1), "W": ("I", stage), "I": ("I", stage + 1)}[kind]
    if kind == "I" and stage + 1 == num_stages:
        before = ("F", stage)
    needed = [end for (k, s, n), end in ended.items() if (k, s, n) == (*before, m)]
    own = [end for (k, s, n), end in ended.items() if (k, s, n) == ("F", stage, m)]
    return max([0, *needed, *(own if kind == "I" else [])])


@given(st.sampled_from(SCHEDULES), sizes, sizes)
def test_script_repeats_the_forwards_and_backwards_of_a_schedule(builder, num_stages, m):
    given_ = builder(num_stages, m)
    if given_.has_updates or not (given_.orders.kinds > 0).any():
        return
    ranks = given_.ranks.astype(np.int64)
    free = np.full(given_.num_ranks, NO_LIMIT)
    rules = Rules(script(given_.orders, ranks.shape), free, in_order=True)
    for split in (False, True):
        orders = greedy(ranks, Seconds(), [rules], split=split).orders
        for mine, other in zip(orders, given_.orders, strict=True):
            assert without_weights(mine) == without_weights(other)


def without_weights(order):
    names = {"F": "F", "B": "I", "I": "I"}
    return [(names[kind], stage, m) for kind, stage, m in order if kind != "W"]


def test_limit_too_low_is_refused_and_says_where():
    placement = one_way(wave(4, 2), 3)
    rules = Rules(prefer("IFW", placement.shape), np.array([2, 1]))
    with pytest.raises(ScheduleError, match="rank 1 may hold 1 activations, and has 2 stages"):
        greedy(placement, Seconds(), [rules])


def test_order_that_needs_more_than_the_limit_is_refused():
    placement = one_way(loop(2, 2), 3)
    forwards_first = np.zeros((3, 2, 3), np.int64)
    forwards_first[0], forwards_first[1] = np.arange(3), 3 + np.arange(3)
    with pytest.raises(ScheduleError, match="the limit is too low for this order"):
        greedy(placement, Seconds(), [Rules(forwards_first, np.array([2, 2]), in_order=True)])


@pytest.mark.parametrize("times", [Seconds(-1.0), Seconds(1.0, (1.0, 2.0)), Seconds(float("nan"))])
def test_seconds_that_cannot_be_are_refused(times):
    with pytest.raises(ScheduleError, match="for 3 stages"):
        times.table(3, split=True)


def test_negative_message_is_refused():
    with pytest.raises(ScheduleError, match="message_s is -1"):
        Seconds(message_s=-1.0).table(2, split=False)


def test_whole_backward_takes_both_halves():
    assert Seconds(1, 2, 4).table(2, split=False).tolist() == [[1, 1], [6, 6], [0, 0]]


@given(placements(), seconds, seconds, seconds)
def test_of_several_rules_the_best_is_taken_the_first_of_equals(placed, f, i, w):
    placement, num_ranks = placed
    free = np.full(num_ranks, NO_LIMIT)
    rules = [Rules(prefer(fixed, placement.shape), free) for fixed in ("WFI", "FIW", "IFW")]
    alone = [greedy(placement, Seconds(f, i, w), [each]) for each in rules]
    best = min(alone, key=lambda result: result.step_s)
    assert greedy(placement, Seconds(f, i, w), rules) == best


def test_preference_orders_kinds_then_age_then_depth():
    priority = prefer("WFI", (2, 2))
    ranked = sorted(
        ((kind, stage, m) for kind in range(3) for stage in range(2) for m in range(2)),
        key=lambda key: priority[key],
    )
    w_first = [(2, 1, 0), (2, 0, 0), (2, 1, 1), (2, 0, 1)]
    assert ranked[:4] == w_first
    assert [kind for kind, _, _ in ranked] == [2] * 4 + [0] * 4 + [1] * 4
