"""Sample: a run that was measured."""

from typing import NamedTuple

from penstock.estimate.training_run import TrainingRun


class Sample(NamedTuple):
    """A run, and what was measured: seconds of a step, and peak bytes where they are known."""

    run: TrainingRun
    seconds: float
    peak_bytes: float | None
