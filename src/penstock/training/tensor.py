"""Tensor: plans whose stages' ops are divided among ranks, and the best of them.

The ranks that divide ops are given; the others are replicas and stages of a pipeline, in every way
that they can be.  Each way is simulated, as a search does; what no such plan has is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, PlanError
from penstock.graph.graph import Graph
from penstock.graph.parts import part_in
from penstock.graph.tensor.cuts import apart_only, collect_points, collects_in
from penstock.job import Job
from penstock.plan.plan import Decision, Plan, divided, plan_by_hand
from penstock.schedule.recipe import any_schedule, built, has_window
from penstock.search.balance import StageEnds, balanced_cuts
from penstock.search.candidate import Candidate
from penstock.search.search import evaluate
from penstock.search.shapes import Fixed
from penstock.training.prepare import divided_step
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.cluster.cluster import Cluster
    from penstock.graph.trace import Capture
    from penstock.profile.profile import Profile
    from penstock.training.choose import Choice, Machines

SCHEDULE = "one_f_one_b"


def check_alone(tensor: int, asks: Mapping[str, object]) -> None:
    """Raise where ops are to be divided together with what no such plan has.

    asks:     what was requested, by flag.
    Raises:   PlanError.
    """
    flags = [flag for flag, value in asks.items() if value]
    if tensor > 1 and flags:
        message = f"--tensor {tensor} divides the ops of stages, and no such plan has {flags[0]}"
        raise PlanError(message, hint=f"leave out --tensor, or {' '.join(flags)}")


def best_by_tensor(
    job: Job,
    captured: "Capture",
    fixed: Fixed,
    profiles: "tuple[Profile, ...]",
    cluster: "Cluster",
) -> Plan:
    """Return the fastest plan of a divided step, by simulation.

    Raises:   PlanError: ranks, stages or micro-batches cannot be divided so.
    """
    graph = captured.graph
    ranks = cluster.num_ranks if fixed.ranks is None else fixed.ranks
    found: list[Candidate] = []
    problem: PenstockError = _no_shape(ranks, graph.tensor, job)
    for plan in _plans(job, graph, fixed, ranks):
        try:
            found.append(evaluate(graph, profiles, cluster, plan)[0])
        except PenstockError as why:
            problem = why
    usable = [candidate for candidate in found if not candidate.refused]
    if not usable:
        why = found[0].refused if found else problem.message
        raise PlanError(f"no plan by {graph.tensor} tensor ranks: {why}", hint=problem.hint or "")
    best = min(usable, key=lambda candidate: candidate.step_s)
    others = sorted({each.step_s for each in usable if each is not best})
    why = f"best alternative: {format_seconds(others[0])}" if others else "no other way was tried"
    shape = f"{best.plan.replicas} replicas on {best.plan.num_ranks} pipeline ranks each"
    reasons = (_reason(graph), Decision("shape", shape, "search", why))
    return replace(best.plan, decisions=reasons)


def _reason(graph: Graph) -> Decision:
    """Return how much of a step is divided, and what that costs, in words."""
    parameters = [node for node in graph.nodes if node.kind == "parameter"]
    sliced = [node for node in parameters if (p := part_in(node.name)) and p.order is not None]
    own, all_bytes = (sum(n.size_bytes for n in nodes) for nodes in (sliced, parameters))
    collects = collects_in(graph.nodes)
    moved = sum(graph.nodes[graph.nodes[at].inputs[0]].size_bytes for at in collects)
    why = (
        f"requested: {len(sliced)} of {len(parameters)} parameters in slices "
        f"({format_bytes(own)} of {format_bytes(all_bytes)} a rank); "
        f"{len(collects)} collects of {format_bytes(moved)} a micro-batch"
    )
    return Decision("tensor", f"{graph.tensor} ranks", "user", why)


def _no_shape(ranks: int, tensor: int, job: Job) -> PlanError:
    message = f"{ranks} ranks, {tensor} of them for the ops of each stage, and a step of "
    message += f"{job.micro_batches} micro-batches do not go together"
    hint = f"give --ranks a multiple of {tensor}, and each replica as many micro-batches"
    return PlanError(message, hint=hint)


def _plans(job: Job, graph: Graph, fixed: Fixed, ranks: int) -> Iterator[Plan]:
    """Yield the plans of all shapes: replicas, and stages of a pipeline, on so many ranks."""
    schedule = any_schedule(SCHEDULE if fixed.schedule is None else fixed.schedule)
    if has_window(schedule):
        message = "ops divided among ranks, with weights of several versions"
        raise PlanError(message, hint="name a synchronous schedule")
    across, rest = divmod(ranks, graph.tensor)
    apart = apart_only(graph)
    flop = [float(node.flop + node.size_bytes / 4) for node in graph.nodes]
    for count in range(1, across + 1) if not rest else ():
        for stages in (fixed.stages,) if fixed.stages else (count,):
            if across % count or job.micro_batches % (across // count):
                continue
            if stages > len(graph.cut_points) + 1 - len(apart):
                continue
            replicas = across // count
            share = job.micro_batches // replicas
            if built(schedule, stages, share).num_ranks != count:
                continue
            cuts = balanced_cuts(graph, flop, stages, StageEnds(frozenset(), apart))
            plan = plan_by_hand(
                graph,
                cuts,
                schedule,
                num_micro_batches=share,
                num_ranks=count,
                replicas=replicas,
                recompute=(bool(fixed.recompute),) * stages,
                clip=job.awaits_all,
            )
            yield divided(plan.changed(buffers=job.buffers), graph, collect_points(graph))


def chosen(
    job: Job, fixed: Fixed, captured: "Capture", there: "Machines", decisions: Sequence[Decision]
) -> "tuple[Choice, tuple[Profile, ...]]":
    """Return the best plan by as many tensor ranks as are fixed, and what it was measured with.

    decisions:  that follow from the job.
    Raises:   PlanError: there is none.  GraphError: no op can be divided.
    """
    from penstock.training.choose import Choice, decided, on_hosts_of, predicted

    assert there.cluster is not None, "it is of some machines"
    step = divided_step(captured, fixed.tensor, there.listener)
    profiles = there.profile(step, job, there.cluster, there.listener)
    plan = best_by_tensor(job, step, fixed, profiles, there.cluster)
    plan = decided(on_hosts_of(plan, there.cluster), decisions)
    plan = predicted(plan, step.graph, profiles, there.cluster)
    return Choice(job, step, plan), profiles
