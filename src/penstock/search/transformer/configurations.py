"""Configurations: the best ways to train a transformer on like devices.

    memory        closed form of all candidates; those that do not fit are counted and dropped
    time          closed form of the rest, ranked
    exact         the best and those of the Pareto front, simulated action by action

Deterministic: candidates come in one order, and ties go to the earlier one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.estimate.constants import Constants
from penstock.estimate.runs import Runs, memory_terms_of, time_terms_of
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.transformer import Transformer
from penstock.estimate.work_terms import Floats
from penstock.search.transformer.exact_step import best_steps
from penstock.search.transformer.found import (
    Configuration,
    Configurations,
    Pool,
    cost_of,
    front_of,
    pareto,
)
from penstock.search.transformer.space import Space, candidates
from penstock.units import format_bytes


def configurations(
    model: Transformer,
    pool: Pool,
    *,
    batch: int,
    constants: tuple[Constants, Constants],
    most: int = 32,
    space: Space = Space(),  # noqa: B008 - a frozen record
) -> Configurations:
    """Return the fastest ways to train on batches of `batch` samples.

    constants   of time and of memory, for every candidate
    most        of the fastest, and of the front, to be simulated
    Raises:     PlanError: nothing fits the memory or the batch.
    """
    groups = [
        runs
        for count in space.devices or (pool.count,)
        for runs in candidates(model, pool.device, count, batch, space=space)
    ]
    total = sum(map(len, groups))
    held = [memory_terms_of(runs).of(constants[1].array) for runs in groups]
    fitting = [np.flatnonzero(each <= pool.memory_bytes) for each in held]
    left = [runs.take(fit) for runs, fit in zip(groups, fitting, strict=True)]
    peaks = np.concatenate(
        [np.zeros(0), *(each[fit] for each, fit in zip(held, fitting, strict=True))]
    )
    too_large = f"need more than {format_bytes(pool.memory_bytes)} a device"
    if not len(peaks):
        raise PlanError(
            f"none of {total} candidates fits: {total} {too_large}",
            hint="use more devices, or another batch",
        )
    step_s = np.concatenate([time_terms_of(runs).of(constants[0].array) for runs in left])
    usd = step_s * np.concatenate([runs.ranks for runs in left]) * pool.usd_per_hour / 3600
    chosen = _chosen(step_s, peaks, usd, most)
    made = _simulated(left, chosen, peaks, pool, constants[0])
    rejected = ((too_large, total - len(peaks)), (_slower(most), len(peaks) - len(chosen)))
    return Configurations(made[0], front_of(made), made, total, rejected)


def _slower(most: int) -> str:
    return f"are slower by the closed form than the best {most}, and not on the front"


def _chosen(step_s: Floats, peaks: Floats, usd: Floats, most: int) -> NDArray[np.int64]:
    """Return the fastest, and of the front as many, spread from the fastest to the smallest."""
    order = np.lexsort((peaks, step_s))
    front = pareto(np.stack([step_s, peaks, usd], axis=1))
    spread = front[np.unique(np.linspace(0, len(front) - 1, most).astype(np.int64))]
    return np.unique(np.concatenate([order[:most], spread]))


def _simulated(
    groups: Sequence[Runs],
    chosen: NDArray[np.int64],
    peaks: Floats,
    pool: Pool,
    constants: Constants,
) -> tuple[Configuration, ...]:
    """Return those `chosen`, counted through all groups, the fastest first."""
    starts = np.cumsum([0, *map(len, groups)])
    places = np.searchsorted(starts, chosen, side="right") - 1
    runs: list[TrainingRun] = []
    for at, group in zip(map(int, chosen), map(int, places), strict=True):
        runs.append(groups[group].one(at - int(starts[group]), pool.device.name))
    made: list[Configuration] = []
    for run, step, peak in zip(runs, best_steps(runs, constants), peaks[chosen], strict=True):
        usd = cost_of(run, (pool,), step.seconds)
        made.append(Configuration(run, step.schedule, step.seconds, float(peak), usd))
    return tuple(sorted(made, key=lambda each: (each.seconds, each.peak_bytes)))
