"""Memory: the peak against the closed forms of the papers, and against a walk in plain Python."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.program.lower import chain, lower, lower_schedule
from penstock.program.memory import check_memory, peak_bytes
from penstock.program.program import (
    Compute,
    Receive,
    Reshard,
    StageBytes,
    Unshard,
    Update,
)
from penstock.schedule import Reads, WeightRule, double_buffered, gpipe, one_f_one_b, zb_h1
from tests.program.programs import programs, unsharded

SIZES = st.integers(1, 6), st.integers(1, 8)


def of_chain(schedule, stage, *, message=0, replicas=1):
    stages = schedule.num_stages
    edges = chain(stages, size_bytes=message)
    return lower_schedule(schedule, edges=edges, stage_bytes=[stage] * stages, replicas=replicas)


@given(*SIZES)
def test_one_f_one_b_holds_as_many_activations_as_ranks_behind(num_stages, micro_batches):
    peaks = peak_bytes(of_chain(one_f_one_b(num_stages, micro_batches), StageBytes(activations=7)))
    assert peaks == tuple(7 * min(num_stages - rank, micro_batches) for rank in range(num_stages))


@given(*SIZES)
def test_gpipe_holds_the_activations_of_all_micro_batches(num_stages, micro_batches):
    peaks = peak_bytes(of_chain(gpipe(num_stages, micro_batches), StageBytes(activations=7)))
    assert peaks == (7 * micro_batches,) * num_stages


@given(*SIZES)
def test_zb_h1_holds_no_more_than_one_f_one_b_on_rank_0(num_stages, micro_batches):
    stage = StageBytes(activations=7, deferred=7)
    split = peak_bytes(of_chain(zb_h1(num_stages, micro_batches), stage))
    whole = peak_bytes(of_chain(one_f_one_b(num_stages, micro_batches), stage))
    assert max(split) == max(whole) == whole[0]


@given(*SIZES, st.integers(1, 4))
def test_two_buffered_weights_are_two_versions(num_stages, micro_batches, num_steps):
    schedule = double_buffered(num_stages, micro_batches, num_steps=num_steps)
    peaks = peak_bytes(of_chain(schedule, StageBytes(weights=100, optimizer=10)))
    assert peaks == (2 * 100 + 100 + 10,) * num_stages


@given(*SIZES)
def test_synchronous_weights_are_one_version_and_their_gradient(num_stages, micro_batches):
    program = of_chain(zb_h1(num_stages, micro_batches), StageBytes(weights=100, optimizer=10))
    assert peak_bytes(program) == (210,) * num_stages


@given(*SIZES, st.integers(1, 4))
def test_version_that_is_read_after_the_next_one_was_made_is_held(
    num_stages, micro_batches, num_steps
):
    late = WeightRule("late", _step_before_but_never_below_0)
    schedule = double_buffered(num_stages, micro_batches, num_steps=num_steps)
    program = of_chain(replace(schedule, weight_rule=late), StageBytes(weights=100))
    versions = 1 if num_steps == 1 else 2
    assert peak_bytes(program) == (100 * versions + 100,) * num_stages


def _step_before_but_never_below_0(stage, micro_batch, num_stages, num_micro_batches):
    step = micro_batch // num_micro_batches
    return Reads(np.maximum(step - 1, 0), np.maximum(step - 1, 0), step)


def test_a_message_is_held_from_its_receive_to_its_last_use():
    program = of_chain(gpipe(2, 3), StageBytes(), message=5)
    assert peak_bytes(program) == (5, 15)


def test_sharded_stage_is_whole_only_while_it_is_gathered():
    stage = StageBytes(weights=100, optimizer=60, activations=1)
    program = of_chain(one_f_one_b(1, 1), stage, replicas=2)
    assert peak_bytes(program) == (261, 261)
    sharded = unsharded(program, lambda rank: _Always(), {0})
    assert peak_bytes(sharded) == (130 + 101, 130 + 101)


class _Always:
    """A chance that drops the gathered weights of a stage after each compute."""

    def random(self):
        return 0.0


@given(programs(), st.lists(st.integers(0, 9), min_size=16, max_size=16), st.integers(0, 9))
def test_peak_is_that_of_a_walk_that_asks_at_each_instruction_what_is_needed(program, sizes, m):
    stages = [StageBytes(*sizes[4 * s : 4 * s + 4]) for s in range(program.num_stages)]
    edges = tuple(edge._replace(size_bytes=m + n) for n, edge in enumerate(program.edges))
    # A replica's sum is as large as the weights, so the sums are sized anew with the stages.
    code = tuple(tuple(_resized(one, stages) for one in code) for code in program.code)
    program = replace(program, stage_bytes=tuple(stages), edges=edges, code=code)
    assert peak_bytes(program) == tuple(_peak(program, rank) for rank in range(program.num_ranks))


def _resized(one, stages):
    if getattr(one, "how", "") != "replicas":
        return one
    return replace(one, size_bytes=stages[int(one.bucket.removeprefix("stage"))].weights)


def _peak(program, rank):
    code, stages = program.code[rank], program.stages_of(rank)
    most = _held(program, code, -1, stages)
    for at in range(len(code)):
        during = _held(program, code, at, stages) + _freed(program, code, at)
        most = max(most, during)
    return most


def _done(code, at, kinds, stage, m):
    return any(
        isinstance(one, Compute) and one.action[1:] == (stage, m) and one.action.kind in kinds
        for one in code[: at + 1]
    )


def _held(program, code, at, stages):
    """Return the bytes that must be there after instruction `at`."""
    backward = any(isinstance(one, Compute) and one.action.kind != "F" for one in code)
    window, total = program.num_micro_batches * program.num_steps, 0
    for stage in stages:
        size = program.stage_bytes[stage]
        gathers = [one for one in code if isinstance(one, Unshard) and one.stage == stage]
        whole = 2 * size.weights + size.optimizer
        total += -(-whole // program.replicas) if gathers else whole
        total += size.weights * _balance(code, at, stage)
        total += size.weights * (_versions(program, code, at, stage) - 1)
        for m in range(window):
            forward = _done(code, at, "F", stage, m)
            if forward and not _done(code, at, "BI" if backward else "F", stage, m):
                total += size.activations
            if _done(code, at, "I", stage, m) and not _done(code, at, "W", stage, m):
                total += size.deferred
    end = "BW" if backward else "F"
    for one in code[: at + 1]:
        if isinstance(one, Receive):
            edge = program.edges[one.edge]
            if not _done(code, at, end, edge.target, one.of.micro_batch):
                total += edge.size_bytes
    return total


def _balance(code, at, stage):
    ups = sum(isinstance(one, Unshard) and one.stage == stage for one in code[: at + 1])
    return ups - sum(isinstance(one, Reshard) and one.stage == stage for one in code[: at + 1])


def _versions(program, code, at, stage):
    """Return how many versions of a stage are alive after instruction `at`."""
    newest = sum(isinstance(one, Update) and one.stage == stage for one in code[: at + 1])
    later = {
        one.version
        for one in code[at + 1 :]
        if isinstance(one, Compute) and one.action.stage == stage
    }
    sizes = program.num_stages, program.num_micro_batches
    history = int(program.weight_rule.history(*sizes)[stage])
    kept = {v for v in range(-history, newest + 1) if v >= program.num_steps - history}
    if newest == 0:  # of what was there at the start, only what is read is kept
        kept = {v for v in kept if v >= 0}
    return len({v for v in later | kept if v <= newest} | {newest})


def _freed(program, code, at):
    """Return what instruction `at` still needed but nobody does after it."""
    one = code[at]
    if not isinstance(one, Compute) or one.action.kind == "I":
        return 0
    before, after = _held(program, code, at - 1, ()), _held(program, code, at, ())
    kind, stage, _ = one.action
    size = program.stage_bytes[stage]
    backward = any(isinstance(each, Compute) and each.action.kind != "F" for each in code)
    freed = before - after
    freed += size.weights * (
        _versions(program, code, at - 1, stage) - _versions(program, code, at, stage)
    )
    if kind == "B" or (kind == "F" and not backward):
        freed += size.activations
    return freed + (size.deferred if kind == "W" else 0)


def test_cap_that_is_passed_is_told_with_the_instruction():
    program = of_chain(one_f_one_b(2, 4), StageBytes(weights=1024, activations=1024))
    check_memory(program, [4096, 3072])
    with pytest.raises(ProgramError) as caught:
        check_memory(program, [3072, 3072])
    assert caught.value.message == (
        "rank 0 holds 4.00 KiB after F0.1; it may hold 3.00 KiB\n"
        "  rank 0  F0.0 F0.0>r1e0s0 F0.1 F0.1>r1e0s1 B1.0<r1e1s0 B0.0 F0.2 ..."
    )


def test_cap_below_the_weights_is_told_too():
    program = of_chain(one_f_one_b(2, 1), StageBytes(weights=1024))
    with pytest.raises(
        ProgramError, match=r"rank 0 holds 2\.00 KiB before it begins; it may hold 2"
    ):
        check_memory(program, 2047)


def test_program_without_sizes_has_no_peak():
    with pytest.raises(ValueError, match="no stage_bytes"):
        peak_bytes(lower(one_f_one_b(2, 2)))
