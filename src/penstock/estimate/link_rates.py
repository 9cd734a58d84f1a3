"""Links: seconds of collectives at the rates of the datasheet, by where their ranks are.

Ranks are numbered tensor first, then context, data and pipe, as Megatron numbers them; a host
holds consecutive ranks.  No latency: hops are counted elsewhere.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from penstock.estimate.datasheet import Datasheet
from penstock.estimate.either import ever, least, most, where
from penstock.estimate.training_run import TrainingRun


class LinkSeconds(NamedTuple):
    """Seconds that a message takes, by the link that is its slowest: one of them is zero."""

    inside_s: float
    across_s: float


def all_reduce_s(
    run: TrainingRun, at: int, size_bytes: float, *, axis: Literal["tensor", "data"]
) -> LinkSeconds:
    """Return the seconds of summing `size_bytes` over the ranks of an axis, in stage `at`.

    2 * (n - 1) / n * size / rate, as slow as the slowest link of the ring: inside a host, or
    between hosts, where each of the ranks on one host brings its share of the network.
    On a bus the ranks of a host share one rate.

    Ignores:  trees, which are faster for small sizes.
    Source:   "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    return _one_way_s(run, at, 2 * size_bytes, axis=axis)


def gather_s(run: TrainingRun, at: int, size_bytes: float) -> LinkSeconds:
    """Return the seconds of gathering `size_bytes`, sharded over the ranks of `data`."""
    return _one_way_s(run, at, size_bytes, axis="data")


def slowest_of(ways: Sequence[LinkSeconds]) -> LinkSeconds:
    """Return the longest, of each run."""
    slowest = ways[0]
    for way in ways[1:]:
        is_more = sum(way) > sum(slowest)
        slowest = LinkSeconds(*(where(is_more, a, b) for a, b in zip(way, slowest, strict=True)))
    return slowest


def _one_way_s(run: TrainingRun, at: int, size_bytes: float, *, axis: str) -> LinkSeconds:
    device = run.devices[at]
    ranks, stride = run.tensor, 1
    if axis == "data":
        ranks, stride = run.data * run.context, run.tensor
    together = most(1, least(ranks, device.ranks_per_host // stride))
    inside = device.inside_bytes_per_s / (together if device.shared else 1)
    across = together * device.across_bytes_per_s
    sent = (ranks - 1) / ranks * size_bytes
    if not ever(ranks > together):
        return LinkSeconds(sent / inside, 0.0 * sent)
    is_across = (ranks > together) & ((together == 1) | (across < inside))
    return LinkSeconds(where(is_across, 0.0, sent / inside), where(is_across, sent / across, 0.0))


def exchange_s(run: TrainingRun, at: int, size_bytes: float) -> LinkSeconds:
    """Return the seconds in which each expert rank sends `size_bytes`, evenly to all of them.

    (n - 1) / n * size / rate, with the slower rate where the ranks are of several hosts.
    """
    device, sent = run.devices[at], (run.expert - 1) / run.expert * size_bytes
    if run.expert <= device.ranks_per_host:
        return LinkSeconds(sent / device.inside_bytes_per_s, 0.0 * sent)
    return LinkSeconds(0.0 * sent, sent / device.across_bytes_per_s)


def neighbour_s(run: TrainingRun, at: int, size_bytes: float) -> LinkSeconds:
    """Return the seconds of sending `size_bytes` to the next stage or the one before.

    The slower way of both.  A host holds devices of one kind.  Across hosts the tensor ranks send a
    part each, as fast as the slower of both kinds.
    """
    device, alike = run.devices[at], alike_around(run, at)
    is_inside = run.tensor * run.context * run.data * alike.stages <= device.ranks_per_host
    inside, across = (
        size_bytes / device.inside_bytes_per_s,
        size_bytes / run.tensor / device.across_bytes_per_s,
    )
    ways = [LinkSeconds(where(is_inside, inside, 0.0), where(is_inside, 0.0, across))]
    for other in (alike.before, alike.after):
        if other is not None:
            slower = min(device.across_bytes_per_s, other.across_bytes_per_s)
            ways.append(LinkSeconds(0.0 * size_bytes, size_bytes / run.tensor / slower))
    return slowest_of(ways if alike.stages > 1 else ways[1:] or ways)


class Around(NamedTuple):
    """How many stages in a row have the kind of device of one, and other kinds beside them.

    `before` and `after` are None but for the first and the last of these stages.
    """

    stages: int
    before: Datasheet | None
    after: Datasheet | None


def alike_around(run: TrainingRun, at: int) -> Around:
    """Return the kinds of devices around stage `at`."""
    own, first, last = run.devices[at], at, at
    while first > 0 and run.devices[first - 1] == own:
        first -= 1
    while last + 1 < run.pipe and run.devices[last + 1] == own:
        last += 1
    before = run.devices[at - 1] if first == at > 0 else None
    after = run.devices[at + 1] if last == at < run.pipe - 1 else None
    return Around(last - first + 1, before, after)
