"""Choices: what the search finds under a cap, each kind by itself and all of them together.

    python -m bench.choices [--json] [--quick]

Eight linear layers of 256 with AdamW on two replicas, measured here, over a link that is given:
simulated, not run.

cap_bytes   of a rank; none: all that there is
apart_s     step of the best plan where shards, copies and recompute are searched one by one
search_s    step of the best plan where they are searched together, too
seconds     that the search takes
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import nn

import penstock as ps
from bench.machine import machine
from penstock.cluster.cluster import Cluster, Link
from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.profile.profile import Profile
from penstock.search.search import search
from penstock.search.shapes import Fixed
from penstock.units import MiB

Row = dict[str, object]

CAPS = None, 9.66, 6.10, 5.08, 4.07  # MiB
LINKS = 150e6, 2e9  # bytes per second
FIXED = Fixed(ranks=2, replicas=2)


def data(start: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.ones(32, 256)


def job() -> ps.Job:
    return ps.Job(
        model=lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))),
        loss=lambda model, x: model(x).square().mean(),
        data=data,
        optimizer=lambda weights: torch.optim.AdamW(weights, 1e-3),
        micro_batches=8,
    )


def there(cap: float | None, bytes_per_s: float) -> Cluster:
    """Return two ranks of this machine, a core for copies each, with that memory and link."""
    here = Cluster.here(2)
    devices = here.devices
    if cap is not None:
        devices = tuple(replace(kind, memory_bytes=int(cap * MiB)) for kind in devices)
    hosts = tuple(replace(host, cores=2) for host in here.hosts)
    return replace(here, devices=devices, hosts=hosts, inside=Link(20e-6, bytes_per_s))


def found(graph: Graph, profile: Profile, cluster: Cluster) -> float | None:
    """Return the seconds of a step of the best plan; None where none fits."""
    try:
        plan = search(graph, profile, cluster, micro_batches=8, fixed=FIXED).plan
    except PlanError:
        return None
    assert plan.predicted is not None, "it was simulated"
    return plan.predicted.step_s


def rows_of(*, quick: bool) -> Iterator[Row]:
    graph = ps.trace(job())
    profile = ps.measure(graph)
    for bytes_per_s in LINKS[:1] if quick else LINKS:
        for cap in CAPS[:2] if quick else CAPS:
            cluster = there(cap, bytes_per_s)
            with patch.dict(search.__globals__, with_moves=lambda *_: ()):
                apart_s = found(graph, profile, cluster)
            start = time.perf_counter()
            search_s = found(graph, profile, cluster)
            yield {
                "case": "8 linear layers, 2 replicas",
                "link_bytes_per_s": bytes_per_s,
                "cap_bytes": None if cap is None else int(cap * MiB),
                "apart_s": apart_s,
                "search_s": search_s,
                "seconds": time.perf_counter() - start,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="two caps over one link")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for row in rows_of(quick=options.quick):
        rows.append(row)
        if not options.json:
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
