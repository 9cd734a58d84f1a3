"""Read store: how a run has read its store, which is tried once more for the summary.

A summary keeps it as "store", with the predicted wait of a step.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from penstock.errors import StoreError
from penstock.job import Job
from penstock.stores.store_use import StoreUse
from penstock.timeline.breakdown import PARTS, Breakdown
from penstock.typed import MisfitError, typed

if TYPE_CHECKING:
    from penstock.choose.choose import Choice

_WAIT = "wait_s_predicted"


def read_store(job: Job, measured: Breakdown | None, choice: "Choice | None") -> StoreUse | None:
    """Return how a run reads its store.

    None: it has none; its samples are named by a sampler of their own; the store does not answer
    any more; where the time of the run went is unknown.
    """
    from penstock.batches.stored_data import stored_data
    from penstock.stores.measured_speed import measured_speed

    found = stored_data(job.data)
    if found is None or measured is None:
        return None
    dataset, samples = found
    try:
        speed = measured_speed(dataset)
    except StoreError:
        return None
    readers = measured.num_ranks if choice is None else choice.plan.replicas
    return StoreUse(
        dataset.store.url,
        speed.latency_s,
        speed.bytes_per_s / readers,
        dataset.fetching.requests,
        dataset.fetching.ahead_bytes,
        max(1, samples * job.micro_batches // readers),
        max(1, round(fmean(each.size_bytes for each in dataset.objects))),
        max(0.0, measured.step_s - max(measured.of("data"))),
    )


def in_summary(use: StoreUse | None) -> dict[str, object]:
    """Return what a summary keeps of it."""
    return {} if use is None else {"store": {**asdict(use), _WAIT: use.wait_s}}


def of_summary(summary: Mapping[str, Any]) -> StoreUse | None:
    """Return what `in_summary` has written; None: nothing, or something else."""
    written = summary.get("store")
    if not isinstance(written, dict):
        return None
    content: dict[str, Any] = {name: value for name, value in written.items() if name != _WAIT}  # pyright: ignore[reportUnknownVariableType]
    try:
        return typed(StoreUse, content)
    except MisfitError:
        return None


def with_wait(
    expected: Breakdown | None, measured: Breakdown | None, use: StoreUse | None
) -> Breakdown | None:
    """Return a predicted breakdown in which the ranks that read data wait as predicted."""
    if expected is None or measured is None or use is None:
        return expected
    at, wait_s = PARTS.index("data"), use.wait_s * expected.num_steps
    waits = [wait_s if each_s > 0 else 0.0 for each_s in measured.of("data")]
    rows = [[*row] for row in expected.seconds]
    for row, each_s in zip(rows, waits, strict=True):
        row[at] += each_s
    walls = tuple(w + each_s for w, each_s in zip(expected.wall_s, waits, strict=True))
    return replace(expected, wall_s=walls, seconds=tuple(map(tuple, rows)))
