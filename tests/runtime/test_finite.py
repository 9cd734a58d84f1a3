"""A number that is not finite ends a run with the step, the micro-batch and where it came from."""

import json
import math
import re
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from penstock.checkpoints.saver import SavePolicy
from penstock.errors import RunError
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.listener import SILENT
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.worker import Task, work
from penstock.training.results import explained
from tests.parity.models import plan_of
from tests.parity.training import listed

WIDTH = 16
HERE = str(Path(__file__))


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + 1000).sqrt()  # the root


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))
        self.first = nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))
        self.second = Root()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + x)


def data_with(value: float, at: int):
    """Return data whose micro-batch `at` holds a number that spoils it."""

    def data(start: int):
        for index in count(start):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(index))
            if index == at:
                x[1, 2] = value
            yield {"x": x, "mask": torch.tensor([0.0, -math.inf] * (WIDTH // 2))}

    return data


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss that an infinity in a mask does not harm."""
    weights = torch.softmax(batch["mask"], 0)
    return (model(batch["x"]) * weights).sum()


def norm_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model.first(batch["x"]).mul(batch["x"][1, 2] == 0).square().sum().sqrt()  # its slope


def job(value: float = 0.5, at: int = 6, **changes: object) -> Job:
    made = Job(Net, loss, data_with(value, at), lambda p: SGD(p, lr=1e-3), micro_batches=4)
    return replace(made, **changes)


def planned(own: Job, folder: Path, *, stages: int, replicas: int, launcher) -> RunError:
    captured = capture(own)
    share = own.micro_batches // replicas
    clip = own.clip_norm is not None
    plan = plan_of(captured.graph, "one_f_one_b", stages, share, replicas=replicas, clip=clip)
    program = lower_plan(plan, captured.graph)
    windows = tuple((program, step) for step in range(4))
    parts = stages_of(plan, captured.graph)
    task = Task(captured, parts, own, listed(windows), policy=SavePolicy(folder / "checkpoints"))
    return caught(own, folder, lambda end, tell: work(task, end, tell), plan.total_ranks, launcher)


def eagerly(own: Job, folder: Path, ranks: int = 2) -> RunError:
    task = EagerTask(own, 0, 4, policy=SavePolicy(folder / "checkpoints"))
    return caught(
        own, folder, lambda end, tell: work_eagerly(task, end, tell), ranks, run_processes
    )


def caught(own: Job, folder: Path, run, ranks: int, launcher) -> RunError:
    with pytest.raises(RunError) as problem:
        launcher(run, ranks, lambda step: None)
    error = explained(folder, own, problem.value, SILENT)
    assert not (folder / "checkpoints" / ".not-finite").exists()
    return error


WAYS = {
    "threads": lambda own, folder: planned(own, folder, stages=2, replicas=1, launcher=run_threads),
    "processes": lambda own, folder: planned(
        own, folder, stages=2, replicas=2, launcher=run_processes
    ),
    "eager": eagerly,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_op_is_named_with_its_module_and_line(way: str, tmp_path: Path) -> None:
    error = WAYS[way](job(-1e9), tmp_path)
    first, op = error.message.splitlines()
    assert "the loss of step 2, micro-batch 2 (number 6 of the data), is nan on rank " in first
    assert op.startswith("first nan: aten.sqrt.default in second, " + HERE)
    assert op.endswith("return (self.layer(x) + 1000).sqrt()  # the root")
    assert "epsilon" in error.hint


@pytest.mark.parametrize("way", WAYS)
def test_data_that_is_not_finite_is_named_as_such(way: str, tmp_path: Path) -> None:
    error = WAYS[way](job(math.nan, at=9), tmp_path)
    first, cause = error.message.splitlines()
    assert "step 3, micro-batch 1 (number 9 of the data), is nan" in first
    assert cause == "the data is not finite: leaf ['x'] has 1 of its 48 numbers (1 nan)"


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_an_update_made_so_names_itself(way: str, tmp_path: Path) -> None:
    rates = {0: 1.0, 1: math.inf}
    error = WAYS[way](job(learning_rate=lambda step: rates.get(step, 1.0)), tmp_path)
    first, cause = error.message.splitlines()
    at = r"step 3, micro-batch (0|2) \(number (8|10) of the data\), is nan on rank \d"
    assert re.fullmatch(f"the loss of {at}", first)
    assert cause.startswith("parameter ")
    assert " is not finite since the update of step 2: " in cause
    assert "learning rate" in error.hint


@pytest.mark.parametrize("way", WAYS)
def test_no_checkpoint_is_written_of_weights_that_the_last_update_spoilt(
    way: str, tmp_path: Path
) -> None:
    error = WAYS[way](job(learning_rate=lambda step: 1.0 if step < 3 else math.nan), tmp_path)
    first, cause = error.message.splitlines()
    assert re.fullmatch(r"parameter \S+, after the update of step 4, is nan on rank \d", first)
    assert " is not finite since the update of step 4: " in cause
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_norm_that_is_not_finite_names_parameter_and_line(way: str, tmp_path: Path) -> None:
    error = WAYS[way](job(1.0, loss=norm_loss, clip_norm=1.0, data=data_of_zero(6)), tmp_path)
    first, cause = error.message.splitlines()
    assert first.startswith("the norm of the gradient of first.")
    assert "in step 2 is nan on rank " in first
    assert cause.startswith(f"in the backward pass of {HERE}:")
    assert "# its slope" in cause


def data_of_zero(at: int):
    """Return data by which only micro-batch `at` has a loss of zero, where a root has no slope."""
    return lambda start: (
        {**batch, "x": batch["x"].index_fill(0, torch.tensor([1]), float(index == at))}
        for index, batch in zip(count(start), data_with(1.0, -1)(start), strict=False)
    )


def test_infinity_that_is_meant_is_not_blamed(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = model.first(batch["x"]).masked_fill(batch["mask"] < 0, -math.inf)
        kept = torch.softmax(hidden, -1)
        return (kept.sum() * batch["x"].abs().sum()).mul(100).exp()  # too large

    error = eagerly(job(1e6, loss=loss), tmp_path, ranks=1)
    assert "is inf" in error.message
    assert "first infinite: aten.exp.default" in error.message
    assert "# too large" in error.message
    assert "nan" not in error.message.splitlines()[1]


def test_what_cannot_be_repeated_is_said_to_be_so(tmp_path: Path) -> None:
    times = iter([*([1.0] * 5), math.nan])

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).mean() * next(times, 1.0)

    task = EagerTask(job(loss=loss), 0, 4, policy=SavePolicy(tmp_path / "checkpoints"))
    error = caught(
        job(), tmp_path, lambda end, tell: work_eagerly(task, end, tell), 1, run_processes
    )
    assert "micro-batch 5 run once more in one process gives finite numbers" in error.message


def test_a_run_whose_numbers_are_finite_leaves_nothing(tmp_path: Path) -> None:
    task = EagerTask(job(), 0, 2, policy=SavePolicy(tmp_path))
    run_processes(lambda end, tell: work_eagerly(task, end, tell), 1, lambda step: None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    other = RunError("of another kind")
    assert explained(tmp_path, job(), other, SILENT) is other


def test_what_an_earlier_run_left_in_part_is_no_matter(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / ".not-finite"
    folder.mkdir(parents=True)
    (folder / ".rank-0").write_bytes(b"in part")
    (folder / "found.json").write_text(json.dumps({"what": "it"})[:5])
    error = eagerly(job(-1e9), tmp_path, ranks=1)
    assert "number 6 of the data" in error.message
