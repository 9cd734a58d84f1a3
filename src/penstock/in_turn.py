"""In turn: steps of several kinds by turns, each with a loss and weights of its own.

    loss = ps.in_turn({
        "judge": ps.Turn(judged, weights="judge.*", steps=5),
        "maker": ps.Turn(fooled, weights="maker.*"),
    })

Five steps of a judge, one of a generator, and so on.  A step trains the weights of its turn, at the
newest values of all: in its loss the others are constants.  They get no gradient then, no update,
and their moments and counts stay as they are.

Each turn is a step over the same weights that a function of its number tells, as one of several
shapes is (keyed.py): traced, planned and proved like that.
"""

import copy
import fnmatch
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

from penstock.errors import JobError

Data = Callable[[int], Iterator[Any]]
_HINT = 'say what it trains: ps.Turn(loss, weights="judge.*", steps=5)'
_SHOWN = 4  # names in a message


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps with one loss, which train some of the weights.

    loss:     as Job.loss: the mean loss of one micro-batch, or a pair of it and figures by name.
    weights:  patterns of the names of what is trained, or one; * stands for anything, dots
              included.
    steps:    in a row.
    again:    whether they read the micro-batches of the step before again, in place of new ones.

    Raises:   JobError: the loss is no function, a pattern no text, or `steps` no whole number of 1
              or more.
    """

    loss: Callable[[Any, Any], Any]
    weights: str | Sequence[str]
    steps: int = 1
    again: bool = False

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise JobError(f"the loss of a turn is {self.loss!r:.60}, no function", hint=_HINT)
        given: Any = [self.weights] if isinstance(self.weights, str) else self.weights
        rows = cast("Sequence[object]", given if isinstance(given, list | tuple) else ())
        if not rows or not all(isinstance(row, str) for row in rows):
            raise JobError(f"the weights of a turn are {self.weights!r:.60}", hint=_HINT)
        object.__setattr__(self, "weights", tuple(rows))
        steps: Any = self.steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            message = f"a turn has {steps!r:.60} steps, not a whole number of 1 or more"
            raise JobError(message, hint=_HINT)

    def trains(self, name: str) -> bool:
        """Return whether a parameter of this name is trained."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.weights)


class TurnBatch(NamedTuple):
    """A micro-batch, and the name of the turn of its step."""

    batch: Any
    turn: str


@dataclass(frozen=True)
class LossTurns:
    """The loss of a micro-batch of any turn.

    rows:       the turns with their names, in order.
    validates:  whose loss a validation is the mean of.
    is_jobs:    whether it is that of a job, whose data tells micro-batches their turn.
    """

    rows: tuple[tuple[str, Turn], ...]
    validates: str
    is_jobs: bool = False

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return what the loss of the batch's turn does, all other weights being constants.

        A figure beside it, "NAME_loss", is that of this turn alone.
        Raises:   JobError: the batch is of no turn, or the turn trains nothing.
        """
        if not isinstance(batch, TurnBatch):
            message = "ps.in_turn tells micro-batches their turn, and the job was given others"
            raise JobError(message, hint="make the job anew: Job(..., loss=ps.in_turn(...))")
        from penstock import _compat

        turn = self.by_name[batch.turn]
        named = dict(model.named_parameters())
        still = {name: value for name, value in named.items() if not turn.trains(name)}
        if len(still) == len(named):
            names = [*named][:_SHOWN] + ["..."] * (len(named) > _SHOWN)
            message = f"the turn {batch.turn!r} trains {', '.join(turn.weights)}: no parameter"
            raise JobError(message, hint=f"there are: {', '.join(names)}")
        with _compat.reparametrize(model, {name: p.detach() for name, p in still.items()}):
            return _with_figure(f"{batch.turn}_loss", turn.loss(model, batch.batch))

    @cached_property
    def by_name(self) -> Mapping[str, Turn]:
        """Return the turns by name, in order."""
        return dict(self.rows)

    @cached_property
    def cycle(self) -> tuple[str, ...]:
        """Return the turn of each step, until they begin again."""
        rows = (itertools.repeat(name, turn.steps) for name, turn in self.rows)
        return tuple(itertools.chain.from_iterable(rows))

    @cached_property
    def fresh(self) -> tuple[int, ...]:
        """Return how many steps of a cycle, to each and with it, read micro-batches of their own.

        The last one tells of the whole cycle.
        """
        return tuple(itertools.accumulate(not self.by_name[name].again for name in self.cycle))

    def data_step(self, step: int) -> int:
        """Return which step of the author's data a step of the run reads."""
        rounds, place = divmod(step, len(self.cycle))
        return rounds * self.fresh[-1] + self.fresh[place] - 1


def _with_figure(name: str, told: Any) -> Any:
    """Return what a loss has told, with itself as a figure too; what is none stays as it is."""
    pair = cast("tuple[Any, ...]", told if isinstance(told, tuple) else (told, {}))
    if len(pair) != 2 or not isinstance(pair[1], Mapping) or not hasattr(pair[0], "detach"):
        return cast("object", told)
    figures = cast("Mapping[str, Any]", pair[1])
    return pair[0], {name: pair[0].detach(), **figures}


@dataclass(frozen=True)
class TurnData:
    """Micro-batches with the turns of their steps, of `step_micro_batches` each."""

    of: Data
    turns: LossTurns
    step_micro_batches: int
    kinds: ClassVar[str] = "turns"

    @property
    def keys(self) -> Mapping[str, int]:
        """Return how many steps of a cycle each turn has."""
        return {name: turn.steps for name, turn in self.turns.rows}

    def key_of(self, number: int) -> str:
        """Return the turn of a micro-batch."""
        cycle = self.turns.cycle
        return cycle[number // self.step_micro_batches % len(cycle)]

    def __call__(self, start: int) -> Iterator[TurnBatch]:
        """Return the micro-batches from number `start` on."""
        return self._read(itertools.count(start))

    def picked(self, reads: Any) -> Iterator[TurnBatch]:
        """Return the micro-batches of these numbers, in this order."""
        return self._read(reads.numbers())

    def _read(self, numbers: Iterator[int]) -> Iterator[TurnBatch]:
        """Read on where a number is a little further; those that are read again are kept."""
        per_step, source, upcoming = self.step_micro_batches, iter(()), -1
        repeats = len(self.turns.cycle) > self.turns.fresh[-1]
        held: dict[int, Any] = {}
        for number in numbers:
            step, place = divmod(number, per_step)
            wanted = self.turns.data_step(step) * per_step + place
            if wanted not in held:
                if not 0 <= wanted - upcoming <= 2 * per_step or upcoming < 0:
                    source, upcoming = iter(self.of(wanted)), wanted
                found = next(itertools.islice(source, wanted - upcoming, None), _END)
                if found is _END:
                    return
                upcoming = wanted + 1
                first = wanted - place
                held = {at: batch for at, batch in held.items() if at >= first and repeats}
                held[wanted] = copy.deepcopy(found) if repeats else found
            yield TurnBatch(held[wanted], self.key_of(number))


_END = object()


def in_turn(turns: Mapping[str, Turn], validates: str | None = None) -> LossTurns:
    """Return a function for `Job.loss`: steps of several kinds by turns.

    turns:      by name, in the order in which they come: `steps` of the first, of the second, and
                so on, then of the first again.
    validates:  the name of the one whose loss a validation is the mean of; None: the last.
    Raises:     JobError: there are fewer than two, the first reads again what nobody has read, or
                there is none of this name.
    """
    rows = dict[Any, Any]()
    if isinstance(cast("object", turns), Mapping):
        rows.update(turns)
    if len(rows) < 2 or not all(isinstance(row, Turn) for row in rows.values()):
        hint = 'give two at least: {"judge": ps.Turn(...), "maker": ps.Turn(...)}'
        raise JobError(f"ps.in_turn is given {turns!r:.80}, not turns by name", hint=hint)
    if wrong := [name for name in rows if not (isinstance(name, str) and name)]:
        raise JobError(f"ps.in_turn has a turn named {wrong[0]!r:.60}", hint="give it a text")
    first, last = next(iter(turns)), [*turns][-1]
    if turns[first].again:
        message = f"the turn {first!r} is the first, and reads again what the step before has read"
        raise JobError(message, hint="let another one begin, or leave out again=True")
    if validates is not None and validates not in turns:
        hint = f"take one of {', '.join(turns)}"
        raise JobError(f"ps.in_turn validates {validates!r:.60}, which is no turn", hint=hint)
    return LossTurns(tuple(turns.items()), last if validates is None else validates)


def turned(loss: Any, data: Any, per_step: int) -> tuple[Any, Any]:
    """Return loss and data of a job whose steps take turns, or of one whose steps do not any more.

    What others have made of data that tells of turns is left alone.
    Raises:   JobError: the author's data has steps of several shapes already.
    """
    own = data.of if isinstance(data, TurnData) else data
    if not isinstance(loss, LossTurns):
        return loss, own
    if loss.is_jobs and not isinstance(data, TurnData):
        return loss, data
    if hasattr(own, "key_of"):
        message = "the steps of this data have several shapes, and ps.in_turn gives them turns"
        raise JobError(message, hint="pad the data to one shape, as ps.batches has it")
    told = replace(loss, is_jobs=True)
    return told, TurnData(own, told, per_step)
