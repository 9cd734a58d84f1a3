"""Batch: time and cost to a target over ranks and batch, from a few short runs of the job.

    seconds(K, B) = steps(B) * step_s(K, B)          cost = seconds * K * price
    steps(B)      ~ 1 + scale / B                    (profile/noise.py)
    step_s(K, B)  = a + b * B / C + c * (C - 1) / C  (a start, samples of a copy, sums over copies)
    C             = K / M                            copies of the model, on M ranks each

a, b and c are not below 0 and make relative errors least, for each M of the runs by itself.  Only
ratios are known until the steps to the target are, with any one batch.

With M of 1 alone that is data parallelism.  With runs of which each copy is a pipeline, too, there
is a number of ranks from which on these reach the target sooner: more copies need a larger batch,
or sum for longer, at some point for less than dividing the model gains.

Source:   "Scavenger", arXiv:2303.06659; copies of several ranks, arXiv:1907.13257.
Ignores:  that the noise scale grows while the loss falls, learning rates that have to follow the
          batch, and anything that bends with K but the sums.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np

from penstock.errors import EstimateError
from penstock.files import Json, read_json
from penstock.minima import least_squares
from penstock.profile.noise import steps_needed


@dataclass(frozen=True, slots=True)
class Phase:
    """A short run: ranks, samples of a step, seconds of a step, and its noise scale in samples.

    watched:     steps that told of the noise; 0: none did
    copy_ranks:  ranks of one copy of the model
    """

    ranks: int
    batch: int
    step_s: float
    scale: float = math.nan
    watched: int = 0
    copy_ranks: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.ranks < 1 or self.batch < 1 or not self.step_s > 0:
            message = f"{self.ranks} ranks take {self.step_s} s for a step of {self.batch} samples"
            raise EstimateError(message, hint="give runs that took some steps")
        if self.copy_ranks < 1 or self.ranks % self.copy_ranks:
            message = f"{self.ranks} ranks are no copies of {self.copy_ranks} ranks each"
            raise EstimateError(message, hint="give a number that divides the ranks")


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
    copy_ranks = int(_number(found.get("copy_ranks")) or 1)
    return Phase(len(peaks), int(batch), step_s, scale, int(watched), copy_ranks)


def _number(value: Json) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


Least = Literal["time", "cost"]


class BatchOption(NamedTuple):
    """Ranks and batch, and what is foreseen with them.

    steps:     to the target
    seconds:   to the target
    usd:       to the target
    copy_ranks: of one copy of the model
    """

    ranks: int
    batch: int
    step_s: float
    steps: float
    seconds: float
    usd: float
    copy_ranks: int = 1

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
    copy_ranks: int = 1

    def step_s(self, ranks: int, batch: int) -> float:
        """Return the seconds of a step."""
        copies = ranks / self.copy_ranks
        share = (copies - 1) / copies
        return self.start_s + self.sample_s * batch / copies + self.sums_s * share

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
        Of ranks that are no whole copies there is none.
        """
        known = {(o.ranks, o.batch): o.step_s for o in told if o.copy_ranks == self.copy_ranks}
        found: list[BatchOption] = []
        for ranks, samples in over:
            if ranks % self.copy_ranks:
                continue
            step_s = known.get((ranks, samples)) or self.step_s(ranks, samples)
            count = steps_needed(steps, batch, self.scale, other=samples)
            seconds = count * step_s
            usd = seconds / 3600.0 * ranks * usd_per_hour
            own = samples, step_s, count, seconds, usd
            found.append(BatchOption(ranks, *own, self.copy_ranks))
        return found


def phases(told: Sequence[Phase], scale: float | None = None) -> Phases:
    """Return the phases of several short runs with copies of as many ranks as one record.

    scale:    of the noise; default: their mean, by the steps that were watched.
    Raises:   EstimateError: fewer than two unlike runs, or none that was watched.
    """
    if len({(one.ranks, one.batch) for one in told}) < 2:
        message = f"{len(told)} runs of one kind tell nothing of ranks and batch"
        raise EstimateError(message, hint="give runs with two numbers of ranks, or two batches")
    scale = noise_scale(told) if scale is None else scale
    copies = [(one, one.ranks / one.copy_ranks) for one in told]
    rows = np.array([[1.0, one.batch / count, (count - 1) / count] for one, count in copies])
    system = rows / np.array([one.step_s for one in told])[:, None]
    a, b, c = least_squares(system, np.ones(len(told)), 0.0, math.inf).tolist()
    return Phases(a, b, c, scale, told[0].copy_ranks)


def noise_scale(told: Sequence[Phase]) -> float:
    """Return the mean noise scale of runs, by the steps that were watched.

    Raises:   EstimateError: none was watched.
    """
    watched = [one for one in told if one.watched and math.isfinite(one.scale)]
    if not watched:
        raise EstimateError(
            "no run tells how noisy its gradients are",
            hint="let one take 20 steps of two micro-batches or more",
        )
    weight = sum(one.watched for one in watched)
    return sum(one.scale * one.watched for one in watched) / weight


def phases_by_copies(told: Sequence[Phase]) -> list[Phases]:
    """Return the phases for each number of ranks that copies have, the least first.

    Raises:   EstimateError: as `phases`, of any of them.
    """
    if not told:
        return [phases(told)]
    scale, counts = noise_scale(told), sorted({one.copy_ranks for one in told})
    return [phases([o for o in told if o.copy_ranks == count], scale) for count in counts]


def crossover(options: Sequence[BatchOption], least: Least) -> int | None:
    """Return the ranks from which on the best options are of copies with several ranks.

    That is at this number of ranks and all larger ones; None where at the largest it is not so.
    """
    best = {
        r: min((o for o in options if o.ranks == r), key=lambda o: o.score(least))
        for r in {o.ranks for o in options}
    }
    found = None
    for ranks in sorted(best, reverse=True):
        if best[ranks].copy_ranks == 1:
            break
        found = ranks
    return found
