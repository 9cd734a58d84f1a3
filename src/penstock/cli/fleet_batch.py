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
    gradients are (20 steps each); docs/fleet_predict.md has the formulas.  With runs of pipelines
    beside data parallel ones it says from how many ranks on copies of several ranks are better.

    Example: penstock fleet batch runs/one runs/two --objective cost
    """
    from penstock.fleet.batch_size import crossover, phase_of, phases_by_copies

    told = [phase_of(folder) for folder in flags.runs]
    kinds = phases_by_copies(told)
    sizes = sorted({one.batch for one in told})
    sizes = _numbers("--batches", flags.batches) if flags.batches else sizes
    over = [(count, size) for count in _numbers("--ranks", flags.ranks) for size in sizes]
    batch, price = told[0].batch, flags.price
    options = [
        one
        for kind in kinds
        for one in kind.options(over, steps=flags.steps, batch=batch, usd_per_hour=price)
    ]
    if not options:
        message = f"no number of ranks in {flags.ranks} is copies of {kinds[0].copy_ranks} ranks"
        raise EstimateError(message, hint="give numbers that it divides")
    options.sort(key=lambda one: one.score(flags.objective))
    cross = crossover(options, flags.objective) if len(kinds) > 1 else None
    if flags.as_json:
        rows: list[Json] = [dict(one._asdict()) for one in options]
        scale: Json = kinds[0].scale
        words: dict[str, Json] = {"noise_scale_samples": scale, "objective": flags.objective}
        face.show_json({**words, "crossover_ranks": cross, "rows": rows})
    else:
        _show(options, kinds[0].scale)
        if len(kinds) > 1:
            face.show(_crossing(cross))


def _numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10**9 for part in parts):
        raise EstimateError(f'{flag} is "{text}"', hint=f"write {flag} 1,2,4")
    return sorted({int(part) for part in parts})


def _crossing(ranks: int | None) -> str:
    if ranks is None:
        return "at no number of ranks up to the largest are copies of several ranks better"
    return f"from {ranks} ranks on copies of several ranks are better than of one"


def _show(options: "list[BatchOption]", scale: float) -> None:
    head = "ranks", "of a copy", "batch", "a step", "steps", "time", "dollars"
    rows = [
        (
            one.ranks,
            one.copy_ranks,
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
