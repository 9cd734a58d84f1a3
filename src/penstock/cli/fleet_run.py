"""penstock fleet run: an elastic run's own trace and figures, for replays."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face
from penstock.files import Json, write_text


def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Of an elastic run.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For both files; default: the run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write what an elastic run was as a trace and a job: ranks.csv and fleet.toml.

    Steps per second by ranks, what changes cost, who came and went when.

    Example: penstock fleet run runs/gpt --out plans
    """
    from penstock.fleet.of_run import recorded

    found, place = recorded(folder), folder if out is None else out
    write_text(place / "ranks.csv", found.csv)
    write_text(place / "fleet.toml", found.toml)
    speeds = {speed.machines: speed.steps_per_s for speed in found.job.speeds}
    if as_json:
        rates: dict[str, Json] = {f"{count}": rate for count, rate in speeds.items()}
        about: dict[str, Json] = {"steps": found.job.steps, "seconds": found.seconds}
        face.show_json({**about, "reform_s": found.job.reform_s, "steps_per_s": rates})
        return
    words = ", ".join(f"{rate:.4g} on {count}" for count, rate in speeds.items())
    face.show(f"{found.job.steps:,.0f} steps in {found.seconds:,.1f} s; steps/s: {words} ranks")
    face.show(f"a change took {found.job.reform_s:.3g} s; wrote {place}/ranks.csv and fleet.toml")
