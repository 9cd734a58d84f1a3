"""Versions: what a law means for an order of work."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    DOUBLE_BUFFERED,
    SYNCHRONOUS,
    WEIGHT_RULES,
    Action,
    Orders,
    Reads,
    Row,
    Schedule,
    WeightRule,
    arrange,
    double_buffered,
    one_f_one_b,
    scaled,
    versions,
)
from tests.schedule.toy import actions, alive

sizes = st.integers(1, 6)


def stash(num_stages: int) -> WeightRule:
    """PipeDream: the weights of a micro-batch are those there were when it came to the stage."""

    def law(stage, micro_batch, num_stages, num_micro_batches, /):
        version = np.maximum(micro_batch - (num_stages - stage) + 1, 0)
        return Reads(version, version, micro_batch)

    return WeightRule("stash", law)


def delayed(by: int) -> WeightRule:
    def law(stage, micro_batch, num_stages, num_micro_batches, /):
        step = micro_batch // num_micro_batches
        return Reads(step - by, step - by, step)

    return WeightRule(f"delayed by {by}", law)


def pipedream(num_stages: int, num_steps: int) -> Schedule:
    m = np.arange(num_steps)
    orders = arrange(
        (
            Row("B", s, m, 3 * m),
            Row("U", s, m, 3 * m + 1),
            Row("F", s, m, 3 * (m - num_stages + s) + 2),
        )
        for s in range(num_stages)
    )
    return Schedule(num_stages, 1, orders, num_steps, stash(num_stages))


@given(sizes, st.integers(0, 4))
def test_stash_keeps_a_version_for_each_stage_from_its_own_on(num_stages, more):
    """PipeDream's count: a stage holds the version of every micro-batch that is in flight."""
    table = versions(pipedream(num_stages, 2 * num_stages + more))
    assert table.alive == tuple(range(num_stages, 0, -1))


def reads_of(schedule: Schedule) -> dict[Action, int]:
    table = versions(schedule)
    reads = {"F": table.forward, "B": table.backward, "I": table.backward, "W": table.backward}
    return {
        action: int(reads[action.kind][action.stage, action.micro_batch])
        for order in schedule.orders
        for action in order
        if action.kind != "U"
    }


@given(sizes, st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_versions_alive_are_those_that_someone_still_needs(num_stages, m, num_steps, by):
    orders = double_buffered(num_stages, m, num_steps=num_steps).orders
    schedule = Schedule(num_stages, m, orders, num_steps, delayed(by))
    reads = reads_of(schedule)
    counted = tuple(alive(schedule, stage, stage, reads) for stage in range(num_stages))
    assert versions(schedule).alive == counted


@given(sizes, st.integers(1, 4), st.integers(2, 5))
def test_drained_window_needs_one_version(num_stages, m, num_steps):
    """1F1B, a step after the other, with its updates written out."""
    ranks = []
    for stage, order in enumerate(one_f_one_b(num_stages, m).orders):
        ranks.append([])
        for number in range(num_steps):
            ranks[-1] += [a._replace(micro_batch=a.micro_batch + number * m) for a in order]
            ranks[-1].append(Action("U", stage, number))
    schedule = Schedule(num_stages, m, Orders.of(ranks), num_steps)
    table = versions(schedule)
    assert table.alive == (1,) * num_stages
    assert (table.forward == np.arange(m * num_steps) // m).all()
    assert (table.backward == table.forward).all()


@given(sizes, st.integers(1, 4), st.integers(2, 5))
def test_schedule_that_does_not_drain_cannot_be_synchronous(num_stages, m, num_steps):
    assume(num_stages > 1)
    orders = double_buffered(num_stages, m, num_steps=num_steps).orders
    with pytest.raises(ScheduleError, match="rank 0 cannot do F0"):
        Schedule(num_stages, m, orders, num_steps)


def test_version_that_comes_later_is_named_with_the_place():
    orders = (actions("F0.0 F0.1 B0.0 U0.0 B0.1 U0.1"),)
    with pytest.raises(ScheduleError) as caught:
        Schedule(1, 1, orders, 2)
    assert caught.value.message == (
        "rank 0 cannot do F0.1: rule synchronous needs version 1 of stage 0, "
        "but U0.0 makes it later\n"
        "  rank 0  F0.0 F0.1 B0.0 U0.0 B0.1 U0.1"
    )
    assert caught.value.hint == "move U0.0 before F0.1 on rank 0"


def test_updates_out_of_order_are_refused():
    orders = (actions("F0.0 F0.1 B0.0 B0.1 U0.1 U0.0"),)
    with pytest.raises(ScheduleError, match=r"cannot do U0\.1: .* needs version 1"):
        Schedule(1, 1, orders, 2, delayed(1))


def test_law_that_goes_back_to_an_older_version_is_refused():
    def law(stage, micro_batch, num_stages, num_micro_batches, /):
        return Reads(-1 - micro_batch, -1 - micro_batch, micro_batch // num_micro_batches)

    orders = double_buffered(2, 2, num_steps=2).orders
    with pytest.raises(ScheduleError, match=r"needs version -2 .* only versions -1 to 2") as caught:
        Schedule(2, 2, orders, 2, WeightRule("back", law))
    assert caught.value.hint == "give rule back a law that never goes back to an older version"


def test_version_after_the_window_is_refused():
    orders = (actions("F0.0 B0.0 U0.0"),)
    with pytest.raises(ScheduleError, match=r"needs version 2 .* only versions 0 to 1"):
        Schedule(1, 1, orders, 1, delayed(-2))


def test_version_made_on_another_rank_does_not_count():
    """Each rank on which a stage lives updates its own copy."""
    orders = (actions("F0.0 B0.0 U0.0 U0.1"), actions("F0.1 B0.1 U0.0 U0.1"))
    with pytest.raises(ScheduleError, match=r"rank 1 cannot do F0\.1: .*version 1 of stage 0"):
        Schedule(1, 1, orders, 2)


def test_each_copy_of_a_stage_is_counted_by_itself():
    orders = (actions("F0.0 B0.0 U0.0 U0.1"), actions("F0.1 B0.1 U0.0 U0.1"))
    schedule = Schedule(1, 1, orders, 2, delayed(1))
    reads = reads_of(schedule)
    assert versions(schedule).alive == (max(alive(schedule, 0, rank, reads) for rank in (0, 1)),)


def test_law_that_puts_a_gradient_into_another_step_is_refused():
    def law(stage, micro_batch, num_stages, num_micro_batches, /):
        return Reads(0 * micro_batch, 0 * micro_batch, 0 * micro_batch)

    orders = (actions("F0.0 B0.0 U0.0 F0.1 B0.1 U0.1"),)
    with pytest.raises(ScheduleError) as caught:
        Schedule(1, 1, orders, 2, WeightRule("first", law))
    assert caught.value.message == (
        "rule first puts the gradient of stage 0, micro-batch 1 into step 0, "
        "and the micro-batch is of step 1"
    )


@given(st.integers(0, 9), st.integers(0, 30), st.integers(1, 6))
def test_laws_of_the_foundation(stage, micro_batch, num_micro_batches):
    step = micro_batch // num_micro_batches
    sizes = stage, micro_batch, stage + 1, num_micro_batches
    assert SYNCHRONOUS.law(*sizes) == (step, step, step, 0, 0)
    assert DOUBLE_BUFFERED.law(*sizes) == (step - 1, step - 1, step, 0, 0)
    for rule, kept in ((SYNCHRONOUS, 0), (DOUBLE_BUFFERED, 1)):
        assert rule.history(stage + 1, num_micro_batches).tolist() == [kept] * (stage + 1)


@pytest.mark.parametrize("rule", WEIGHT_RULES, ids=lambda rule: rule.name)
@given(st.integers(1, 7), st.integers(1, 5))
def test_law_takes_numbers_and_arrays_and_never_goes_back(rule, num_stages, num_micro_batches):
    stages, m = np.arange(num_stages), np.arange(3 * num_micro_batches)
    arrays = rule.law(stages[:, None], m[None, :], num_stages, num_micro_batches)
    table = [np.broadcast_to(read, (len(stages), len(m))) for read in arrays]
    for stage in stages.tolist():
        for number in m.tolist():
            reads = rule.law(stage, number, num_stages, num_micro_batches)
            assert reads == tuple(int(column[stage, number]) for column in table)
            assert max(reads.forward, reads.backward) <= reads.step
    assert all((np.diff(column) >= 0).all() for column in table[:3])
    oldest = np.minimum(table[0], table[1]).min(1)
    assert (rule.history(num_stages, num_micro_batches) == np.maximum(-oldest, 0)).all()


def test_names_of_rules_are_unique():
    assert len({rule.name for rule in WEIGHT_RULES}) == len(WEIGHT_RULES)


@given(st.floats(0.001, 1.0), st.floats(0.0, 0.99), st.integers(1, 64), st.integers(1, 64))
def test_scaled_update_keeps_the_effect_of_a_sample_and_how_fast_it_fades(rate, m, size, reference):
    """SGD with momentum: a gradient that is the mean of N samples moves rate / (1 - m) / N each."""
    other_rate, other = scaled(rate, m, samples=size, reference=reference)
    whole, new = rate / (1 - m) / reference, other_rate / (1 - other) / size
    assert new == pytest.approx(whole)
    assert other ** (1 / size) == pytest.approx(m ** (1 / reference))


def test_scaling_to_the_reference_changes_nothing():
    assert scaled(0.1, 0.9, samples=8, reference=8) == pytest.approx((0.1, 0.9))


@pytest.mark.parametrize(("m", "size", "reference"), [(1.0, 1, 1), (-0.1, 1, 1), (0.9, 0, 1)])
def test_scaling_by_nonsense_is_refused(m, size, reference):
    with pytest.raises(ValueError, match="samples are 1 or more"):
        scaled(0.1, m, samples=size, reference=reference)
