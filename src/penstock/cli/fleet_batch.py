"""penstock fleet batch: how many ranks and which batch, by time and by cost, from short runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from penstock.cli import face
from penstock.cli.of_flags import of_flags
from penstock.errors import EstimateError
from penstock.files import Json
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.fleet.batch_size import BatchOption

_MOST_SHOWN = 20  # options; --json has them all


class BatchFlags(NamedTuple):
    """Runs, and what is looked for."""

    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of short runs.")]
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of ranks.")] = "1,2,4,8"
    batches: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Samples of a step; default: the runs'.")
    ] = None
    steps: Annotated[
        float, typer.Option(min=1, help="To the target, with the first run's batch.")
    ] = 1000.0
    price: Annotated[float, typer.Option(min=0, help="Dollars an hour of a rank.")] = 1.0
    objective: Annotated[Literal["time", "cost"], typer.Option(help="What is to be least.")] = (
        "time"
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@of_flags
def batch(flags: BatchFlags) -> None:
    """Say how many ranks and which batch reach a target soonest, or for least money.

    Short runs of the job with unlike ranks or batches tell how long a step takes and how noisy
    gradients are (20 steps each); docs/fleet_predict.md has the formulas.

    Example: penstock fleet batch runs/one runs/two --objective cost
    """
    from penstock.fleet.batch_size import phase_of, phases

    told = [phase_of(folder) for folder in flags.runs]
    found = phases(told)
    sizes = sorted({one.batch for one in told})
    sizes = _numbers("--batches", flags.batches) if flags.batches else sizes
    over = [(count, size) for count in _numbers("--ranks", flags.ranks) for size in sizes]
    options = found.options(over, steps=flags.steps, batch=told[0].batch, usd_per_hour=flags.price)
    options.sort(key=lambda one: (one.seconds if flags.objective == "time" else one.usd, one.ranks))
    if flags.as_json:
        rows: list[Json] = [dict(one._asdict()) for one in options]
        about: dict[str, Json] = {"noise_scale_samples": found.scale, "objective": flags.objective}
        face.show_json({**about, "rows": rows})
    else:
        _show(options, found.scale)


def _numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10**9 for part in parts):
        raise EstimateError(f'{flag} is "{text}"', hint=f"write {flag} 1,2,4")
    return sorted({int(part) for part in parts})


def _show(options: "list[BatchOption]", scale: float) -> None:
    head = "ranks", "batch", "a step", "steps", "time", "dollars"
    rows = [
        (
            one.ranks,
            one.batch,
            format_seconds(one.step_s),
            f"{one.steps:.0f}",
            format_seconds(one.seconds),
            f"{one.usd:.4g}",
        )
        for one in options
    ]
    face.show(face.table(head, rows[:_MOST_SHOWN]))
    face.show(f"noise scale {scale:.4g} samples; best first")
