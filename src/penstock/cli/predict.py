"""penstock predict: step time and memory of a table of configurations, beside what was measured."""

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli import face
from penstock.errors import EstimateError
from penstock.files import Json
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.estimate.pool import Pooled
    from penstock.estimate.predict import Estimate
    from penstock.estimate.table import RunTable

_MOST_SHOWN = 40  # rows; --json has them all
_DOUBTFUL = 100  # times what is predicted, or a part of it: no machine is so unlike those known


def predict(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="A table of runs.")],
    fit: Annotated[Path | None, typer.Option(help="Runs of your own, to fit on as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict step time and peak memory of a table of runs, beside what was measured.

    The constants come with Penstock; with --fit, those of a cluster in that file are moved by its
    runs.  The columns that a table can have are in docs/estimate.md.

    Example: penstock predict runs.csv --fit my_runs.csv
    """
    from penstock.estimate.described import read
    from penstock.estimate.shipped import load

    table, pools, gains = read(file), load(), list[Sureness]()
    if fit is not None:
        with face.busy("fitting"):
            gains, pools = fitted(read(fit), pools)
    found = predicted(table, pools)
    for line in doubtful(found["time"]):
        face.say(line)
    if as_json:
        face.show_json({**_document(table, found), "gains": [gain._asdict() for gain in gains]})
    else:
        _show(table, found)
        for gain in gains:
            face.show(str(gain))


class Sureness(NamedTuple):
    """What each run of a cluster gave: the deviation of a prediction of its next run, in percent,
    before any and after each of them."""

    cluster: str
    runs: int
    deviations: list[float]

    def __str__(self) -> str:
        """Return a line."""
        steps = " -> ".join(f"{each:.1f}" for each in self.deviations)
        return f"{self.cluster}: {self.runs} runs, a prediction is sure to {steps} %"


_MOST_GAINS = 8  # runs, one by one; then only the last


def fitted(
    table: "RunTable", pools: "Sequence[Pooled]"
) -> "tuple[list[Sureness], tuple[Pooled, ...]]":
    """Return what the runs of a table give, and the constants with them.

    Raises:   EstimateError: no run of the table was measured, or one that cannot be right.
    """
    from penstock.estimate.fit import adapted, by_cluster, sureness

    samples = [sample for sample in table.samples if not math.isnan(sample.seconds)]
    if not samples:
        raise EstimateError("no run to fit on", hint="give at least one finished run")
    for line in doubtful(predicted(table, pools)["time"]):
        hint = "is it of a whole step, and are the links as the columns say?"
        raise EstimateError(f"{line}: not fitted on", hint=hint)
    gains: list[Sureness] = []
    for cluster, own in by_cluster(samples).items():
        counts = [*range(min(len(own), _MOST_GAINS) + 1), len(own)]
        sure = [
            round(100 * sureness(pools[0], own[:count], own[-1]), 2)
            for count in dict.fromkeys(counts)
        ]
        gains.append(Sureness(cluster, len(own), sure))
    return gains, tuple(adapted(pool, samples) for pool in pools)


class Predicted(NamedTuple):
    """The estimates of one quantity beside what was measured."""

    measured: "tuple[float, ...]"
    estimates: "tuple[Estimate, ...]"

    @property
    def errors(self) -> list[float]:
        """Return |predicted / measured - 1| of every row that was measured, in percent."""
        pairs = zip(self.measured, self.estimates, strict=True)
        known = [(value, estimate) for value, estimate in pairs if not math.isnan(value)]
        return [100 * abs(estimate.value / value - 1) for value, estimate in known]


def predicted(table: "RunTable", constants: "Sequence[Pooled]") -> dict[str, Predicted]:
    """Return the estimates of "time", and of "memory" where table and constants have it."""
    from penstock.estimate.predict import predict as estimate

    samples = table.samples
    times = estimate("time", [sample.run for sample in samples], constants)
    found = {"time": Predicted(tuple(sample.seconds for sample in samples), times)}
    if any(item.quantity == "memory" for item in constants):
        sizes = estimate("memory", [sample.run for sample in samples], constants)
        peaks = tuple(math.nan if s.peak_bytes is None else s.peak_bytes for s in samples)
        found["memory"] = Predicted(peaks, sizes)
    return found


def doubtful(times: Predicted) -> list[str]:
    """Return a line for each run whose measured time is hardly in seconds, by its number."""
    lines: list[str] = []
    for at, (value, estimate) in enumerate(zip(times.measured, times.estimates, strict=True)):
        ratio = value / estimate.value  # NaN where nothing was measured
        if ratio > _DOUBTFUL or ratio < 1 / _DOUBTFUL:
            both = f"{format_seconds(value)} measured, {format_seconds(estimate.value)} predicted"
            lines.append(f"run {at + 1}: {both}; is it in seconds?")
    return lines


def _document(table: "RunTable", found: dict[str, Predicted]) -> dict[str, Json]:
    document: dict[str, Json] = {**_part(found["time"])}
    if "memory" in found:
        document["memory"] = _part(found["memory"])
    return {**document, "skipped": table.skipped, "taken": list(table.taken)}


def _part(one: Predicted) -> dict[str, Json]:
    """Return rows in seconds or bytes, errors in percent, and the rows that extrapolate."""
    rows: list[Json] = [
        {
            "measured": None if math.isnan(value) else value,
            "predicted": e.value,
            "low": e.low,
            "high": e.high,
            "rests_on": e.rests_on,
        }
        for value, e in zip(one.measured, one.estimates, strict=True)
    ]
    outside: dict[str, Json] = {
        str(at): list(e.outside) for at, e in enumerate(one.estimates) if e.outside
    }
    return {
        "rows": rows,
        "mape": statistics.mean(one.errors) if one.errors else None,
        "median": statistics.median(one.errors) if one.errors else None,
        "extrapolates": outside,
    }


def _show(table: "RunTable", found: dict[str, Predicted]) -> None:
    for name, one in found.items():
        text = format_seconds if name == "time" else _bytes
        rows = [
            (
                at + 1,
                "-" if math.isnan(value) else text(value),
                text(e.value),
                f"{text(e.low)} .. {text(e.high)}",
                "-" if math.isnan(value) else f"{100 * (e.value / value - 1):+.1f} %",
                e.rests_on,
                ", ".join(e.outside),
            )
            for at, (value, e) in enumerate(zip(one.measured, one.estimates, strict=True))
        ]
        head = (
            "row",
            "measured",
            "predicted",
            "8 times in 10",
            "error",
            "rests on",
            "extrapolates in",
        )
        face.show(face.table(head, rows[:_MOST_SHOWN]))
        if len(rows) > _MOST_SHOWN:
            face.show(f"... and {len(rows) - _MOST_SHOWN} more; --json has them all")
        if one.errors:
            mean, median = statistics.mean(one.errors), statistics.median(one.errors)
            face.show(
                f"{name}: mean error {mean:.1f} %, median {median:.1f} %, {len(one.errors)} runs\n"
            )
    if table.taken:
        face.say(f"not said by the table, and taken as: {', '.join(table.taken)}")
    if table.skipped:
        face.say(f"{table.skipped} rows of runs that failed were skipped")


def _bytes(size: float) -> str:
    return format_bytes(round(size))
