"""Flag text: what the text of a flag says: a schedule, units, a size."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from penstock.errors import PlanError, ScheduleError
from penstock.job import Job
from penstock.plan.plan import Units
from penstock.program.passes.offload import Offloaded
from penstock.routes import FASTEST, topology_of
from penstock.schedule.recipe import AnySchedule, Recipe, any_schedule, has_window, name_of
from penstock.schedule.schedule import Schedule
from penstock.units import GB, KB, MB, TB, GiB, KiB, MiB, TiB

_MOST_UNITS = 1_000_000
_SIZE = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?) ?(?P<unit>[a-zA-Z]*)", re.ASCII)


def schedule_asked(text: str) -> AnySchedule:
    """Return the recipe of that name, like "two_bp(limit=4)", or the schedule in that file.

    A schedule that has no name is named after its file.
    Raises:   ScheduleError: there is neither, or the file holds no valid schedule.
    """
    path = Path(text)
    if not path.is_file():
        is_recipe = " / units " in text or text.endswith(")")  # arguments may have a point
        if not is_recipe and (path.suffix or len(path.parts) > 1):
            hint = "check the path; `penstock schedule` lists the names"
            raise ScheduleError(f"there is no schedule file {text}", hint=hint)
        return Recipe.parse(text)
    found = Schedule.load(path)
    return found if found.name else replace(found, name=" ".join(path.stem.split()))


def units_asked(text: str | None) -> Units | None:
    """Return what a flag says of units: "block", "woven", or at most how many a stage has.

    Raises:   PlanError: it is neither.
    """
    match text:
        case None | "block" | "woven":
            return text
        case number if number.isdecimal() and 1 <= int(number) < _MOST_UNITS:
            return int(number)
        case _:
            message = f'units is "{text}", neither block, woven, nor a number'
            raise PlanError(message, hint='write units="block", or units=4')


def check_fits(asked: str | AnySchedule | None, job: Job, *, post_validation: bool = False) -> None:
    """Raise unless a step of the job can be made as asked.

    Raises:   PlanError: the micro-batches of a schedule that stands for itself do not divide the
              job's; updates are to be validated, and nothing is clipped, or before a step's end.
    """
    if post_validation:
        _check_validation(asked, job)
    if isinstance(asked, Schedule) and job.micro_batches % asked.num_micro_batches:
        own, theirs = asked.num_micro_batches, job.micro_batches
        message = f"{name_of(asked)} is of {own} micro-batches; a step of the job has {theirs}"
        hint = f"write it out for {theirs} micro-batches, or a number that divides them"
        raise PlanError(message, hint=hint)


def _check_validation(asked: str | AnySchedule | None, job: Job) -> None:
    hint = "leave out post_validation"
    if job.scales_loss:
        message = "post_validation, and Job.precision is float16, where a step may be left out"
        raise PlanError(message, hint=f"set it to bfloat16, or {hint}")
    if job.clip_norm is None:
        raise PlanError("post_validation, and Job.clip_norm is None", hint=f"set it, or {hint}")
    if asked is not None and has_window(schedule := any_schedule(asked)):
        message = f"post_validation, and {name_of(schedule)} does not update at a step's end"
        raise PlanError(message, hint=f"take another schedule, or {hint}")


def check_left_out(asks: Mapping[str, object]) -> None:
    """Raise if an option sets, beside a plan, what the plan already says.

    Raises:   PlanError: it names them.
    """
    names = [name for name, value in asks.items() if value]
    if names:
        message = f"a plan is given, and it already decides what {names[0]} asks for"
        raise PlanError(message, hint=f"leave out plan, or {', '.join(names)}")


def topology_asked(text: str | None) -> str | None:
    """Return along whose rounds sums are to go, None: as the transport makes them.

    Raises:   PlanError: there is no such topology.
    """
    if text in (None, FASTEST):
        return text
    try:
        topology_of(text)
    except ValueError as problem:
        raise PlanError(f"topology is not {problem}", hint='or "fastest", by prediction') from None
    return text


def memory_asked(text: str | int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    """Return the bytes that a rank may hold: a number of bytes, or with a unit as in "1.5 GiB".

    Several, as in "60MiB,30MiB": of one rank each.
    Raises:   PlanError: something else, or less than one byte.
    """
    if text is None:
        return None
    sizes = text if isinstance(text, tuple) else (text,) if isinstance(text, int) else ()
    sizes = tuple(map(_size, text.split(","))) if isinstance(text, str) else sizes
    if min(sizes) < 1:
        hint = 'give a size such as "60MiB" or "1.5GB", or one for each rank: "60MiB,30MiB"'
        raise PlanError(f"memory is {text!r}", hint=hint)
    return sizes[0] if len(sizes) == 1 else sizes


def to_fill(memory: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    """Return how much of the bytes that a rank may hold a plan is to fill: all but a thousandth.

    What a rank holds beyond a prediction is less: the losses of micro-batches, and how far the
    measured workspace of ops is off.  Of little, 4 KiB besides, but at most a sixteenth in all.
    """
    if memory is None or isinstance(memory, tuple):
        return memory and tuple(map(_most, memory))
    return _most(memory)


def _most(size_bytes: int) -> int:
    return size_bytes - min(size_bytes // 1024 + 4 * KiB, size_bytes // 16)


def _size(text: str) -> int:
    """Return the bytes that a text says; 0 where it says none."""
    units = {"": 1, "B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB}
    units |= {"KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB}
    parts = _SIZE.fullmatch(text.strip())
    unit = units.get(parts["unit"].upper()) if parts else None
    return 0 if parts is None or unit is None else int(float(parts["number"]) * unit)


def offload_asked(text: str | None) -> Offloaded | None:
    """Return what is to be in far memory while it is not needed.

    Raises:   PlanError: not one of its words.
    """
    if text is None:
        return None
    for word in get_args(Offloaded):
        if text == word:
            return word
    words = ", ".join(get_args(Offloaded))
    raise PlanError(f'offload is "{text}"', hint=f"it can be {words}")
