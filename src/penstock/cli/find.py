"""penstock schedule --find: the shortest schedule for given seconds and memory, beside the others.

`exact` solves for one stage on each rank, or for equal seconds for stages in waves, and gives a
lower bound; with the seconds of a copy it also decides which activations wait on the host.
`anneal` shortens existing schedules.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.cli import face
from penstock.errors import ScheduleError
from penstock.files import Json
from penstock.schedule.exact_offload import Copies
from penstock.schedule.figures import peak_activations
from penstock.schedule.greedy import Seconds
from penstock.schedule.orders import B, F, I, W
from penstock.schedule.schedule import Schedule
from penstock.timeline.draw import draw
from penstock.timeline.timeline import Timeline

How: TypeAlias = Literal["exact", "anneal"]
_MOST = {"exact": 600, "anneal": 100_000}  # forwards
_STARTS, _SHOWN = 3, 5  # built-in schedules: annealed, and listed
_MOST_DRAWN = 64  # ranks
_WIDEST = 240  # columns with copies, whose seconds rarely have a common part
_HINT = "write F,I,W as in 10,11,8, then optionally a message and a copy; by stage as in 10:12:9"


class Times(NamedTuple):
    """What actions and messages take, and a copy of an activation to the host or back."""

    seconds: Seconds
    copies: Copies | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What to find a schedule for: sizes, activations that a rank may hold, and seconds.

    start   what to anneal; None: the best built-in ones
    """

    stages: int
    micro_batches: int
    ranks: int
    limit: int
    times: Times
    start: Schedule | None = None


@dataclass(frozen=True, slots=True)
class Shortest:
    """What was found: its step, a lower bound, and the built-in ones, best first."""

    schedule: Schedule
    step_s: float
    bound_s: float
    is_proved: bool
    known: tuple[tuple[str, float], ...]
    copies: tuple[str, ...] = ()
    run_s: float | None = None  # with copies, which ranks begin between computes


def times_of(text: str, stages: int) -> Times:
    """Return the seconds that `text` says: F,I,W[,MESSAGE[,COPY]].

    Raises:   ScheduleError: too few or many numbers, one below 0, or not one for each stage.
    """
    parts = text.split(",")
    try:
        numbers = [tuple(map(float, part.split(":"))) for part in parts]
    except ValueError:
        raise ScheduleError(
            f"--seconds {text} has something that is not a number", hint=_HINT
        ) from None
    if not 3 <= len(parts) <= 5 or any(len(each) > 1 for each in numbers[3:]):
        message = f"--seconds {text} is not three to five numbers, of which F, I and W may differ"
        raise ScheduleError(message, hint=_HINT)
    forward, backward, weights = (each[0] if len(each) == 1 else each for each in numbers[:3])
    more = [each[0] for each in numbers[3:]]
    if any(not 0 <= each < float("inf") for part in numbers for each in part):
        raise ScheduleError(f"--seconds {text} has a negative or infinite number", hint=_HINT)
    seconds = Seconds(forward, backward, weights, more[0] if more else 0.0)
    seconds.table(stages, split=True)  # raises where there is not one for each stage
    return Times(seconds, Copies(more[1], more[1]) if len(more) > 1 else None)


def aim_of_run(folder: Path, sizes: tuple[int | None, int | None], limit: int | None) -> Target:
    """Return what to find for the seconds of a run, in its sizes, with the room that it had.

    sizes:    stages and micro-batches, where they are asked for.
    Raises:   ScheduleError: they are asked for, and others.  PlanError: no such run, or not of one
              stage on each rank.
    """
    from penstock.cli.replay import load
    from penstock.simulate.again import measured

    run = load(folder)
    own = run.plan.num_stages, run.plan.num_micro_batches
    for what, asked, has in zip(("stages", "micro-batches"), sizes, own, strict=True):
        if asked not in (None, has):
            message = f"{folder} is a run of {has} {what}, not of {asked}"
            raise ScheduleError(message, hint=f"leave out --{what}")
    seconds, copies, held = measured(run)
    most = held if limit is None else limit
    return Target(*own, own[0], most, Times(seconds, copies))


def aim_of(
    start: Schedule | None, sizes: tuple[int, int, int | None], limit: int | None, times: Times
) -> Target:
    """Return what to find; `sizes` are stages, micro-batches and ranks, those of `start` first.

    Without `limit` a rank holds as many activations as in the schedule named, or as there are
    stages, which is what 1F1B takes.
    """
    stages, micro_batches, ranks = sizes
    if start is None:
        most = stages if limit is None else limit
        return Target(stages, micro_batches, ranks or stages, most, times)
    most = max(peak_activations(start)) if limit is None else limit
    return Target(start.num_stages, start.num_micro_batches, start.num_ranks, most, times, start)


def shortest(aim: Target, how: How, within_s: float) -> Shortest:
    """Return the shortest schedule that is found in about `within_s`.

    Raises:   ScheduleError: too many actions; more than `how` can do is requested; no schedule has
              these sizes and holds so little.
    """
    if aim.stages * aim.micro_batches > _MOST[how]:
        message = f"{aim.stages} stages x {aim.micro_batches} micro-batches: too many"
        other = "; --find anneal takes more" if how == "exact" else ""
        raise ScheduleError(message, hint=f"ask for at most {_MOST[how]} in all{other}")
    return _exact(aim, within_s) if how == "exact" else _annealed(aim, within_s)


def _exact(aim: Target, within_s: float) -> Shortest:
    from penstock.schedule.exact import exact
    from penstock.schedule.exact_offload import exact_offload
    from penstock.schedule.exact_waves import exact_waves

    if aim.start is not None:
        message = f"--find exact starts from no schedule, but {aim.start.name} is named"
        raise ScheduleError(message, hint="leave out the name, or take --find anneal")
    if aim.ranks != aim.stages:
        _check_alike(aim)
        sizes = aim.stages, aim.micro_batches, aim.ranks
        made = exact_waves(*sizes, limit=aim.limit, time_limit_s=within_s)
        second = aim.times.seconds.table(aim.stages, split=True)[0, 0]
        steps = made.step_s * second, made.bound_s * second
        return Shortest(made.schedule, *steps, made.is_proved, _known(aim))
    sizes, (seconds, copies) = (aim.stages, aim.micro_batches), aim.times
    if copies is None:
        made = exact(*sizes, seconds=seconds, limit=aim.limit, time_limit_s=within_s)
        return Shortest(made.schedule, made.step_s, made.bound_s, made.is_proved, _known(aim))
    made = exact_offload(*sizes, copies, seconds=seconds, limit=aim.limit, time_limit_s=within_s)
    figures = made.step_s, made.bound_s, made.is_proved
    listed = tuple(map(str, made.copies))
    return Shortest(made.schedule, *figures, _known(aim), listed, made.run_s)


def _check_alike(aim: Target) -> None:
    """Check that F, I and W take the same everywhere, and messages nothing."""
    seconds, copies = aim.times
    if copies is not None or seconds.message_s or np.ptp(seconds.table(aim.stages, split=True)):
        message = f"--find exact puts one stage on each rank, not {aim.stages} on {aim.ranks}"
        hint = "leave out --ranks, give F, I and W the same seconds and no more, or --find anneal"
        raise ScheduleError(message, hint=hint)


def _annealed(aim: Target, within_s: float) -> Shortest:
    from penstock.search.shortest import Requirements, anneal, built_in, least_s

    seconds, copies = aim.times
    if copies is not None or (aim.start is not None and aim.start.far):
        hint = "leave out the fifth number of --seconds, or take --find exact"
        hint = hint if copies is not None else "take --find exact, which starts from no schedule"
        raise ScheduleError("--find anneal makes no copies to the host", hint=hint)
    given = Requirements(aim.stages, aim.micro_batches, aim.ranks, aim.limit, seconds)
    known = built_in(given)
    starts = [each.schedule for each in known[:_STARTS]] if aim.start is None else [aim.start]
    end_s = time.monotonic() + within_s
    found = anneal(starts, given, lambda: time.monotonic() >= end_s)
    bound_s = min(found.step_s, least_s(found.schedule, seconds))
    is_proved = found.step_s <= bound_s * (1 + 1e-9)
    pairs = tuple((each.schedule.name, each.step_s) for each in known)
    return Shortest(found.schedule, found.step_s, bound_s, is_proved, pairs)


def _known(aim: Target) -> tuple[tuple[str, float], ...]:
    from penstock.search.shortest import Requirements, built_in

    sizes = aim.stages, aim.micro_batches, aim.ranks, aim.limit
    known = built_in(Requirements(*sizes, aim.times.seconds))
    return tuple((each.schedule.name, each.step_s) for each in known)


# -- words ----------------------------------------------------------------------------------------


def words(aim: Target, how: How, found: Shortest) -> str:
    """Return what was found beside known schedules, its picture, and its copies."""
    made = found.schedule
    best = found.known[0][1] if found.known else None
    head = (
        f"{aim.stages} stages on {aim.ranks} ranks, {aim.micro_batches} micro-batches, "
        f"at most {aim.limit} activations on a rank; {_said(aim.times)}"
    )
    rows = [(f"found ({how})", f"{found.step_s:g} s", *_beside(found.step_s, best))]
    rows += [(name, f"{step:g} s", "") for name, step in found.known[:_SHOWN]]
    parts = [head, face.table(("schedule", "step", ""), rows)]
    where = "" if aim.ranks == aim.stages else " with its stages on these ranks"
    below = f"no schedule{where} is below {found.bound_s:g} s"
    parts.append(f"no schedule{where} is shorter" if found.is_proved else below)
    drawn = draw(timeline(made, aim.times)) if made.num_ranks <= _MOST_DRAWN else ""
    if drawn and not (found.copies and drawn.index("\n") > _WIDEST):
        parts.append(drawn)
    if found.copies:
        parts.append("\n".join([str(made), *found.copies]))
    if found.run_s is not None and found.run_s > found.step_s:
        parts.append(f"with copies back begun between computes, as ranks do: {found.run_s:g} s")
    return "\n\n".join(parts)


def _beside(step_s: float, best_s: float | None) -> tuple[str]:
    if best_s is None or best_s == 0:
        return ("",)
    return (f"{100 * (step_s / best_s - 1):+.1f} % of the best built-in",)


def _said(times: Times) -> str:
    shown: list[str] = []
    for name, value in zip(("F", "I", "W", "a message"), times.seconds[:4], strict=True):
        each = value if isinstance(value, Sequence) else (value,)
        shown.append(f"{name} {' '.join(f'{one:g}' for one in each)} s")
    for name, value in zip(("to the host", "back"), times.copies or (), strict=False):
        each = value if isinstance(value, Sequence) else (value,)
        shown.append(f"a copy {name} {' '.join(f'{one:g}' for one in each)} s")
    return ", ".join(shown)


def document(aim: Target, found: Shortest) -> dict[str, Json]:
    """Return what `words` shows, to be added to the document of the schedule."""
    return {
        "limit": aim.limit,
        "step_s": found.step_s,
        "bound_s": found.bound_s,
        "is_proved": found.is_proved,
        "built_in": [{"name": name, "step_s": step} for name, step in found.known],
        "copies": list(found.copies),
        **({} if found.run_s is None else {"run_s": found.run_s}),
    }


def timeline(made: Schedule, times: Times) -> Timeline:
    """Return the timeline of a schedule with these seconds; messages share no link."""
    from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
    from penstock.program.codes import COST_ROW, NUM_COSTS, OFFLOAD, RELOAD
    from penstock.program.lower import lower
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulate import simulate

    seconds = times.seconds
    rows = np.zeros((NUM_COSTS, made.num_stages, 1))
    rows[[F, I, W], :, 0] = seconds.table(made.num_stages, split=True)
    rows[B] = rows[I] + rows[W]
    if times.copies is not None:
        rows[COST_ROW[[RELOAD, OFFLOAD], F], :, 0] = times.copies.table(made.num_stages)
    link = Link(seconds.message_s, float("inf"))
    there = Cluster((DeviceKind("any", 1, (), 1.0),), (Host("any", "any", made.num_ranks),), link)
    return simulate(lower(made), Costs(rows), there if seconds.message_s else None)
