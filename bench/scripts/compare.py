"""Two states compared: which tensor differs most, and whether that is more than rounding."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.scripts.oracle import Found
from penstock.state.tensor_parts import whole

ROUNDING = 1e-5  # of the largest element; ten steps of float32 in another order
ROUNDING_BFLOAT16 = 2e-2  # two of its units: a sum in another order may round a factor away
ULP = 2.0**-22  # of float32, two of them
SMALL_GAP = 1e-4  # is looked at by moving the first weights by so much of themselves
GROWS = "rounding that grows"
SMALL = 0.1  # beside the largest of its kind: some gradients are nothing but rounding
COMPARED = ("weights/", "buffers/", "optimizer/", "loss/")  # checkpoints hold more, to resume by
NOTHING = 1e-9  # where the loop has no more than this anywhere, what it does has no scale
SCALE_OF_NOTHING = 1e-2


class Difference(NamedTuple):
    """The greatest difference of any tensor, over its scale, and where it is."""

    value: float
    where: str


def read(folder: Path) -> Found:
    """Return the newest checkpoint of a run's folder, and the loss of every step."""
    newest = newest_checkpoint(folder)
    tensors: dict[str, Tensor] = {}
    for part in sorted(newest.glob("*.safetensors")):
        tensors |= load_file(part)
    plain = json.loads((newest / "state.json").read_text())["plain"]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = {row["step"]: row["loss"] for row in rows}  # a step done again counts as the last time
    return Found(
        whole(tensors), plain, [losses[n] for n in sorted(losses) if n <= steps_of(newest)]
    )


def newest_checkpoint(folder: Path) -> Path:
    """Return the checkpoint of a run's folder after most steps."""
    return max((folder / "checkpoints").glob("step-*"))


def steps_of(checkpoint: Path) -> int:
    """Return after how many steps a checkpoint was written."""
    return int(checkpoint.name.partition("-")[2])


def difference(found: Found, expected: Found) -> Difference:
    """Return the greatest difference of any weight, buffer, optimizer state or loss.

    |found - expected| / scale, with the scale of a tensor its largest element, but at least SMALL
    times the largest of all tensors of its kind.  Infinite where one is missing, or not finite in
    one of the two only.
    """
    found_values, expected_values = _values(found), _values(expected)
    largest: dict[str, float] = {}
    for key, value in expected_values.items():
        largest[_kind(key)] = max(largest.get(_kind(key), 0.0), _largest(value))
    rows = [Difference(0.0, "")]
    for key in sorted(found_values.keys() | expected_values.keys()):
        if key not in found_values or key not in expected_values:
            side = "is not in the checkpoint" if key in expected_values else "is not the loop's"
            rows.append(Difference(math.inf, f"{key} {side}"))
            continue
        scale = max(_largest(expected_values[key]), SMALL * largest[_kind(key)])
        rows.append(Difference(_between(found_values[key], expected_values[key], scale), key))
    return max(rows, key=lambda row: row.value)


def _values(found: Found) -> dict[str, Tensor]:
    """Return all that is compared as tensors."""
    values = {key: _real(value).double() for key, value in found.tensors.items()}
    for key, value in found.plain.items():
        if isinstance(value, bool | int | float):
            values[key] = torch.tensor(float(value), dtype=torch.float64)
    values |= {f"loss/{step}": torch.tensor(x).double() for step, x in enumerate(found.losses)}
    return {key: value for key, value in values.items() if key.startswith(COMPARED)}


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _kind(key: str) -> str:
    first, _, rest = key.partition("/")
    return f"{first}/{rest.rpartition('/')[2]}" if first == "optimizer" else first


def _largest(value: Tensor) -> float:
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _between(found: Tensor, expected: Tensor, scale: float) -> float:
    if found.shape != expected.shape:
        return math.inf
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return math.inf
    gap = torch.where(expected.isfinite(), found - expected, 0.0)
    most = float(gap.abs().max()) if gap.numel() else 0.0
    return most / (scale if scale > NOTHING else SCALE_OF_NOTHING)


def differing(found: Found, expected: Found) -> Iterator[str]:
    """Yield a line for every tensor that is not bit-equal, for a person who looks for the cause."""
    for key, value in sorted(expected.tensors.items()):
        other = found.tensors.get(key)
        if other is None:
            yield f"{key}: missing"
        elif not torch.equal(other, value):
            yield f"{key}: {_between(other.double(), value.double(), _largest(value)):.1e}"
