"""A run that is resumed, by the same plan or by another one, ends where the unbroken run ends."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.errors import CheckpointError, RunError
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.run import Outcome
from tests.pairwise import pairwise
from tests.parity.models import OPTIMIZERS, captured, job_of, plan_of
from tests.parity.training import Run, difference, differing, steps_saved, train, windows

BEFORE, AFTER = 2, 3
MICRO_BATCHES = 4


def run_of(name, schedule, stages, optimizer="adamw", dtype=torch.float32, replicas=1) -> Run:
    graph = captured(name, dtype).graph
    plan = plan_of(graph, schedule, stages, MICRO_BATCHES // replicas, replicas=replicas)
    return Run(plan, job_of(name, dtype, optimizer), captured(name, dtype))


def resume(run: Run, folder, done, launcher=run_threads):
    rest = tuple((program, BEFORE + step) for program, step in windows(run, (AFTER,)))
    return train(run, folder, windows=rest, launcher=launcher, resume=checkpoint.latest(done))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "optimizer", "launcher"),
    pairwise(
        ("dropout", "tied", "batch_norm", "frozen"), tuple(OPTIMIZERS), (run_threads, run_processes)
    ),
)
def test_resuming_by_the_same_plan_gives_the_same_bits(name, optimizer, launcher, tmp_path):
    run = run_of(name, "one_f_one_b", 2, optimizer)
    whole = train(run, tmp_path / "whole", (BEFORE + AFTER,))
    train(run, tmp_path / "part", (BEFORE,), launcher)
    rest = resume(run, tmp_path / "rest", tmp_path / "part", launcher)
    assert differing(rest.weights, whole.weights) == []
    assert [s.loss for s in rest.steps] == [s.loss for s in whole.steps][BEFORE:]
    assert [s.step for s in rest.steps] == list(range(BEFORE, BEFORE + AFTER))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Outcome, Path]]:
    """Return what gives a model's unbroken run, and the folder of one that was stopped."""

    @cache
    def of(name: str) -> tuple[Outcome, Path]:
        run, folder = run_of(name, "one_f_one_b", 4), tmp_path_factory.mktemp(name)
        whole = train(run, folder / "whole", (BEFORE + AFTER,))
        train(run, folder / "part", (BEFORE,))
        return whole, folder / "part"

    return of


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 1), ("zb_h1", 2), ("interleaved", 8), ("one_f_one_b", 3)]
)
@pytest.mark.parametrize("name", ["dropout", "batch_norm", "frozen"])
@pytest.mark.sampled(3)
def test_resuming_by_another_plan_gives_the_same_bits(name, schedule, stages, stopped, tmp_path):
    whole, part = stopped(name)
    rest = resume(run_of(name, schedule, stages), tmp_path, part)
    assert differing(rest.weights, whole.weights) == []


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_resuming_with_other_replicas_differs_only_by_the_order_of_sums(before, after, tmp_path):
    runs = [run_of("tied", "one_f_one_b", 2, "sgd", torch.float64, r) for r in (before, after)]
    whole = train(runs[0], tmp_path / "whole", (BEFORE + AFTER,))
    train(runs[0], tmp_path / "part", (BEFORE,))
    rest = resume(runs[1], tmp_path / "rest", tmp_path / "part")
    assert difference(rest.weights, whole.weights) < 1e-12


def test_double_buffering_goes_on_from_a_synchronous_checkpoint(tmp_path):
    """Its older version is then the checkpoint's only one, as at the start of training."""
    train(run_of("gpt", "one_f_one_b", 2), tmp_path / "part", (BEFORE,))
    rest = resume(run_of("gpt", "double_buffered", 4), tmp_path / "rest", tmp_path / "part")
    other = resume(run_of("gpt", "double_buffered", 2), tmp_path / "other", tmp_path / "part")
    assert differing(rest.weights, other.weights) == []
    assert rest.live_versions == (2,) * 4


def test_double_buffering_goes_on_with_other_stages(tmp_path):
    runs = [run_of("dropout", "double_buffered", stages) for stages in (4, 2)]
    whole = train(runs[0], tmp_path / "whole", (BEFORE + AFTER,))
    train(runs[0], tmp_path / "part", (BEFORE,))
    rest = resume(runs[1], tmp_path / "rest", tmp_path / "part")
    assert differing(rest.weights, whole.weights) == []


def test_checkpoints_are_made_when_due_and_the_newest_two_are_kept(tmp_path, monkeypatch):
    run, made = run_of("frozen", "one_f_one_b", 2), steps_saved(monkeypatch)
    train(run, tmp_path, (7,), every=2)
    assert made == [2, 4, 6, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000007"]


def test_a_half_written_checkpoint_of_an_earlier_run_is_not_mixed_in(tmp_path):
    run = run_of("frozen", "one_f_one_b", 2)
    other = {"weights/embedding.weight": torch.zeros(1)}
    checkpoint.write_part(tmp_path, 3, 7, (other, {"stray": 1}))
    outcome = train(run, tmp_path, (3,))
    assert outcome.weights["weights/embedding.weight"].shape == (11, 16)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_a_checkpoint_of_another_model_is_refused(launcher, tmp_path):
    train(run_of("frozen", "one_f_one_b", 2), tmp_path / "part", (BEFORE,))
    with pytest.raises(RunError, match="holds no weights/blocks") as caught:
        resume(run_of("gpt", "one_f_one_b", 2), tmp_path / "rest", tmp_path / "part", launcher)
    assert "another model" in caught.value.hint
    assert not (tmp_path / "rest").exists()


def test_a_parameter_of_another_shape_is_refused(tmp_path):
    run = run_of("frozen", "one_f_one_b", 2)
    train(run, tmp_path / "part", (BEFORE,))
    state = checkpoint.load(checkpoint.latest(tmp_path / "part"))
    wrong = {**state.tensors, "weights/head.bias": torch.zeros(7)}
    checkpoint.write_part(tmp_path / "wrong", BEFORE, 0, (wrong, state.plain))
    checkpoint.finish(tmp_path / "wrong", BEFORE)
    with pytest.raises(RunError, match=r"weights/head.bias is \[7\] in the checkpoint, \[11\]"):
        resume(run, tmp_path / "rest", tmp_path / "wrong")


def test_an_optimizer_whose_state_cannot_be_saved_is_told(tmp_path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["odd"] = {1, 2}

    run = run_of("frozen", "one_f_one_b", 2)
    run = run._replace(job=replace(run.job, optimizer=lambda parameters: Odd(parameters, lr=0.1)))
    with pytest.raises(RunError, match=r"odd of .* is a set, which cannot be saved"):
        train(run, tmp_path, (1,))


def test_plain_values_of_an_optimizer_are_resumed(tmp_path):
    class Counting(torch.optim.SGD):
        """An SGD whose rate falls with a plain count that it keeps for each parameter."""

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    count = self.state[parameter].get("count", 0) + 1
                    self.state[parameter]["count"] = count
                    if parameter.grad is not None:
                        parameter.data -= 0.1 / count * parameter.grad

    run = run_of("frozen", "one_f_one_b", 2)
    job = replace(run.job, optimizer=lambda parameters: Counting(parameters, lr=0.1))
    run = run._replace(job=job)
    whole = train(run, tmp_path / "whole", (BEFORE + AFTER,))
    train(run, tmp_path / "part", (BEFORE,))
    rest = resume(run, tmp_path / "rest", tmp_path / "part")
    assert differing(rest.weights, whole.weights) == []


def test_a_damaged_checkpoint_is_refused_before_anything_runs(tmp_path):
    run = run_of("frozen", "one_f_one_b", 2)
    train(run, tmp_path / "part", (BEFORE,))
    newest = checkpoint.latest(tmp_path / "part")
    (newest / "rank-1.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors"):
        checkpoint.load(newest)
    with pytest.raises(RunError, match=r"rank-1.safetensors.* is (missing or )?damaged"):
        resume(run, tmp_path / "rest", tmp_path / "part")
