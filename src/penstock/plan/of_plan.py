"""Lower a plan, or a schedule alone, to a program; a plan's program remembers its origin."""

from dataclasses import replace
from typing import NamedTuple

from penstock.errors import PlanError, ProgramError
from penstock.graph.graph import Graph
from penstock.graph.stages import Stages
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.plan import Plan, is_asynchronous
from penstock.program.lower import lower_schedule
from penstock.program.program import Program
from penstock.schedule.recipe import name_of
from penstock.schedule.schedule import Schedule


class Origin(NamedTuple):
    """What a program was lowered from; kept in `Program.stages`."""

    plan: Plan
    graph: Graph
    stages: Stages


def lower(
    of: Schedule | Plan, graph: Graph | None = None, *, num_steps: int | None = None
) -> Program:
    """Return the program of a plan for `graph`, or of a schedule alone.

    A schedule alone is lowered for a chain of stages and messages of unknown size.
    num_steps:  the window of a plan whose schedule is asynchronous, which drains at its end only.
    Raises:     ValueError: a plan without its graph.  PlanError: the plan is for another graph, or
                is asynchronous and no window is given.
                ScheduleError, GraphError: the plan cannot be built.
    """
    if isinstance(of, Schedule):
        return lower_schedule(of)
    if graph is None:
        raise ValueError("a plan is lowered with the graph that it is for: lower(plan, graph)")
    if num_steps is None and is_asynchronous(of):
        message = f"{name_of(of.schedule)} drains only at the end of a window, and none is given"
        raise PlanError(message, hint="say of how many steps: lower(plan, graph, num_steps=8)")
    program = lower_plan(of, graph, num_steps=num_steps or 1)
    origin = Origin(of, graph, stages_of(of, graph))
    return replace(program, graph=replace(program.graph, stages=origin))


def origin_of(program: Program) -> Origin:
    """Return what `program` was lowered from.

    Raises:   ProgramError: it is not known: a schedule alone, or a program from a file.
    """
    if not isinstance(program.graph.stages, Origin):
        hint = "lower a plan with its graph: lower(plan, graph)"
        raise ProgramError("the program does not know the stages of a model", hint=hint)
    return program.graph.stages
