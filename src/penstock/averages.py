"""Averages: the mean of a model's weights over steps, kept beside the weights as they train.

    average = decay * average + (1 - decay) * weights      an exponential moving average (EMA)
    average = mean of the weights taken so far             stochastic weight averaging (SWA)

Both as torch.optim.swa_utils.AveragedModel has them: the first weights that are taken are the first
average.  Buffers are not averaged.  An average is part of the optimizer's state: it is divided,
sharded and saved as the weights are.
"""

from dataclasses import dataclass

from penstock.errors import JobError

_DECAY = "give what is kept of the average at each step: ps.ema(0.999)"


@dataclass(frozen=True, slots=True)
class Average:
    """Which weights are averaged, and how.

    decay:      what is kept of the average when weights are taken; None: all of them count alike.
    start:      the step after whose update weights are taken first; steps count from 1.
    every:      steps from one taking to the next.
    validates:  whether the average is validated, in place of the weights.

    Raises:   JobError: a number is out of range.
    """

    decay: float | None
    start: int = 1
    every: int = 1
    validates: bool = False

    def __post_init__(self) -> None:
        if self.decay is not None:
            _check_decay(self.decay)
        _check_steps("start", self.start)
        _check_steps("every", self.every)

    def share_of(self, step: int) -> float:
        """Return the share of the weights in the average after `step` updates: 1 is all, 0 none.

        Before the start the average is the weights themselves.
        """
        taken, rest = divmod(step - self.start, self.every)
        if step <= self.start:
            return 1.0
        if rest:
            return 0.0
        return 1.0 / (taken + 1) if self.decay is None else 1.0 - self.decay


def _check_decay(value: object) -> None:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise JobError(f"the decay of an average is {value!r}, not in [0, 1)", hint=_DECAY)


def _check_steps(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        message = f"{name} of an average is {value!r}, not a whole number of 1 or more"
        raise JobError(message, hint=f"count it in steps: {name}=1")


def ema(decay: float, *, start: int = 1, every: int = 1, validates: bool = False) -> Average:
    """Return an exponential moving average of the weights, for `Job.average`.

    decay:      what is kept of it at each taking, as 0.999.
    start:      the step after which weights are taken first; until then it is the weights.
    every:      steps from one taking to the next.
    validates:  whether validations are of the average, in place of the weights.
    Raises:     JobError: a number is out of range.
    """
    return Average(decay, start, every, validates)


def swa(*, start: int, every: int = 1, validates: bool = False) -> Average:
    """Return the mean of the weights after step `start`, `start` + `every`, ... for `Job.average`.

    validates:  whether validations are of the average, in place of the weights.
    Raises:     JobError: a number is out of range.
    """
    return Average(None, start, every, validates)
