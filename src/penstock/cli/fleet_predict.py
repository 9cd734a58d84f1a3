"""penstock fleet predict: seconds of models and devices not measured, learned from others."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli import face
from penstock.cli.of_flags import of_flags
from penstock.errors import EstimateError
from penstock.files import Json
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.fleet.learn import Foreseen
    from penstock.fleet.measurement import MeasuredTable

_MOST_SHOWN = 40  # rows; --json has them all
_Fit = Annotated[
    list[Path] | None, typer.Option(metavar="CSV", help="Measurements to learn from; repeat it.")
]


class PredictFlags(NamedTuple):
    """Of what, and from which measurements."""

    what: Annotated[str, typer.Argument(metavar="JOB|CSV", help="A job, or a table.")]
    fit: _Fit = None
    ranks: Annotated[
        str | None, typer.Option(metavar="DEVICE=N,...", help="Of a job: on which devices.")
    ] = None
    cap: Annotated[
        list[str] | None, typer.Option(metavar="WHAT=X", help="server, link, loader: steps/s.")
    ] = None
    scales: Annotated[
        str | None, typer.Option(metavar="RANKS=X,...", help="Measured steps/s, of 1 and more.")
    ] = None
    observed: Annotated[float | None, typer.Option(help="Steps per second that it does.")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Of the whole run.")] = None
    prices: Annotated[
        str | None, typer.Option(metavar="DEVICE=USD,...", help="Dollars an hour of a rank.")
    ] = None
    every: Annotated[int, typer.Option(min=0, help="Steps from checkpoint to checkpoint.")] = 0
    losses: Annotated[float, typer.Option(min=0, help="Ranks expected to be preempted.")] = 0.0
    equal_shares: Annotated[
        bool, typer.Option("--equal-shares", help="All ranks wait for the slowest.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@of_flags
def predict(flags: PredictFlags) -> None:
    """Predict seconds of models and devices not measured yet, from measurements of others.

    Of a table: each row, held out with its group, beside what was measured.  Of a job: a
    micro-batch, a checkpoint, a start, and the time and dollars to finish.  Tables and their
    columns are in docs/fleet_predict.md.  Whole configurations: `penstock predict`.

    Example: penstock fleet predict measured.csv
    """
    if flags.what.endswith(".csv"):
        about_jobs = "ranks", "cap", "scales", "observed", "steps", "prices"
        _refuse({name: getattr(flags, name) for name in about_jobs})
        _of_table(Path(flags.what), flags.fit or [], as_json=flags.as_json)
    else:
        from penstock.cli.fleet_predict_job import JobFlags, of_job

        own = {name: getattr(flags, name) for name in JobFlags._fields if name != "cap"}
        asked = JobFlags(cap=tuple(flags.cap or ()), **own)
        of_job(flags.what, flags.fit or [], asked, as_json=flags.as_json)


def _refuse(flags: Mapping[str, object]) -> None:
    given = [f"--{name}" for name, value in flags.items() if value is not None]
    if given:
        message = f"{', '.join(given)} given with a table"
        raise EstimateError(message, hint="they are about a job: penstock fleet predict JOB")


# -- a table ---------------------------------------------------------------------------------------


class _TableBeside(NamedTuple):
    """Rows of a table and what is foreseen of each."""

    table: "MeasuredTable"
    found: "list[Foreseen]"

    @property
    def errors(self) -> list[float]:
        """Return |predicted / measured - 1| of every row that was measured, in percent."""
        pairs = zip(self.table.rows, self.found, strict=True)
        return [100 * abs(one.seconds / row.seconds - 1) for row, one in pairs if row.seconds]

    @property
    def coverage(self) -> float:
        """Return the percentage of measured rows inside their interval."""
        pairs = zip(self.table.rows, self.found, strict=True)
        inside = [one.low <= row.seconds <= one.high for row, one in pairs if row.seconds]
        return 100 * statistics.fmean(inside)


def _of_table(path: Path, fit: Sequence[Path], *, as_json: bool) -> None:
    from penstock.fleet.learn import held_out, learn
    from penstock.fleet.measurement import read_table, read_tables

    table = read_table(path)
    with face.progress("learning") as tell:
        if fit:
            others = read_tables(fit).get(table.layout, [])
            found = learn(others).foresee(table.rows)
        else:
            found = held_out(table.rows, tell)
    predicted = _TableBeside(table, found)
    if as_json:
        face.show_json(_document(predicted))
    else:
        _show(predicted)


def _document(one: _TableBeside) -> Json:
    rows: list[Json] = [
        {
            "group": row.group,
            "device": row.device,
            "measured": row.seconds,
            "predicted": found.seconds,
            "low": found.low,
            "high": found.high,
            "extrapolates": list(found.outside),
        }
        for row, found in zip(one.table.rows, one.found, strict=True)
    ]
    document: dict[str, Json] = {"layout": one.table.layout, "interval": 80.0, "rows": rows}
    if one.errors:
        document |= {"mape": statistics.fmean(one.errors), "coverage": one.coverage}
    return document


def _show(one: _TableBeside) -> None:
    rows = [
        (
            row.group,
            row.device,
            "" if row.seconds is None else format_seconds(row.seconds),
            format_seconds(found.seconds),
            f"{format_seconds(found.low)} .. {format_seconds(found.high)}",
            "" if row.seconds is None else f"{100 * (found.seconds / row.seconds - 1):+.1f} %",
            ", ".join(found.outside),
        )
        for row, found in zip(one.table.rows, one.found, strict=True)
    ]
    head = "group", "device", "measured", "predicted", "8 times in 10", "error", "extrapolates in"
    face.show(face.table(head, rows[:_MOST_SHOWN]))
    if len(rows) > _MOST_SHOWN:
        face.show(f"... and {len(rows) - _MOST_SHOWN} more; --json has them all")
    if one.errors:
        face.show(
            f"{one.table.layout}: mean error {statistics.fmean(one.errors):.1f} %, "
            f"{one.coverage:.0f} % of {len(one.errors)} rows inside their interval"
        )
