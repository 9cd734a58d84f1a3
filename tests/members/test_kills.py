"""Kills: a run that loses ranks, at any moment, trains what an undisturbed one does."""

import threading
from collections import defaultdict
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.choose.run_windows import windows_of
from penstock.pilot.losses import PlanBasis
from penstock.plan import Guarding, Plan
from penstock.plan.lower_plan import stages_of
from penstock.runtime.launch import run_threads
from penstock.runtime.reader import Reader
from penstock.runtime.worker import Task, work
from tests.members import runs
from tests.parity.models import plain_loop

CASES = {  # model, stages, replicas, what else the plan says; stages and replicas after a loss
    "replicas": ("tied", 1, 3, {}, (1, 2)),
    "grid": ("dropout", 2, 2, {}, (3, 1)),
    "pipeline": ("batch_norm", 3, 1, {"guard": Guarding(2, 2)}, (2, 1)),
    "updated": ("batch_norm", 3, 1, {"guard": Guarding(0)}, (2, 1)),
    "away": ("gpt", 3, 1, {"offload": ("state",) * 3, "guard": Guarding(2)}, (2, 1)),
    "divided": ("gpt", 2, 2, {"shard": ("shard", "shard_keep"), "guard": Guarding(3)}, (3, 1)),
}


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


def case_of(name: str) -> tuple[str, int, PlanBasis, dict[int, Plan]]:
    """Return model, number of ranks, and plans for that number and one less."""
    model, stages, replicas, options, (later, copies) = CASES[name]
    count, ways = stages * replicas, runs.ways_of(model, "adamw", stages * replicas)
    if "shard" in options:  # a stage is on one rank of its replica
        options = {**options, "num_ranks": stages}
    plans = {count: runs.plan_for(ways, stages, replicas, **options)}
    every = {"guard": Guarding(options["guard"].every)} if "guard" in options else {}
    return model, count, ways, {**plans, count - 1: runs.plan_for(ways, later, copies, **every)}


def check(told: runs.Told, model: str, *, killed: int = 1, may_repeat: bool = False) -> None:
    """Compare a run with the plain loop: each step once, its loss, all weights and buffers.

    may_repeat:  whether steps may be done again: what two ranks had may have died with them.
    """
    for end in told.ended.values():
        if end.problem and not isinstance(end.problem, runs.Killed):
            raise end.problem
    assert sum(isinstance(end.problem, runs.Killed) for end in told.ended.values()) == killed
    expected = plain_loop(runs.job_of(model), runs.STEPS, runs.MICRO_BATCHES)
    losses = {step.step: step.loss for step in told.steps}
    assert sorted(losses) == list(range(runs.STEPS))
    order = [step for step, _ in groupby(each.step for each in told.steps)]
    # A new first member tells its last again; it may be one behind the one that died.
    assert may_repeat or all(abs(now - before) == 1 for before, now in pairwise(order))
    torch.testing.assert_close(list(losses.values()), expected.losses, rtol=1e-10, atol=1e-10)
    for key, value in expected.weights.items():
        torch.testing.assert_close(told.weights[key], value, rtol=1e-9, atol=1e-9)
    resumed = {event.view.resume for event in told.events[1:]}
    assert may_repeat or resumed <= {""}, "nothing was done twice"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_a_run_without_losses_is_the_plain_loop(name: str, tmp_path: Path) -> None:
    model, count, ways, plans = case_of(name)
    check(runs.run(ways, plans, count, tmp_path), model, killed=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_weights_are_to_the_bit_those_of_a_run_whose_ranks_leave_in_peace(
    name: str, tmp_path: Path
) -> None:
    _, count, ways, plans = case_of(name)
    told = runs.run(ways, plans, count, tmp_path / "killed", runs.doomed(count - 1, 2, 5))
    step = told.events[-1].view.step
    folder = tmp_path / "in peace"
    _in_peace(ways, plans[count], range(step), folder, None)
    middle = checkpoint.latest(folder)
    final = Plan.from_text(told.events[-1].view.plan)
    _in_peace(ways, final, range(step, runs.STEPS), folder, middle)
    newest = checkpoint.latest(folder)
    assert newest is not None
    expected = checkpoint.load(newest).tensors
    for key, value in expected.items():
        assert torch.equal(told.weights[key], value), key


def test_what_a_rank_has_read_of_a_step_that_is_done_again_it_does_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = defaultdict[int, list[int]](list)
    reading = Reader._read

    def noted(reader: Reader, number: int, *about: Any) -> Any:
        read[threading.get_ident()].append(number)
        return reading(reader, number, *about)

    monkeypatch.setattr(Reader, "_read", noted)
    _, count, ways, plans = case_of("replicas")
    calls = [0] * count
    noted_calls = runs.counting(lambda who, made: calls.__setitem__(who, made))
    runs.run(ways, plans, count, tmp_path / "whole", noted_calls)
    read.clear()
    told = runs.run(ways, plans, count, tmp_path / "less", runs.doomed(2, 2, calls[2] - 2))
    check(told, "tied")
    assert len(read) == count
    for numbers in read.values():
        assert len({*numbers}) == len(numbers)


def _in_peace(ways: PlanBasis, plan: Plan, steps: range, folder: Path, resume: Path | None) -> None:
    """Run some steps of a plan, and write a checkpoint."""
    captured, job = ways.ways[0].captured, ways.ways[0].job
    windows = windows_of(captured.graph, plan, steps, [])
    about = captured, stages_of(plan, captured.graph), job, windows
    task = Task(*about, policy=SavePolicy(folder), resume=resume)
    run_threads(partial(work, task), plan.total_ranks, lambda step: None, groups=task.groups)


def test_the_last_rank_finishes_alone(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 4)
    shapes = {4: (2, 2), 3: (3, 1), 2: (1, 2), 1: (1, 1)}
    plans = {count: runs.plan_for(ways, *shape) for count, shape in shapes.items()}
    doom = {0: (1, 4), 2: (2, 6), 1: (4, 2)}
    told = runs.run(ways, plans, 4, tmp_path, runs.doomed_all(doom))
    check(told, "gpt", killed=3)
    counts = [len(event.view.members) for event in told.events]
    assert (counts[0], counts[-1]) == (4, 1)
    # a second one may die before the others have agreed on the loss of the first
    assert set(counts) <= {4, 3, 2, 1}
    assert counts == sorted(set(counts), reverse=True)


def test_two_ranks_die_at_once(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 4)
    shapes = {4: (1, 4), 3: (1, 3), 2: (1, 2)}
    plans = {count: runs.plan_for(ways, *shape) for count, shape in shapes.items()}
    doom = runs.doomed_all({0: (2, 3), 3: (2, 3)}, at_once=True)
    told = runs.run(ways, plans, 4, tmp_path, doom)
    check(told, "gpt", killed=2)


def test_a_rank_and_its_guard_die_and_the_run_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    shapes = {3: (3, 1), 2: (2, 1), 1: (1, 1)}
    plans = {count: runs.plan_for(ways, *shape) for count, shape in shapes.items()}
    doom = runs.doomed_all({0: (3, 0), 1: (3, 0)}, at_once=True)
    told = runs.run(ways, plans, 3, tmp_path, doom, every=2)
    expected = plain_loop(runs.job_of("gpt"), runs.STEPS, runs.MICRO_BATCHES)
    for key, value in expected.weights.items():
        torch.testing.assert_close(told.weights[key], value, rtol=1e-9, atol=1e-9)
    assert told.events[-1].view.members == (2,)
    assert Path(told.events[-1].view.resume).name == "step-000002"
