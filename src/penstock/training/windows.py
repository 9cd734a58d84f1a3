"""Windows: the programs that make up a run, and which of them is watched for its memory."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.plan import Plan, is_asynchronous, schedule_of
from penstock.program.lower_plan import lower_plan
from penstock.program.program import Program
from penstock.schedule.recipe import Recipe, units_of

_MOST_STEPS = 100  # of an asynchronous window between checkpoints that are due by the clock
FIRST_WINDOW = 4  # steps of an asynchronous schedule that are run, and watched, before the rest

Windows = tuple[tuple[Program, int], ...]  # each with its first step
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class CheckpointInterval(NamedTuple):
    """How often checkpoints are written, besides the one at the end: in steps, or in seconds."""

    steps: int = 100
    seconds: float | None = None

    def window_steps(self, step_s: float | None) -> int:
        """Return after how many steps an asynchronous schedule drains, if one takes `step_s`."""
        if self.seconds is None:
            return self.steps
        return max(1, min(_MOST_STEPS, int(self.seconds / step_s) if step_s else _MOST_STEPS))

    def __str__(self) -> str:
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
    message = f'--checkpoint-every is "{text}", neither a number of steps nor a time'
    raise PlanError(message, hint="write 500 (steps), 30s, 10m or 2h")


def check_early(plan: Plan) -> None:
    """Raise where receives are to be posted early, and messages are matched by order.

    Raises:   PlanError: on GPUs, where NCCL does that.
    """
    from penstock.graph.trace import device_here

    if plan.early and device_here().type != "cpu":
        message = (
            f"receives are to be posted {plan.early} computes early, and NCCL matches by order"
        )
        raise PlanError(message, hint="make the plan again on these machines, or with early=0")


def windows_of(graph: Graph, plan: Plan, steps: range, every: Sequence[int]) -> Windows:
    """Return the windows that make up `steps`, those that are left.

    A synchronous program is one step.  An asynchronous one drains only after multiples of each of
    `every`, and once at the start, after a few steps that are watched for their memory.
    Raises:   PlanError: receives are to be posted early where messages are matched by order.
    """
    check_early(plan)
    if not is_asynchronous(plan):
        program = lower_plan(plan, graph)
        return tuple((program, step) for step in steps)
    made: dict[int, Program] = {}
    windows = _warm_up(graph, plan, steps)
    start = step = steps.start + len(windows)
    while step < steps.stop:
        until = min(steps.stop, *((step // each + 1) * each for each in every))
        length = min(FIRST_WINDOW, until - step) if step == start else until - step
        if length not in made:
            made[length] = lower_plan(plan, graph, num_steps=length)
        windows.append((made[length], step))
        step += length
    return tuple(windows)


def _warm_up(graph: Graph, plan: Plan, steps: range) -> list[tuple[Program, int]]:
    """Return the windows of the synchronous steps that the weight rule begins with."""
    until = min(schedule_of(plan).weight_rule.warm_up_steps, steps.stop)
    if steps.start >= until:
        return []
    drained = Recipe("one_f_one_b", units=units_of(plan.schedule))
    program = lower_plan(replace(plan, schedule=drained), graph)
    return [(program, step) for step in range(steps.start, until)]


def memory_window(windows: Sequence[tuple[Program, int]]) -> int:
    """Return the window to run under the memory profiler: the first complete, short one.

    That is the second step, for the optimizer makes its state in the first; or the first window
    of several steps.
    """
    longer = (at for at, (program, _) in enumerate(windows) if program.num_steps > 1)
    return next(longer, min(1, len(windows) - 1))
