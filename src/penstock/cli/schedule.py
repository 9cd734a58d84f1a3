"""penstock schedule: list the schedules, or draw one with its bubble, versions and memory."""

import inspect
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from penstock.cli import face
from penstock.errors import ScheduleError
from penstock.files import Json
from penstock.schedule import (
    SCHEDULES,
    Builder,
    Schedule,
    bubble,
    bubble_fraction,
    find,
    peak_activations,
    versions,
)

UNIT_S = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0}
UNITS = "F, I and W take 1 s, B takes 2 s, updates and links nothing; equal stages"
_MOST_FORWARDS = 50_000_000  # arrays of about 2 GiB
_MOST_DRAWN = 64  # ranks


def schedule(
    name: Annotated[str | None, typer.Argument(help="Which to draw; without it, list all.")] = None,
    stages: Annotated[int, typer.Option(min=1, help="Stages of the model.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 8,
    ranks: Annotated[int | None, typer.Option(min=1, help="Where stages share ranks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the schedules, or draw one.

    A drawing comes with its bubble, its weight versions and what its ranks hold.

    Example: penstock schedule zb_h1 --stages 4 --micro-batches 8
    """
    if name is not None:
        with face.busy("building"):
            made = build(find(name), stages, micro_batches, ranks)
        _one(made, as_json=as_json)
    elif as_json:
        face.show_json({"schedules": [builder.__name__ for builder in SCHEDULES]})
    else:
        _all(stages, micro_batches)


def build(builder: Builder, stages: int, micro_batches: int, ranks: int | None) -> Schedule:
    """Return the schedule of these sizes; `ranks` None leaves it to the schedule.

    Raises:   ScheduleError: too large, or not possible on so many ranks.
    """
    if stages * micro_batches > _MOST_FORWARDS:
        message = f"{stages} stages x {micro_batches} micro-batches are too many to list"
        raise ScheduleError(message, hint=f"ask for at most {_MOST_FORWARDS} in all")
    if ranks is not None and "num_ranks" in inspect.signature(builder).parameters:
        extra = {"num_ranks": ranks}
        return builder(stages, micro_batches, **extra)
    made = builder(stages, micro_batches)
    if ranks not in (None, made.num_ranks):
        message = f"{made.name} puts {stages} stages on {made.num_ranks} ranks, not on {ranks}"
        raise ScheduleError(message, hint="leave out --ranks, or take interleaved")
    return made


def _all(stages: int, micro_batches: int) -> None:
    rows: list[tuple[object, ...]] = []
    with face.progress("building") as update:
        for number, builder in enumerate(SCHEDULES):
            update(number, len(SCHEDULES))
            made = build(builder, stages, micro_batches, None)
            text = (inspect.getdoc(inspect.getmodule(builder)) or "").splitlines()[0]
            idle, held = 100 * bubble_fraction(made), max(peak_activations(made))
            alive = max(versions(made).alive)
            rows.append((made.name, made.num_ranks, f"{idle:.1f} %", held, alive, text))
    face.show(f"{stages} stages, {micro_batches} micro-batches a step; {UNITS}\n")
    face.show(face.table(("schedule", "ranks", "bubble", "activations", "versions", ""), rows))
    face.show(
        "\nbubble: idle part of all ranks' time; activations, versions: most that one rank holds"
    )


def _one(made: Schedule, *, as_json: bool) -> None:
    if as_json:
        face.show_json(_document(made))
        return
    steps = f" x {made.num_steps} steps" if made.num_steps > 1 else ""
    sizes = f"{made.num_stages} stages on {made.num_ranks} ranks"
    face.show(f"{made.name}: {sizes}, {made.num_micro_batches} micro-batches{steps}; {UNITS}\n")
    if made.num_ranks <= _MOST_DRAWN:
        face.show(f"{picture(made)}\n")
    else:
        face.show(f"(no picture of more than {_MOST_DRAWN} ranks; --json lists the orders)\n")
    with face.busy("counting"):
        idle_s, held, share = bubble(made), peak_activations(made), bubble_fraction(made)
        alive, lives = versions(made).alive, made.stage_ranks
    rows = [
        (rank, f"{idle_s[rank]:g} s", held[rank], max(_of_rank(rank, alive, lives), default=0))
        for rank in range(made.num_ranks)
    ]
    face.show(face.table(("rank", "idle", "activations", "versions"), rows[:_MOST_DRAWN]))
    face.show(f"\nbubble: {100 * share:.2f} % of all ranks' time")


def _of_rank(rank: int, alive: Sequence[int], lives: Sequence[Sequence[int]]) -> Iterator[int]:
    return (count for count, ranks in zip(alive, lives, strict=True) if rank in ranks)


def _document(made: Schedule) -> dict[str, Json]:
    return {
        "name": made.name,
        "stages": made.num_stages,
        "micro_batches": made.num_micro_batches,
        "ranks": [list(words.split()) for words in made.orders.words()],
        "bubble_fraction": bubble_fraction(made),
        "peak_activations": list(peak_activations(made)),
        "weight_versions": list(versions(made).alive),
    }


def picture(made: Schedule) -> str:
    """Return a line per rank and a column per second, in blocks that fit the terminal."""
    from penstock.program.lower import lower
    from penstock.simulate import simulate
    from penstock.timeline import draw

    with face.busy("simulating"):
        drawn = draw(simulate(lower(made), lambda action: UNIT_S[action.kind]))
    if not sys.stdout.isatty():
        return drawn
    return "\n\n".join(in_blocks(drawn, shutil.get_terminal_size().columns))


def in_blocks(drawn: str, columns: int) -> Iterator[str]:
    """Yield parts of a picture, each at most `columns` wide and with the names of the ranks."""
    lines = drawn.splitlines()
    names = [" ".join(line.split()[:2]) for line in lines]
    start = max(map(len, names)) + 2
    longest = max(lines, key=len)
    cell = 1 + max(map(len, longest[start:].split()), default=1)
    cell = next((w for w in range(cell, len(longest) + 2) if _is_grid(lines, start, w)), cell)
    take = max(1, (columns - start + 1) // cell) * cell
    for at in range(start, max(start + 1, len(longest)), take):
        rows = zip(names, lines, strict=True)
        yield "\n".join(f"{name:{start}}{line[at : at + take]}".rstrip() for name, line in rows)


def _is_grid(lines: Sequence[str], start: int, cell: int) -> bool:
    """Return whether a space ends every cell of that width on every line."""
    return all(line[at] == " " for line in lines for at in range(start + cell - 1, len(line), cell))
