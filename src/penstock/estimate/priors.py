"""Priors: what each constant of time and memory is before any run, how firmly, and why.

An efficiency is between 0 and 1: it is kept as its inverse, 1 + exp(z), so that no fit can leave
the range.  What is counted, seconds or bytes, is exp(z).
"""

import math
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.estimate.either import Floats

Quantity: TypeAlias = Literal["time", "memory"]
Axis: TypeAlias = Literal["", "power", "memory", "inside", "across"]


class Prior(NamedTuple):
    """A constant before any run.

    value      1 / efficiency, or seconds or bytes of what is counted, on an A100-80
    doubt      standard deviation of z
    own        standard deviation of z from cluster to cluster
    axis       what it changes with from device to device, and by how much in z for each factor
    slope      of e; with its standard deviation
    """

    name: str
    is_efficiency: bool
    value: float
    doubt: float
    own: float
    axis: Axis
    slope: tuple[float, float]
    source: str


_FLASH = "arXiv:2307.08691, figures 4 to 7: 50 to 73 % of an A100's peak, 35 % of an H100's"
_POWER = "the best product takes 87, 80, 78 % of peak on A100, H100, B200 (ml-engineering); less "
TIME_PRIORS = (
    Prior(
        "products", True, 1.35, 0.3, 0.35,
        "power", (1.0, 0.4), _POWER + "where a FLOP has less power",
    ),
    Prior("attention", True, 1.7, 0.5, 0.6, "power", (0.7, 0.5), _FLASH),
    Prior(
        "bytes", True, 1.35, 0.4, 0.5, "memory", (0.7, 0.4),
        "copies reach 85 to 90 %, short kernels less; the more so the faster the memory is",
    ),
    Prior(
        "inside", True, 1.3, 0.4, 0.6, "inside", (0.5, 0.5),
        "nccl-tests on NVLink: 75 to 80 % of the rate",
    ),
    Prior(
        "across", True, 1.5, 0.5, 0.7, "across", (0.3, 0.3),
        "nccl-tests between hosts: 60 to 90 %",
    ),
    Prior(
        "launches", False, 25e-6, 0.4, 0.2, "", (0.0, 0.0),
        "an op of an eager framework with its Python: 10 to 40 us",
    ),
    Prior(
        "hops", False, 12e-6, 0.4, 0.3, "", (0.0, 0.0),
        "a small collective of 8 ranks: 30 to 100 us",
    ),
    Prior(
        "step", False, 5e-3, 0.7, 0.7, "", (0.0, 0.0),
        "batch, learning rate, norm, log: milliseconds",
    ),
)  # fmt: skip
MEMORY_PRIORS = (
    Prior(
        "states", False, 1.0, 0.01, 0.02, "", (0.0, 0.0),
        "counted; padding of parts and buckets",
    ),
    Prior("activations", False, 1.0, 0.05, 0.06, "", (0.0, 0.0), "counted, arXiv:2205.05198"),
    Prior("logits", False, 1.0, 0.2, 0.2, "", (0.0, 0.0), "counted by the kernels of the loss"),
    Prior("gradient", False, 1.0, 0.2, 0.2, "", (0.0, 0.0), "counted, in 32 bits"),
    Prior(
        "buffers", False, 0.7, 0.3, 0.3, "", (0.0, 0.0),
        "buffers of messages to a rank, or work spaces of libraries: some hundred MB",
    ),
)  # fmt: skip


def priors(quantity: Quantity) -> tuple[Prior, ...]:
    """Return the constants of a quantity, in the order of its terms."""
    return TIME_PRIORS if quantity == "time" else MEMORY_PRIORS


def usual(quantity: Quantity) -> Floats:
    """Return the values of a quantity before any run."""
    return np.array([prior.value for prior in priors(quantity)])


def values_of(quantity: Quantity, z: Floats) -> Floats:
    """Return constants from what is fitted."""
    ones = np.array([1.0 if prior.is_efficiency else 0.0 for prior in priors(quantity)])
    return ones + np.exp(z)


def z_of(prior: Prior, value: float) -> float:
    """Return z for a value of a constant."""
    return math.log(value - 1.0 if prior.is_efficiency else value)
