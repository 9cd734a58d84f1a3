"""Writers: what takes the figures of every step during a run: TensorBoard, W&B, MLflow, your own.

A writer is a function of one row of metrics.jsonl.  It is called in the process that leads the
run, after the row is written; what it raises ends the run.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import JobError

Row = Mapping[str, float | int | None]
Writer = Callable[[Row], None]


def tensorboard(folder: Path | str) -> Writer:
    """Return a writer of event files for TensorBoard into `folder`.

    Nothing is imported or opened before the first row.
    Raises:   JobError: tensorboard is not installed.
    """
    _check("tensorboard", "tensorboard")
    found: list[Any] = []

    def write(row: Row) -> None:
        if not found:
            module: Any = importlib.import_module("torch.utils.tensorboard")
            found.append(module.SummaryWriter(str(folder)))
        (events,) = found
        step = row["step"]
        for name, value in _figures(row).items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def wandb(project: str, **settings: object) -> Writer:
    """Return a writer to a run of Weights & Biases; `settings` are those of `wandb.init`.

    Nothing is imported, and no run begun, before the first row.
    Raises:   JobError: wandb is not installed.
    """
    _check("wandb", "wandb")
    found: list[Any] = []

    def write(row: Row) -> None:
        if not found:
            module: Any = importlib.import_module("wandb")
            found.append(module.init(project=project, **settings))
        (run,) = found
        run.log(_figures(row), step=row["step"])

    return write


def mlflow(experiment: str, **settings: object) -> Writer:
    """Return a writer to a run of MLflow; `settings` are those of `mlflow.start_run`.

    Nothing is imported, and no run begun, before the first row.
    Raises:   JobError: mlflow is not installed.
    """
    _check("mlflow", "mlflow")
    found: list[Any] = []

    def write(row: Row) -> None:
        if not found:
            module: Any = importlib.import_module("mlflow")
            module.set_experiment(experiment)
            module.start_run(**settings)
            found.append(module)
        (module,) = found
        module.log_metrics(_figures(row), step=row["step"])

    return write


def _figures(row: Row) -> dict[str, float | int]:
    """Return what can be shown of a row."""
    return {name: value for name, value in row.items() if value is not None and name != "step"}


def _check(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        hint = f'install it: pip install "penstock[{extra}]"'
        raise JobError(f"the writer needs {module}, which is not installed", hint=hint)
