"""penstock fleet market: what a trace tells of the machines that each pool offered."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from penstock.cli import face
from penstock.files import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.fleet.market import Market

_HOURS = 1.0, 6.0, 12.0, 23.0  # after which the share that lasts is shown
_MOST_SHOWN = 40  # pools; --json has them all

Traces = Annotated[  # of several commands
    list[Path], typer.Argument(metavar="TRACE...", help="Traces of machines and prices.")
]
Unit = Annotated[
    str | None, typer.Option("--unit", help="Of times that do not say theirs: ms s min h d.")
]
PoolNames = Annotated[
    list[str] | None, typer.Option("--pool", help="Only this pool; may be given again.")
]


def market(
    traces: Traces,
    machines: Annotated[int, typer.Option(min=1, help="How many have to be there.")] = 1,
    unit: Unit = None,
    pool: PoolNames = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what traces tell of the machines that each pool offered, lost and charged.

    The format of a trace is in docs/fleet.md.

    Example: penstock fleet market spot.csv --machines 8
    """
    from penstock.fleet.spells import told

    there = read(traces, unit, pool or ())
    if there.laws:
        lives(traces, as_json=as_json)
        return
    rows = [told(there, k, machines) for k in range(len(there.pools))]
    if as_json:
        pools: list[Json] = [{**row._asdict()} for row in rows]
        hours = there.until_s / 3600
        face.show_json({"hours": hours, "pools": pools, "notes": list(there.notes)})
        return
    head = "pool", "machines", f"{machines} there", "spells", "up", "down", "lost/h", "usd/h"
    cells = [
        (
            row.pool,
            f"{row.fewest:g} .. {row.most:g}",
            f"{100 * row.share_up:.1f} %",
            row.spells,
            _span(row.median_up_s),
            _span(row.median_down_s),
            f"{row.lost_per_h:.2f}",
            _prices(row.least_usd_h, row.most_usd_h),
        )
        for row in rows
    ]
    face.show(face.table(head, cells[:_MOST_SHOWN]))
    if len(rows) > _MOST_SHOWN:
        face.show(f"... and {len(rows) - _MOST_SHOWN} more pools; --json has them all")
    face.show(f"{there.until_s / 3600:.2f} h; up and down: median spell with and without them")
    tell(there)


def lives(traces: "Sequence[Path]", *, as_json: bool) -> None:
    """Show the laws that fit lifetimes, the likeliest first, beside what was seen."""
    from penstock.fleet.lifetimes import empirical, fits, read_lifetimes

    rows: list[tuple[str, str, str, float, list[float]]] = []
    for trace in traces:
        for pool, seen in read_lifetimes(trace).items():
            for law in (empirical(seen), *fits(seen)):
                share = [float(law.survival(np.array([3600.0 * h]))[0]) for h in _HOURS]
                numbers = ", ".join(f"{number:.4g}" for number in law.numbers)
                rows.append((pool, law.name, numbers, law.aic, share))
    if as_json:
        found: list[Json] = [
            {"pool": pool, "law": name, "numbers": numbers, "aic": aic, "survival": [*share]}
            for pool, name, numbers, aic, share in rows
        ]
        face.show_json({"hours": list(_HOURS), "laws": found})
        return
    head = "pool", "law", "numbers", "AIC", *(f"after {hour:g} h" for hour in _HOURS)
    cells = [
        (
            pool,
            name,
            numbers,
            f"{aic:.0f}" if numbers else "-",
            *(f"{100 * s:.1f} %" for s in share),
        )
        for pool, name, numbers, aic, share in rows
    ]
    face.show(face.table(head, cells))


def read(traces: "Sequence[Path]", unit: str | None, pools: "Sequence[str]") -> "Market":
    """Return all traces on one axis, with the pools that are asked for.

    Raises:   FleetError: a trace cannot be read, or has no such pool.
    """
    from penstock.fleet.market import only, together
    from penstock.fleet.traces import read_market

    if len(traces) == 1:
        return read_market(traces[0], unit=unit, pools=pools)
    there = together([read_market(trace, unit=unit) for trace in traces])
    return only(there, pools) if pools else there


def tell(there: "Market") -> None:
    """Say what a reader should know of the traces."""
    for note in there.notes:
        face.say(f"note: {note}")


def _span(seconds: float) -> str:
    """Return minutes or hours, a dash for what is not known."""
    if seconds != seconds:
        return "-"
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _prices(least: float, most: float) -> str:
    if least != least:
        return "-"
    return f"{least:.4g}" if least == most else f"{least:.4g} .. {most:.4g}"
