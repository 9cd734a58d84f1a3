"""Used: what a run has made of its devices' memory and FLOP/s, for its summary."""

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.choose.choose import Choice
from penstock.cluster.cluster import Cluster
from penstock.errors import ClusterError
from penstock.profile.kinds import load_profiles

if TYPE_CHECKING:
    from penstock.runtime.run import Outcome


def used_rows(folder: Path, outcome: "Outcome", choice: Choice | None) -> dict[str, object]:
    """Return bytes of each rank by what they are for, bytes of far memory as predicted and as they
    are, and FLOP/s of the model beside those of the devices; a part that nobody knows is left out.

    The model's FLOP are those of its own step: what is repeated for want of memory is not counted.
    """
    rows: dict[str, object] = {}
    if choice is None or not all(outcome.held):
        return rows
    names = [name for name in outcome.held[0] if name != "far"]
    peaks = zip(outcome.held, outcome.peak_bytes, strict=True)
    rows["held_bytes"] = [
        {**{n: held[n] for n in names}, "activations": max(0, peak - sum(held[n] for n in names))}
        for held, peak in peaks
    ]
    if not (folder / "cluster.toml").exists():
        return rows
    cluster = Cluster.load(folder / "cluster.toml")
    if choice.plan.offloads:
        rows["far_bytes_predicted"] = _far_predicted(folder, choice, cluster)
        rows["far_bytes_measured"] = [held["far"] for held in outcome.held]
    return {**rows, **_flop(outcome, choice, cluster)}


def _far_predicted(folder: Path, choice: Choice, cluster: Cluster) -> list[int] | None:
    from penstock.search.judge import Judge

    if not (folder / "profile.json").exists():
        return None
    profiles = load_profiles(folder / "profile.json")
    return list(Judge(choice.captured.graph, profiles, cluster).far_bytes(choice.plan))


def _flop(outcome: "Outcome", choice: Choice, cluster: Cluster) -> dict[str, object]:
    """Return the FLOP/s of the model on all ranks, and what part of their devices' that is."""
    plan, job = choice.plan, choice.job
    flop = choice.captured.graph.flop * plan.step_micro_batches
    if not flop or not outcome.step_s:
        return {}
    dtype, ranks = job.precision or job.autocast or "float32", range(plan.total_ranks)
    rows: dict[str, object] = {"flop_per_s": flop / outcome.step_s}
    try:
        peak = sum(cluster.device_of(rank).peak_flop_per_s(dtype) for rank in ranks)
    except ClusterError:  # nobody says what the devices can do
        return rows
    return {**rows, "flop_per_s_of_devices": peak, "mfu": flop / outcome.step_s / peak}
