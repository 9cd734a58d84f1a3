"""Penstock: plan, predict and run the training of an unmodified PyTorch model.

    job = penstock.Job(model=..., loss=..., data=..., optimizer=...)
    cluster = penstock.Cluster.here()
    graph = penstock.trace(job)
    profile = penstock.measure(graph)    # or penstock.estimate(graph, cluster)
    plan = penstock.search(graph, profile, cluster)
    program = penstock.lower(plan, graph)
    predicted = penstock.simulate(program, profile, cluster)
    measured = penstock.run(program, job, num_steps=100)
    penstock.report(plan, predicted, measured).save("report.html")

    penstock.train(job, out="runs/mine")    # all of it, as `penstock train`

Each name is loaded when it is first used, so that `import penstock` costs little and no torch.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import rules
    from penstock.averages import ema, swa
    from penstock.batches import batches, bucketed, document_mask, from_loader, packed
    from penstock.cluster import Cluster
    from penstock.errors import PenstockError
    from penstock.estimate.traced import estimate
    from penstock.graph.composed import by_name
    from penstock.graph.graph import Graph
    from penstock.graph.layerwise import Lamb, Lars
    from penstock.graph.traced_graph import trace
    from penstock.in_turn import Turn, in_turn
    from penstock.job import Job, load_job
    from penstock.large_batch import scaled_rate, warm_up
    from penstock.lightning_job import from_lightning
    from penstock.listener import Listener
    from penstock.plan import Plan
    from penstock.plan.of_plan import lower
    from penstock.ported import from_transformers
    from penstock.profile import Profile
    from penstock.profile.of_graph import measure
    from penstock.program.program import Program
    from penstock.report.run_report import report
    from penstock.schedule import SCHEDULES, Schedule
    from penstock.search.one_plan import search
    from penstock.simulate.of_program import simulate
    from penstock.stores import DiskCache, stored
    from penstock.timeline import Timeline
    from penstock.training.export import load_weights
    from penstock.training.loop import loop
    from penstock.training.run_program import run
    from penstock.training.train import train
    from penstock.writers import mlflow, tensorboard, wandb

    __version__: str

__all__ = [
    "SCHEDULES",
    "Cluster",
    "DiskCache",
    "Graph",
    "Job",
    "Lamb",
    "Lars",
    "Listener",
    "PenstockError",
    "Plan",
    "Profile",
    "Program",
    "Schedule",
    "Timeline",
    "Turn",
    "batches",
    "bucketed",
    "by_name",
    "document_mask",
    "ema",
    "estimate",
    "from_lightning",
    "from_loader",
    "from_transformers",
    "in_turn",
    "load_job",
    "load_weights",
    "loop",
    "lower",
    "measure",
    "mlflow",
    "packed",
    "report",
    "rules",
    "run",
    "scaled_rate",
    "search",
    "simulate",
    "stored",
    "swa",
    "tensorboard",
    "trace",
    "train",
    "wandb",
    "warm_up",
]

_PLACES = {
    "SCHEDULES": "schedule",
    "Cluster": "cluster",
    "DiskCache": "stores",
    "Graph": "graph.graph",
    "Job": "job",
    "Lamb": "graph.layerwise",
    "Lars": "graph.layerwise",
    "Listener": "listener",
    "PenstockError": "errors",
    "Plan": "plan",
    "Profile": "profile",
    "Program": "program.program",
    "Schedule": "schedule",
    "Timeline": "timeline",
    "Turn": "in_turn",
    "batches": "batches",
    "bucketed": "batches",
    "by_name": "graph.composed",
    "document_mask": "batches",
    "ema": "averages",
    "estimate": "estimate.traced",
    "from_loader": "batches",
    "from_lightning": "lightning_job",
    "from_transformers": "ported",
    "in_turn": "in_turn",
    "load_job": "job",
    "load_weights": "training.export",
    "loop": "training.loop",
    "lower": "plan.of_plan",
    "measure": "profile.of_graph",
    "mlflow": "writers",
    "packed": "batches",
    "report": "report.run_report",
    "rules": "rules",
    "run": "training.run_program",
    "scaled_rate": "large_batch",
    "search": "search.one_plan",
    "simulate": "simulate.of_program",
    "stored": "stores",
    "swa": "averages",
    "tensorboard": "writers",
    "trace": "graph.traced_graph",
    "train": "training.train",
    "wandb": "writers",
    "warm_up": "large_batch",
}


_ROOMS = ("rules",)  # whose names are used with theirs: `ps.rules.cut`


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _ROOMS:
        value = _loaded(name)
    elif name in _PLACES:
        value = getattr(_loaded(_PLACES[name]), name)
    else:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    globals()[name] = value
    return value


def _loaded(room: str) -> ModuleType:
    from penstock.garbage import collector_waits

    with collector_waits():
        return importlib.import_module(f"penstock.{room}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("penstock")
    except PackageNotFoundError:  # run from its source
        return "of the source"


class _Penstock(ModuleType):
    """This module: `search`, `estimate` and the others stay verbs when their rooms are loaded."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _ROOMS or not (name in _PLACES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Let functions that name this module be sent to other processes."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Penstock
