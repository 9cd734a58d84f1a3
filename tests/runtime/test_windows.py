"""Which program runs next is asked between windows; programs may differ from one to the next."""

import torch

from penstock.plan.lower_plan import lower_plan
from penstock.runtime.windows import Windows, repeated
from tests.parity.models import captured, job_of, plain_loop, plan_of
from tests.parity.training import Run, differing, train

STEPS = 4


def test_program_changes_between_steps_as_the_answers_say(tmp_path):
    made, job = captured("dropout", torch.float32), job_of("dropout", torch.float32, "adamw")
    plan = plan_of(made.graph, "one_f_one_b", 2, 3)
    plans = plan, plan.changed(schedule="gpipe"), plan.changed(schedule="zb_h1")
    programs = tuple(lower_plan(one, made.graph) for one in plans)
    windows = Windows(0, lambda step: programs[step % 3] if step < STEPS else None, programs)
    outcome = train(Run(plan, job, made), tmp_path, windows=windows)
    assert differing(outcome.weights, plain_loop(job, STEPS, 3).weights) == []
    assert len(outcome.steps) == STEPS


def test_windows_are_counted_no_further_than_needed():
    asked: list[int] = []
    graph = captured("dropout", torch.float32).graph
    program = lower_plan(plan_of(graph, "gpipe", 1, 1), graph)
    endless = Windows(3, lambda step: asked.append(step) or program, (program,))
    assert endless.count(2) == 2
    assert asked == [3, 4]
    assert [step for _, step in repeated(program, range(5, 8))] == [5, 6, 7]
    assert repeated(program, range(5, 5)).count(9) == 0
