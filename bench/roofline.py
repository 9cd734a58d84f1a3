"""Estimated against measured seconds of this machine's CPU: how good a roofline is.

    python -m bench.roofline [--json]

The peak is the rate of a product of 1,024 x 1,024 matrices, the bandwidth that of a copy of
128 MiB, both measured here, on one thread.  The four models of bench/zoo.py are profiled, then
estimated: with the shares that Penstock takes for devices that are not here, and with shares
fitted to the other three models (each class: roofline of all its ops / their measured seconds).

error    estimated / measured - 1, of the seconds of one micro-batch
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from bench.machine import machine
from bench.zoo import JOBS
from penstock.cluster import DeviceKind
from penstock.graph.graph import Graph
from penstock.graph.trace import capture
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.profile.roofline import CLASSES, DEFAULT, Efficiency, op_seconds, roofline_s, works_of

Pair = tuple[Graph, Profile]


def peaks() -> DeviceKind:
    """Return this machine's CPU with its measured rates."""
    a, b, c = (torch.randn(1024, 1024) for _ in range(3))
    x, y = torch.randn(2, 2**25)
    flop_per_s = 2 * 1024**3 / _seconds(lambda: torch.mm(a, b, out=c))
    bytes_per_s = 2 * 4 * x.numel() / _seconds(lambda: y.copy_(x))
    return DeviceKind("cpu", 1 << 30, (("float32", flop_per_s),), bytes_per_s)


def _seconds(call: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(15):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def fitted(pairs: Iterable[Pair], device: DeviceKind) -> Efficiency:
    """Return the share that each class of ops has of its roofline; no launches."""
    least, taken = (dict.fromkeys(CLASSES, 0.0) for _ in range(2))
    for graph, profile in pairs:
        for work, seconds in zip(works_of(graph), profile.op_s, strict=True):
            if work is not None:
                least[work.of] += roofline_s(work, device)
                taken[work.of] += seconds
    known = dict(DEFAULT.share)
    share = ((k, least[k] / taken[k] if taken[k] else known[k]) for k in CLASSES)
    return Efficiency(tuple(share), launch_s=0.0)


def rows_of(pairs: dict[str, Pair], device: DeviceKind) -> list[dict[str, float | str]]:
    """Return for each model measured and estimated seconds."""
    rows: list[dict[str, float | str]] = []
    for name, (graph, profile) in pairs.items():
        others = fitted((pair for key, pair in pairs.items() if key != name), device)
        rows.append(
            {
                "model": name,
                "measured_s": profile.micro_batch_s,
                "error": sum(op_seconds(graph, device, DEFAULT)) / profile.micro_batch_s - 1,
                "error_fitted": sum(op_seconds(graph, device, others)) / profile.micro_batch_s - 1,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device, pairs = peaks(), dict[str, Pair]()
    for name, job in JOBS.items():
        captured = capture(job)
        pairs[name] = captured.graph, measure(captured, job)
    rows, share = rows_of(pairs, device), dict(fitted(pairs.values(), device).share)
    if options.json:
        print(json.dumps({"rows": rows, "share": share, "machine": machine()}))
        return
    rate, bandwidth = device.flop_per_s[0][1] / 1e9, device.memory_bytes_per_s / 1e9
    print(f"peak {rate:.1f} GFLOP/s, memory {bandwidth:.1f} GB/s")
    for row in rows:
        errors = (f"{100 * float(row[key]):+7.1f} %" for key in ("error", "error_fitted"))
        print(f"{row['model']:10} {1e3 * float(row['measured_s']):8.2f} ms", *errors)
    print("share of the roofline:", {name: round(value, 2) for name, value in share.items()})
    print(machine())


if __name__ == "__main__":
    main()
