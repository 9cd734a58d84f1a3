"""Writers get every row; TensorBoard and W&B are imported when the first one comes, not before."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

import penstock as ps
from penstock.errors import JobError
from penstock.job import Job

ROWS = [
    {"step": 1, "loss": 0.5, "seconds": 0.25, "tokens_per_second": None},
    {"step": 2, "loss": 0.25, "seconds": 0.25, "val_loss": None, "val_accuracy": 1.0},
]


class Events:
    """What torch.utils.tensorboard.SummaryWriter is used for."""

    made: ClassVar[list["Events"]] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.told, self.flushed = folder, [], 0
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((step, name, value))

    def flush(self) -> None:
        self.flushed += 1


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """Let a module be found, with these contents."""
    module = ModuleType(name)
    vars(module).update(contents, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard_gets_every_figure_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    Events.made.clear()
    installed(monkeypatch, "tensorboard")
    write = ps.tensorboard("runs/board")
    installed(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Events)
    assert Events.made == []
    for row in ROWS:
        write(row)
    (events,) = Events.made
    assert (events.folder, events.flushed) == ("runs/board", 2)
    assert events.told == [
        (1, "loss", 0.5),
        (1, "seconds", 0.25),
        (2, "loss", 0.25),
        (2, "seconds", 0.25),
        (2, "val_accuracy", 1.0),
    ]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="no tensorboard here")
def test_tensorboard_writes_event_files(tmp_path) -> None:
    write = ps.tensorboard(tmp_path)
    for row in ROWS:
        write(row)
    (path,) = tmp_path.glob("events.out.*")
    assert path.stat().st_size > 100


def test_wandb_begins_a_run_with_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def init(**settings: object) -> object:
        told.append(settings)
        return SimpleNamespace(log=lambda row, step: told.append((step, row)))

    installed(monkeypatch, "wandb", init=init)
    write = ps.wandb("speech", name="first")
    assert told == []
    for row in ROWS:
        write(row)
    assert told == [
        {"project": "speech", "name": "first"},
        (1, {"loss": 0.5, "seconds": 0.25}),
        (2, {"loss": 0.25, "seconds": 0.25, "val_accuracy": 1.0}),
    ]


def test_mlflow_begins_a_run_with_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    installed(
        monkeypatch,
        "mlflow",
        set_experiment=told.append,
        start_run=lambda **settings: told.append(settings),
        log_metrics=lambda row, step: told.append((step, row)),
    )
    write = ps.mlflow("speech", run_name="first")
    assert told == []
    for row in ROWS:
        write(row)
    assert told == [
        "speech",
        {"run_name": "first"},
        (1, {"loss": 0.5, "seconds": 0.25}),
        (2, {"loss": 0.25, "seconds": 0.25, "val_accuracy": 1.0}),
    ]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("tensorboard", lambda: ps.tensorboard("x")),
        ("wandb", lambda: ps.wandb("x")),
        ("mlflow", lambda: ps.mlflow("x")),
    ],
)
def test_a_missing_package_is_told_when_the_job_is_made(monkeypatch, name, make) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(JobError, match=f"needs {name}, which is not installed") as caught:
        make()
    assert caught.value.hint == f'install it: pip install "penstock[{name}]"'


def test_writers_that_are_no_functions_are_refused() -> None:
    def job(writers: object) -> Job:
        return Job(print, print, print, print, writers=writers)

    assert job([print]).writers == (print,)
    with pytest.raises(JobError, match=r"Job.writers is <built-in function print>, not several"):
        job(print)
    with pytest.raises(JobError, match=r"Job.writers\[1\] is the int 3, not a function"):
        job([print, 3])
