"""Sums over 2 to 8 ranks of this machine, measured, beside the formulas of penstock.cluster.

    python -m bench.collectives [--json] [--ranks 2 3 4 8] [--rounds 9]

Each rank is a process with one thread.  Through shared memory ranks add directly, gloo adds around
a ring; the two and all sizes take turns, so that noise of the machine meets all of them.  A link's
two constants are fitted, for each transport, to what two sizes took with two numbers of ranks; all
other rows are predictions.  Where there are more ranks than cores, the cores take turns: a formula
then counts ranks / cores times, which leaves out that they also wait for each other's turns.

seconds      median of the rounds, by the clock of rank 0
predicted_s  by the algorithm's formula and the fitted link
error        predicted_s / seconds - 1, in percent
fitted       whether the constants were fitted to this row
"""

import argparse
import json
import math
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import least_squares

from bench.machine import machine
from bench.measure import in_ranks
from penstock.cluster import Algorithm, Cluster, Collective, DeviceKind, Host, Link, way_of
from penstock.transport import Transport
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.transport.torch_distributed import TorchDistributedTransport
from penstock.units import GB, GiB, KiB, MiB, format_bytes, format_seconds

Row = dict[str, Any]
Figures = dict[tuple[str, int, int], float]  # seconds by transport, ranks and bytes

ALGORITHMS: dict[str, Algorithm] = {"shared_memory": "direct", "gloo": "ring"}
SIZES = (KiB, 8 * KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB)
FITTED = (8 * KiB, 4 * MiB)  # bytes
ROUND_BYTES = 4 * MiB  # a round of sums of one size adds about so much, in 1 to 20 sums


def crossovers(
    cluster: Cluster,
    what: Collective,
    ranks: Sequence[int],
    *,
    among: Sequence[Algorithm],
    limit_bytes: int = GiB,
) -> list[tuple[int, Algorithm]]:
    """Return from which size in bytes on which algorithm is the fastest, from 1 byte to the limit.

    Sizes in steps of an eighth are looked at, and bisected to the byte where the fastest changes.
    """
    ways = {name: way_of(cluster, what, name, ranks) for name in among}

    def fastest(size_bytes: int) -> Algorithm:
        seconds = {name: way.seconds(size_bytes) for name, way in ways.items()}
        least_s = min(seconds.values()) * (1 + 1e-9)  # sums in another order
        return next(name for name in among if seconds[name] <= least_s)

    at, found = 1, [(1, fastest(1))]
    while at < limit_bytes:
        upper = min(limit_bytes, at + max(1, at // 8))
        if fastest(upper) != found[-1][1]:
            upper = bisect_left(range(upper), True, at, key=lambda s: fastest(s) != found[-1][1])
            found.append((upper, fastest(upper)))
        at = upper
    return found


def measure(num_ranks: int, rounds: int, rank: int, folder: Path) -> list[list[Any]]:
    """Sum on this rank; return [transport, bytes, seconds]."""
    store = dist.FileStore(str(folder / "store"), num_ranks)
    theirs = dist.PrefixStore("torch", store)
    dist.init_process_group("gloo", store=theirs, rank=rank, world_size=num_ranks)
    own = dist.PrefixStore("gloo", store.clone())
    ends: dict[str, Transport] = {
        "shared_memory": SharedMemoryTransport(rank, num_ranks, dist.PrefixStore("own", store)),
        "gloo": TorchDistributedTransport(torch.device("cpu"), own),
    }
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(rounds + 1):
        for size_bytes in SIZES:
            for name, end in ends.items():
                ends["shared_memory"].barrier()
                took = sums_s(end, size_bytes)
                if turn:  # the first one touches memory
                    times.setdefault((name, size_bytes), []).append(took)
    for end in ends.values():
        end.barrier()
        end.close()
    dist.destroy_process_group()
    return [[*key, statistics.median(took)] for key, took in times.items()]


def sums_s(end: Transport, size_bytes: int) -> float:
    """Return the seconds of one of several sums in a row, over all ranks."""
    summand, everyone = torch.zeros(size_bytes // 4), tuple(range(end.num_ranks))
    count = max(1, min(20, ROUND_BYTES // size_bytes))
    start = time.perf_counter()
    for _ in range(count):
        end.all_reduce(summand, everyone)
    return (time.perf_counter() - start) / count


# -- predicted ------------------------------------------------------------------------------------


def formula_s(algorithm: Algorithm, ranks: int, size_bytes: int, link: Link, cores: int) -> float:
    """Return the seconds of a sum on one host, more of them where ranks share cores."""
    host = Host("here", "cpu", ranks)
    cluster = Cluster((DeviceKind("cpu", 1, (), 1.0),), (host,), inside=link)
    return max(1.0, ranks / cores) * cluster.all_reduce_s(size_bytes, range(ranks), algorithm)


def fit(figures: Figures, transport: str, ranks: Sequence[int], cores: int) -> Link:
    """Return the link nearest to FITTED sizes with two of `ranks`: least squared log of the ratio.

    No formula used here is cut in chunks; so seconds are a sum of two terms, one for each constant.
    """
    places = [(n, size_bytes) for n in fitted_ranks(ranks) for size_bytes in FITTED]
    units = Link(1e-6, math.inf), Link(0.0, GB)
    algorithm = ALGORITHMS[transport]
    terms = [[formula_s(algorithm, *at, link, cores) for link in units] for at in places]
    measured_s = np.array([figures[transport, *at] for at in places])

    def off(logs: np.ndarray) -> np.ndarray:
        return np.log(np.array(terms) @ np.exp(logs) / measured_s)

    latency_us, s_per_gb = np.exp(least_squares(off, [0.0, 0.0], bounds=(-20.0, 20.0)).x)
    return Link(latency_us * 1e-6, GB / s_per_gb)


def fitted_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the two numbers of ranks that constants are fitted to: the least, and one between."""
    return tuple(dict.fromkeys((ranks[0], ranks[len(ranks) // 2])))


def rows_of(
    figures: Figures, ranks: Sequence[int], cores: int
) -> tuple[list[Row], dict[str, Link]]:
    """Return a row for each figure, and the fitted links."""
    links = {name: fit(figures, name, ranks, cores) for name in ALGORITHMS}
    rows: list[Row] = []
    for (name, n, size_bytes), seconds in figures.items():
        predicted_s = formula_s(ALGORITHMS[name], n, size_bytes, links[name], cores)
        row: Row = {
            "transport": name,
            "algorithm": ALGORITHMS[name],
            "ranks": n,
            "size_bytes": size_bytes,
            "seconds": seconds,
            "predicted_s": predicted_s,
            "error": 100 * (predicted_s / seconds - 1),
            "fitted": n in fitted_ranks(ranks) and size_bytes in FITTED,
        }
        rows.append(row)
    return rows, links


def figures_of(ranks: Sequence[int], rounds: int) -> Figures:
    """Measure, one number of ranks after the other."""
    figures: Figures = {}
    for n in ranks:
        work: Callable[[int, Path], object] = partial(measure, n, rounds)
        for name, size_bytes, seconds in in_ranks(work, n)[0]:
            figures[name, n, size_bytes] = seconds
    return figures


def show(rows: Sequence[Row], links: dict[str, Link], cores: int) -> None:
    """Print a block for each transport: seconds (error) by size and ranks, * where fitted."""
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    for name, link in links.items():
        print(f"{name}, {ALGORITHMS[name]}: {format_seconds(link.latency_s)} a round"
              f" + {link.bytes_per_s / GB:.3g} GB/s")  # fmt: skip
        print(f"{'':>10}" + "".join(f"{_ranks(n, cores):>24}" for n in ranks))
        own = {(row["size_bytes"], row["ranks"]): row for row in rows if row["transport"] == name}
        for size_bytes in dict.fromkeys(size for size, _ in own):
            cells = (_cell(own[size_bytes, n]) for n in ranks)
            print(f"{format_bytes(size_bytes):>10}" + "".join(f"{cell:>24}" for cell in cells))
        told = [abs(row["error"]) for row in own.values() if not row["fitted"]]
        worst = max(told, default=0.0)
        if told:
            print(f"{'':>10} not fitted: {statistics.median(told):.0f} % off in the median,"
                  f" {worst:.0f} % at worst")  # fmt: skip


def _ranks(n: int, cores: int) -> str:
    return f"{n} ranks" + (f" on {cores} cores" if n > cores else "")


def _cell(row: Row) -> str:
    return (
        f"{format_seconds(row['seconds'])} ({row['error']:+.0f} %){'*' if row['fitted'] else ' '}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ranks, cores = sorted(set(options.ranks)), len(os.sched_getaffinity(0))
    if ranks[0] < 2 or options.rounds < 1:
        parser.error(f"--ranks {ranks[0]}, --rounds {options.rounds}: at least 2, and at least 1")
    about = machine()
    rows, links = rows_of(figures_of(ranks, options.rounds), ranks, cores)
    if options.json:
        print(json.dumps({"rows": rows, "machine": about}))
    else:
        show(rows, links, cores)
        print(", ".join(f"{key} {value}" for key, value in about.items()))


if __name__ == "__main__":
    main()
