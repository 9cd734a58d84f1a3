"""What a run gives back, and how ranks' reports become steps."""

import time
from itertools import permutations

import pytest
import torch

from penstock.errors import RunError
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime import worker
from penstock.runtime.calls import StepResult
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.run import Steps, run, windows_of
from penstock.runtime.worker import Task
from penstock.timeline import LANES
from tests.parity.models import captured, job_of, plain_loop, plan_of
from tests.parity.training import differing, listed


def run_model(launcher, schedule="one_f_one_b", steps=4, replicas=1, **options):
    made, job = captured("frozen", torch.float32), job_of("frozen", torch.float32)
    plan = plan_of(made.graph, schedule, 2, 2, replicas=replicas)
    program = lower_plan(plan, made.graph, **options)
    cut = stages_of(plan, made.graph)
    return run(program, made, cut, job, num_steps=steps, launcher=launcher), job


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_outcome_has_weights_losses_times_and_a_timeline(launcher):
    outcome, job = run_model(launcher)
    trained = plain_loop(job, 4, 2)
    assert differing(outcome.weights, trained.weights) == []
    assert [step.loss for step in outcome.steps] == trained.losses
    assert [step.step for step in outcome.steps] == [0, 1, 2, 3]
    assert all(step.seconds > 0 for step in outcome.steps)
    assert outcome.step_s > 0
    assert outcome.live_versions == (1, 1)
    assert outcome.timeline.num_ranks == 2
    assert dict(outcome.timeline.meta) == {"clock": "measured"}
    per_lane = {
        lane: int((outcome.timeline.spans.lanes == i).sum()) for i, lane in enumerate(LANES)
    }
    assert per_lane == {
        "compute": 8,
        "send": 4,
        "receive": 0,
        "collective": 0,
        "update": 2,
        "copy": 0,
    }
    starts = outcome.timeline.spans.starts_s
    assert starts.min() == 0.0


def test_only_processes_measure_the_bytes_held():
    assert run_model(run_threads)[0].peak_bytes == (0, 0)
    outcome, _ = run_model(run_processes)
    assert min(outcome.peak_bytes) > 0
    assert outcome.timeline.totals.peak_bytes == outcome.peak_bytes


def test_a_timeline_of_an_asynchronous_window_has_its_updates():
    outcome, _ = run_model(run_threads, "double_buffered", num_steps=4)
    updates = outcome.timeline.spans.lanes == LANES.index("update")
    assert updates.sum() == 2 * 4
    assert outcome.live_versions == (2, 2)


@pytest.mark.parametrize("num_steps", [0, -4, 3, 7])
def test_steps_that_are_no_whole_windows_are_refused(num_steps):
    graph = captured("frozen", torch.float32).graph
    program = lower_plan(plan_of(graph, "double_buffered", 2, 2), graph, num_steps=4)
    with pytest.raises(RunError, match=f"{num_steps} steps cannot be run in windows of 4"):
        windows_of(program, num_steps)


def test_windows_follow_each_other():
    graph = captured("frozen", torch.float32).graph
    program = lower_plan(plan_of(graph, "double_buffered", 2, 2), graph, num_steps=4)
    assert tuple(windows_of(program, 12, 20)) == ((program, 20), (program, 24), (program, 28))


def test_a_task_without_windows_is_refused():
    made, job = captured("frozen", torch.float32), job_of("frozen", torch.float32)
    with pytest.raises(RunError, match="no steps to run"):
        Task(made, stages_of(plan_of(made.graph, "gpipe", 1, 1), made.graph), job, listed(()))


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_step_is_done_when_the_losses_of_all_micro_batches_are_told(order):
    told = [
        StepResult(7, 1.0, 0.5, 3),
        StepResult(7, 3.0, 0.75),
        StepResult(8, 5.0, 0.25, 3),
        StepResult(8, 6.0, 0.5),
    ]
    done: list[StepResult] = []
    steps = Steps(4, done.append)
    for number in order:
        steps.add(told[number])
        steps.add(StepResult(7, None, 9.0))  # a rank that has no loss
    assert sorted(done, key=lambda s: s.step) == [
        StepResult(7, 1.5, 0.75, 4),
        StepResult(8, 5.25, 0.5, 4),
    ]
    assert steps.waiting == {}


def test_clocks_of_other_hosts_are_aligned(monkeypatch):
    """Two processes that believe to be two hosts, whose clocks are 1,000 s apart."""
    made, job = captured("frozen", torch.float32), job_of("frozen", torch.float32)
    plan = plan_of(made.graph, "gpipe", 2, 2)
    program = lower_plan(plan, made.graph)
    windows = tuple((program, step) for step in range(3))
    task = Task(made, stages_of(plan, made.graph), job, listed(windows))
    clock = time.perf_counter

    def elsewhere(transport, report):
        monkeypatch.setattr(worker, "host_key", lambda: f"host {transport.rank}")
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1000.0 * transport.rank)
        return worker.work(task, transport, report)

    first, second = run_processes(elsewhere, 2, lambda step: None)
    made_at = {(s.kind, s.stage, s.micro_batch): s for s in (*first.spans, *second.spans)}
    for number in range(2):
        sent, used = made_at["F", 0, number], made_at["F", 1, number]
        assert sent.end_s - 0.1 < used.start_s < sent.end_s + 10.0
    assert min(span.start_s for span in first.spans) == 0.0
