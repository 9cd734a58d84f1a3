"""penstock report: one self-contained HTML page of a run."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `penstock train` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="Write to this file; default: DIR/report.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write one HTML page: predicted beside measured.

    The page is self-contained: both timelines, memory, losses and the plan.

    Example: penstock report runs/gpt
    """
    from penstock.report.report import report_of

    path = folder / "report.html" if out is None else out
    face.check_place(path)
    page = report_of(folder)
    page.save(path)
    if as_json:
        face.show_json({"report": str(path), "headline": page.headline})
    else:
        face.show(str(path))
