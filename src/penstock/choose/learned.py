"""Learned: what a run tells of the devices that it ran on, for estimates of other jobs on them.

And of its own step, for the next plan of the same job on the same machine (profile/sampled.py).
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.choose.choose import Choice
from penstock.cluster.cluster import Cluster, DeviceKind
from penstock.errors import ClusterError
from penstock.graph.graph import Graph
from penstock.graph.stages import Segment, SegmentKind
from penstock.plan.lower_plan import stages_of
from penstock.plan.plan import Plan, is_asynchronous
from penstock.profile.estimate import CALL_S
from penstock.profile.kept_profiles import files_of_step, keep_samples
from penstock.profile.latency import TimedSegment, parts_of
from penstock.profile.profile import Profile
from penstock.profile.sampled import StepRatios, keep_sampled
from penstock.schedule.figures import weight_copies
from penstock.schedule.orders import KINDS
from penstock.search.judge import Judge, Priced
from penstock.simulate.price import ways_of
from penstock.timeline.spans import LANES, SPAN_KINDS
from penstock.timeline.timeline import Timeline

if TYPE_CHECKING:
    from penstock.runtime.sampler import Samples

_LEAST = 0.01  # of a ratio: a clock may have stood, or the op was measured while it was first run


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


# -- of the step itself ----------------------------------------------------------------------------


def learn_step(
    choice: Choice,
    profiles: Sequence[Profile],
    cluster: Cluster,
    samples: "Sequence[Samples]",
    folder: Path | None,
) -> None:
    """Keep in `folder` what the sampled steps of a run took, by what was predicted of them.

    profiles:  that the plan was predicted with; those that were not measured learn nothing so.
    samples:   of each rank.
    """
    for profile, told in ratios_of(choice, profiles, cluster, samples):
        files = files_of_step(folder, choice.captured, choice.job, profile.basis.beside)
        if files is not None:
            keep_sampled(files, profile, told)


def ratios_of(
    choice: Choice, profiles: Sequence[Profile], cluster: Cluster, samples: "Sequence[Samples]"
) -> Iterator[tuple[Profile, StepRatios]]:
    """Yield for the device of the first rank its profile, and what its ranks took by that.

    What calling a segment and adding gradients take is as predicted, the rest belongs to its ops;
    those of F that a B repeats take what they take in F.  Of several ranks that have done the same
    the median counts.
    Ignores:  B and W of several micro-batches at once, of which the ops are others.
    """
    plan, judge = choice.plan, Judge(choice.captured.graph, profiles, cluster)
    places = judge.places(plan.place.hosts, plan.total_ranks)
    profile = judge.profiles[places[0]]
    rows = [told for told, place in zip(samples, places, strict=True) if place == places[0]]
    steps = min((told.steps for told in rows if told.steps), default=0)
    if not profile.basis.is_measured or not steps:
        return
    took: dict[tuple[str, int], list[float]] = {}
    for told in rows:
        for each in told.actions:
            took.setdefault((each.kind, each.stage), []).append(each.seconds)
    middle = {action: statistics.median(seconds) for action, seconds in took.items()}
    alike = statistics.median(
        [middle[action] / predicted_s for action, predicted_s in _updates(judge, choice, middle)]
        or [0.0]
    )
    ops = _op_ratios(judge, choice, profile, middle)
    if ops:
        yield profile, StepRatios(ops, alike or None, steps)


def _priced(judge: Judge, plan: Plan) -> Priced:
    schedule = judge.schedule(plan)
    alive = weight_copies(schedule) if is_asynchronous(plan) else ()
    return judge.price(plan, alive, ways_of(schedule))


def _updates(
    judge: Judge, choice: Choice, took: Mapping[tuple[str, int], float]
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the updates that were measured, with the seconds that were predicted of them."""
    place = judge.places(choice.plan.place.hosts, 1)[0]
    seconds = _priced(judge, choice.plan).costs.action_s[KINDS.index("U"), :, place]
    for kind, stage in took:
        if kind == "U" and seconds[stage] > 0:
            yield (kind, stage), float(seconds[stage])


def _op_ratios(
    judge: Judge, choice: Choice, profile: Profile, took: Mapping[tuple[str, int], float]
) -> dict[int, float]:
    plan, graph = choice.plan, choice.captured.graph
    stages, costs, _ = _priced(judge, plan)
    place, together = judge.places(plan.place.hosts, 1)[0], ways_of(judge.schedule(plan)).together
    found: dict[int, float] = {}
    order: tuple[SegmentKind, ...] = ("F", "I", "W", "B")
    for kind in order[:2] if together > 1 else order:
        for stage in stages.stages:
            segment = stage.segment(kind)
            if (kind, stage.index) not in took or not segment.ops:
                continue
            added = sum(graph.kept_bytes(p) for p, _ in segment.gradients)
            fixed_s = profile.call_s + added * profile.accumulate_s_per_byte
            ops_s = float(costs.action_s[KINDS.index(kind), stage.index, place]) - fixed_s
            scale = ops_s / max(sum(profile.op_s[op] for op in segment.ops), 1e-12)
            known_s = sum(scale * profile.op_s[op] * found[op] for op in segment.ops if op in found)
            own = [op for op in segment.ops if op not in found and profile.op_s[op] > 0]
            own_s = scale * sum(profile.op_s[op] for op in own)
            if own_s > 0:
                ratio = (took[kind, stage.index] - fixed_s - known_s) / own_s
                found |= dict.fromkeys(own, min(max(ratio, _LEAST), 1 / _LEAST))
    return found
