"""Goal: the loss at which a run is to end, and whether it is there.

A job with validation has come to its goal when a validation has: its loss is the mean over the same
micro-batches each time.  The loss of a training step is one of other micro-batches each time, so
there it is the mean over the newest steps that have `_WINDOW` times the micro-batches of a step of
the job: the same number of samples whatever the batch.  While the loss falls, such a mean is late
by half of its window.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

from penstock.fleet.batch_size import Least
from penstock.job import Job
from penstock.listener import Row

REACHED = -1  # in place of the signal for which ranks stop
_WINDOW = 16


class Goal(NamedTuple):
    """The loss at which a run is to end, and what is to be least until then."""

    loss: float
    least: Least = "time"


@final
class GoalWatch:
    """Hears the steps of a run, and asks for its end once the goal is reached.

    by:      what has to come down to it: the loss of a "validation", or of "training".
    own:     micro-batches of a step of the job.
    asks:    is called then; whoever runs ranks sets it.
    val_s:   seconds of the newest validation.
    """

    def __init__(self, goal: Goal, *, is_validated: bool, own: int) -> None:
        self.goal, self.own = goal, own
        self.by = "validation" if is_validated else "training"
        self.asks: Callable[[], None] = lambda: None
        self.value: float | None = None
        self.val_s = 0.0
        self.is_reached = False
        self._newest: deque[tuple[float, int]] = deque()
        self._count = 0

    @classmethod
    def of_job(cls, goal: Goal, job: Job) -> "GoalWatch":
        """Return what watches a run of `job`, which is the author's, whatever its batch becomes."""
        return cls(goal, is_validated=job.validation is not None, own=job.micro_batches)

    def afresh(self) -> "GoalWatch":
        """Return one that has heard nothing yet, and asks the same."""
        made = GoalWatch(self.goal, is_validated=self.by == "validation", own=self.own)
        made.asks = self.asks
        return made

    @property
    def words(self) -> str:
        """Return what is compared with the goal, in words."""
        if self.by == "validation":
            return "the loss of a validation"
        return f"the mean loss of the newest {_WINDOW * self.own} micro-batches"

    def hear(self, row: Row, micro_batches: int) -> None:
        """Take the row of a step of so many of the job's micro-batches.

        Once the goal is reached the value stays: steps that end a run later are no part of it.
        """
        if self.is_reached:
            return
        if self.by == "validation":
            if (loss := row.get("val_loss")) is not None:
                self.value, self.val_s = float(loss), float(row.get("val_seconds") or 0.0)
        elif (loss := row.get("loss")) is not None:
            self._take(float(loss), micro_batches)
        if self.value is not None and self.value <= self.goal.loss:
            self.is_reached = True
            self.asks()

    def _take(self, loss: float, micro_batches: int) -> None:
        self._newest.append((loss, micro_batches))
        self._count += micro_batches
        most = _WINDOW * self.own
        while self._count - self._newest[0][1] >= most:
            self._count -= self._newest.popleft()[1]
        if self._count >= most:
            self.value = sum(loss * n for loss, n in self._newest) / self._count
