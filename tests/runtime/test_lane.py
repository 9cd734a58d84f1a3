"""Sums beside the computing thread: when they run, who waits for them, and what they raise."""

import os
import threading

import pytest
import torch

from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.program.program import Compute, Update
from penstock.program.reductions import Reduction
from penstock.runtime.lane import Begun, Lane
from penstock.runtime.launch import run_threads
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.runtime.worker import RankResult
from tests.parity.models import captured, job_of, plan_of

LONG_S = 20.0  # never reached


def threads_here() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_lane_runs_sums_one_after_another_in_order_and_leaves_no_thread():
    before, done, lane = threads_here(), list[int](), Lane()
    gate = threading.Event()
    first = Begun(lambda: (gate.wait(LONG_S), done.append(0)))
    others = [Begun(lambda at=at: done.append(at)) for at in range(1, 5)]
    for each in (first, *others):
        lane.begin(each)
    assert done == []
    gate.set()
    for each in (*others, first):
        each.wait()
    assert done == [0, 1, 2, 3, 4]
    assert first.start_s < first.end_s <= others[0].start_s
    lane.close()
    assert threads_here() == before


def test_what_a_sum_raises_is_raised_where_it_is_waited_for():
    lane, wrong = Lane(), Begun(lambda: 1 // 0)
    lane.begin(wrong)
    with pytest.raises(ZeroDivisionError):
        wrong.wait()
    lane.close()


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 1), ("chimera", 2)])
def test_a_sum_runs_beside_the_next_backward_and_the_update_waits_for_it(schedule, stages):
    """It ends only when the last backward is over and the rank waits for it."""
    made, job = captured("dropout", torch.float32), job_of("dropout", torch.float32)
    replicas = 2 if stages == 1 else 1
    plan = plan_of(made.graph, schedule, stages, 2, replicas=replicas)
    plan = plan.refined(made.graph, 3)
    program, cut = lower_plan(plan, made.graph), stages_of(plan, made.graph)
    seen: list[str] = []

    def work(transport, report):
        rank = Rank(made, cut, job, transport, RankTerms(report=report))
        computed, waited, all_reduce = threading.Event(), threading.Event(), transport.all_reduce
        me = threading.get_ident()

        def held(tensor, ranks):
            if threading.get_ident() != me:
                assert computed.wait(LONG_S)
                assert waited.wait(LONG_S)
                seen.append("sum")
            all_reduce(tensor, ranks)

        transport.all_reduce = held
        calls = rank.bind(program)
        code = program.code[rank.rank]
        last = [one.action for one in code if isinstance(one, Compute)][-1]
        steps = []
        for bound in calls:
            steps.append(bound.call)
            if (bound.lane, bound.kind, bound.stage, bound.micro_batch) == ("compute", *last):
                steps.append(computed.set)
            if bound.begun:
                steps.insert(-1, waited.set)
        transport.barrier()
        with torch.no_grad():
            for step in steps:
                step()
        rank.lane.close()
        return RankResult(transport.rank, (), (), 0, (0.0,), 0.0, {})

    run_threads(work, program.num_ranks, lambda step: None)
    assert seen
    for code in program.code:
        sums = [at for at, one in enumerate(code) if isinstance(one, Reduction)]
        computes = [at for at, one in enumerate(code) if isinstance(one, Compute)]
        assert sums[0] < computes[-1]
        assert sums[-1] < min(at for at, one in enumerate(code) if isinstance(one, Update))


def test_sums_are_waited_for_before_the_update_that_needs_them():
    made, job = captured("dropout", torch.float32), job_of("dropout", torch.float32)
    plan = plan_of(made.graph, "gpipe", 1, 2, replicas=2).refined(made.graph, 4)
    program, cut = lower_plan(plan, made.graph), stages_of(plan, made.graph)
    orders: list[list[str]] = []

    def work(transport, report):
        rank = Rank(made, cut, job, transport, RankTerms(report=report))
        bound = rank.bind(program)
        orders.append([each.lane for each in bound if each.lane in ("begin", "update")])
        waits = [at for at, each in enumerate(bound) if each.lane == "collective"]
        assert [bound[at].begun is not None for at in waits] == [True, True, True, False]
        assert max(waits) < min(at for at, each in enumerate(bound) if each.lane == "update")
        return RankResult(transport.rank, (), (), 0, (0.0,), 0.0, {})

    run_threads(work, program.num_ranks, lambda step: None)
    assert orders == 2 * [["begin"] * 3 + ["update"] * 4]
