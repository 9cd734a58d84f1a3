"""Seconds predicted for devices that were never profiled, before and after a few measured segments.

    python -m bench.latency [--json] [--quick]

Two devices: this machine's CPU on one thread, and the same without oneDNN, so that convolutions and
other products go other ways.  Of both only the round peaks of `Cluster.here` are known.  The models
of bench/zoo.py are measured op by op and cut into 8 stages, of which F and B are segments.  Each
model in turn is the one to be predicted; k segments of the other three, drawn at random, are what
runs have told (profile/latency.py).

mape      mean over segments of |predicted / measured - 1|; median over models and draws
step      |predicted / measured - 1| of a whole micro-batch, likewise
covered   share of segments within the error that is told (twice the standard deviation)
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence

import torch

from bench.machine import machine
from bench.zoo import JOBS
from penstock.cli import face
from penstock.cluster import Cluster, DeviceKind
from penstock.graph.cut import cut
from penstock.graph.trace import capture
from penstock.profile.latency import Latency, TimedSegment, learned, parts_of
from penstock.profile.measure import measure
from penstock.search.balance import balanced_cuts

STAGES, DRAWS = 8, 20
COUNTS = (0, 1, 2, 4, 8, 16, 32)
Row = dict[str, float | int | str]


def segments(name: str, device: DeviceKind) -> list[TimedSegment]:
    """Return the measured segments of a model."""
    job = JOBS[name]
    captured = capture(job)
    graph, profile = captured.graph, measure(captured, job)
    count = min(STAGES, len(graph.cut_points) + 1)
    stages = cut(graph, balanced_cuts(graph, profile.op_s, count)).stages
    made: list[TimedSegment] = []
    for stage in stages:
        for ops in (stage.forward.ops, stage.backward.ops):
            made.append(
                TimedSegment(parts_of(graph, ops, device), sum(profile.op_s[op] for op in ops))
            )
    return [each for each in made if each.seconds > 0 and sum(each.parts_s) > 0]


def errors(known: Latency, tested: Sequence[TimedSegment]) -> tuple[float, float, float]:
    """Return mape, the error of the sum, and the share that is covered."""
    off = [abs(known.seconds(each.parts_s) / each.seconds - 1) for each in tested]
    told = [known.error(each.parts_s) * known.seconds(each.parts_s) for each in tested]
    apart = [abs(known.seconds(each.parts_s) - each.seconds) for each in tested]
    covered = statistics.fmean(a <= b for a, b in zip(apart, told, strict=True))
    whole = sum(known.seconds(each.parts_s) for each in tested)
    return statistics.fmean(off), abs(whole / sum(s.seconds for s in tested) - 1), covered


def rows(device: str, found: dict[str, list[TimedSegment]], draws: int) -> Iterator[Row]:
    for count in COUNTS:
        told: list[tuple[float, float, float]] = []
        for name, tested in found.items():
            others = [each for other, row in found.items() if other != name for each in row]
            for seed in range(draws if count else 1):
                drawn = random.Random(seed).sample(others, min(count, len(others)))
                told.append(errors(learned(drawn), tested))
        mape, step, covered = (statistics.median(column) for column in zip(*told, strict=True))
        yield {"device": device, "samples": count, "mape": mape, "step": step, "covered": covered}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="two models, one device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind, made = Cluster.here(1).devices[0], list[Row]()
    kind = DeviceKind(kind.name, kind.memory_bytes, (("float32", 30e9),), 10e9)
    for device in ("cpu",) if options.quick else ("cpu", "cpu without oneDNN"):
        torch.backends.mkldnn.enabled = device == "cpu"  # pyright: ignore
        names = list(JOBS)[2:] if options.quick else list(JOBS)
        found = {name: segments(name, kind) for name in names}
        made += rows(device, found, 3 if options.quick else DRAWS)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": made}))
        return
    head = ("device", "samples", "mape", "step", "covered")
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in made]
    print(face.table(head, cells))


if __name__ == "__main__":
    main()
