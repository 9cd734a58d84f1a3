"""Lower a plan, or a schedule alone, to a program; a plan's program remembers its origin."""

from dataclasses import replace
from typing import NamedTuple

from penstock.errors import ProgramError
from penstock.graph.graph import Graph
from penstock.graph.stages import Stages
from penstock.plan.lower import lower_plan, stages_of
from penstock.plan.plan import Plan
from penstock.program.lower import lower_schedule
from penstock.program.program import Program
from penstock.schedule.schedule import Schedule


class Origin(NamedTuple):
    """What a program was lowered from; kept in `Program.stages`."""

    plan: Plan
    graph: Graph
    stages: Stages


def lower(of: Schedule | Plan, graph: Graph | None = None, *, num_steps: int = 1) -> Program:
    """Return the program of a plan for `graph`, or of a schedule alone.

    A schedule alone is lowered for a chain of stages and messages of unknown size.
    num_steps:  the window of a plan whose schedule is asynchronous.
    Raises:     ValueError: a plan without its graph.  PlanError: the plan is for another graph.
                ScheduleError, GraphError: the plan cannot be built.
    """
    if isinstance(of, Schedule):
        return lower_schedule(of)
    if graph is None:
        raise ValueError("a plan is lowered with the graph that it is for: lower(plan, graph)")
    program = lower_plan(of, graph, num_steps=num_steps)
    return replace(program, stages=Origin(of, graph, stages_of(of, graph)))


def origin_of(program: Program) -> Origin:
    """Return what `program` was lowered from.

    Raises:   ProgramError: it is not known: a schedule alone, or a program from a file.
    """
    if not isinstance(program.stages, Origin):
        hint = "lower a plan with its graph: lower(plan, graph)"
        raise ProgramError("the program does not know the stages of a model", hint=hint)
    return program.stages
