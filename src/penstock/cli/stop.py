"""penstock stop: a run ends after the step under way, with a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face
from penstock.errors import RunError


def stop(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `penstock train` writes.")],
    limit: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the end.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """End a run as Ctrl-C on its command does, whoever began it, and wherever its ranks are.

    Example: penstock stop runs/gpt
    """
    face.check_folder(folder)
    from penstock.checkpoints.checkpoint import steps_in
    from penstock.training.ending import stop_run

    if not stop_run(folder, limit, face.say):
        message = f"the run in {folder} has not ended within {limit:g} s"
        raise RunError(message, hint="it ends after the step under way; --limit waits longer")
    steps = steps_in(folder / "checkpoints")
    newest = steps[-1] if steps else 0
    if as_json:
        face.show_json({"stopped": str(folder), "checkpoint": newest})
    else:
        face.show(f"the run in {folder} has ended, with a checkpoint after {newest:,} steps")
