"""penstock fleet measured: tables of measurements from one's own runs."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face
from penstock.files import write_text


def measured(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="For the tables.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write what runs have measured as tables for `penstock fleet predict --fit`.

    steps.csv: micro-batches on the devices of the runs.  saves.csv: checkpoints, where there were
    any.

    Example: penstock fleet measured runs/small runs/large --out tables
    """
    from penstock.fleet.own_runs import tables_of

    found = tables_of(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "steps.csv", "\n".join(found.steps) + "\n")
    write_text(out / "saves.csv", "\n".join(found.saves) + "\n")
    if as_json:
        face.show_json({"steps": list(found.steps), "saves": list(found.saves)})
        return
    counts = f"{len(found.steps) - 1} of steps and {len(found.saves) - 1} of checkpoints"
    face.show(f"wrote rows: {counts}, to {out}/steps.csv and saves.csv")
