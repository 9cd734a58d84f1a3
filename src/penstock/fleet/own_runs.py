"""Own runs: what runs have measured, as rows of tables that `penstock fleet predict` learns from.

steps.csv   a micro-batch on the device of each profile that was measured: forward, backward, update
saves.csv   checkpoints: the bytes of weights and two moments, and for how long they kept the ranks
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.cluster.cluster import Cluster
from penstock.errors import EstimateError
from penstock.fleet.of_run import saved_s
from penstock.graph.graph import Graph
from penstock.profile.kinds import load_profiles
from penstock.profile.roofline import works_of

_STATE = 3  # times the weights that a checkpoint holds
STEPS = "model,device,peak_flop_per_s,bytes_per_s,flop,parameters,tensors,moved_bytes,seconds"
SAVES = "model,size_bytes,tensors,seconds"


class OwnTables(NamedTuple):
    """Lines of steps.csv and of saves.csv, heads included."""

    steps: tuple[str, ...]
    saves: tuple[str, ...]


def tables_of(folders: Sequence[Path]) -> OwnTables:
    """Return the tables of some runs; the model is called after the folder.

    Raises:   EstimateError: none of them has a measured profile.  GraphError, ProfileError,
              ClusterError, FleetError: a folder is no run's, or damaged.
    """
    steps, saves = [STEPS], [SAVES]
    for folder in folders:
        graph = Graph.load(folder / "graph.json")
        steps += _steps(folder, graph)
        if (blocked_s := saved_s(folder)) is not None and blocked_s > 0:
            tensors = sum(node.kind == "parameter" for node in graph.nodes)
            size = _STATE * graph.parameter_bytes
            saves.append(f"{folder.name},{size},{_STATE * tensors},{blocked_s:.6g}")
    if len(steps) == 1:
        raise EstimateError("no run has measured its steps", hint="give folders of runs here")
    return OwnTables(tuple(steps), tuple(saves))


def _steps(folder: Path, graph: Graph) -> Iterator[str]:
    """Yield a line for each measured profile of a run."""
    cluster = Cluster.load(folder / "cluster.toml")
    kinds = {kind.name: kind for kind in cluster.devices}
    sizes = [math.prod(node.shape) for node in graph.nodes if node.kind == "parameter"]
    moved = sum(work.moved_bytes for work in works_of(graph) if work is not None)
    work = f"{max(1, graph.flop)},{sum(sizes)},{len(sizes)},{max(1, moved)}"
    for profile in load_profiles(folder / "profile.json"):
        kind = kinds.get(profile.kind) or cluster.devices[0]
        peak = max((rate for _, rate in kind.flop_per_s), default=0.0)
        if profile.basis.is_measured and peak > 0:
            seconds = sum(profile.op_s) + profile.update.update_s
            about = f"{folder.name},{kind.name},{peak:.6g},{kind.memory_bytes_per_s:.6g}"
            yield f"{about},{work},{seconds:.6g}"
