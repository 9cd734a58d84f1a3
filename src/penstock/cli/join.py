"""penstock join: this process becomes a rank of an elastic run."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face


def join(
    run: Annotated[
        str, typer.Argument(metavar="DIR|tcp://HOST:PORT", help="Of an elastic run, or of a rank.")
    ],
    token_file: Annotated[
        Path | None, typer.Option(help="The run's token, for who joins by an address.")
    ] = None,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds to wait to be taken in.")] = 60.0,
    forget_state: Annotated[
        bool, typer.Option("--forget-state", help="Go on without state that is not saved.")
    ] = False,
    yes: face.Yes = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Be a rank of an elastic run that lost one, until it ends; a signal lets it leave before.

    Example: penstock join runs/gpt
    """
    if "://" not in run:
        face.check_folder(Path(run))
    with face.loading():
        from penstock.training import view
        from penstock.training.joining import JoinTerms, join_run

    with face.only_results():
        lived = join_run(
            run,
            token_file=token_file,
            terms=JoinTerms(limit, forget_state, asks=face.agrees(yes=yes)),
            listener=view.TERMINAL,
        )
    if as_json:
        face.show_json({"joined": run, "steps": lived.done, "over": lived.is_over})
    elif lived.is_over:
        face.show(f"the run has ended after {lived.done:,} steps")
    elif not lived.done:
        face.show("this process has left before the run took it in")
    else:
        face.show(f"this rank has left the run after {lived.done:,} steps")
