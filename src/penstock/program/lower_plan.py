"""Lower a plan: its stages cut from the graph, its schedule built, messages added."""

import inspect
from functools import cache

from penstock.errors import PlanError, ScheduleError
from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.graph.stages import Stages
from penstock.plan import Plan, check_fits
from penstock.program.instructions import Edge, StageBytes, TiedGroup
from penstock.program.lower import lower_schedule
from penstock.program.program import Program
from penstock.schedule import Schedule, find
from penstock.schedule.orders import F


def stages_of(plan: Plan, graph: Graph) -> Stages:
    """Return the stages into which `plan` cuts `graph`; without backward if its schedule has none.

    Raises:   PlanError: the plan is for another graph.  GraphError: a cut that cannot be.
    """
    check_fits(plan, graph)
    return cut(graph, plan.cuts, plan.recompute, backward=trains(plan.schedule))


def schedule_of(plan: Plan, *, num_steps: int = 1) -> Schedule:
    """Return the schedule of `plan`; `num_steps` is the window of an asynchronous one.

    Raises:   ScheduleError: no such schedule, or one that cannot be built for these sizes.
              PlanError: it puts the stages on another number of ranks.
    """
    make = find(plan.schedule)
    extra: dict[str, int] = {}
    known = inspect.signature(make).parameters
    if "num_ranks" in known:
        extra["num_ranks"] = plan.num_ranks
    if "num_steps" in known:
        extra["num_steps"] = num_steps
    made = make(plan.num_stages, plan.num_micro_batches, **extra)
    if made.num_ranks != plan.num_ranks:
        message = f"{made.name} puts {plan.num_stages} stages on {made.num_ranks} ranks"
        hint = "cut the model into more stages, or use another number of ranks"
        raise PlanError(f"{message}, the plan on {plan.num_ranks}", hint=hint)
    if plan.buffers == "one copy" and not made.is_in_order:
        message = "buffers ask for one copy of each stage that takes its micro-batches in order"
        hint = "take another schedule, as one_f_one_b"
        raise PlanError(f"{message}; {made.name} does not", hint=hint)
    return made


def is_asynchronous(plan: Plan) -> bool:
    """Return whether the plan's schedule drains only at the end of a window of several steps."""
    return has_window(plan.schedule)


def has_window(schedule: str) -> bool:
    """Return whether a schedule is built for a window of several steps."""
    return "num_steps" in inspect.signature(find(schedule)).parameters


def shares_ranks(schedule: str) -> bool:
    """Return whether a schedule can be told on how many ranks to put the stages."""
    return "num_ranks" in inspect.signature(find(schedule)).parameters


@cache
def trains(schedule: str) -> bool:
    """Return whether a schedule has a backward pass."""
    return bool((find(schedule)(1, 1).orders.kinds != F).any())


def made_on(
    schedule: str, num_stages: int, num_micro_batches: int, num_ranks: int
) -> Schedule | None:
    """Return a schedule of so many stages on so many ranks; None if it does not put them there."""
    make = find(schedule)
    extra = {"num_ranks": num_ranks} if shares_ranks(schedule) else {}
    if extra and num_stages < num_ranks:  # some would have nothing to do
        return None
    try:
        made = make(num_stages, num_micro_batches, **extra)
    except ScheduleError:
        return None
    return made if made.num_ranks == num_ranks else None


def ranks_of(schedule: str, num_stages: int, num_micro_batches: int) -> int:
    """Return on how many ranks a schedule puts so many stages if it is not told otherwise."""
    return find(schedule)(num_stages, num_micro_batches).num_ranks


def lower_plan(
    plan: Plan,
    graph: Graph,
    *,
    num_steps: int = 1,
    stages: Stages | None = None,
    schedule: Schedule | None = None,
) -> Program:
    """Return the program of `plan`: one step, or a window of `num_steps` if it is asynchronous.

    stages, schedule:   what `stages_of` and `schedule_of` return for it, where that is at hand.
    Raises:   PlanError: the plan is for another graph.  GraphError: a cut that cannot be.
              ScheduleError: no such schedule, or one that cannot be built for these sizes.
    """
    stages = stages_of(plan, graph) if stages is None else stages
    nodes = graph.nodes
    return lower_schedule(
        schedule or schedule_of(plan, num_steps=num_steps),
        edges=[Edge(e.kind, e.source, e.target, e.size_bytes) for e in stages.edges],
        tied=[TiedGroup(nodes[p].name, held, nodes[p].size_bytes) for p, held in stages.tied],
        replicas=plan.replicas,
        clip=plan.clip,
        post_validation=plan.clip and plan.post_validation,
        stages=stages.stages,
        stage_bytes=[
            StageBytes(weights=sum(nodes[p].size_bytes for p in stage.parameters))
            for stage in stages.stages
        ],
    )
