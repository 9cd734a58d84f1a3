"""Choices: what the search finds under a cap, beside the best that climbing from it finds.

    python -m bench.choices [--json] [--quick] [--only NAME]

Forty random nets, gpt, llama, resnet and mixtral on described devices, each at eight caps
(choice_cases.py); simulated, not run.  And eight linear layers of 256 with AdamW on two replicas,
measured here, over links that are given.

cap_bytes    of a rank; none: all that there is
link         bytes per second
search_s     step of the plan that is found
climbed_s    the shortest step that single and double changes of it lead to (choice_climb.py)
brute_s      the shortest of all choices for the plan's stages: of nets of two layers
apart_s      where shards, copies and recompute are searched one by one: of the linear layers
refused      why there is no plan
seconds      that the search takes, of processor time

At last, over all rows: how far search_s is above climbed_s, at most and in the median, how many
rows are more than 2 % above it, and where a larger cap is slower.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import nn

import penstock as ps
from bench.choice_cases import Case, cases
from bench.choice_climb import Climb, brute
from bench.machine import machine
from penstock.cluster.cluster import Cluster, Link
from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.judge import Judge
from penstock.search.search import search
from penstock.search.shapes import Fixed
from penstock.units import MiB

Row = dict[str, object]

CAPS = None, 9.66, 6.10, 5.08, 4.07  # MiB
LINKS = 150e6, 2e9  # bytes per second
FIXED = Fixed(ranks=2, replicas=2)
PARTS = 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4  # of what the plan without a cap holds
MOST = 240  # plans that are simulated for a climb
NEAR = 1.02


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


def planned(case: Case, cap: int | None) -> tuple[Plan | None, Row]:
    """Return the plan that is found, if any, and a row of it."""
    start = time.process_time()
    row: Row = {
        "case": case.name,
        "cap_bytes": cap,
        "link": case.cluster.inside.bytes_per_s,
        "search_s": None,
        "refused": "",
    }
    plan = None
    try:
        plan = search(
            case.graph,
            case.profile,
            case.under(cap),
            micro_batches=case.micro_batches,
            fixed=case.fixed,
        ).plan
    except PlanError as problem:
        row["refused"] = str(problem).splitlines()[0]
    if plan is not None:
        assert plan.predicted is not None, "it was simulated"
        row["search_s"] = plan.predicted.step_s
    return plan, row | {"seconds": time.process_time() - start}


def case_rows(case: Case, *, quick: bool) -> Iterator[Row]:
    """Yield the rows of a case, without a cap and then with less and less memory."""
    whole = 0
    for part in (None, *(PARTS[1::3] if quick else PARTS)):
        plan, row = planned(case, None if part is None else int(part * whole))
        judge = Judge(case.graph, case.profile, case.under(row["cap_bytes"]))
        if plan is not None:
            assert plan.predicted is not None, "it was simulated"
            whole = whole or max(plan.predicted.peak_bytes)
            beside = case.cluster.devices[0].copy_engine
            climb = Climb(judge, beside=beside, most=MOST)
            row["climbed_s"] = climb.top(replace(plan, decisions=(), predicted=None)).step_s
            if case.tiny and plan.num_stages <= 2:
                row["brute_s"] = brute(judge, plan, beside=beside)
        yield row


def linear_rows(*, quick: bool) -> Iterator[Row]:
    """Yield rows of eight linear layers: what is searched together, and one by one."""
    graph = ps.trace(job())
    profile = ps.measure(graph)
    for bytes_per_s in LINKS[:1] if quick else LINKS:
        for cap in CAPS[:2] if quick else CAPS:
            cluster = there(cap, bytes_per_s)
            case = Case("8 linear layers, 2 replicas", graph, profile, cluster, 8, FIXED)
            with patch.dict(search.__globals__, with_moves=lambda *_: ()):
                _, apart = planned(case, None)
            _, row = planned(case, None)
            held = None if cap is None else int(cap * MiB)
            yield row | {"cap_bytes": held, "apart_s": apart["search_s"]}


def rows_of(names: str = "", *, quick: bool) -> Iterator[Row]:
    for case in cases(names):
        yield from case_rows(case, quick=quick)


def summary(rows: Sequence[Row]) -> Row:
    """Return how far the search is behind, and where more memory is slower."""
    behind = [r["search_s"] / r["climbed_s"] for r in rows if r["search_s"] and r.get("climbed_s")]
    slower = [
        (more["case"], less["cap_bytes"], (more["search_s"] or math.inf) / less["search_s"])
        for more, less in pairwise(rows)
        if more["case"] == less["case"]
        and more["link"] == less["link"]
        and less["search_s"]
        and (not more["search_s"] or more["search_s"] > less["search_s"])
    ]
    return {
        "rows": len(rows),
        "refused": sum(bool(row["refused"]) for row in rows),
        "worst": max(behind, default=None),
        "median": statistics.median(behind) if behind else None,
        "behind": sum(each > NEAR for each in behind),
        "slower_with_more": slower,
        "search_cpu_s": sum(row["seconds"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="three caps each")
    parser.add_argument("--only", default="", help="cases whose name begins so; 8: the layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for row in _all(options.only, quick=options.quick):
        rows.append(row)
        if not options.json:
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    told = summary(rows)
    if options.json:
        print(json.dumps({"rows": rows, "summary": told, "machine": machine()}, indent=1))
    else:
        print(told)


def _all(names: str, *, quick: bool) -> Iterator[Row]:
    if "8 linear layers".startswith(names):
        yield from linear_rows(quick=quick)
    yield from rows_of(names, quick=quick)


if __name__ == "__main__":
    main()
