"""Any schedule that can be lowered trains the plain loop, in whatever order it takes its work."""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan import Plan
from penstock.plan.lower_plan import lower_plan
from penstock.runtime.launch import run_processes
from penstock.schedule import Action, Schedule
from tests.draws import examples
from tests.parity.models import captured, job_of, plain_loop, plan_of
from tests.parity.training import Run, difference, train
from tests.program.programs import random_schedule

STEPS = 2


def differs(schedule: Schedule, folder: Path, **options: object) -> float:
    """Train the tied model by `schedule`; return how far its weights are from the plain loop's."""
    job, capture = job_of("tied", torch.float64), captured("tied", torch.float64)
    micro_batches = schedule.num_micro_batches
    plan = plan_of(capture.graph, schedule, schedule.num_stages, micro_batches)
    plan = Plan.from_text(json.dumps(plan.to_json()))
    program = lower_plan(plan, capture.graph)
    windows = tuple((program, step) for step in range(STEPS))
    outcome = train(Run(plan, job, capture), folder, windows=windows, **options)
    weights = plain_loop(job, STEPS, micro_batches).weights
    return difference(outcome.weights, weights)


@examples(6)
@given(
    num_stages=st.integers(1, 4),
    num_micro_batches=st.integers(1, 5),
    num_ranks=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_random_schedule_trains_the_plain_loop(num_stages, num_micro_batches, num_ranks, seed):
    chance = random.Random(seed)
    sizes = (num_stages, num_micro_batches, min(num_ranks, num_stages))
    schedule = random_schedule(chance, *sizes, fixed=True, backward=True)
    with TemporaryDirectory() as folder:
        assert differs(schedule, Path(folder)) < 1e-12


def test_messages_may_be_read_in_another_order_than_they_come(tmp_path):
    """Rank 1 begins with micro-batch 2, which is sent last."""
    orders = [
        [*(Action("F", 0, m) for m in range(3)), *(Action("B", 0, m) for m in (1, 0, 2))],
        [Action(kind, 1, m) for m in (2, 0, 1) for kind in "FB"],
    ]
    schedule = Schedule(2, 3, tuple(map(tuple, orders)))
    assert differs(schedule, tmp_path, launcher=run_processes) < 1e-12
