"""A rehearsal runs the same instructions and messages, and computes nothing."""

from functools import partial

import pytest
import torch

from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.emulate import sleeping
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.run import run
from penstock.runtime.worker import Task, work
from penstock.schedule import find
from tests.parity.models import captured, job_of, plan_of
from tests.parity.training import listed
from tests.runtime.test_memory import profile_of


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_v", "double_buffered"])
@pytest.mark.sampled(2)
def test_rehearsal_has_the_spans_of_the_run_and_leaves_the_weights(schedule, launcher):
    made, job = captured("tied", torch.float32), job_of("tied", torch.float32)
    stages = 2 if find(schedule)(2, 3).num_ranks == 2 else 4
    plan = plan_of(made.graph, schedule, stages, 3)
    program, cut = lower_plan(plan, made.graph), stages_of(plan, made.graph)
    profile = profile_of("tied")
    real = run(program, made, cut, job, num_steps=program.num_steps, launcher=run_threads)
    rehearsed = run(
        program,
        made,
        cut,
        job,
        num_steps=program.num_steps,
        launcher=launcher,
        emulate=profile,
    )
    for name in ("ranks", "lanes", "kinds", "stages", "micro_batches"):
        left, right = getattr(rehearsed.timeline.spans, name), getattr(real.timeline.spans, name)
        assert left.tolist() == right.tolist()
    assert [step.loss for step in rehearsed.steps] == [0.0] * program.num_steps
    first = dict(made.model.named_parameters())
    assert all(torch.equal(rehearsed.weights[f"weights/{n}"], p) for n, p in first.items())
    assert rehearsed.live_versions == real.live_versions


def test_rehearsal_holds_about_the_bytes_of_the_run():
    made, job = captured("tied", torch.float32), job_of("tied", torch.float32, "adamw")
    plan = plan_of(made.graph, "one_f_one_b", 2, 4)
    program, cut = lower_plan(plan, made.graph), stages_of(plan, made.graph)
    windows = tuple((program, step) for step in range(2))
    task = Task(made, cut, job, listed(windows), memory_window=1)
    asleep, function_of = sleeping(job, profile_of("tied"))
    peaks = [
        [result.peak_bytes for result in run_processes(partial(work, each), 2, lambda step: None)]
        for each in (task, task.remade(job=asleep, function_of=function_of))
    ]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.15)
