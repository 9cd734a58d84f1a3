"""penstock schedule: list the schedules, or draw one with its bubble, versions and memory."""

import inspect
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from penstock.choose.flag_text import schedule_asked
from penstock.cli import face
from penstock.cli import find as finding
from penstock.cli.of_flags import of_flags
from penstock.errors import ScheduleError
from penstock.files import Json, write_text
from penstock.schedule import SCHEDULES, Builder
from penstock.schedule.figures import (
    Step,
    added_step,
    bubble,
    bubble_fraction,
    num_messages,
    peak_activations,
    weight_copies,
)
from penstock.schedule.recipe import AnySchedule, Recipe, has_window
from penstock.schedule.schedule import Schedule
from penstock.schedule.steady import (
    steady_bubble_fraction,
    steady_s,
)
from penstock.schedule.weight_rule import versions
from penstock.timeline.draw import draw
from penstock.timeline.svg import svg_of
from penstock.timeline.timeline import Timeline

UNIT_S = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0}
UNITS = "F, I and W take 1 s, B takes 2 s, updates and links nothing; equal stages"
_MOST_FORWARDS = 50_000_000  # arrays of about 2 GiB
_MOST_DRAWN = 64  # ranks
_STAGES, _MICRO_BATCHES = 4, 8
_OF_SEARCHES, _WITHIN_S = ("seconds", "limit", "within"), 20.0
_FULL = 4  # micro-batches for each stage, after which a window is full

_SECONDS = typer.Option(
    metavar="F,I,W[,MESSAGE[,COPY]]|DIR",
    help="To find one for; 2:3:2,2,1 has F by stage; or a run's. Default: 1,1,1.",
)
_LIMIT = typer.Option(min=1, help="Activations that a rank may hold, of one stage each.")
_WITHIN = typer.Option(min=0, help="Seconds to search. Default: 20.")


class ScheduleFlags(NamedTuple):
    """Which schedule is drawn, or found, and for what."""

    name: Annotated[str | None, typer.Argument(help="A name, or a file; default: list all.")] = None
    stages: Annotated[int | None, typer.Option(min=1, help="Default: 4, or its units.")] = None
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches per step. Default: 8.")
    ] = None
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks, where stages share them.")] = None
    how: Annotated[finding.How | None, typer.Option("--find", help="Find the shortest.")] = None
    seconds: Annotated[str | None, _SECONDS] = None
    limit: Annotated[int | None, _LIMIT] = None
    within: Annotated[float | None, _WITHIN] = None
    out: Annotated[Path | None, typer.Option(help="Write its orders into this file.")] = None
    svg: Annotated[Path | None, typer.Option(help="Also draw it into this file.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@of_flags
def schedule(flags: ScheduleFlags) -> None:
    """List the schedules, draw one, or find one.

    A drawing comes with its bubble, its weight versions and what its ranks hold.  --find exact
    solves for one stage on each rank, --find anneal moves actions in the named schedule, or
    in the best built-in ones; the result is shown beside those and a lower bound.

    Example: penstock schedule zb_h1 --stages 4 --micro-batches 8
    """
    if flags.how is None:
        _check_no_search({f"--{name}": getattr(flags, name) for name in _OF_SEARCHES})
    named, sizes = flags.name, (flags.stages, flags.micro_batches, flags.ranks)
    made = None if named is None else _named(named, sizes)
    if flags.how is not None:
        within_s = _WITHIN_S if flags.within is None else flags.within
        aim = _aim(made, flags.how, sizes, flags.limit, flags.seconds)
        _found(aim, flags.how, within_s, (flags.out, flags.svg), as_json=flags.as_json)
    elif made is not None:
        _write(made, flags.out, flags.svg, lambda: simulated(made))
        _one(made, None if named is None else schedule_asked(named), as_json=flags.as_json)
    elif flags.out is not None:
        raise ScheduleError("--out writes one schedule: which?", hint="name it, or add --find")
    elif flags.svg is not None:
        hint = "penstock schedule zb_h1 --svg zb_h1.svg"
        raise ScheduleError("--svg draws one schedule: which?", hint=hint)
    elif flags.as_json:
        face.show_json({"schedules": [builder.__name__ for builder in SCHEDULES]})
    else:
        _all(flags.stages or _STAGES, flags.micro_batches or _MICRO_BATCHES)


def _aim(
    made: Schedule | None,
    how: finding.How,
    sizes: tuple[int | None, int | None, int | None],
    limit: int | None,
    seconds: str | None,
) -> finding.Target:
    """Return what to find; `sizes` are stages, micro-batches and ranks, where asked for."""
    stages, micro_batches, ranks = sizes
    if how == "exact" and made is None and ranks is None and seconds and Path(seconds).is_dir():
        with face.busy("reading"):
            return finding.aim_of_run(Path(seconds), (stages, micro_batches), limit)
    own = stages or _STAGES
    times = finding.times_of(seconds or "1,1,1", made.num_stages if made else own)
    return finding.aim_of(made, (own, micro_batches or _MICRO_BATCHES, ranks), limit, times)


def _named(name: str, sizes: tuple[int | None, int | None, int | None]) -> Schedule:
    """Return the schedule in a file, or the named one of these sizes, by default of its units."""
    stages, micro_batches, ranks = sizes
    with face.busy("building"):
        asked = schedule_asked(name)
        if isinstance(asked, Schedule):
            return asked
        return build(
            asked, stages or sum(asked.units) or _STAGES, micro_batches or _MICRO_BATCHES, ranks
        )


def _check_no_search(flags: Mapping[str, object]) -> None:
    for flag, value in flags.items():
        if value is not None:
            hint = "add --find exact or --find anneal"
            raise ScheduleError(f"{flag} without --find", hint=hint)


def _found(
    aim: finding.Target,
    how: finding.How,
    within_s: float,
    files: tuple[Path | None, Path | None],
    *,
    as_json: bool,
) -> None:
    """Find a schedule, write it into its files, orders and picture, and show it."""
    out, svg = files
    for path in (out, svg):
        if path is not None:
            face.check_place(path)
    with face.busy("searching"):
        found = finding.shortest(aim, how, within_s)
    made = found.schedule
    _write(made, out, svg, lambda: finding.timeline(made, aim.times))
    if as_json:
        face.show_json({**_document(made, _long_run(made, made)), **finding.document(aim, found)})
    else:
        face.show(finding.words(aim, how, found))
    if out is not None:
        face.say(f"wrote {out}")


def _write(
    made: Schedule, out: Path | None, svg: Path | None, timed: Callable[[], Timeline]
) -> None:
    if out is not None:
        write_text(out, f"{made}\n")
    if svg is not None:
        title = f"{made.name}: {made.num_stages} stages, {made.num_micro_batches} micro-batches"
        write_text(svg, svg_of(timed(), title))


def build(recipe: Recipe, stages: int, micro_batches: int, ranks: int | None) -> Schedule:
    """Return the schedule of these sizes; `ranks` None leaves it to the schedule.

    Raises:   ScheduleError: too large, or impossible on that many ranks.
    """
    if stages * micro_batches > _MOST_FORWARDS:
        message = f"{stages} stages x {micro_batches} micro-batches are too many to list"
        raise ScheduleError(message, hint=f"ask for at most {_MOST_FORWARDS} in all")
    made = recipe.build(stages, micro_batches, num_ranks=ranks)
    if ranks not in (None, made.num_ranks):
        message = f"{made.name} puts {stages} stages on {made.num_ranks} ranks, not on {ranks}"
        raise ScheduleError(message, hint="leave out --ranks, or take interleaved")
    return made


def _all(stages: int, micro_batches: int) -> None:
    rows: list[tuple[object, ...]] = []
    with face.progress("building") as update:
        for number, builder in enumerate(SCHEDULES):
            update(number, len(SCHEDULES))
            made = build(Recipe(builder.__name__), stages, micro_batches, None)
            text = _what(builder)
            idle, held = 100 * bubble_fraction(made), max(peak_activations(made))
            steady = f"{100 * _long_run(made, Recipe(builder.__name__)).idle_fraction:.1f} %"
            alive, sent = max(versions(made).alive), num_messages(made) // made.num_steps
            figures = (f"{idle:.1f} %", steady, held, alive, sent)
            rows.append((made.name, made.num_ranks, *figures, text))
    face.show(f"{stages} stages, {micro_batches} micro-batches a step; {UNITS}\n")
    names = ("schedule", "ranks", "bubble", "long run", "activations", "versions", "messages", "")
    face.show(face.table(names, rows))
    face.show(
        "\nbubble: idle part of all ranks' time; long run: in a run without a barrier; "
        "activations, versions: most that one rank holds; messages: between ranks, per step"
    )


def _what(builder: Builder) -> str:
    """Return the first line of a schedule's page, or of its function where a page has several."""
    page = inspect.getmodule(builder)
    alone = sum(inspect.getmodule(other) is page for other in SCHEDULES) == 1
    text = (inspect.getdoc(page if alone else builder) or "").splitlines()[0]
    return text.removeprefix("Return ").removeprefix("the schedule of ")


def _long_run(made: Schedule, of: AnySchedule) -> Step:
    """Return a step of a long run without a barrier.

    of:  of what a window is; an asynchronous recipe drains only at the end of the run, so its step
         is what each one of a longer window adds.
    """
    if not isinstance(of, Recipe) or not has_window(of):
        return Step(steady_s(made), steady_bubble_fraction(made))
    each, turn = made.num_micro_batches, made.weight_rule.turn
    rounds = -(-_FULL * made.num_stages // each)  # micro-batches that fill the pipeline
    steps = rounds * (lcm(each, turn) // each)
    sizes = made.num_stages, each
    window, longer = (of.build(*sizes, num_steps=count) for count in (steps, 2 * steps))
    return added_step(window, longer)


def _one(made: Schedule, asked: AnySchedule | None, *, as_json: bool) -> None:
    own = made if asked is None else asked
    if as_json:
        face.show_json(_document(made, _long_run(made, own)))
        return
    steps = f" x {made.num_steps} steps" if made.num_steps > 1 else ""
    sizes = f"{made.num_stages} stages on {made.num_ranks} ranks"
    each = "B" if any(action.kind == "B" for action in made.orders[0]) else "W"
    group = f"; each {each} is of {made.together} micro-batches" if made.together > 1 else ""
    counts = f"{made.num_micro_batches} micro-batches{steps}"
    face.show(f"{made.name}: {sizes}, {counts}{group}; {UNITS}\n")
    if made.num_ranks <= _MOST_DRAWN:
        face.show(f"{picture(made)}\n")
    else:
        face.show(f"(no picture of more than {_MOST_DRAWN} ranks; --json lists the orders)\n")
    with face.busy("counting"):
        idle_s, held, share = bubble(made), peak_activations(made), bubble_fraction(made)
        alive, lives = versions(made).alive, made.stage_ranks
        each_s, steady = _long_run(made, own)
    rows = [
        (rank, f"{idle_s[rank]:g} s", held[rank], max(_of_rank(rank, alive, lives), default=0))
        for rank in range(made.num_ranks)
    ]
    face.show(face.table(("rank", "idle", "activations", "versions"), rows[:_MOST_DRAWN]))
    face.show(f"\nbubble: {100 * share:.2f} % of all ranks' time")
    face.show(f"in a long run without a barrier: {100 * steady:.2f} %, {each_s:g} s a step")


def _of_rank(rank: int, alive: Sequence[int], lives: Sequence[Sequence[int]]) -> Iterator[int]:
    return (count for count, ranks in zip(alive, lives, strict=True) if rank in ranks)


def _document(made: Schedule, long_run: Step) -> dict[str, Json]:
    return {
        "name": made.name,
        "stages": made.num_stages,
        "micro_batches": made.num_micro_batches,
        "ranks": [list(words.split()) for words in made.words()],
        "bubble_fraction": bubble_fraction(made),
        "steady_bubble_fraction": long_run.idle_fraction,
        "steady_s": long_run.step_s,
        "peak_activations": list(peak_activations(made)),
        "weight_versions": list(versions(made).alive),
        "weight_copies": list(weight_copies(made)),
    }


def simulated(made: Schedule) -> Timeline:
    """Return the timeline of a schedule with the seconds of UNIT_S and free links."""
    from penstock.program.lower import lower
    from penstock.simulate.simulate import simulate

    with face.busy("simulating"):
        program = lower(made)
        return simulate(program, lambda a: UNIT_S[a.kind] * len(program.group_of(a)))


def picture(made: Schedule) -> str:
    """Return a line per rank and a column per second, in blocks that fit the terminal."""
    drawn = draw(simulated(made))
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
