"""Recipe: how a schedule is made, beside its sizes: a builder's name with all its arguments.

    one_f_one_b
    two_bp(limit=4)
    one_f_one_b / units 4 4                                     each of two stages in four units
    one_f_one_b / units 4 woven                                 two micro-batches in turn by unit
    zb_greedy for F 2.1 0.9 ms, I 2 0.8 ms, W 1.9 0.7 ms

Code that has the sizes (stages, micro-batches, ranks, steps of a window) makes the schedule.
Where no builder makes a schedule - it was solved, annealed, imported, written by hand - it stands
for itself; so the functions here answer for either.
"""

import functools
import hashlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeAlias, cast, get_type_hints

import numpy as np

from penstock.errors import PlanError, ScheduleError
from penstock.files import Json
from penstock.schedule import WITH_LINKS, find
from penstock.schedule.greedy import Seconds
from penstock.schedule.orders import F
from penstock.schedule.refine import check_units, refine, words_of_units
from penstock.schedule.schedule import Schedule
from penstock.schedule.weight_rule import SYNCHRONOUS
from penstock.typed import MisfitError, typed

_SIZES = ("num_stages", "num_micro_batches", "num_ranks", "num_steps")
_TEXT = re.compile(r"(\w+)(?:\((.*)\))?(?:\s*/\s*units((?:\s+\d{1,9})+)(\s+woven)?)?", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,20})?(?:e-?\d{1,3})?", re.ASCII)

_MOST_KEPT = 1024  # stages times micro-batches
_LISTS = ("there_s", "back_s", "sums_s")
_MORE = ("messages", "there", "back", "sums")

Argument: TypeAlias = int | float | str


@dataclass(frozen=True, slots=True)
class Recipe:
    """A builder's name with all its arguments; those not named have the builder's defaults.

    arguments:  by name, sorted; no sizes.
    seconds:    for which the builder arranges the actions, if it takes any; None: all equal.
    units:      how many each of the builder's own stages is cut into (refine.py); empty: none is.
                The seconds are then those of the builder's stages, the sizes those of the units.
    woven:      whether units of two micro-batches are done in turn.
    Raises:     ScheduleError: no such builder or argument, or a value that it cannot have.
    """

    builder: str
    arguments: tuple[tuple[str, Argument], ...] = ()
    seconds: Seconds | None = None
    units: tuple[int, ...] = ()
    woven: bool = False

    def __post_init__(self) -> None:
        if self.units:
            check_units(self.units)
        elif self.woven:
            raise ScheduleError(f"{self.builder} is woven without units", hint="leave out woven")
        known = _known(self.builder)
        object.__setattr__(self, "arguments", tuple(sorted(self.arguments)))
        own = known.keys() - {*_SIZES, "seconds"}
        hint = f"arguments of {self.builder}: {', '.join(sorted(own)) or 'none'}"
        for at, (name, value) in enumerate(self.arguments):
            if name not in own:
                raise ScheduleError(f"{self.builder} has no argument {name!r}", hint=hint)
            if name in dict(self.arguments[:at]):
                raise ScheduleError(f"{name!r} of {self.builder} stands twice", hint="delete one")
            try:
                typed(known[name], value)
            except MisfitError as problem:
                message = f"{self.builder}: {problem.inside(name)}"
                raise ScheduleError(message, hint=hint) from problem
        if self.seconds is not None:
            if not self.takes_seconds:
                message = f"{self.builder} is not made for seconds"
                raise ScheduleError(message, hint="leave the seconds out")
            object.__setattr__(self, "seconds", _plain(self.seconds))

    @property
    def takes_seconds(self) -> bool:
        """Return whether the builder arranges actions for given seconds of the stages."""
        return "seconds" in _known(self.builder)

    @property
    def takes_links(self) -> bool:
        """Return whether it also minds the seconds of each link, and of sums over replicas."""
        return find(self.builder) in WITH_LINKS

    @property
    def name(self) -> str:
        """Return builder, arguments and units without seconds, as `parse` reads them."""
        words = ", ".join(f"{name}={value}" for name, value in self.arguments)
        named = f"{self.builder}({words})" if words else self.builder
        return f"{named}{words_of_units(self.units, woven=self.woven)}" if self.units else named

    def __str__(self) -> str:
        if self.seconds is None:
            return self.name
        rows = zip("FIW", self.seconds[:3], strict=True)
        words = [f"{kind} {_in_ms(row)} ms" for kind, row in rows]
        more = zip(_MORE, self.seconds[3:], strict=True)
        words += [f"{what} {_in_ms(value)} ms" for what, value in more if value]
        return f"{self.name} for {', '.join(words)}"

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """Return the recipe whose name is `text`, like "gpipe" or "two_bp(limit=4)".

        Raises:   ScheduleError: it is none.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            find(text)
        assert found is not None, "a builder's name is a word"
        pairs: list[tuple[str, Argument]] = []
        for part in (found[2] or "").split(",") if (found[2] or "").strip() else ():
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals:
                hint = f"write {found[1]}(name=value)"
                raise ScheduleError(f"{part.strip()!r} is no argument of {found[1]}", hint=hint)
            pairs.append((name, _value(value)))
        units = tuple(map(int, (found[3] or "").split()))
        return cls(found[1], tuple(pairs), units=units, woven=bool(found[4]))

    def build(
        self,
        num_stages: int,
        num_micro_batches: int,
        *,
        num_ranks: int | None = None,
        num_steps: int | None = None,
    ) -> Schedule:
        """Return the schedule of these sizes; ranks and steps count where the builder takes them.

        Raises:   ScheduleError: it cannot be built for these sizes.
        """
        self.check(num_stages)
        extra: dict[str, Any] = dict(self.arguments)
        if self.seconds is not None:
            extra["seconds"] = self.seconds
        for name, number in (("num_ranks", num_ranks), ("num_steps", num_steps)):
            if number is not None and name in _known(self.builder):
                extra[name] = number
        own = len(self.units) or num_stages
        asked = self.builder, own, num_micro_batches, tuple(sorted(extra.items()))
        make = _kept if own * num_micro_batches <= _MOST_KEPT else _made
        return refine(make(*asked), self.units, woven=self.woven) if self.units else make(*asked)

    def check(self, num_stages: int) -> None:
        """Check that units and seconds are for that many stages.

        Raises:   ScheduleError: they are not.
        """
        if self.units and sum(self.units) != num_stages:
            message = f"{self.name} is of {sum(self.units)} stages, not of {num_stages}"
            raise ScheduleError(message, hint="give units that add up to the number of stages")
        if self.seconds is not None:
            self.seconds.table(len(self.units) or num_stages, split=True)

    def refined(self, units: Sequence[int]) -> "Recipe":
        """Return the recipe whose schedule is this one's with stage s cut into `units[s]`.

        Raises:   ScheduleError: one of them is below 1, or there is no such number of stages.
        """
        counts = check_units(units)
        self.check(len(counts))
        ends = np.cumsum(self.units or (1,) * len(counts))
        parts = np.split(np.array(counts), ends[:-1])
        return replace(self, units=tuple(int(part.sum()) for part in parts))


def _made(
    builder: str, num_stages: int, num_micro_batches: int, extra: tuple[tuple[str, Any], ...]
) -> Schedule:
    """Return the schedule that a builder makes of these sizes and arguments."""
    return find(builder)(num_stages, num_micro_batches, **dict(extra))


_kept = functools.lru_cache(maxsize=2048)(_made)  # a search asks for one many times


AnySchedule: TypeAlias = Recipe | Schedule  # either gives a schedule of given sizes


def any_schedule(given: str | AnySchedule) -> AnySchedule:
    """Return a schedule or recipe as it is given, or the recipe that a text names.

    Raises:   ScheduleError: the text is none.
    """
    return Recipe.parse(given) if isinstance(given, str) else given


def built(
    of: AnySchedule,
    num_stages: int,
    num_micro_batches: int,
    *,
    num_ranks: int | None = None,
    num_steps: int | None = None,
) -> Schedule:
    """Return the schedule of these sizes; `num_steps` is the window of an asynchronous recipe.

    Raises:   ScheduleError: it cannot be built for these sizes, or is of others.
    """
    if isinstance(of, Recipe):
        sizes = num_stages, num_micro_batches
        return of.build(*sizes, num_ranks=num_ranks, num_steps=num_steps)
    found = of.num_stages, of.num_micro_batches, of.num_ranks
    asked = num_stages, num_micro_batches, of.num_ranks if num_ranks is None else num_ranks
    if found != asked:
        message = f"{name_of(of)} is of {_sizes(*found)}, not of {_sizes(*asked)}"
        raise ScheduleError(message, hint="write it out for these sizes, or name a builder")
    return of


def built_on(
    of: AnySchedule, num_stages: int, num_micro_batches: int, ranks: int
) -> Schedule | None:
    """Return the schedule of these sizes on that many ranks; None if it is not on them."""
    if shares_ranks(of) and num_stages < ranks:  # some would have nothing to do
        return None
    try:
        made = built(of, num_stages, num_micro_batches, num_ranks=ranks)
    except ScheduleError:
        return None
    return made if made.num_ranks == ranks else None


def refined(of: AnySchedule, units: Sequence[int]) -> AnySchedule:
    """Return the recipe or schedule with stage s cut into `units[s]` stages.

    Raises:   ScheduleError: `units` is of another number of stages, or one of them is below 1.
    """
    return of.refined(units) if isinstance(of, Recipe) else refine(of, units)


def units_of(of: AnySchedule) -> tuple[int, ...]:
    """Return the number of units in each of a recipe's stages; empty: it has no units."""
    return of.units if isinstance(of, Recipe) else ()


def is_woven(of: AnySchedule) -> bool:
    """Return whether a recipe's units are those of two micro-batches in turn."""
    return isinstance(of, Recipe) and of.woven


def as_cut(asked: AnySchedule, of: AnySchedule) -> AnySchedule:
    """Return the recipe `asked` with the units of `of`, unless it has its own; a schedule as is."""
    if not isinstance(asked, Recipe) or asked.units:
        return asked
    return replace(asked, units=units_of(of), woven=is_woven(of))


def name_of(of: AnySchedule) -> str:
    """Return a name for people: the recipe's without seconds, or the schedule's."""
    return of.name or "a written schedule"


def words_of(of: AnySchedule) -> str:
    """Return all of a recipe, or a schedule's sizes and a digest of its orders."""
    if isinstance(of, Recipe):
        return str(of)
    sizes = _sizes(of.num_stages, of.num_micro_batches, of.num_ranks)
    return f"{name_of(of)} ({sizes}, {hashlib.sha256(str(of).encode()).hexdigest()[:8]})"


def has_window(of: AnySchedule) -> bool:
    """Return whether it drains only at the end of a window of several steps."""
    if isinstance(of, Recipe):
        return "num_steps" in _known(of.builder)
    return of.num_steps > 1 or of.weight_rule != SYNCHRONOUS


def shares_ranks(of: AnySchedule) -> bool:
    """Return whether it can be told on how many ranks to put the stages."""
    return isinstance(of, Recipe) and "num_ranks" in _known(of.builder)


def copied_of(of: AnySchedule) -> frozenset[int]:
    """Return the stages of which it lists copies to far memory."""
    return frozenset() if isinstance(of, Recipe) else frozenset(copy.stage for copy in of.far)


def trains(of: AnySchedule) -> bool:
    """Return whether it has a backward pass."""
    if isinstance(of, Recipe):
        return _trains(of.builder)
    return bool((of.orders.kinds != F).any())


def check_trains(of: AnySchedule) -> None:
    """Raise where a schedule has no backward pass.

    Raises:   PlanError: it has none.
    """
    if not trains(of):
        hint = "take one of the others that `penstock schedule` lists"
        raise PlanError(f"{name_of(of)} has no backward pass: it cannot train", hint=hint)


def to_json(of: AnySchedule) -> Json:
    """Return a recipe without seconds as its name; else an object, as `from_json` reads it."""
    if isinstance(of, Schedule):
        return cast("Json", of.to_json())
    if of.seconds is None:
        return of.name
    rows = of.seconds._asdict().items()
    rows = {key: _listed(value) for key, value in rows if value != ()}
    return {"builder": of.name, "seconds": rows}


def from_json(content: Json) -> AnySchedule:
    """Return the recipe or schedule that `to_json` has written as `content`.

    Raises:   ScheduleError: it is not such a text or object, or what it says cannot be.
              MisfitError: a part of a recipe is missing, unknown, or of another type.
    """
    if isinstance(content, str):
        return Recipe.parse(content)
    if not isinstance(content, dict):
        hint = "give a builder's name, an object with its seconds, or a schedule's object"
        raise ScheduleError(f"schedule is {content!r:.60}, neither text nor object", hint=hint)
    if "builder" not in content:
        return Schedule.from_json(content)
    written = typed(_RecipeFile, content)
    return replace(Recipe.parse(written.builder), seconds=Seconds(*astuple(written.seconds)))


@dataclass(frozen=True, slots=True)
class _SecondsFile:
    """Seconds, as files have them."""

    forward_s: float | tuple[float, ...]
    input_s: float | tuple[float, ...]
    weights_s: float | tuple[float, ...]
    message_s: float
    there_s: tuple[float, ...] = ()
    back_s: tuple[float, ...] = ()
    sums_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _RecipeFile:
    """A recipe with seconds, as files have it."""

    builder: str
    seconds: _SecondsFile


@functools.cache
def _known(builder: str) -> dict[str, Any]:
    """Return the types of the arguments of a builder that can be left out, by name."""
    hints = get_type_hints(find(builder))
    return {
        name: hints[name]
        for name, each in inspect.signature(find(builder)).parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _value(text: str) -> Argument:
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


@functools.cache
def _trains(builder: str) -> bool:
    return bool((find(builder)(1, 1).orders.kinds != F).any())


def _plain(seconds: Seconds) -> Seconds:
    """Return the same with tuples and floats, which can be compared and kept.

    Raises:   ScheduleError: a number is negative, infinite or not a number.
    """
    rows: list[float | tuple[float, ...]] = []
    for name, value in seconds._asdict().items():
        row = np.asarray(value, np.float64)
        if (
            row.ndim > (name != "message_s")
            or (not row.ndim and name in _LISTS)
            or not ((row >= 0) & np.isfinite(row)).all()
        ):
            hint = "give one number, or one per stage, 0 or more"
            raise ScheduleError(f"{name} is {value}", hint=hint)
        rows.append(tuple(row.tolist()) if row.ndim else float(row))
    return Seconds(*rows)  # type: ignore[arg-type]


def _listed(value: float | Sequence[float]) -> Json:
    return list(value) if isinstance(value, Sequence) else value


def _in_ms(value: float | Sequence[float]) -> str:
    row = value if isinstance(value, Sequence) else [value]
    return " ".join(f"{1e3 * each:.4g}" for each in row)


def _sizes(num_stages: int, num_micro_batches: int, num_ranks: int) -> str:
    return f"{num_stages} stages and {num_micro_batches} micro-batches on {num_ranks} ranks"
