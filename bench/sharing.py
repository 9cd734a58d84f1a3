"""Sharing: what searching who keeps and does how much gains over simple rules, on random cases.

    python -m bench.sharing [--json] [--cases 200]

sharding   10 to 100 buckets of 64 KiB to 64 MiB, Adam's state, 2 to 16 ranks, 5 to 100 GB/s, 5 to
           100 us, computing that hides up to four times what a replicated bucket sends; memory
           from what all sharded hold to a fifth more than all gathered once and kept, beside
           the largest that is gathered; slices of 1, 2, 4 and 8
bare 500   the same, of 500 buckets that nothing hides, a tenth of the cases: all save nearly as
           much for a byte, which is hardest to prove
shares     2 to 8 devices, speeds within a factor of 4, 16 to 80 GB, a batch of 64, a state of 20
           to 160 % of what fits in all

rule       what is compared: every bucket replicated, sharded, or gathered once and kept; the
           better of the three; the even split; samples by speed and the state even
fits       cases in which the rule fits the memory, of those in which anything does
mean, p10, p90, worst   seconds of the rule / ours, over the cases in which it fits (exposed
           seconds of the collectives; seconds of the step).  Never below 1
gap        the most by which a choice could still be shorter than ours, relative
cpu_s      mean CPU seconds of one search
"""

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench.machine import machine
from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.search.choices.ring import alike
from penstock.search.choices.sharding import Bucket, Way, best_sharding, ways_of
from penstock.search.choices.shares import (
    Load,
    Worker,
    affine_s,
    best_shares,
    even_shares,
    shares_of,
)
from penstock.units import GB, KiB, MiB

Row = dict[str, object]

SLICES = (1, 2, 4, 8)
BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--cases", type=int, default=200, help="of each search")
    options = parser.parse_args()
    rows = rows_of(options.cases)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}, indent=1))
    else:
        show(rows)


def rows_of(cases: int) -> list[Row]:
    """Return a row for every rule."""
    rows: list[Row] = []
    for name, one, part in SEARCHES:
        rng = random.Random(f"{name} 0")
        ratios: defaultdict[str, list[float]] = defaultdict(list)
        gaps, taken, count = [0.0], [0.0], 0
        last = time.monotonic()
        for at in range(max(2, cases // part)):
            if time.monotonic() - last > 2:
                last = time.monotonic()
                print(f"{name}: {at} cases", file=sys.stderr, flush=True)
            found = one(rng)
            if found is None:
                continue
            count += 1
            gaps.append(found.gap)
            taken.append(found.cpu_s)
            for rule, seconds in found.rules.items():
                ratios[rule] += [] if math.isinf(seconds) else [seconds / found.seconds]
        common = {"of": count, "gap": max(gaps), "cpu_s": sum(taken) / max(1, count)}
        rows += [_row(name, rule, each) | common for rule, each in ratios.items()]
    return rows


def _row(name: str, rule: str, ratios: Sequence[float]) -> Row:
    row: Row = {"search": name, "rule": rule, "fits": len(ratios)}
    if not ratios:
        return row | dict.fromkeys(("mean", "p10", "p90", "worst"))
    p10, p90 = np.quantile(ratios, (0.1, 0.9)).tolist()
    return row | {"mean": float(np.mean(ratios)), "p10": p10, "p90": p90, "worst": max(ratios)}


class Case(NamedTuple):
    """Seconds of ours and of every rule, inf where it does not fit; how near; CPU seconds."""

    seconds: float
    rules: dict[str, float]
    gap: float
    cpu_s: float


# -- cases


def sharding_case(
    rng: random.Random, *, hidden: float = 4.0, count: int | None = None
) -> Case | None:
    """Return random buckets under ours and the rules; None where nothing is exposed."""
    ring = alike(
        rng.choice((2, 4, 8, 16)), Link(10 ** rng.uniform(-5.3, -4), rng.uniform(5, 100) * GB)
    )
    buckets: list[Bucket] = []
    for _ in range(count or rng.randint(10, 100)):
        size = round(64 * KiB * (64 * MiB / (64 * KiB)) ** rng.random())
        hides = hidden * rng.random() * ring.all_reduce_s(size)
        buckets.append(Bucket(size, size, 2 * size, hides / 3, hides * 2 / 3))
    every = [ways_of(bucket, ring, slices=SLICES) for bucket in buckets]
    least = sum(min(way.held_bytes for way in ways) for ways in every)
    most = least + 1.2 * (sum(ways[1].held_bytes for ways in every) - least)
    gathered = max(way.gathered_bytes for ways in every for way in ways)
    memory = gathered + round(rng.uniform(least, most))
    start = time.process_time()
    found = best_sharding(buckets, ring, memory, slices=SLICES)
    cpu_s = time.process_time() - start
    if not found.seconds:
        return None
    rules = {
        f"all {how}": uniform_s([ways[place] for ways in every], memory)
        for place, how in enumerate(("replicate", "shard_keep", "shard"))
    }
    rules["better of the three"] = min(rules.values())
    return Case(found.seconds, rules, 1 - found.bound_s / found.seconds, cpu_s)


def uniform_s(ways: Sequence[Way], memory_bytes: int) -> float:
    """Return the exposed seconds of these ways; inf where they do not fit."""
    held = sum(way.held_bytes for way in ways)
    fits = held + max(way.gathered_bytes for way in ways) <= memory_bytes
    return math.fsum(way.seconds for way in ways) if fits else math.inf


def shares_case(rng: random.Random) -> Case | None:
    """Return random devices under ours and the rules; None where nothing fits."""
    workers = list(random_workers(rng))
    memory = sum(worker.memory_bytes for worker in workers)
    weights = memory * rng.uniform(0.2, 1.6) / 8 / 2
    load = Load(BATCH, weights, weights, 8 * weights)
    ring = alike(len(workers), Link(1e-5, rng.uniform(5, 100) * GB))
    start = time.process_time()
    try:
        found = best_shares(workers, load, ring)
    except PlanError:
        return None
    cpu_s = time.process_time() - start
    count = len(workers)
    even = even_shares(workers, load, ring)
    by_speed = shares_of(
        workers, load, ring, samples=samples_by_speed(workers), parts=[1 / count] * count
    )
    by_memory = shares_of(
        workers,
        load,
        ring,
        samples=samples_by_speed(workers),
        parts=[worker.memory_bytes / memory for worker in workers],
    )
    rules = {
        "even split": even,
        "samples by speed, state even": by_speed,
        "samples by speed, state by memory": by_memory,
    }
    seconds = {rule: math.inf if each is None else each.step_s for rule, each in rules.items()}
    return Case(found.step_s, seconds, 0.0, cpu_s)


def random_workers(rng: random.Random) -> Iterator[Worker]:
    for at in range(rng.randint(2, 8)):
        sample_s = 0.02 * 4 ** rng.random()
        memory = rng.choice((16, 24, 40, 80)) * GB
        sample_bytes = rng.uniform(0.02, 0.5) * GB
        seconds = affine_s(BATCH, 0.01, sample_s)
        yield Worker(f"device {at}", seconds, memory, sample_bytes, 1.0 * GB)


def samples_by_speed(workers: Sequence[Worker]) -> list[int]:
    """Return samples as the speed in large batches is, rounded to the whole batch."""
    speeds = [1 / worker.batch_s[-1] for worker in workers]
    ends = np.rint(np.cumsum([0.0, *speeds]) / sum(speeds) * BATCH).astype(int)
    return np.diff(ends).tolist()


def bare_case(rng: random.Random) -> Case | None:
    """Return 500 buckets of which nothing is hidden: all save nearly the same for a byte."""
    return sharding_case(rng, hidden=0.0, count=500)


SEARCHES = (
    ("sharding", sharding_case, 1),
    ("bare 500", bare_case, 10),
    ("shares", shares_case, 1),
)


def show(rows: list[Row]) -> None:
    """Print a line for every rule, then how near the search is."""
    print(f"{'':10}{'rule':36}{'fits':>10}  rule / ours: mean   p10   p90  worst")
    for row in rows:
        fits = f"{row['fits']}/{row['of']}"
        figures = "".join(
            f"{row[key]:6.2f}" if row["fits"] else "     -" for key in ("p10", "p90", "worst")
        )
        mean = f"{row['mean']:6.2f}" if row["fits"] else "     -"
        print(f"{row['search']:10}{row['rule']:36}{fits:>10}  {mean:>17}{figures}")
    for name in dict.fromkeys(row["search"] for row in rows):
        row = next(row for row in rows if row["search"] == name)
        print(f"{name}: at most {row['gap']:.1g} above the best, {row['cpu_s']:.3f} CPU s each")


if __name__ == "__main__":
    main()
