"""Scoreboard: step time and memory of runs that others measured, each predicted without its group.

    python -m bench.scoreboard [--json] [--data ../shared/data/measured] [--constants]

A row is a set: the runs of each group are predicted by constants fitted on the other groups of
the same cluster; "vtrain_multi" says that all were fitted on another set.

mape         mean of |predicted / measured - 1|, in percent
median       the same, median
aim          what it should be at most
best_known   the least error that another published for this set, or that was found by running it;
             `others` has all of them (SimuMax: on the very rows, from its own columns)

--constants  fits on everything there and writes the constants that come with Penstock
"""

import argparse
import csv
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.machine import machine
from penstock.estimate.constants import SHIPPED, Quantity, save
from penstock.estimate.fit import Key, fit, left_out, measured
from penstock.estimate.layouts import Sample
from penstock.estimate.predict import predict
from penstock.estimate.table import read

DATA = Path(__file__).parents[2] / "shared" / "data" / "measured"
Row = dict[str, object]

# Published, or re-run from what was published; percent.
SINGLE = {"vTrain": 8.37, "Calculon": 38.9}
MULTI = {"vTrain": 14.73, "Calculon": 15.4}
SAILOR_TIME = {"Sailor": 8.9, "Varuna": 11.4, "Metis": 12.2}
SAILOR_MEMORY = {"Sailor": 5.9, "Metis": 50.6, "Varuna": 69.3}
MEGATRON = {"Calculon": 10.8}


class HeldOut(NamedTuple):
    """By what runs are left out together."""

    name: str
    key: Key


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


HIDDEN = HeldOut("hidden size", lambda run: run.model.hidden)
MODEL = HeldOut("model", lambda run: run.model.hidden)  # each has a hidden size of its own
RANKS = HeldOut("GPUs", lambda run: run.ranks)
DEGREES = HeldOut("tensor, pipe", lambda run: (run.tensor, run.pipe))
ELSEWHERE = HeldOut("vtrain_multi", lambda run: run)  # fitted on another set altogether

ONE_HOST, HOSTS, MOSAIC = "vtrain_single.csv", "vtrain_multi.csv", "mosaic_fsdp.csv"
PLANS, B200, TABLE = "sailor.csv", "simumax_b200.csv", "megatron_tables.csv"
SETS = (
    Set("vtrain single", ONE_HOST, HIDDEN, 7.5, SINGLE),
    Set("vtrain single", ONE_HOST, RANKS, 7.5, SINGLE),
    Set("vtrain multi", HOSTS, MODEL, 8.0, MULTI),
    Set("vtrain multi", HOSTS, DEGREES, None, MULTI),
    Set("sailor", PLANS, RANKS, 8.0, SAILOR_TIME),
    Set("sailor GH200", PLANS, RANKS, 8.0, SAILOR_TIME, cluster="clariden"),
    Set("sailor RTX", PLANS, RANKS, 8.0, cluster="mit"),
    Set("simumax", B200, MODEL),
    Set("mosaic A100-40", MOSAIC, MODEL, cluster="mosaic a100-40"),
    Set("mosaic A100-80", MOSAIC, MODEL, cluster="mosaic a100-80"),
    Set("mosaic H100", MOSAIC, MODEL, cluster="mosaic h100"),
    Set("sailor memory", PLANS, RANKS, 5.0, SAILOR_MEMORY, "memory"),
    Set("sailor GH200 memory", PLANS, RANKS, 5.0, SAILOR_MEMORY, "memory", "clariden"),
    Set("sailor RTX memory", PLANS, RANKS, 5.0, {}, "memory", "mit"),
    Set("simumax memory", B200, MODEL, 3.0, {}, "memory", aims_at="median"),
)


def rows_of(data: Path, say: Callable[[str], None]) -> list[Row]:
    """Return a row for every set whose file is there; `say` is told of the others."""
    rows: list[Row] = []
    for one in SETS:
        path = data / one.file
        if not path.exists():
            say(f"{one.name}: skipped, {path} is missing")
            continue
        samples = _samples(one, path)
        if not samples:
            say(f"{one.name}: skipped, {path} has no such run")
            continue
        rows.append(_row(one, samples, path))
    return rows + _elsewhere(data, say)


def _samples(one: Set, path: Path) -> list[Sample]:
    """Return the runs of a file that are of the set."""
    found = read(path).samples
    own = [s for s in found if one.cluster in ("", s.run.cluster)]
    return [s for s in own if one.quantity == "time" or s.peak_bytes is not None]


def _row(one: Set, samples: Sequence[Sample], path: Path) -> Row:
    errors: list[float] = []
    for cluster in sorted({sample.run.cluster for sample in samples}):
        own = [sample for sample in samples if sample.run.cluster == cluster]
        ratio = left_out(one.quantity, own, one.held_out.key) / measured(one.quantity, own)
        errors += [float(error) for error in 100 * np.abs(ratio - 1)]
    others = _simumax(path, one.quantity) if one.file == B200 else one.others
    return _result(one, errors, others)


def _result(one: Set, errors: Sequence[float], others: dict[str, float]) -> Row:
    result = {"mape": statistics.mean(errors), "median": statistics.median(errors)}
    return {
        "set": one.name,
        "quantity": one.quantity,
        "rows": len(errors),
        "held_out_by": one.held_out.name,
        **result,
        "aim": one.aim,
        "aims_at": one.aims_at,
        "reached": None if one.aim is None else result[one.aims_at] <= one.aim,
        "best_known": min(others.values(), default=None),
        "others": others,
    }


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


def _elsewhere(data: Path, say: Callable[[str], None]) -> list[Row]:
    """Return Megatron's table, predicted by constants fitted on vTrain's runs alone."""
    one = Set("megatron", TABLE, ELSEWHERE, 6.0, MEGATRON)
    missing = [data / f for f in (TABLE, HOSTS) if not (data / f).exists()]
    if missing:
        say(f"{one.name}: skipped, {missing[0]} is missing")
        return []
    constants = fit(read(data / HOSTS).samples)
    samples = read(data / one.file).samples
    estimates = predict("time", [sample.run for sample in samples], constants)
    pairs = zip(estimates, samples, strict=True)
    return [_result(one, [100 * abs(e.value / s.seconds - 1) for e, s in pairs], one.others)]


def write_constants(data: Path, path: Path = SHIPPED) -> int:
    """Fit on every set but Megatron's table, write the constants, and return how many there are."""
    samples: list[Sample] = []
    files = sorted({one.file for one in SETS})
    for name in files:
        samples += read(data / name).samples
    constants = fit(samples)
    made_by = f"python -m bench.scoreboard --constants, from {', '.join(files)}"
    save(constants, path, made_by=made_by)
    return len(constants)


def show(rows: Sequence[Row]) -> None:
    head = "set", "rows", "held out by", "mean", "median", "aim", "best known"
    print("{:20} {:>4}  {:13} {:>6} {:>7}  {:18} {}".format(*head))
    for row in rows:
        aim = "-"
        if row["aim"] is not None:
            word = "reached" if row["reached"] else "MISSED"
            aim = f"{row['aim']:g} {row['aims_at']} {word}"
        others = ", ".join(f"{name} {error:.1f}" for name, error in dict(row["others"]).items())
        print(
            f"{row['set']:20} {row['rows']:4}  {row['held_out_by']:13} {row['mape']:6.1f} "
            f"{row['median']:7.1f}  {aim:18} {others or '-'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the measured sets")
    parser.add_argument("--constants", action="store_true", help="write the shipped constants")
    options = parser.parse_args()
    if options.constants:
        print(f"{write_constants(options.data)} sets of constants written to {SHIPPED}")
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
