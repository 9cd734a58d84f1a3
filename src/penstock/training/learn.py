"""Learn: what a run tells of the devices that it ran on, for estimates of other jobs on them."""

import statistics
from pathlib import Path

import numpy as np

from penstock.cluster import Cluster, DeviceKind
from penstock.errors import ClusterError
from penstock.graph.graph import Graph
from penstock.graph.stages import Segment, SegmentKind
from penstock.profile.estimate import CALL_S
from penstock.profile.latency import TimedSegment, parts_of
from penstock.profile.store import keep_samples
from penstock.program.lower_plan import stages_of
from penstock.timeline import LANES, SPAN_KINDS, Timeline
from penstock.training.choose import Choice


def learn(choice: Choice, cluster: Cluster, timeline: Timeline, folder: Path | None) -> None:
    """Keep in `folder` what each segment of a run took, by kind of device.

    A device without FLOP/s for the dtypes of the job cannot be estimated, and tells nothing.
    """
    if folder is None:
        return
    for kind, samples in segments_of(choice, cluster, timeline).items():
        keep_samples(folder, kind, samples)


def segments_of(
    choice: Choice, cluster: Cluster, timeline: Timeline
) -> dict[DeviceKind, list[TimedSegment]]:
    """Return for each kind of device the segments that ran on it: medians over micro-batches.

    Of the ranks that run a stage on one kind of device, the first one counts.
    """
    graph, spans = choice.captured.graph, timeline.spans
    stages = stages_of(choice.plan, graph).stages
    known: dict[str, SegmentKind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    rows = np.flatnonzero(spans.lanes == LANES.index("compute"))
    columns = spans.ranks[rows].tolist(), spans.kinds[rows].tolist(), spans.stages[rows].tolist()
    took: dict[tuple[int, int, int], list[float]] = {}
    for row, where in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
        took.setdefault(where, []).append(float(spans.ends_s[row] - spans.starts_s[row]))
    found: dict[tuple[DeviceKind, int, int], TimedSegment] = {}
    for (rank, kind, stage), seconds in sorted(took.items()):
        device, name = cluster.device_of(rank), known.get(SPAN_KINDS[kind])
        if name is None:
            continue
        parts = _parts(graph, stages[stage].segment(name), device)
        sample = TimedSegment(parts, max(0.0, statistics.median(seconds) - CALL_S))
        if sample.seconds > 0 and sum(parts) > 0:
            found.setdefault((device, kind, stage), sample)
    by_kind: dict[DeviceKind, list[TimedSegment]] = {}
    for (device, _, _), sample in found.items():
        by_kind.setdefault(device, []).append(sample)
    return by_kind


def _parts(graph: Graph, segment: Segment, device: DeviceKind) -> tuple[float, ...]:
    """Return the parts of a segment; none where the device's FLOP/s are not known for it."""
    try:
        return parts_of(graph, segment.ops, device)
    except ClusterError:
        return ()
