"""Lower a plan: its stages cut from the graph, its schedule built, messages added, passes applied.

The result is what is simulated and what runs, to the letter.
"""

from itertools import starmap

from penstock.errors import PlanError, ScheduleError
from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.graph.known_stages import KnownStages
from penstock.graph.parts import word_of
from penstock.graph.stages import Stage, StageEdge, Stages
from penstock.graph.tensor.cuts import collect_points, collects_of
from penstock.graph.wire import message_bytes, summed_bytes
from penstock.plan.plan import Plan, check_fits, schedule_of
from penstock.program.edges import Collected, Edge, StageBytes, StageGraph, TiedGroup
from penstock.program.lower import drafted
from penstock.program.passes.delay import delay
from penstock.program.passes.offload import offload
from penstock.program.passes.receive_early import receive_early
from penstock.program.passes.shard import shard
from penstock.program.program import Program, sound
from penstock.program.step_end import StepEnd
from penstock.schedule.figures import reads_alike
from penstock.schedule.orders import B
from penstock.schedule.recipe import trains
from penstock.schedule.schedule import Schedule


def stages_of(plan: Plan, graph: Graph, known: KnownStages | None = None) -> Stages:
    """Return the stages into which `plan` cuts `graph`; without backward if its schedule has none.

    known:    as in `cut`.
    Raises:   PlanError: the plan is for another graph.  GraphError: an impossible cut.
    """
    check_fits(plan, graph)
    missing = sorted({*collect_points(graph)}.difference(plan.cuts))
    if missing:
        name = graph.cut_points[missing[0]].name
        hint = "make the plan with ops divided among ranks, which cuts it there"
        raise PlanError(f"the plan does not cut {name!r}, where ranks collect", hint=hint)
    return cut(graph, plan.cuts, plan.recompute, backward=trains(plan.schedule), known=known)


def bits_of(plan: Plan, stages: Stages) -> tuple[int, ...]:
    """Return the bits of a number in the messages of each edge."""
    return tuple(plan.terms.wire[edge.kind == "B"] for edge in stages.edges)


def lower_plan(  # long: what a plan says, field by field
    plan: Plan,
    graph: Graph,
    *,
    num_steps: int = 1,
    stages: Stages | None = None,
    schedule: Schedule | None = None,
) -> Program:
    """Return the program of `plan`: one step, or a window of `num_steps` if it is asynchronous.

    stages, schedule:   what `stages_of` and `schedule_of` return for it, if already built.
                        With unlike shares, the schedule of the largest.
    Raises:   PlanError: the plan is for another graph.  GraphError: an impossible cut.
              ScheduleError: no such schedule, or one that cannot be built for these sizes, or that
              has B read other weights than F, of which some ops are to be repeated.
    """
    stages = stages_of(plan, graph) if stages is None else stages
    largest = schedule or schedule_of(plan, num_steps=num_steps)  # 3 in docs/architecture.md
    _check_repeats(plan, largest)
    made = {plan.num_micro_batches: largest}
    for share in set(plan.place.shares) - set(made):
        made[share] = schedule_of(plan, share=share)
    agreed = plan.agreement
    program = drafted(
        [made[share] for share in plan.grid.shares],
        _stage_graph(plan, graph, stages, largest),
        StepEnd(
            agreed.clip,
            agreed.clip and agreed.post_validation,
            agreed.commits,
            agreed.guard,
            plan.averages,
            plan.topology,
            plan.served,
        ),
        plan.place.axis,
        plan.far,
    )
    if plan.shards or plan.far:  # 5 in docs/architecture.md
        ahead, parts = plan.ahead, plan.place.parts
        program = shard(program, plan.shard, prefetch=ahead, parts=parts, far=plan.far)
    if plan.sums_way.late:
        program = delay(program)
    if plan.offloads:
        program = offload(program, plan.offload, beside=plan.overlap.beside)
    if plan.overlap.early:
        program = receive_early(program, distance=plan.overlap.early)
    return sound(program)


def _stage_graph(plan: Plan, graph: Graph, stages: Stages, largest: Schedule) -> StageGraph:
    """Return what goes between the stages of a plan, and what they hold."""
    edges = (
        Edge(
            e.kind,
            e.source,
            e.target,
            _held_in(e, largest) * message_bytes(graph, e.values, bits),
            tuple(starmap(Collected, collects_of(graph, e).items())),
        )
        for e, bits in zip(stages.edges, bits_of(plan, stages), strict=True)
    )
    tied = (
        TiedGroup(word_of(graph.nodes[p].name), held, graph.kept_bytes(p))
        for p, held in stages.tied
    )
    sizes = (
        _bytes_of(stage, plan, graph, (stages.shared, plan.replicas * len(ranks)))
        for stage, ranks in zip(stages.stages, largest.stage_ranks, strict=True)
    )
    bits = bits_of(plan, stages) if plan.terms.rounds else ()
    return StageGraph(tuple(edges), tuple(tied), tuple(sizes), tuple(bits), stages.stages)


def _check_repeats(plan: Plan, schedule: Schedule) -> None:
    """Raise where a stage would keep what older weights made and repeat the rest with newer ones.

    Raises:   ScheduleError.
    """
    if all(isinstance(again, bool) for again in plan.recompute) or reads_alike(schedule):
        return
    stage = next(k for k, again in enumerate(plan.recompute) if not isinstance(again, bool))
    message = f"stage {stage} is to repeat some ops, and {schedule.name} has F and B read unlike"
    hint = "let the stage repeat all of F, or nothing"
    raise ScheduleError(f"{message} weights", hint=hint)


def _bytes_of(
    stage: Stage, plan: Plan, graph: Graph, agreed: tuple[frozenset[int], int]
) -> StageBytes:
    """Return the bytes of a stage.

    agreed:   the parameters that several stages hold, and the ranks over which it is summed.
    """
    (shared, ranks), own, sums = agreed, stage.parameters, plan.agreement.sums
    fewer = bool(sums) and not (
        plan.averages or plan.served
    )  # else gradients, if any, are summed as they are
    summed = summed_bytes(graph, own, sums, ranks=ranks, shared=shared) if fewer else 0
    return StageBytes(weights=sum(map(graph.kept_bytes, own)), summed=summed)


def _held_in(edge: StageEdge, schedule: Schedule) -> int:
    """Return the micro-batches of a message: one, or those of a B."""
    whole = edge.kind == "B" and bool((schedule.orders.kinds == B).any())
    return schedule.together if whole else 1
