"""Windows: the programs that make up a run, and which of them is watched for its memory."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.graph.graph import Graph
from penstock.plan import Plan
from penstock.program.lower_plan import is_asynchronous, lower_plan, schedule_of
from penstock.program.program import Program

CHECKPOINT_EVERY = 100  # steps; and at the end
FIRST_WINDOW = 4  # steps of an asynchronous schedule that are run, and watched, before the rest

Windows = tuple[tuple[Program, int], ...]  # each with its first step


def windows_of(graph: Graph, plan: Plan, steps: range) -> Windows:
    """Return the windows that make up `steps`, those that are left.

    A synchronous program is one step.  An asynchronous one drains only where a checkpoint
    is due, and once at the start, after a few steps that are watched for their memory.
    """
    if not is_asynchronous(plan):
        program = lower_plan(plan, graph)
        return tuple((program, step) for step in steps)
    made: dict[int, Program] = {}
    windows = _warm_up(graph, plan, steps)
    start = step = steps.start + len(windows)
    while step < steps.stop:
        until = min(steps.stop, (step // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY)
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
    program = lower_plan(replace(plan, schedule="one_f_one_b"), graph)
    return [(program, step) for step in range(steps.start, until)]


def memory_window(windows: Sequence[tuple[Program, int]]) -> int:
    """Return the window to run under the memory profiler: the first complete, short one.

    That is the second step, for the optimizer makes its state in the first; or the first window
    of several steps.
    """
    longer = (at for at, (program, _) in enumerate(windows) if program.num_steps > 1)
    return next(longer, min(1, len(windows) - 1))
