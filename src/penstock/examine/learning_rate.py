"""Learning rate: whether a job's learning rate is a function of the step, or keeps state.

A rank, a resumed run and the proof ask for steps of their own.  A rate that keeps state is called
for each step once and in order, as a plain loop does (`ReplayedRate`), by each of them anew.  One
that reads the time, or draws from a generator that others draw from too, cannot be replayed.
"""

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from penstock.examine.python_values import Values, held
from penstock.examine.queries import Queries, global_chance, position, text_of, watching
from penstock.job import Job
from penstock.processes.child import apart, can_fork
from penstock.state.optimizer.rates import ReplayedRate

_MOST, _ENOUGH_S = 10_000, 0.1  # steps for which a rate is asked, twice
_LOOKED_AT = 3  # of these, with all that it reads
_BESIDE = "the time", "chance"


@dataclass(frozen=True, slots=True)
class RateFound:
    """How a job's learning rate depends on the past.

    keeps:   it is another one when it is asked again for the same steps, or has changed something
             that it reads.
    beside:  "file.py:12: the time: read here", what no replay gives again; "" if nothing.
    """

    keeps: bool = False
    beside: str = ""


def rate_of(job: Job) -> RateFound:
    """Return how the learning rate of `job` depends on the past, found in a process of its own.

    Ignores:  what changes only after more steps than are asked for.
    Raises:   RunError: the process died.
    """
    if job.learning_rate is None:
        return RateFound()
    return RateFound(*apart(lambda: _found(job)))


def replayed(job: Job) -> Job:
    """Return `job` with a learning rate that gives what it gives in a plain loop, in any order.

    Where nothing can be tried apart, on a GPU that is in use, it is taken to keep state.
    """
    rate = job.learning_rate
    if rate is None or isinstance(rate, ReplayedRate):
        return job
    found = rate_of(job) if can_fork() else RateFound(keeps=True)
    if found.keeps and not found.beside:
        return replace(job, learning_rate=ReplayedRate(rate))
    return job


def _found(job: Job) -> tuple[bool, str]:
    rate, steps = job.learning_rate, range(min(job.num_steps, _MOST))
    assert rate is not None, "only then it is asked"
    rate = rate.rate if isinstance(rate, ReplayedRate) else rate
    first, beside, changed = _looked_at(rate, steps[:_LOOKED_AT])
    if beside:
        return changed, beside
    first += _asked(rate, steps[len(first) :])
    for more in (0, 1):  # a cycle is where it was after so many calls, but not after one more, too
        _asked(rate, steps[:more])
        again = _asked(rate, steps[: len(first)])
        pairs = zip(first, again, strict=False)
        changed = changed or any(repr(one) != repr(other) for one, other in pairs)
    return changed, ""


def _asked(rate: Any, steps: range) -> list[float | None]:
    """Return the rates of as many of the steps as there is time for; None where it fails."""
    rates, until = list[float | None](), time.process_time() + _ENOUGH_S
    for step in steps:
        try:
            rates.append(float(rate(step)))
        except Exception:  # noqa: BLE001 - the step may never come
            rates.append(None)
            break
        if time.process_time() > until:
            break
    return rates


def _looked_at(rate: Any, steps: range) -> tuple[list[float | None], str, bool]:
    """Return the rates of some steps, what else than the past they depend on, what has changed."""
    asked, lines, rates = Queries(), list[tuple[str, int]](), list[float | None]()
    chance = global_chance()
    states = list[Values]()
    try:
        for step in steps:
            with asked.listening():
                rates.append(float(rate(step)))
            states.append(held(nn.Module(), (), asked.codes, [rate])[0])
        if global_chance() != chance:
            with watching(position, lines.append):
                rate(steps[0])
    except Exception:  # noqa: BLE001 - the step may never come
        return rates, "", False
    found = [f"{text_of(line)}: {what}: read here" for what, line in asked.found if what in _BESIDE]
    drawn = [f"{text_of(line)}: random numbers that others draw from, too" for line in lines]
    if global_chance() != chance and not drawn:
        drawn = ["learning_rate: random numbers that others draw from, too"]
    changed = any(one != other for one, other in itertools.pairwise(states))
    return rates, next(iter([*found, *drawn]), ""), changed
