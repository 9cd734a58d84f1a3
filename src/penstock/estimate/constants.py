"""Constants: the fit of one quantity on one cluster, its error, and the runs behind it."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

import numpy as np

from penstock.errors import EstimateError
from penstock.estimate.memory import MEMORY_TERMS, memory_terms
from penstock.estimate.run import TrainingRun
from penstock.estimate.solve import Prior
from penstock.estimate.terms import Floats, Terms, time_terms
from penstock.estimate.work import TIME_TERMS
from penstock.files import Json, read_json, write_text
from penstock.typed import MisfitError, typed

Quantity: TypeAlias = Literal["time", "memory"]
Seen: TypeAlias = "dict[str, tuple[float | str, ...]]"

SHIPPED = Path(__file__).with_name("constants.json")

# Without data: 1 / the efficiency usual for large sizes, or seconds; and how firmly (solve.py).
_TIME_PRIOR = {
    "products": (1.3, 1.0),  # 77 % of the peak
    "again": (1.0, 1.0),  # a forward without a graph is faster
    "experts": (2.0, 1.0),
    "attention": (2.0, 1.0),
    "head": (2.0, 1.0),
    "loss": (10.0, 1.0),  # passes over logits
    "scores": (1.15, 1.0),
    "kernels": (1.3, 1.0),
    "launches": (30e-6, 1.0),  # s, with the Python of an eager framework
    "tensor": (1.3, 1.0),
    "tensor across": (1.5, 1.0),
    "messages": (15e-6, 1.0),  # s a hop
    "pipe": (1.1, 1.0),
    "exchange": (2.0, 1.0),
    "context": (1.0, 1.0),
    "gather": (1.5, 1.0),
    "reduce": (1.3, 1.0),
    "update": (1.2, 1.0),
    "step": (5e-3, 1.0),  # s
}
_MEMORY_PRIOR = {
    "states": (1.0, 10.0),
    "activations": (1.0, 10.0),
    "logits": (8.0, 0.05),  # bytes
    "gradient": (4.0, 0.1),  # bytes
    "buffers": (0.8, 0.3),  # GB a rank of the host: depends on how memory is measured
}


def prior(quantity: Quantity) -> Prior:
    """Return the constants of a quantity without data, and how firmly they are held."""
    table = _TIME_PRIOR if quantity == "time" else _MEMORY_PRIOR
    names = TIME_TERMS if quantity == "time" else MEMORY_TERMS
    values, weights = zip(*(table[name] for name in names), strict=True)
    return Prior(np.array(values), np.array(weights))


def terms(quantity: Quantity, runs: Sequence[TrainingRun]) -> Terms:
    """Return the terms of a quantity of `runs`."""
    return time_terms(runs) if quantity == "time" else memory_terms(runs)


def features(run: TrainingRun) -> dict[str, float | str]:
    """Return the sizes and choices of a run, by which a prediction may be outside its data."""
    return {
        "hidden size": run.model.hidden,
        "blocks": run.model.blocks,
        "sequence": run.model.sequence,
        "ranks": run.ranks,
        "tensor": run.tensor,
        "data": run.data,
        "pipe": run.pipe,
        "expert": run.expert,
        "context": run.context,
        "micro-batch": run.micro_batch,
        "micro-batches": run.num_micro_batches,
        "device": "/".join(sorted({device.name for device in run.devices})),
        "recompute": run.recompute,
        "sharding": run.sharding,
    }


def seen_in(runs: Iterable[TrainingRun]) -> Seen:
    """Return the range of every size, and the choices, that `runs` have."""
    found: dict[str, list[float | str]] = {}
    for run in runs:
        for name, value in features(run).items():
            found.setdefault(name, []).append(value)
    seen: Seen = {}
    for name, values in found.items():
        words = sorted({value for value in values if isinstance(value, str)})
        numbers = [value for value in values if not isinstance(value, str)]
        seen[name] = (min(numbers), max(numbers)) if numbers else tuple(words)
    return seen


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of one quantity on one cluster.

    spread   a measured value is within a factor exp(spread) of its prediction, 9 times in 10
    error    mean relative error of runs whose group was left out of the fit
    groups   by what they were left out
    seen     the ranges and choices fitted on
    Raises:   EstimateError: a constant is missing, below zero or not a number.
    """

    quantity: Quantity
    cluster: str
    values: dict[str, float]
    spread: float
    error: float
    groups: str
    runs: int
    seen: Seen

    def __post_init__(self) -> None:
        names = TIME_TERMS if self.quantity == "time" else MEMORY_TERMS
        wrong = [n for n in names if not 0 <= self.values.get(n, -1.0) < math.inf]
        if wrong or not 0 <= self.spread < math.inf:
            message = f"constants of {self.cluster}: no value of 0 or more for {', '.join(wrong)}"
            raise EstimateError(message, hint="fit them again")
        for name, seen in self.seen.items():
            words = [value for value in seen if isinstance(value, str)]
            if len(words) != len(seen) and (words or len(seen) != 2):
                message = f"constants of {self.cluster}: {name} is seen in {seen}"
                raise EstimateError(message, hint="give the least and the greatest, or words")

    @property
    def array(self) -> Floats:
        """Return the values in the order of the terms."""
        names = TIME_TERMS if self.quantity == "time" else MEMORY_TERMS
        return np.array([self.values[name] for name in names])

    def outside(self, run: TrainingRun) -> tuple[str, ...]:
        """Return the features in which `run` lies outside the runs that were fitted."""
        own = features(run)
        return tuple(name for name, seen in self.seen.items() if not _within(own[name], seen))


def _within(value: float | str, seen: tuple[float | str, ...]) -> bool:
    if isinstance(value, str):
        return value in seen
    least, most = cast("tuple[float, float]", seen)
    return least <= value <= most


# -- files -----------------------------------------------------------------------------------------


def save(constants: Iterable[Constants], path: Path, *, made_by: str = "") -> None:
    """Write constants as JSON, four digits each, with their origin.

    Raises:   OSError: the file cannot be written.
    """
    rows: list[Json] = []
    for item in constants:
        row: dict[str, Json] = {
            "quantity": item.quantity,
            "cluster": item.cluster,
            "values": {name: float(f"{value:.4g}") for name, value in item.values.items()},
            "spread": round(item.spread, 4),
            "error": round(item.error, 4),
            "groups": item.groups,
            "runs": item.runs,
            "seen": {name: list(values) for name, values in item.seen.items()},
        }
        rows.append(row)
    write_text(path, json.dumps({"made_by": made_by, "constants": rows}, indent=1) + "\n")


def load(path: Path = SHIPPED) -> tuple[Constants, ...]:
    """Return the constants in a file; those that come with Penstock unless another is named.

    Raises:   EstimateError: it cannot be read, or holds something else.
    """
    document = read_json(path, EstimateError, "table of constants")
    try:
        return typed(tuple[Constants, ...], document.get("constants"))
    except (MisfitError, EstimateError) as problem:
        message = f"{path} is not a table of constants: {problem}"
        raise EstimateError(message, hint="recreate it with bench.scoreboard") from problem
