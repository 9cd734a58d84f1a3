"""Batch: time and cost to a target over ranks and batch, from a few short runs of the job.

    seconds(K, B) = steps(B) * step_s(K, B)          cost = seconds * K * price
    steps(B)      ~ 1 + scale / B                    (profile/noise.py)
    step_s(K, B)  = a + b * B / K + c * (K - 1) / K  (a start, samples of a rank, sums over ranks)

a, b and c are not below 0 and make relative errors least.  Only ratios are known until the steps to
the target are, with any one batch.

Source:   "Scavenger", arXiv:2303.06659.
Ignores:  that the noise scale grows while the loss falls, learning rates that have to follow the
          batch, and anything that bends with K but the sums.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from penstock.errors import EstimateError
from penstock.files import Json, read_json
from penstock.profile.noise import steps_needed


@dataclass(frozen=True, slots=True)
class Phase:
    """A short run: ranks, samples of a step, seconds of a step, and its noise scale in samples.

    watched:   steps that told of the noise; 0: none did
    """

    ranks: int
    batch: int
    step_s: float
    scale: float = math.nan
    watched: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.ranks < 1 or self.batch < 1 or not self.step_s > 0:
            message = f"{self.ranks} ranks take {self.step_s} s for a step of {self.batch} samples"
            raise EstimateError(message, hint="give runs that took some steps")


def phase_of(folder: Path) -> Phase:
    """Return the phase that a run's summary describes.

    Raises:   EstimateError: no summary, or one without the noise of gradients.
    """
    found = read_json(folder / "summary.json", EstimateError, "summary")
    hint = "it needs steps that were measured and watched: a synchronous run of 20 steps or more"
    keys = "step_s_measured", "noise_scale_batch", "noise_scale_samples", "noise_scale_steps"
    numbers = [_number(found.get(key)) for key in keys]
    peaks = found.get("peak_bytes_measured")
    if not isinstance(peaks, list) or None in numbers:
        lacking = [key for key, value in zip(keys, numbers, strict=True) if value is None]
        message = f"{folder}/summary.json lacks {', '.join(lacking) or 'peak_bytes_measured'}"
        raise EstimateError(message, hint=hint)
    step_s, batch, scale, watched = cast("list[float]", numbers)
    return Phase(len(peaks), int(batch), step_s, scale, int(watched))


def _number(value: Json) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


Least = Literal["time", "cost"]


class BatchOption(NamedTuple):
    """Ranks and batch, and what is foreseen with them.

    steps:     to the target
    seconds:   to the target
    usd:       to the target
    """

    ranks: int
    batch: int
    step_s: float
    steps: float
    seconds: float
    usd: float

    def score(self, least: Least) -> tuple[float, ...]:
        """Return the sort key of a choice: `least` first; of equals the simpler one comes first."""
        return (self.seconds if least == "time" else self.usd, self.ranks, self.batch)


@dataclass(frozen=True, slots=True)
class Phases:
    """What short runs tell of time and cost: the constants of a step, and the noise scale."""

    start_s: float
    sample_s: float
    sums_s: float
    scale: float

    def step_s(self, ranks: int, batch: int) -> float:
        """Return the seconds of a step."""
        share = (ranks - 1) / ranks
        return self.start_s + self.sample_s * batch / ranks + self.sums_s * share

    def options(
        self,
        over: Iterable[tuple[int, int]],
        *,
        steps: float,
        batch: int,
        usd_per_hour: float,
        told: Sequence[Phase] = (),
    ) -> list[BatchOption]:
        """Return the prediction for each (ranks, batch).

        steps:   to the target with steps of `batch` samples
        told:    whose seconds are known, and need not be foreseen
        """
        known = {(one.ranks, one.batch): one.step_s for one in told}
        found: list[BatchOption] = []
        for ranks, samples in over:
            step_s = known.get((ranks, samples)) or self.step_s(ranks, samples)
            count = steps_needed(steps, batch, self.scale, other=samples)
            seconds = count * step_s
            usd = seconds / 3600.0 * ranks * usd_per_hour
            found.append(BatchOption(ranks, samples, step_s, count, seconds, usd))
        return found


def phases(told: Sequence[Phase]) -> Phases:
    """Return the phases of several short runs as one record.

    The noise scale is their mean, by the steps that were watched.
    Raises:   EstimateError: fewer than two unlike runs, or none that was watched.
    """
    if len({(one.ranks, one.batch) for one in told}) < 2:
        message = f"{len(told)} runs of one kind tell nothing of ranks and batch"
        raise EstimateError(message, hint="give runs with two numbers of ranks, or two batches")
    watched = [one for one in told if one.watched and math.isfinite(one.scale)]
    if not watched:
        raise EstimateError(
            "no run tells how noisy its gradients are",
            hint="let one take 20 steps of two micro-batches or more",
        )
    from sklearn.linear_model import LinearRegression  # pyright: ignore - no types

    rows = np.array([[1.0, one.batch / one.ranks, (one.ranks - 1) / one.ranks] for one in told])
    system = rows / np.array([one.step_s for one in told])[:, None]
    model: Any = LinearRegression(positive=True, fit_intercept=False)
    found = cast("Sequence[float]", model.fit(system, np.ones(len(told))).coef_)
    weight = sum(one.watched for one in watched)
    scale = sum(one.scale * one.watched for one in watched) / weight
    return Phases(float(found[0]), float(found[1]), float(found[2]), scale)
