"""Run windows: the programs that make up a run, and which of them is watched for its memory."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.checkpoints.folders import Keep
from penstock.errors import PlanError, RunError
from penstock.graph.graph import Graph
from penstock.plan.lower_plan import lower_plan
from penstock.plan.plan import Plan, is_asynchronous, schedule_of
from penstock.program.program import Program
from penstock.runtime.windows import Windows, repeated
from penstock.schedule.recipe import Recipe, units_of
from penstock.units import format_seconds

_MOST_STEPS = 100  # of an asynchronous window between checkpoints that are due by the clock
FIRST_WINDOW = 4  # steps of an asynchronous schedule that are run, and watched, before the rest

_MOST_DIGITS = 12
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class CheckpointInterval(NamedTuple):
    """How often checkpoints are written, besides the one at the end: in steps, or in seconds.

    mtbf_s:  mean seconds between failures, by which the run finds the interval.
    """

    steps: int = 100
    seconds: float | None = None
    mtbf_s: float | None = None

    def window_steps(self, step_s: float | None) -> int:
        """Return after how many steps an asynchronous schedule drains, if one takes `step_s`."""
        if self.mtbf_s is not None:
            return _MOST_STEPS
        if self.seconds is None:
            return self.steps
        return max(1, min(_MOST_STEPS, int(self.seconds / step_s) if step_s else _MOST_STEPS))

    def __str__(self) -> str:
        if self.mtbf_s is not None:
            return f"sqrt(2 x what one costs x {format_seconds(self.mtbf_s)} between failures)"
        return f"{self.steps} steps" if self.seconds is None else f"{self.seconds:g} s"


EVERY = CheckpointInterval()


def parse_every(text: str) -> CheckpointInterval:
    """Return what `text` means: "500" steps, "30s", "10m" or "2h".

    Raises:   PlanError: it is neither a number of steps nor a time.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)(s|m|h)?", text.strip())
    number, unit = (float(found[1]), found[2]) if found else (0.0, None)
    if unit and number > 0:
        return CheckpointInterval(0, number * _UNITS_S[unit])
    if not unit and number >= 1 and number.is_integer():
        return CheckpointInterval(int(number))
    message = f'checkpoint_every is "{text}", neither a number of steps nor a time'
    raise PlanError(message, hint="write 500 (steps), 30s, 10m or 2h")


def parse_seconds(text: str, flag: str) -> float:
    """Return the seconds that "30s", "10m" or "2h" means.

    Raises:   PlanError: it is no time.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)(s|m|h)", text.strip())
    if found is None or not float(found[1]):
        raise PlanError(f'{flag} is "{text}", no time', hint="write 30s, 10m or 2h")
    return float(found[1]) * _UNITS_S[found[2]]


def parse_keep(text: str) -> Keep:
    """Return what "3", "3,every=1000" or "1,no-best" means.

    Raises:   PlanError: something else.
    """
    newest, every, best = 2, 0, True
    for word in text.split(","):
        name, _, number = word.strip().rpartition("=")
        if name == "every" and number.isdecimal() and len(number) < _MOST_DIGITS:
            every = int(number)
        elif not name and number.isdecimal() and len(number) < _MOST_DIGITS:
            newest = int(number)
        elif word.strip() in ("best", "no-best"):
            best = word.strip() == "best"
        else:
            hint = "write 3 (the newest), 3,every=1000 (steps, for good), or 3,no-best"
            raise PlanError(f'keep is "{text}"', hint=hint)
    return Keep(newest, every, best)


def check_early(plan: Plan) -> None:
    """Raise where receives are to be posted early, and messages are matched by order.

    Raises:   PlanError: on GPUs, where NCCL does that.
    """
    from penstock.device import here

    if plan.overlap.early and not here().is_cpu:
        message = f"receives are to be posted {plan.overlap.early} computes early"
        raise PlanError(
            f"{message}, and NCCL matches by order",
            hint="make the plan again on these machines, or with early=0",
        )


def windows_of(graph: Graph, plan: Plan, steps: range, every: Sequence[int]) -> Windows:
    """Return the windows that make up `steps`, those that are left.

    A synchronous program is one step.  An asynchronous one drains only after multiples of each of
    `every`, and once at the start, after a few steps that are watched for their memory.
    Raises:   PlanError: receives are to be posted early where messages are matched by order.
    """
    check_early(plan)
    if not is_asynchronous(plan):
        return repeated(lower_plan(plan, graph), steps)
    warm_up = _warm_up(graph, plan, steps)
    start = steps.start if warm_up is None else max(steps.start, _warm_until(plan, steps))
    made: dict[int, Program] = {}

    def length(step: int) -> int:
        until = min(steps.stop, *((step // each + 1) * each for each in every))
        return min(FIRST_WINDOW, until - step) if step == start else until - step

    def ask(step: int) -> Program | None:
        if step >= steps.stop:
            return None
        return warm_up if step < start else made[length(step)]

    step = start
    while step < steps.stop:
        if length(step) not in made:
            made[length(step)] = lower_plan(plan, graph, num_steps=length(step))
        step += length(step)
    first = () if warm_up is None else (warm_up,)
    return Windows(steps.start, ask, (*first, *made.values()))


def windows_of_keys(
    programs: Mapping[Hashable, Program], key_of: Callable[[int], Hashable], steps: range
) -> Windows:
    """Return the windows of steps of several keys: of one step each, by the program of its key.

    Raises:   RunError: a step has a key without a program.
    """

    def ask(step: int) -> Program | None:
        if step >= steps.stop:
            return None
        key = key_of(step)
        if key not in programs:
            message = f"step {step} has the shape {key}, which was not planned"
            raise RunError(message, hint="does the data know all its keys?")
        return programs[key]

    return Windows(steps.start, ask, tuple(programs.values()))


def _warm_until(plan: Plan, steps: range) -> int:
    return min(schedule_of(plan).weight_rule.warm_up_steps, steps.stop)


def _warm_up(graph: Graph, plan: Plan, steps: range) -> Program | None:
    """Return the program of the synchronous steps that the weight rule begins with, if any."""
    if steps.start >= _warm_until(plan, steps):
        return None
    drained = Recipe("one_f_one_b", units=units_of(plan.schedule))
    return lower_plan(replace(plan, schedule=drained), graph)


def memory_window(windows: Windows) -> int:
    """Return the window to run under the memory profiler: the first complete, short one.

    That is the second step, for the optimizer makes its state in the first; or the first window
    of several steps.
    """
    if all(program.num_steps == 1 for program in windows.programs):
        return windows.count(2) - 1
    return next(at for at, (program, _) in enumerate(windows) if program.num_steps > 1)
