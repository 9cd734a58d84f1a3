"""An update before the norm is known, taken back where it is wrong, gives the bits of one after."""

from dataclasses import replace

import pytest
import torch

from penstock.errors import ProgramError
from penstock.program.lower import lower_schedule
from penstock.program.lower_plan import lower_plan
from penstock.program.program import Reduce, Update
from penstock.runtime.launch import run_processes, run_threads
from penstock.schedule import double_buffered, zb_h2
from penstock.training.prove import Planned, prove
from tests.pairwise import pairwise
from tests.parity.models import captured, job_of, plan_of
from tests.parity.training import Run, differing, train

STEPS = (1,) * 6
NEVER, SOMETIMES, ALWAYS = 1e6, 1.0, 0.05


def run_of(name: str, optimizer: str, clip_norm: float, schedule: str = "zb_h2", **options) -> Run:
    made = captured(name, torch.float32)
    plan = plan_of(made.graph, schedule, options.pop("stages", 2), 4, clip=True, **options)
    return Run(plan, job_of(name, torch.float32, optimizer, clip_norm=clip_norm), made)


def late(run: Run) -> Run:
    return run._replace(plan=replace(run.plan, post_validation=True))


@pytest.mark.parametrize(
    ("clip_norm", "optimizer", "launcher"),
    pairwise((NEVER, SOMETIMES, ALWAYS), ("sgd", "adamw"), (run_threads, run_processes)),
)
def test_weights_and_state_are_those_of_clipping_before(optimizer, clip_norm, launcher, tmp_path):
    run = run_of("dropout", optimizer, clip_norm)
    before = train(run, tmp_path / "before", STEPS, launcher)
    after = train(late(run), tmp_path / "after", STEPS, launcher)
    assert differing(after.weights, before.weights) == []
    assert [step.loss for step in after.steps] == [step.loss for step in before.steps]


@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        ("tied", "one_f_one_b", {"stages": 4}),
        ("tied", "chimera", {"stages": 4}),
        ("dropout", "one_f_one_b", {"stages": 2, "replicas": 2}),
        ("frozen_start", "zb_h1", {"stages": 4}),
    ],
)
def test_tied_replicated_and_frozen_weights_too(name, schedule, options, tmp_path):
    run = run_of(name, "adamw", ALWAYS, schedule, **options)
    before = train(run, tmp_path / "before", STEPS)
    after = train(late(run), tmp_path / "after", STEPS)
    assert differing(after.weights, before.weights) == []


def test_sometimes_is_neither_never_nor_always(tmp_path):
    """Else the test above would not show that both ways are taken in one run."""
    found = [
        train(run_of("dropout", "sgd", norm), tmp_path / str(norm), STEPS).weights
        for norm in (NEVER, SOMETIMES, ALWAYS)
    ]
    assert differing(found[1], found[0])
    assert differing(found[1], found[2])


def test_resuming_gives_the_bits_of_one_run(tmp_path):
    run = late(run_of("dropout", "adamw", SOMETIMES))
    whole = train(run, tmp_path / "whole", STEPS)
    train(run, tmp_path / "parts", STEPS[:3])
    program = lower_plan(run.plan, run.captured.graph)
    rest = tuple((program, step) for step in range(3, 6))
    done = tmp_path / "parts" / "step-000003"
    resumed = train(run, tmp_path / "rest", windows=rest, resume=done)
    assert differing(resumed.weights, whole.weights) == []


def test_check_sees_the_clipped_gradients():
    run = late(run_of("dropout", "adamw", ALWAYS))
    differences = prove(Planned(run.job, run.captured, run.plan)).differences
    assert max(each.value for each in differences) < 1e-6


def test_norm_comes_after_the_updates_and_nothing_else_does():
    program = lower_schedule(zb_h2(3, 4), clip=True, post_validation=True)
    for code in program.code:
        assert isinstance(code[-2], Update)
        assert isinstance(code[-1], Reduce)
        assert code[-1].how == "validate"


def test_schedule_that_updates_on_the_way_is_refused():
    with pytest.raises(ProgramError, match="double_buffered updates before a step's end"):
        lower_schedule(double_buffered(2, 2), clip=True, post_validation=True)
