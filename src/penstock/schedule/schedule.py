"""Schedule: for every rank the order of its actions, and so the placement; nothing of time."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.schedule.orders import Action, Kind, Orders, Row, arrange
from penstock.schedule.play import UPDATE, play
from penstock.schedule.verify import check_complete, check_updates, deadlock
from penstock.schedule.weight_rule import SYNCHRONOUS, WeightRule, versions

__all__ = ["Action", "Kind", "Orders", "Row", "Schedule", "arrange"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The orders of all ranks over a window of `num_steps` steps, each of `num_micro_batches`.

    Micro-batches count over the whole window: m is of step m // num_micro_batches.  A synchronous
    schedule is one step and lists no update, for there is nothing to say: it stands at the end.
    Any other lists U(stage, step), once for every step on every rank on which the stage lives.

    `orders` may be given as tuples of actions, one per rank; they are kept as arrays.

    Raises:   ScheduleError: an action is missing, doubled, on another rank than its forward, can
              never start, or reads a version of the weights that is not there.
    """

    num_stages: int
    num_micro_batches: int
    orders: Orders
    num_steps: int = 1
    weight_rule: WeightRule = SYNCHRONOUS
    name: str = ""
    _ranks: npt.NDArray[np.int32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_micro_batches", "num_steps"):
            if (number := getattr(self, name)) < 1:
                raise ScheduleError(f"{name} is {number}", hint="give 1 or more")
        object.__setattr__(self, "orders", Orders.of(self.orders))
        window = (self.num_stages, self.num_steps * self.num_micro_batches, self.num_steps)
        ranks = check_complete(self.orders, window)
        ranks.setflags(write=False)
        object.__setattr__(self, "_ranks", ranks)
        self._check_steps()
        stops, _ = play(self.orders, ranks, self._num_updates, seconds=(1.0,) * 5)
        if (stops < self.orders.offsets[1:]).any():
            raise deadlock(self.orders, stops, ranks, self.num_micro_batches)
        if self.has_updates:
            versions(self)

    def _check_steps(self) -> None:
        """Check that updates are listed, or are the one update at the end of the one step."""
        if self.has_updates:
            check_updates(self.orders, self._ranks, self.num_steps)
            return
        rule = self.weight_rule
        if rule != SYNCHRONOUS or self.num_steps > 1:
            raise ScheduleError(
                f"num_steps is {self.num_steps}, the weight rule {rule.name}, and U0.0 is missing",
                hint="list U(stage, step) after the last backward of each step",
            )

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def has_updates(self) -> bool:
        """Whether the orders list updates; where they do not, the one step ends with them."""
        return bool((self.orders.kinds == UPDATE).any())

    @property
    def _num_updates(self) -> int:
        return self.num_steps if self.has_updates else 0

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Return the rank on which a stage does a micro-batch, counted over the window."""
        return int(self._ranks[stage, micro_batch])

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on which each stage lives, in increasing order."""
        return tuple(tuple(np.unique(ranks).tolist()) for ranks in self._ranks)
