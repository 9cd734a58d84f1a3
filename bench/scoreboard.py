"""Scoreboard: step time and memory of runs that others measured, each predicted without its group.

    python -m bench.scoreboard [--json] [--data ../shared/data/measured] [--constants]

A row is a set, and what its runs were predicted without:

cluster      no run of their cluster: the constants are those of the other clusters
model        the runs of other models on their cluster, after the other clusters
parallelism  the same, by tensor and pipeline degrees
GPUs         the same, by the number of devices

mape         mean of |predicted / measured - 1|, in percent
median, max  the same
coverage     share of measured values inside the interval, which is to hold 80 %
ranking      of runs of the same model and batch on as many GPUs, of which there are four or more:
             Spearman's correlation of predicted and measured, the mean by their number
regret       of these, measured seconds of the one predicted fastest / of the fastest - 1, percent
aim          what mape, or the median, should be at most
best_known   the least error that another published for this set, or that was found by running it;
             `others` has all of them (SimuMax: on the very rows, from its own columns)

What torchtitan published (bench/torchtitan.csv) is never fitted on.

--constants  fits on everything else and writes the constants that come with Penstock
"""

import argparse
import csv
import json
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.layouts import read
from bench.machine import machine
from penstock.estimate.described import read as read_described
from penstock.estimate.fit import Key, adapted, by_cluster, fit
from penstock.estimate.pool import Pooled
from penstock.estimate.predict import Estimate, pool_of, predict
from penstock.estimate.priors import Quantity
from penstock.estimate.sample import Sample
from penstock.estimate.shipped import SHIPPED, save

DATA = Path(__file__).parents[2] / "shared" / "data" / "measured"
Row = dict[str, object]

# Published, or re-run from what was published; percent.
SINGLE = {"vTrain": 8.37, "Calculon": 38.9}
MULTI = {"vTrain": 14.73, "Calculon": 15.4}
SAILOR_TIME = {"Sailor": 8.9, "Varuna": 11.4, "Metis": 12.2}
SAILOR_MEMORY = {"Sailor": 5.9, "Metis": 50.6, "Varuna": 69.3}
MEGATRON = {"Calculon": 10.8}


class HeldOut(NamedTuple):
    """By what runs are left out together; without a key, their whole cluster."""

    name: str
    key: Key | None = None


@dataclass(frozen=True)
class Set:
    """Runs of a file that are predicted together."""

    name: str
    file: str
    held_out: HeldOut
    aim: float | None = None
    others: dict[str, float] = field(default_factory=dict)
    quantity: Quantity = "time"
    cluster: str = ""
    aims_at: str = "mape"


LEAST_RANKED = 4

CLUSTER = HeldOut("cluster")
MODEL = HeldOut("model", lambda run: run.model.hidden)  # each has a hidden size of its own
RANKS = HeldOut("GPUs", lambda run: run.ranks)
DEGREES = HeldOut("parallelism", lambda run: (run.tensor, run.pipe))

ONE_HOST, HOSTS, MOSAIC = "vtrain_single.csv", "vtrain_multi.csv", "mosaic_fsdp.csv"
PLANS, B200, TABLE = "sailor.csv", "simumax_b200.csv", "megatron_tables.csv"
FITTED = (MOSAIC, PLANS, B200, HOSTS, ONE_HOST, TABLE)
TOLD = Path(__file__).with_name("torchtitan.csv")
SETS = (
    Set("vtrain single", ONE_HOST, CLUSTER, 6.0, SINGLE),
    Set("vtrain multi", HOSTS, CLUSTER, 8.0, MULTI),
    Set("simumax", B200, CLUSTER, 12.0),
    Set("mosaic", MOSAIC, CLUSTER, 10.0),
    Set("sailor", PLANS, CLUSTER, 15.0, SAILOR_TIME),
    Set("megatron", TABLE, CLUSTER, 4.0, MEGATRON),
    Set("simumax memory", B200, CLUSTER, 5.0, {}, "memory"),
    Set("sailor memory", PLANS, CLUSTER, 8.0, SAILOR_MEMORY, "memory"),
    Set("vtrain single", ONE_HOST, MODEL, 7.5, SINGLE),
    Set("vtrain single", ONE_HOST, DEGREES, None, SINGLE),
    Set("vtrain single", ONE_HOST, RANKS, 7.5, SINGLE),
    Set("vtrain multi", HOSTS, MODEL, 8.0, MULTI),
    Set("vtrain multi", HOSTS, DEGREES, None, MULTI),
    Set("simumax", B200, MODEL),
    Set("mosaic A100-40", MOSAIC, MODEL, cluster="mosaic a100-40"),
    Set("mosaic A100-80", MOSAIC, MODEL, cluster="mosaic a100-80"),
    Set("mosaic H100", MOSAIC, MODEL, cluster="mosaic h100"),
    Set("sailor GH200", PLANS, RANKS, 8.0, SAILOR_TIME, cluster="clariden"),
    Set("sailor RTX", PLANS, RANKS, 8.0, cluster="mit"),
    Set("sailor GH200 memory", PLANS, RANKS, 5.0, SAILOR_MEMORY, "memory", "clariden"),
    Set("sailor RTX memory", PLANS, RANKS, 5.0, {}, "memory", "mit"),
    Set("simumax memory", B200, MODEL, 3.0, {}, "memory", aims_at="median"),
)


class Board:
    """The samples that are fitted on, and the constants without each cluster, made once."""

    def __init__(self, data: Path) -> None:
        files = [data / name for name in FITTED if (data / name).exists()]
        self._samples = [sample for path in files for sample in read(path).samples]
        self._pools: dict[str, tuple[Pooled, ...]] = {}

    def without(self, cluster: str) -> tuple[Pooled, ...]:
        """Return constants fitted on every cluster but one."""
        if cluster not in self._pools:
            others = [sample for sample in self._samples if sample.run.cluster != cluster]
            self._pools[cluster] = fit(others, honest=False) if others else ()
        return self._pools[cluster]


def rows_of(data: Path, say: Callable[[str], None]) -> list[Row]:
    """Return a row for every set whose file is there; `say` is told of the others."""
    rows: list[Row] = []
    board = Board(data)
    for one in SETS:
        path = data / one.file
        if not path.exists():
            say(f"{one.name}: skipped, {path} is missing")
            continue
        samples = _samples(one, path)
        if not samples:
            say(f"{one.name}: skipped, {path} has no such run")
            continue
        pairs = [
            pair
            for own in by_cluster(samples).values()
            for pair in _left_out(board.without(own[0].run.cluster), own, one)
        ]
        if not pairs:
            say(f"{one.name}: skipped, no other cluster is there")
            continue
        others = _simumax(path, one.quantity) if one.file == B200 else one.others
        rows.append(_result(one, pairs, others))
    if any((data / name).exists() for name in FITTED):
        rows.append(_told(board))
    return rows


def _samples(one: Set, path: Path) -> list[Sample]:
    """Return the runs of a file that are of the set."""
    found = read(path).samples
    own = [s for s in found if one.cluster in ("", s.run.cluster)]
    return [s for s in own if one.quantity == "time" or s.peak_bytes is not None]


class Pair(NamedTuple):
    """A prediction beside what was measured, and what all plans for the same work share."""

    estimate: Estimate
    measured: float
    work: Hashable


class Ranking(NamedTuple):
    """How well plans for the same work are put in order; None where there are too few."""

    ranking: float | None
    regret: float | None


def _left_out(pools: Sequence[Pooled], samples: Sequence[Sample], one: Set) -> list[Pair]:
    """Return the predictions of one cluster's runs, each without its group."""
    if not any(pool.quantity == one.quantity for pool in pools):
        return []
    key = one.held_out.key
    if key is None:
        return _pairs(one.quantity, samples, pools)
    pool, found = pool_of(one.quantity, pools), list[Pair]()
    for group in dict.fromkeys(key(sample.run) for sample in samples):
        kept = [sample for sample in samples if key(sample.run) != group]
        out = [sample for sample in samples if key(sample.run) == group]
        own = adapted(pool, kept) if kept else pool
        found += _pairs(one.quantity, out, [own])
    return found


def _pairs(quantity: Quantity, samples: Sequence[Sample], pools: Sequence[Pooled]) -> list[Pair]:
    estimates = predict(quantity, [sample.run for sample in samples], pools)
    values = [s.seconds if quantity == "time" else float(s.peak_bytes or 0.0) for s in samples]
    works = [_work_of(sample) for sample in samples]
    return [Pair(*pair) for pair in zip(estimates, values, works, strict=True)]


def _work_of(sample: Sample) -> Hashable:
    run = sample.run
    batch = run.data * run.micro_batch * run.num_micro_batches
    return run.cluster, run.model, batch, run.ranks


def ranked(pairs: Sequence[Pair]) -> Ranking:
    """Return how well plans for the same work are put in order."""
    groups: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.work, []).append(pair)
    some = [group for group in groups.values() if len(group) >= LEAST_RANKED]
    if not some:
        return Ranking(None, None)
    correlations: list[float] = []
    regrets: list[float] = []
    for group in some:
        values = np.array([[pair.estimate.value, pair.measured] for pair in group])
        order = values.argsort(axis=0).argsort(axis=0)
        correlations.append(float(np.corrcoef(order.T)[0, 1]))
        taken = group[int(values[:, 0].argmin())]
        regrets.append(100 * (taken.measured / values[:, 1].min() - 1))
    sizes = [len(group) for group in some]
    means = (float(np.average(each, weights=sizes)) for each in (correlations, regrets))
    return Ranking(*means)


def _result(one: Set, pairs: Sequence[Pair], others: dict[str, float]) -> Row:
    errors = [100 * abs(pair.estimate.value / pair.measured - 1) for pair in pairs]
    inside = [pair.estimate.low <= pair.measured <= pair.estimate.high for pair in pairs]
    result = {
        "mape": statistics.mean(errors),
        "median": statistics.median(errors),
        "max": max(errors),
        "coverage": statistics.mean(inside),
    }
    return {
        "set": one.name,
        "quantity": one.quantity,
        "rows": len(errors),
        "held_out_by": one.held_out.name,
        **result,
        **(ranked(pairs) if one.quantity == "time" else Ranking(None, None))._asdict(),
        "aim": one.aim,
        "aims_at": one.aims_at,
        "reached": None if one.aim is None else result[one.aims_at] <= one.aim,
        "best_known": min(others.values(), default=None),
        "others": others,
    }


def _told(board: Board) -> Row:
    """Return what torchtitan published, predicted by everything that is fitted on."""
    one = Set("torchtitan", TOLD.name, CLUSTER, 8.0)
    return _result(one, _pairs("time", read_described(TOLD).samples, board.without("")), {})


def _simumax(path: Path, quantity: Quantity) -> dict[str, float]:
    """Return SimuMax's own mean error on the same rows, in percent."""
    names = ("perf_ms", "real_ms")
    if quantity == "memory":
        names = ("perf_alloc_gib", "real_alloc_gib")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not all(name in row for row in rows for name in names):
        return {}
    errors = [100 * abs(float(row[names[0]]) / float(row[names[1]]) - 1) for row in rows]
    return {"SimuMax": statistics.mean(errors)}


def write_constants(data: Path, path: Path = SHIPPED) -> int:
    """Fit on every set but the one that is only told, write the constants, and count them."""
    pools = fit([sample for name in FITTED for sample in read(data / name).samples])
    made_by = f"python -m bench.scoreboard --constants, from {', '.join(FITTED)}"
    save(pools, path, made_by=made_by)
    return sum(pool.count for pool in pools)


def show(rows: Sequence[Row]) -> None:
    head = (
        "set", "rows", "held out by", "mean", "median", "max", "in 80 %", "order", "regret", "aim",
        "best known",
    )  # fmt: skip
    print("{:20} {:>4}  {:11} {:>6} {:>6} {:>6} {:>7} {:>6} {:>6}  {:16} {}".format(*head))
    for row in rows:
        aim = "-"
        if row["aim"] is not None:
            word = "reached" if row["reached"] else "MISSED"
            aim = f"{row['aim']:g} {row['aims_at']} {word}"
        others = ", ".join(f"{name} {error:.1f}" for name, error in dict(row["others"]).items())
        told = row["ranking"] is not None
        ranks = f"{row['ranking']:6.2f} {row['regret']:6.1f}" if told else "     -      -"
        print(
            f"{row['set']:20} {row['rows']:4}  {row['held_out_by']:11} {row['mape']:6.1f} "
            f"{row['median']:6.1f} {row['max']:6.1f} {100 * row['coverage']:7.1f} {ranks}  "
            f"{aim:16} {others or '-'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the measured sets")
    parser.add_argument("--constants", action="store_true", help="write the shipped constants")
    options = parser.parse_args()
    if options.constants:
        print(f"{write_constants(options.data)} constants written to {SHIPPED}")
        return
    skipped: list[str] = []
    rows = rows_of(options.data, skipped.append)
    if options.json:
        print(json.dumps({"rows": rows, "skipped": skipped, "machine": machine()}))
        return
    show(rows)
    for line in skipped:
        print(line)


if __name__ == "__main__":
    main()
