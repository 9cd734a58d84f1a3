"""Links: seconds of collectives at the rates of the datasheet, by where their ranks are.

Ranks are numbered tensor first, then context, data and pipe, as Megatron numbers them; a host
holds consecutive ranks.  No latency: messages are counted elsewhere.
"""

import functools
from typing import Literal

from penstock.estimate.either import ever, least, most, where
from penstock.estimate.run import TrainingRun


def all_reduce_s(
    run: TrainingRun, at: int, size_bytes: float, *, axis: Literal["tensor", "data"]
) -> float:
    """Return the seconds of summing `size_bytes` over the ranks of an axis, in stage `at`.

    2 * (n - 1) / n * size / rate, as slow as the slowest link of the ring: inside a host, or
    between hosts, where each of the ranks on one host brings its share of the network.
    On a bus the ranks of a host share one rate.

    Ignores:  trees, which are faster for small sizes.
    Source:   "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    return 2 * _one_way_s(run, at, size_bytes, axis=axis)


def gather_s(run: TrainingRun, size_bytes: float) -> float:
    """Return the seconds of gathering `size_bytes`, sharded over the ranks of `data`."""
    ways = (_one_way_s(run, at, size_bytes, axis="data") for at in range(run.pipe))
    return functools.reduce(most, ways)


def _one_way_s(run: TrainingRun, at: int, size_bytes: float, *, axis: str) -> float:
    device = run.devices[at]
    ranks, stride = run.tensor, 1
    if axis == "data":
        ranks, stride = run.data * run.context, run.tensor
    together = most(1, least(ranks, device.ranks_per_host // stride))
    rate = device.inside_bytes_per_s / (together if device.shared else 1)
    if ever(ranks > together):
        across = together * min(device.across_bytes_per_s for device in run.devices)
        between = where(together == 1, across, least(rate, across))
        rate = where(ranks > together, between, rate)
    return (ranks - 1) / ranks * size_bytes / rate


def exchange_s(run: TrainingRun, at: int, size_bytes: float) -> float:
    """Return the seconds in which each expert rank sends `size_bytes`, evenly to all of them.

    (n - 1) / n * size / rate, with the slower rate where the ranks are of several hosts.
    """
    device = run.devices[at]
    inside = run.expert <= device.ranks_per_host
    rate = where(inside, device.inside_bytes_per_s, device.across_bytes_per_s)
    return (run.expert - 1) / run.expert * size_bytes / rate


def neighbour_s(run: TrainingRun, at: int, size_bytes: float) -> float:
    """Return the seconds of sending `size_bytes` to the next stage.

    Across hosts the tensor ranks send a part each.
    """
    device = run.devices[at]
    stride = run.tensor * run.context * run.data
    slowest = min(device.across_bytes_per_s for device in run.devices)
    across_s = size_bytes / run.tensor / slowest
    is_inside = stride * run.pipe <= device.ranks_per_host
    return where(is_inside, size_bytes / device.inside_bytes_per_s, across_s)
