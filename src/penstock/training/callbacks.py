"""Callbacks: functions of the user's that a run calls: of steps, validations and checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import final

from penstock.errors import PlanError
from penstock.job import Job
from penstock.listener import Row
from penstock.training.options import Options


@final
class Hearing:
    """Calls them in the process that leads a run; what one raises ends it.

    on_step:        with the row of each step.
    on_validation:  with the row of a step after which there was a validation.
    on_checkpoint:  with the steps done and the folder of a checkpoint that is complete, at the end
                    of the step under way then.
    """

    def __init__(
        self,
        on_step: Callable[[Row], object] | None,
        on_validation: Callable[[Row], object] | None,
        on_checkpoint: Callable[[int, Path], object] | None,
    ) -> None:
        self.on_step, self.on_validation = on_step, on_validation
        self.on_checkpoint = on_checkpoint
        self.folder: Path | None = None  # of checkpoints
        self._first, self._told = -1, set[int]()

    def hear(self, row: Row) -> None:
        """Take the row of a step."""
        if self._first < 0:
            self._first = int(row["step"] or 0)
        if self.on_step is not None:
            self.on_step(row)
        if self.on_validation is not None and "val_loss" in row:
            self.on_validation(row)
        self.look()

    def look(self) -> None:
        """Tell of checkpoints of this run that are complete now and were not before."""
        from penstock.checkpoints.checkpoint import folder_of, steps_in

        if self.on_checkpoint is None or self.folder is None or self._first < 0:
            return
        for step in steps_in(self.folder):
            if step >= self._first and step not in self._told:
                self._told.add(step)
                self.on_checkpoint(step, folder_of(self.folder, step))


def check_declared(options: Options, job: Job) -> None:
    """Raise where what a job declares does not go with how it is to be run.

    Raises:   PlanError.
    """
    if job.weight is not None and options.get("until_loss") is not None:
        message = "Job.weight is of steps of one size, and until_loss looks for the size"
        raise PlanError(message, hint="leave out until_loss, or Job.weight")
    if job.patience is None:
        return
    for name in ("elastic", "until_loss"):
        if options.get(name) not in (None, False):
            message = f"Job.patience is {job.patience}, which a run with {name} does not follow"
            raise PlanError(message, hint=f"leave out {name}, or set Job.patience to None")
    if "no-best" in options.get("keep", ""):
        message = f"Job.patience is {job.patience}, and keep forgets which was the best by no-best"
        raise PlanError(message, hint="leave no-best out of keep, or set Job.patience to None")
