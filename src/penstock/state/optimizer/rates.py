"""Rates: the options of an optimizer's groups in each step.

A factor on its own rates, or what a scheduler like torch's says.  A scheduler is built on the
whole optimizer of a rank and stepped once per step, whichever stage asks first; what it gave to
the groups is kept for a while, since stages of one rank may be updated at other times.
"""

import inspect
import threading
from array import array
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from penstock import _compat
from penstock.errors import JobError, PenstockError
from penstock.graph.functional import where
from penstock.graph.whole_optimizer import needed_arguments
from penstock.job import Job, is_users

Options = list[dict[str, Any]]  # of each group, without its parameters
_KEPT = 64  # steps whose options are remembered


def options_of(optimizer: Optimizer) -> Options:
    """Return the options of every group as they are now."""
    return [
        {k: _copied(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def put_options(optimizer: Optimizer, first: Options) -> None:
    """Give every group the options `first`, and no others."""
    for group, options in zip(
        optimizer.param_groups, first, strict=False
    ):  # more may be added later
        for added in group.keys() - options.keys() - {"params", "param_names"}:
            del group[added]
        group.update({key: _copied(value) for key, value in options.items()})


def changed_options(optimizer: Optimizer, first: Options) -> Options:
    """Return the options that are not what they were at first, of every group that there was."""
    rows = zip(options_of(optimizer), first, strict=False)
    return [{k: v for k, v in now.items() if not same(v, old.get(k, ...))} for now, old in rows]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def same(one: Any, other: Any) -> bool:
    """Return whether two options are equal; tensors bit by bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other)


class JobScheduler:
    """The job's scheduler on the whole optimizer of a rank.

    Raises:   JobError: what the job returns is not a scheduler, or needs a metric.
    """

    def __init__(self, job: Job, optimizer: Optimizer) -> None:
        self.job, self.optimizer = job, optimizer
        self.first = options_of(optimizer)
        self._start()

    def _start(self) -> None:
        assert self.job.scheduler is not None, "only then there is a schedule"
        put_options(self.optimizer, self.first)
        self.scheduler = _asked(lambda: self.job.scheduler(self.optimizer), "scheduler fails")  # type: ignore[misc]
        _check(self.scheduler)
        self.now, self.kept = 0, dict[int, Options]()
        self._note()

    def options(self, step: int) -> Options:
        """Return what the options that the scheduler sets, of each group, are in a step.

        Raises:   JobError: the scheduler fails, as one at its end does.
        """
        if step < self.now and step not in self.kept:
            self._start()
        while self.now < step:
            _compat.without_order_warning(self.optimizer)
            _asked(self.scheduler.step, f"scheduler fails after step {self.now}")
            self.now += 1
            self._note()
        rows = zip(self.kept[step], self.managed(), self.first, strict=True)
        return [
            {key: then.get(key, first.get(key)) for key in managed} for then, managed, first in rows
        ]

    def managed(self) -> list[set[str]]:
        """Return the options of each group that the scheduler has set so far."""
        return [set(options) for options in self.kept[self.now]]

    def check_groups(self) -> None:
        """Raise if the optimizer has other groups than at first.

        Raises:   JobError: so it is.
        """
        now, first = len(self.optimizer.param_groups), len(self.first)
        if now == first:
            return
        code: CodeType | None = getattr(inspect.unwrap(self.scheduler.step), "__code__", None)
        is_own = code is not None and is_users(code.co_filename)
        place = f"{code.co_filename}:{code.co_firstlineno}: " if code and is_own else ""
        message = f"{place}the job's scheduler leaves the optimizer {now} groups, not {first}"
        raise JobError(message, hint="make all groups in Job.optimizer, with an lr of 0 at first")

    def _note(self) -> None:
        """Remember what is different now, and what has been in the step before."""
        before = self.kept.get(self.now - 1, [{} for _ in self.first])
        found: Options = []
        self.check_groups()
        for now, first, old in zip(options_of(self.optimizer), self.first, before, strict=True):
            changed = {k for k, v in now.items() if k not in first or not same(v, first[k])}
            found.append({key: now[key] for key in changed | old.keys()})
        self.kept[self.now] = found
        self.kept.pop(self.now - _KEPT, None)


@final
class ReplayedRate:
    """A job's `learning_rate` that is called once for each step, in order, whoever asks for which.

    One that keeps state (a scheduler in its closure, a counter) gives what it gives in a plain
    loop only then: a rank that begins with a later step calls it for all those before.
    """

    def __init__(self, rate: Callable[[int], float]) -> None:
        self.rate, self.told, self._alone = rate, array("d"), threading.Lock()

    def __call__(self, step: int) -> float:
        """Return the factor of a step."""
        with self._alone:
            while len(self.told) <= step:
                self.told.append(float(self.rate(len(self.told))))
            return self.told[step]


def _asked(call: Callable[[], Any], what: str, hint: str = "") -> Any:
    try:
        return call()
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, f"the job's {what}")
        raise JobError(message, hint=hint or "it is stepped once after every update") from problem


def _check(scheduler: Any) -> None:
    step = getattr(scheduler, "step", None)
    if not callable(step):
        message = f"the job's scheduler is a {type(scheduler).__name__}"
        raise JobError(message, hint="return one of torch.optim.lr_scheduler")
    inside = [scheduler, *getattr(scheduler, "_schedulers", ())]
    plateau = next((one for one in inside if isinstance(one, ReduceLROnPlateau)), None)
    needed = needed_arguments(step)
    if plateau is not None or _METRICS.intersection(needed):
        name = type(scheduler if plateau is None else plateau).__name__
        message = (
            f"the job's scheduler, {name}, waits for a metric, and none is measured between steps"
        )
        raise JobError(message, hint="use one that depends on the step alone, as CosineAnnealingLR")
    if needed:
        message = f"step() of the job's scheduler, {type(scheduler).__name__}, takes {needed[0]}"
        raise JobError(
            f"{message}, and is called without it after every update", hint=_wrap(scheduler)
        )


_METRICS = {"metric", "metrics", "loss", "val_loss", "score", "value"}


def _wrap(scheduler: Any) -> str:
    """Return what to do about a scheduler that is told where it is, as those of timm are."""
    if callable(getattr(scheduler, "step_update", None)):
        return (
            "count in updates: make it with t_in_epochs=False, in a class of your own whose step() "
            "counts its calls and passes the count to step_update"
        )
    return (
        "wrap it in a class whose step() counts its calls and passes on what it takes, or give "
        "the factor of each step as learning_rate=lambda step: ..."
    )


class Rates:
    """Sets the options of one optimizer, whole or of a stage, to those of a step."""

    def __init__(self, job: Job, optimizer: Optimizer, schedule: JobScheduler | None) -> None:
        self.rate, self.optimizer, self.schedule = job.learning_rate, optimizer, schedule
        self.first = options_of(optimizer) if schedule is None else schedule.first
        if job.learning_rate is not None and any("lr" not in group for group in self.first):
            message = "Job.learning_rate is a factor on lr, which a group of the optimizer lacks"
            raise JobError(
                message, hint="give every group an lr, or let the optimizer set its rate"
            )

    def apply(self, step: int, factor: float) -> Callable[[], None] | None:
        """Give every group its options of a step, its rate times `factor`.

        What is returned, if anything, is to be called after the update: where the rate is the
        optimizer's own, it puts that back.
        """
        groups = self.optimizer.param_groups
        if self.schedule is not None:
            for group, options in zip(groups, self.schedule.options(step), strict=True):
                group.update({key: _copied(value) for key, value in options.items()})
                if factor != 1.0:
                    group["lr"] = options.get("lr", group["lr"]) * factor
        elif self.rate is not None:
            rate = self.rate
            factor *= float(
                _asked(
                    lambda: rate(step),
                    "learning_rate fails",
                    "it is asked for the factor of each step",
                )
            )
            for group, first in zip(groups, self.first, strict=False):  # more may be added later
                group["lr"] = first["lr"] * factor
        elif factor != 1.0:
            return self._scaled(factor)
        return None

    def _scaled(self, factor: float) -> Callable[[], None]:
        groups = self.optimizer.param_groups
        own = [group["lr"] for group in groups]
        scaled = [rate * factor for rate in own]
        for group, rate in zip(groups, scaled, strict=True):
            group["lr"] = rate

        def put_back() -> None:
            for group, rate, old in zip(groups, scaled, own, strict=True):
                if group["lr"] is rate:  # not set anew by the optimizer itself
                    group["lr"] = old

        return put_back

    def managed(self) -> list[set[str]]:
        """Return the options of each group that are not the optimizer's own business."""
        if self.schedule is not None:
            return self.schedule.managed()
        names = {"lr"} if self.rate is not None else set[str]()
        return [set(names) for _ in self.first]

    def changed(self) -> list[Mapping[str, Any]]:
        """Return the options of each group that the optimizer has changed by itself."""
        now = changed_options(self.optimizer, self.first)
        rows = zip(now, self.managed(), strict=True)
        return [{k: v for k, v in one.items() if k not in managed} for one, managed in rows]
