"""penstock predict: step time and memory of a table of configurations, beside what was measured."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli import face
from penstock.files import Json
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.estimate.constants import Constants
    from penstock.estimate.predict import Estimate
    from penstock.estimate.table import RunTable

_MOST_SHOWN = 40  # rows; --json has them all


def predict(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="A table of runs.")],
    fit: Annotated[Path | None, typer.Option(help="Fit the constants on these runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict step time and peak memory of a table of runs, beside what was measured.

    Without --fit, the constants that come with Penstock are used.  The columns that a table must
    have are in docs/estimate.md.

    Example: penstock predict runs.csv --fit other_runs.csv
    """
    from penstock.estimate.constants import load
    from penstock.estimate.fit import fit as fit_on
    from penstock.estimate.table import read

    table = read(file)
    with face.busy("fitting"):
        constants = load() if fit is None else fit_on(read(fit).samples)
    found = predicted(table, constants)
    if as_json:
        face.show_json(_document(table, found))
    else:
        _show(table, found)


class Predicted(NamedTuple):
    """The estimates of one quantity beside what was measured."""

    measured: "tuple[float, ...]"
    estimates: "tuple[Estimate, ...]"

    @property
    def errors(self) -> list[float]:
        """Return |predicted / measured - 1| of every row, in percent."""
        pairs = zip(self.measured, self.estimates, strict=True)
        return [100 * abs(estimate.value / value - 1) for value, estimate in pairs]


def predicted(table: "RunTable", constants: "Sequence[Constants]") -> dict[str, Predicted]:
    """Return the estimates of "time", and of "memory" where table and constants have it."""
    from penstock.estimate.predict import predict as estimate

    samples = table.samples
    times = estimate("time", [sample.run for sample in samples], constants)
    found = {"time": Predicted(tuple(sample.seconds for sample in samples), times)}
    sized = [(s.run, float(s.peak_bytes)) for s in samples if s.peak_bytes is not None]
    if sized and any(item.quantity == "memory" for item in constants):
        sizes = estimate("memory", [run for run, _ in sized], constants)
        found["memory"] = Predicted(tuple(size for _, size in sized), sizes)
    return found


def _document(table: "RunTable", found: dict[str, Predicted]) -> Json:
    document: dict[str, Json] = {**_part(found["time"])}
    if "memory" in found:
        document["memory"] = _part(found["memory"])
    return {**document, "layout": table.layout, "skipped": table.skipped}


def _part(one: Predicted) -> dict[str, Json]:
    """Return rows in seconds or bytes, errors in percent, and the rows that extrapolate."""
    rows: list[Json] = [
        {"measured": value, "predicted": e.value, "low": e.low, "high": e.high}
        for value, e in zip(one.measured, one.estimates, strict=True)
    ]
    outside: dict[str, Json] = {
        str(at): list(e.outside) for at, e in enumerate(one.estimates) if e.outside
    }
    return {
        "rows": rows,
        "mape": statistics.mean(one.errors),
        "median": statistics.median(one.errors),
        "extrapolates": outside,
    }


def _show(table: "RunTable", found: dict[str, Predicted]) -> None:
    for name, one in found.items():
        text = format_seconds if name == "time" else format_bytes
        rows = [
            (
                at + 1,
                text(value),
                text(e.value),
                f"{text(e.low)} .. {text(e.high)}",
                f"{100 * (e.value / value - 1):+.1f} %",
                ", ".join(e.outside),
            )
            for at, (value, e) in enumerate(zip(one.measured, one.estimates, strict=True))
        ]
        head = "row", "measured", "predicted", "9 times in 10", "error", "extrapolates in"
        face.show(face.table(head, rows[:_MOST_SHOWN]))
        if len(rows) > _MOST_SHOWN:
            face.show(f"... and {len(rows) - _MOST_SHOWN} more; --json has them all")
        mean, median = statistics.mean(one.errors), statistics.median(one.errors)
        face.show(f"{name}: mean error {mean:.1f} %, median {median:.1f} %, {len(rows)} runs\n")
    if table.skipped:
        face.say(f"{table.skipped} rows without a measured time were skipped")
