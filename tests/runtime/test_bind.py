"""A rank's calls: nothing is left after a window, nothing is looked up that need not be."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.batches import ReadNumbers
from penstock.errors import RunError
from penstock.graph.cut import cut
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.program.program import Reshard, Unshard
from penstock.runtime.launch import run_threads
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.runtime.worker import RankResult
from penstock.schedule import find
from penstock.transport.threads import thread_transports
from tests.parity.models import TRAINING, captured, job_of, plan_of


def result(rank: int) -> RankResult:
    return RankResult(rank, (), (), 0, (0.0,), 0.0, {})


def ranks_after(name, schedule, stages, micro_batches, *, num_windows=2, **options) -> list[Rank]:
    """Run windows with ranks as threads; return the ranks as they are then."""
    made, job = captured(name, torch.float32), job_of(name, torch.float32)
    plan = plan_of(made.graph, schedule, stages, micro_batches, **options)
    program, cut_stages = lower_plan(plan, made.graph), stages_of(plan, made.graph)
    ranks: list[Rank] = []

    def work(transport, report):
        rank = Rank(made, cut_stages, job, transport, RankTerms(report=report))
        calls = rank.bind(program)
        transport.barrier()
        with torch.no_grad():
            for number in range(num_windows):
                rank.run(calls, number * program.num_steps)
                ranks.append(rank)
                assert_empty(rank)
        return result(transport.rank)

    run_threads(work, program.num_ranks, lambda step: None)
    return ranks


def assert_empty(rank: Rank) -> None:
    assert not any(rank.frames.values())
    assert rank.outbox == {}
    assert rank.batches == {}
    assert rank.progress.losses == {}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("name", ["tied", "batch_norm", "frozen_start"])
def test_no_value_message_or_batch_is_left_after_a_window(name, schedule):
    ranks = ranks_after(name, schedule, 4, 3)
    assert len(ranks) == 2 * find(schedule)(4, 3).num_ranks


@given(
    schedule=st.sampled_from(TRAINING),
    stages=st.integers(1, 8),
    micro_batches=st.integers(1, 6),
    recompute=st.booleans(),
)
def test_nothing_is_left_whatever_the_sizes(schedule, stages, micro_batches, recompute):
    ranks_after(
        "frozen", schedule, stages, micro_batches, num_windows=1, recompute=(recompute,) * stages
    )


def test_a_micro_batch_is_read_once_by_each_rank_that_needs_it():
    made, plain = captured("gpt", torch.float32), job_of("gpt", torch.float32)
    plan = plan_of(made.graph, "one_f_one_b", 4, 3)
    program, stages = lower_plan(plan, made.graph), stages_of(plan, made.graph)
    read: dict[int, list[int]] = {rank: [] for rank in range(4)}

    def work(transport, report):
        def counted(start):
            for index, batch in enumerate(plain.data(start), start):
                read[transport.rank].append(index)
                yield batch

        rank = Rank(made, stages, replace(plain, data=counted), transport)
        calls = rank.bind(program)
        transport.barrier()
        with torch.no_grad():
            for step in range(3):
                rank.run(calls, step)
        return result(transport.rank)

    run_threads(work, 4, lambda step: None)
    assert read == {0: list(range(9)), 1: [], 2: [], 3: list(range(9))}


def test_replicas_read_different_micro_batches():
    made, plain = captured("frozen", torch.float32), job_of("frozen", torch.float32)
    plan = plan_of(made.graph, "gpipe", 1, 2, replicas=3)
    program, stages = lower_plan(plan, made.graph), stages_of(plan, made.graph)
    read: dict[int, list[int]] = {rank: [] for rank in range(3)}

    def work(transport, report):
        class Counted:
            """Data that is asked for the numbers that its rank reads, and for no others."""

            def __call__(self, start):
                return self.picked(ReadNumbers.all_from(start))

            def picked(self, reads):
                for index in reads.numbers():
                    read[transport.rank].append(index)
                    yield next(plain.data(index))

        rank = Rank(made, stages, replace(plain, data=Counted()), transport)
        calls = rank.bind(program)
        with torch.no_grad():
            for step in range(2):
                rank.run(calls, step)
        return result(transport.rank)

    run_threads(work, 3, lambda step: None)
    assert read == {0: [0, 1, 6, 7], 1: [2, 3, 8, 9], 2: [4, 5, 10, 11]}


# -- what is refused -----------------------------------------------------------------------------


def one_rank(job) -> Rank:
    (transport,) = thread_transports(1)
    made = captured("frozen", torch.float32)
    return Rank(made, cut(made.graph), job, transport)


@pytest.mark.parametrize(
    ("clip_norm", "clip", "message"),
    [
        (1.5, False, "the job clips gradients to norm 1.5, and the plan does not"),
        (None, True, "the plan clips gradients, but the job does not say to which norm"),
    ],
)
def test_clipping_that_only_one_of_job_and_plan_wants_is_refused(clip_norm, clip, message):
    graph = captured("frozen", torch.float32).graph
    program = lower_plan(plan_of(graph, "gpipe", 1, 1, clip=clip), graph)
    rank = one_rank(job_of("frozen", torch.float32, clip_norm=clip_norm))
    with pytest.raises(RunError, match=message) as caught:
        rank.bind(program)
    assert "clip_norm" in caught.value.hint


def test_gathers_of_what_nobody_divides_are_refused():
    graph = captured("frozen", torch.float32).graph
    program = lower_plan(plan_of(graph, "gpipe", 1, 1), graph)
    sharded = program.map_ranks(lambda code: (Unshard(0), *code[:-1], Reshard(0), code[-1]))
    with pytest.raises(RunError, match="stage 0 is gathered, but no sum leaves shards of it"):
        one_rank(job_of("frozen", torch.float32)).bind(sharded)


# -- what is shown -------------------------------------------------------------------------------


def test_spans_are_those_of_the_instructions_in_order():
    made, job = captured("frozen", torch.float32), job_of("frozen", torch.float32)
    graph = made.graph
    plan = plan_of(graph, "one_f_one_b", 2, 2)
    program, stages = lower_plan(plan, graph), stages_of(plan, graph)
    shown: dict[int, list[str]] = {}

    def work(transport, report):
        rank = Rank(made, stages, job, transport)
        calls = rank.bind(program)
        transport.barrier()
        with torch.no_grad():
            marks = rank.run(calls, 0)
        spans = rank.spans(calls, marks, marks[0])
        shown[transport.rank] = [f"{s.lane} {s.kind}{s.stage}.{s.micro_batch}" for s in spans]
        assert all(s.start_s <= s.end_s for s in spans)
        assert [s.start_s for s in spans] == sorted(s.start_s for s in spans)
        return result(transport.rank)

    run_threads(work, 2, lambda step: None)
    assert shown[0] == [
        "compute F0.0", "send F0.0", "compute F0.1", "send F0.1",
        "compute B0.0", "compute B0.1", "update U0.0",
    ]  # fmt: skip
    assert shown[1] == [
        "compute F1.0", "compute B1.0", "send B1.0",
        "compute F1.1", "compute B1.1", "send B1.1", "update U1.0",
    ]  # fmt: skip


def test_a_step_is_told_by_every_rank_and_its_loss_by_the_last():
    told = []
    made, job = captured("frozen", torch.float32), job_of("frozen", torch.float32)
    plan = plan_of(made.graph, "interleaved", 4, 2)
    program, stages = lower_plan(plan, made.graph), stages_of(plan, made.graph)

    def work(transport, report):
        mine = lambda step: told.append((transport.rank, step.step, step.loss is None))  # noqa: E731
        rank = Rank(made, stages, job, transport, RankTerms(report=mine))
        calls = rank.bind(program)
        transport.barrier()
        with torch.no_grad():
            rank.run(calls, 7)
            rank.run(calls, 8)
        return result(transport.rank)

    run_threads(work, 2, lambda step: None)
    assert sorted(told) == [(0, 7, True), (0, 8, True), (1, 7, False), (1, 8, False)]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_v", "double_buffered"])
def test_batch_is_read_once_and_before_its_message_is_waited_for(schedule):
    made, job = captured("gpt", torch.float32), job_of("gpt", torch.float32)
    plan = plan_of(made.graph, schedule, 4 if schedule == "zb_v" else 2, 3)
    program = lower_plan(plan, made.graph)
    for end in thread_transports(2):
        rank = Rank(made, stages_of(plan, made.graph), job, end)
        lanes = [(b.lane, b.kind, b.micro_batch) for b in rank.bind(program)]
        batches = sorted(m for lane, _, m in lanes if lane == "data")
        assert batches in ([], list(range(program.num_steps * 3)))
        reads = {m: at for at, (lane, _, m) in enumerate(lanes) if lane == "data"}
        if schedule in ("gpipe", "one_f_one_b") and end.rank == 1:
            takes = {m: at for at, (lane, _, m) in enumerate(lanes) if lane == "take"}
            assert all(reads[m] < takes[m] for m in range(3))
