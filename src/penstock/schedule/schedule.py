"""Schedule: for every rank the order of its actions, and so the placement; nothing of time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.files import Json, read_bytes, write_text
from penstock.schedule import parse
from penstock.schedule.clock import play
from penstock.schedule.far_words import FarCopy, check_far, words
from penstock.schedule.orders import Action, B, F, I, Kind, Orders, Row, U, arrange
from penstock.schedule.verify_orders import check_complete, check_updates, deadlock, updated_only
from penstock.schedule.weight_rule import SYNCHRONOUS, WEIGHT_RULES, WeightRule, versions

__all__ = ["Action", "Kind", "Orders", "Row", "Schedule", "arrange"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The orders of all ranks over a window of `num_steps` steps, each of `num_micro_batches`.

    Micro-batches count over the whole window: m is of step m // num_micro_batches.  One synchronous
    step lists no update, as there is nothing to say: it is at the end.  Any other schedule
    lists U(stage, step), once for every step on every rank on which the stage lives.

    `orders` may be given as tuples of actions, one per rank; they are kept as arrays.
    With `together` of 2 or more, what makes gradients of weights - B, or W where I stands apart -
    is one action for so many consecutive micro-batches of a step, named by the first of them.
    What some forwards keep may be in `far` memory for a while (far_words.py).

    Raises:   ScheduleError: an action is missing, doubled, on another rank than its forward, can
              never start, or reads a version of the weights, or what is kept, that is not there.
    """

    num_stages: int
    num_micro_batches: int
    orders: Orders
    num_steps: int = 1
    weight_rule: WeightRule = SYNCHRONOUS
    name: str = ""
    together: int = 1
    far: tuple[FarCopy, ...] = ()
    _ranks: npt.NDArray[np.int32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_micro_batches", "num_steps", "together"):
            if (number := getattr(self, name)) < 1:
                raise ScheduleError(f"{name} is {number}", hint="give 1 or more")
        if self.num_micro_batches % self.together:
            message = f"{self.num_micro_batches} micro-batches cannot go {self.together} together"
            raise ScheduleError(message, hint="give a number that divides those of a step")
        if self.name != " ".join(self.name.split()):
            raise ScheduleError(f"name is {self.name!r}", hint="put one space between its words")
        object.__setattr__(self, "orders", Orders.of(self.orders))
        if self.together > 1 and {B, I} <= {*np.unique(self.orders.kinds).tolist()}:
            message = f"B of {self.together} micro-batches and I of one are both there"
            raise ScheduleError(message, hint="cut every B in two, or none")
        window = (self.num_stages, self.num_steps * self.num_micro_batches, self.num_steps)
        ranks = check_complete(self.orders, window, self.together)
        ranks.setflags(write=False)
        object.__setattr__(self, "_ranks", ranks)
        self._check_steps()
        stops, _ = self.play((1.0,) * 5)
        if (stops < self.orders.offsets[1:]).any():
            raise deadlock(self.orders, stops, ranks, self.num_micro_batches)
        if self.has_updates:
            versions(self)
        object.__setattr__(self, "far", check_far(self.orders, self.far, self.together))

    def _check_steps(self) -> None:
        """Check that updates are listed, or are the one update at the end of the one step."""
        rule = self.weight_rule
        if self.has_updates:
            check_updates(self.orders, self._ranks, self.num_steps)
        elif rule != SYNCHRONOUS or self.num_steps > 1:
            message = f"num_steps is {self.num_steps}, weights are {rule.name}, U0.0 is missing"
            hint = "list U(stage, step) after the last backward of each step"
            raise ScheduleError(message, hint=hint)

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def has_updates(self) -> bool:
        """Whether the orders list updates; where they do not, the one step ends with them."""
        return bool((self.orders.kinds == U).any())

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Return the rank on which a stage does a micro-batch, counted over the window."""
        return int(self._ranks[stage, micro_batch])

    @property
    def ranks(self) -> npt.NDArray[np.int32]:
        """The rank of every [stage, micro-batch], micro-batches counted over the window."""
        return self._ranks

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on which each stage lives, in increasing order."""
        homes = [{*np.unique(ranks).tolist()} for ranks in self._ranks]
        for rank, stage in updated_only(self.orders):
            homes[stage].add(rank)
        return tuple(tuple(sorted(ranks)) for ranks in homes)

    @property
    def is_in_order(self) -> bool:
        """Whether each stage lives on one rank, and takes its micro-batches' forwards in order."""
        forwards = self.orders.kinds == F
        by_stage = np.argsort(self.orders.stages[forwards], kind="stable")
        numbers = self.orders.micro_batches[forwards][by_stage].reshape(self.num_stages, -1)
        one_rank = (self._ranks == self._ranks[:, :1]).all()
        return bool(one_rank and (np.diff(numbers, axis=1) > 0).all())

    def play(
        self, seconds: tuple[float, ...]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return where in the arrays every rank stops, and when its last action ends, in seconds.

        `seconds` are those of one F, B, I, W and U.  Links are free, and nothing but the actions
        takes time; `penstock.simulate` models more.
        """
        num_updates = self.num_steps if self.has_updates else 0
        return play(self.orders, self._ranks, num_updates, seconds)

    def __str__(self) -> str:
        """Return a line with the sizes and one line per rank, as `parse` reads them."""
        title = f"schedule {self.name}" if self.name else "schedule"
        sizes = f"stages {self.num_stages}, micro-batches {self.num_micro_batches}"
        window = f"steps {self.num_steps}, weights {self.weight_rule.name}"
        window += f", together {self.together}" if self.together > 1 else ""
        rows = (f"rank {rank}  {row}".rstrip() for rank, row in enumerate(self.words()))
        return "\n".join([f"{title}: {sizes}, {window}", *rows])

    def words(self) -> Iterator[str]:
        """Yield actions and copies of each rank as text, with spaces between."""
        return words(self.orders, self.far) if self.far else self.orders.words()

    @classmethod
    def parse(cls, lines: str, *, weight_rules: Sequence[WeightRule] = WEIGHT_RULES) -> "Schedule":
        """Return the schedule that prints as `lines`; without the first line, one synchronous step.

        Raises:   ScheduleError: a line cannot be read, or the schedule is not valid.
        """
        return _of(parse.parse(lines, weight_rules))

    @classmethod
    def parse_torch_csv(cls, rows: str) -> "Schedule":
        """Return the schedule in a CSV of torch.distributed.pipelining, its messages left out.

        Raises:   ScheduleError: a cell cannot be read, or the schedule is not valid.
        """
        return _of(parse.parse_torch_csv(rows))

    def to_json(self) -> dict[str, Json]:
        """Return the schedule as JSON values, the actions of a rank as one text."""
        return {
            "penstock": "schedule",
            "name": self.name,
            "num_stages": self.num_stages,
            "num_micro_batches": self.num_micro_batches,
            "num_steps": self.num_steps,
            "weight_rule": self.weight_rule.name,
            **({"together": self.together} if self.together > 1 else {}),
            "orders": list(self.words()),
        }

    @classmethod
    def from_json(
        cls, content: Mapping[str, Json], *, weight_rules: Sequence[WeightRule] = WEIGHT_RULES
    ) -> "Schedule":
        """Return the schedule from which `to_json` made `content`.

        Raises:   ScheduleError: it is not such an object, or the schedule is not valid.
        """
        return _of(parse.from_json(content, weight_rules))

    def save(self, path: Path | str) -> None:
        """Write the schedule as JSON, whole or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(
        cls, path: Path | str, *, weight_rules: Sequence[WeightRule] = WEIGHT_RULES
    ) -> "Schedule":
        """Read a schedule that `save` wrote, or one as it prints, or as `parse_torch_csv` reads it.

        Raises:   ScheduleError: the file is missing or damaged, or the schedule is not valid.
        """
        content = read_bytes(path, ScheduleError, "schedule")
        try:
            return _of(parse.parse_any(content.decode("utf-8-sig"), weight_rules))
        except UnicodeDecodeError as problem:
            hint = "the file is damaged, or not the right one"
            raise ScheduleError(f"schedule {path} is not text: {problem}", hint=hint) from problem
        except ScheduleError as problem:
            message = f"schedule {path}: {problem.message}"
            raise ScheduleError(message, hint=problem.hint) from problem


def _of(parts: parse.Fields) -> Schedule:
    return Schedule(parts.num_stages, parts.num_micro_batches, Orders.of(parts.orders), *parts[3:])
