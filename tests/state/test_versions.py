"""Which tensors hold which version: never one that is still read, never more than needed."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.program.lower import lower
from penstock.program.program import Compute, Program, Update
from penstock.schedule import double_buffered, find, versions
from penstock.schedule.asynchronous import (
    delayed_gradients,
    pipedream,
    pipemare,
    spec_train,
    vertical_sync,
    weight_prediction,
    x_pipe,
)
from penstock.schedule.schedule import Action, Schedule
from penstock.schedule.weight_rule import Reads, WeightRule
from penstock.state.versions import VersionSlots


def history_of(program: Program, rank: int) -> list[tuple[int, int]]:
    """Replay a rank's window; return (version read, version found in its slot) of every compute."""
    slots = VersionSlots(program, rank)
    (stage,) = program.stages_of(rank)
    count = int(program.weight_rule.history(program.num_stages, program.num_micro_batches)[stage])
    holds = {0: 0, **{k: -k for k in range(1, count + 1)}}
    seen: list[tuple[int, int]] = []
    for place, instruction in enumerate(program.code[rank]):
        match instruction:
            case Compute(action, version):
                seen.append((version, holds[slots.of(action, version, place).slot]))
            case Update(_, step):
                if (stage, step) in slots.stash_at:
                    holds[slots.stash_at[stage, step]] = step
                holds[0] = step + 1
            case _:
                pass
    assert len(holds) == 1 + slots.count[stage]
    moved = slots.moved[stage]
    assert [holds[moved.get(k, k)] for k in range(1, count + 1)] == [
        program.num_steps - k for k in range(1, count + 1)
    ]
    return seen


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 6), num_steps=st.integers(1, 7))
def test_every_compute_of_2bw_finds_its_version_and_there_are_two(stages, micro_batches, num_steps):
    schedule = double_buffered(stages, micro_batches, num_steps=num_steps)
    program, table = lower(schedule), versions(schedule)
    for rank in range(stages):
        seen = history_of(program, rank)
        assert len(seen) == 2 * micro_batches * num_steps
        assert all(read == found for read, found in seen)
        assert VersionSlots(program, rank).count == {rank: table.alive[rank] - 1} == {rank: 1}


@given(
    make=st.sampled_from([pipedream, vertical_sync, delayed_gradients]),
    stages=st.integers(1, 5),
    micro_batches=st.integers(1, 4),
    num_steps=st.integers(1, 9),
)
def test_every_compute_finds_the_version_that_was_stashed(make, stages, micro_batches, num_steps):
    schedule = make(stages, micro_batches, num_steps=num_steps)
    program, table = lower(schedule), versions(schedule)
    for rank in range(stages):
        assert all(read == found for read, found in history_of(program, rank))
        assert VersionSlots(program, rank).count[rank] <= table.alive[rank]


@given(
    make=st.sampled_from([spec_train, x_pipe, pipemare, weight_prediction]),
    stages=st.integers(1, 5),
    micro_batches=st.integers(1, 4),
    num_steps=st.integers(1, 9),
)
def test_a_prediction_is_made_from_the_newest_version_and_kept_if_that_is_replaced(
    make, stages, micro_batches, num_steps
):
    program = lower(make(stages, micro_batches, num_steps=num_steps))
    for rank in range(stages):
        slots, newest, holds = VersionSlots(program, rank), 0, {}
        for place, instruction in enumerate(program.code[rank]):
            match instruction:
                case Compute(action, version):
                    read = slots.of(action, version, place)
                    if read.ahead and (read.is_first or read.slot < 0):
                        assert newest == version
                        holds[read.slot] = (version, read.ahead)
                    assert not read.ahead or holds[read.slot] == (version, read.ahead)
                case Update(_, step):
                    newest = step + 1
                case _:
                    pass
        assert len(holds.keys() - {-1}) == slots.predictions[rank]


@given(st.sampled_from(["gpipe", "one_f_one_b", "zb_h1"]), st.integers(1, 6), st.integers(1, 6))
def test_a_synchronous_schedule_needs_no_stash(name, stages, micro_batches):
    program = lower(find(name)(stages, micro_batches))
    for rank in range(stages):
        slots = VersionSlots(program, rank)
        assert slots.count == {rank: 0}
        assert slots.stash_at == {}


def test_a_version_that_is_read_after_its_update_gets_a_stash():
    """All micro-batches read version 0, which the first update replaces."""
    rule = WeightRule("first", lambda s, m, stages, per_step: Reads(m * 0, m * 0, m // per_step))
    text = "F0.0 F0.1 F0.2 B0.0 U0.0 B0.1 U0.1 B0.2 U0.2"
    order = tuple(Action.parse(action) for action in text.split())
    program = lower(Schedule(1, 1, (order,), 3, rule))
    slots = VersionSlots(program, 0)
    assert (slots.count, slots.stash_at) == ({0: 1}, {(0, 0): 1})
    assert history_of(program, 0) == [(0, 0)] * 6
