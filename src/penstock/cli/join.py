"""penstock join: this process becomes a rank of an elastic run."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face, view


def join(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Of an elastic run on this host.")],
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds to wait to be taken in.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Be a rank of an elastic run that lost one, until it ends.

    Example: penstock join runs/gpt
    """
    from penstock.training.joining import join_run

    with face.only_results():
        steps = join_run(folder, limit_s=limit, listener=view.TERMINAL)
    if as_json:
        face.show_json({"joined": str(folder), "steps": steps})
    else:
        face.show(f"the run in {folder} has ended after {steps:,} steps")
