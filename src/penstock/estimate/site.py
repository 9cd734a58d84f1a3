"""Site: where a run stands among others in physical terms, and how near two of them are."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.estimate.datasheet import Datasheet
from penstock.estimate.either import Floats
from penstock.estimate.training_run import TrainingRun

# Natural logarithms by which two places are far: 0.7 is a factor of 2, 2.0 one of 7.
_SCALES = (0.7, 0.7, 0.7, 1.0, 2.0, 1.0)
_USUAL_LINK = 300e9, 25e9  # bytes/s inside and across, where there is none


class Site(NamedTuple):
    """Logarithms of FLOP/s, bytes/s, bytes/s of links inside and across hosts, ranks; whether
    weights are sharded, 0 to 1; and the logarithm of watts.
    """

    peak: float
    memory: float
    inside: float
    across: float
    ranks: float
    sharded: float
    watts: float

    @property
    def axes(self) -> dict[str, float]:
        """Return by what efficiencies change: 0 for an A100-80 on 300 and 25 GB/s."""
        return {
            "power": self.peak - self.watts - math.log(0.78e12),
            "memory": self.memory - math.log(2.039e12),
            "inside": self.inside - math.log(_USUAL_LINK[0]),
            "across": self.across - math.log(_USUAL_LINK[1]),
        }


def site_of(devices: Sequence[Datasheet], ranks: int, *, sharded: float) -> Site:
    """Return the place of devices, the geometric mean of several.

    Where nothing is sent across hosts, that link is a usual one.
    """

    def mean(rates: Sequence[float]) -> float:
        return sum(map(math.log, rates)) / len(rates)

    inside, across = _USUAL_LINK
    insides = [d.inside_bytes_per_s for d in devices]
    acrosses = [across if ranks <= d.ranks_per_host else d.across_bytes_per_s for d in devices]
    return Site(
        mean([device.peak_flop_per_s for device in devices]),
        mean([device.bytes_per_s for device in devices]),
        mean([inside if math.isinf(rate) else rate for rate in insides]),
        mean([across if math.isinf(rate) else rate for rate in acrosses]),
        math.log(ranks),
        sharded,
        mean([device.power_w for device in devices]),
    )


def site_of_run(run: TrainingRun) -> Site:
    """Return the place of a run."""
    sharded = float(run.sharding in ("full", "gradients"))
    return site_of(run.devices, run.ranks, sharded=sharded)


def middle(places: Sequence[Site]) -> Site:
    """Return the mean of places."""
    return Site(*map(float, np.mean(np.array(places), axis=0)))


def nearness(some: Sequence[Site], others: Sequence[Site]) -> Floats:
    """Return exp(-d^2 / 2) for each of `some` and each of `others`."""
    count = len(_SCALES)
    a, b = (np.array(places, dtype=np.float64)[:, :count] for places in (some, others))
    apart = (a[:, None, :] - b[None, :, :]) / np.array(_SCALES)
    return np.exp(-np.square(apart).sum(axis=-1) / 2)
