"""Search: try every (replicas, depth, schedule, recompute), balance the cuts, simulate each.

Every candidate is lowered to a Program and simulated exactly; the cuts of the best ones are
then moved one cut point at a time while that helps.  Deterministic.  A decision's reason is
the best candidate that decides otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.cluster import Cluster
from penstock.errors import GraphError, PlanError, ScheduleError
from penstock.graph.graph import Graph
from penstock.plan import By, Decision, Plan, Prediction, decide, plan_by_hand
from penstock.profile import Profile
from penstock.program.lower_plan import (
    has_window,
    is_asynchronous,
    lower_plan,
    on_ranks,
    ranks_of,
    schedule_of,
    shares_ranks,
    stages_of,
    trains,
)
from penstock.schedule import SCHEDULES, weight_copies
from penstock.search.balance import balanced_cuts, stage_seconds
from penstock.simulate import simulate
from penstock.simulate.price import costs_of, memory_of
from penstock.timeline import Timeline, peak_bytes, step_s
from penstock.units import format_bytes, format_seconds

Objective = Literal["time", "cost", "memory"]
_WINDOW = 8  # steps over which an asynchronous schedule is simulated
_POLISHED = 3  # candidates whose cuts are moved


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user decided beforehand; None leaves it to the search."""

    ranks: int | None = None
    replicas: int | None = None
    stages: int | None = None
    schedule: str | None = None
    recompute: bool | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, what its simulation says, and why it cannot be used (empty if it can)."""

    plan: Plan
    step_s: float
    peak_bytes: tuple[int, ...]
    usd: float
    refused: str = ""

    def score(self, objective: Objective) -> tuple[float, float]:
        """Return what is to be small: the objective, then the other of time and memory."""
        peak = float(max(self.peak_bytes, default=0))
        match objective:
            case "time":
                return self.step_s, peak
            case "cost":
                return self.usd or self.step_s * self.plan.total_ranks, self.step_s
            case "memory":
                return peak, self.step_s


def search(  # noqa: PLR0913 - what there is, and one for each wish
    graph: Graph,
    profile: Profile,
    cluster: Cluster,
    *,
    micro_batches: int,
    objective: Objective = "time",
    clip: bool = False,
    wish: Wish = Wish(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Plan, tuple[Candidate, ...]]:
    """Return the best plan with its reasons, and every candidate that was simulated.

    micro_batches:  per step over all replicas; the product of replicas and micro-batches of
                    each is always this number, so every candidate computes the same step.
    Asynchronous schedules change the mathematics: they are tried only where `wish` names one.
    Raises:   PlanError: nothing fits the wish, or nothing fits the memory.
              ScheduleError: the wish names a schedule that does not exist.
    """
    if wish.schedule is not None and not trains(wish.schedule):
        hint = "take one of the others that `penstock schedule` lists"
        raise PlanError(f"{wish.schedule} has no backward pass: it cannot train", hint=hint)
    shapes = list(_shapes(graph, cluster, micro_batches, wish))
    if not shapes:
        raise _nothing_fits(graph, cluster, micro_batches, wish)
    found: list[Candidate] = []
    for done, shape in enumerate(shapes):
        found += _candidates(graph, profile, cluster, shape, clip, wish)
        if progress is not None:
            progress(done + 1, len(shapes))
    usable = [c for c in found if not c.refused]
    if not usable:
        raise PlanError(_why_none(found), hint="use more ranks, or a smaller micro-batch")
    ranked = sorted(usable, key=lambda c: c.score(objective))[:_POLISHED]
    polished = [_polish(graph, profile, cluster, c, objective) for c in ranked]
    best = min(polished, key=lambda c: c.score(objective))
    everything = (best, *found)
    per_stage = stage_seconds(graph, profile.op_s, best.plan.cuts)
    reasons = _reasons(best, everything, objective, wish, per_stage)
    prediction = Prediction(best.step_s, best.peak_bytes, best.usd)
    return decide(best.plan, reasons, prediction), everything


def evaluate(
    graph: Graph, profile: Profile, cluster: Cluster, plan: Plan
) -> tuple[Candidate, Timeline]:
    """Return what the exact simulation of `plan` says, and its timeline.

    For an asynchronous schedule, a window of 8 steps; seconds are those that one more step adds.
    """
    return _simulated(graph, profile, cluster, plan, spans=True)


@dataclass(frozen=True, slots=True)
class _Shape:
    replicas: int
    num_ranks: int
    stages: int
    schedule: str
    num_micro_batches: int


def _shapes(graph: Graph, cluster: Cluster, micro_batches: int, wish: Wish) -> Iterator[_Shape]:
    for ranks in range(1, cluster.num_ranks + 1):
        if wish.ranks not in (None, ranks):
            continue
        for replicas in range(1, ranks + 1):
            if (
                ranks % replicas
                or micro_batches % replicas
                or wish.replicas not in (None, replicas)
            ):
                continue
            if ranks == replicas and _wants_pipeline(graph, cluster, wish):
                continue
            yield from _pipelines(
                graph, ranks // replicas, replicas, micro_batches // replicas, wish
            )


def _wants_pipeline(graph: Graph, cluster: Cluster, wish: Wish) -> bool:
    """Return whether a schedule is wished for and there can be a pipeline to have it."""
    most = (wish.ranks or cluster.num_ranks) // (wish.replicas or 1)
    return wish.schedule is not None and min(most, len(graph.cut_points) + 1) > 1


def _pipelines(
    graph: Graph, num_ranks: int, replicas: int, num_micro_batches: int, wish: Wish
) -> Iterator[_Shape]:
    names = [wish.schedule] if wish.schedule else _synchronous(num_ranks)
    most = len(graph.cut_points) + 1
    for name in names:
        for stages in _stage_counts(name, num_ranks) if wish.stages is None else (wish.stages,):
            if 1 <= stages <= most and on_ranks(name, stages, num_micro_batches, num_ranks):
                yield _Shape(replicas, num_ranks, stages, name, num_micro_batches)


def _synchronous(num_ranks: int) -> list[str]:
    """Return the schedules that are tried if none is wished for; on one rank all are the same."""
    names = [make.__name__ for make in SCHEDULES]
    return (
        [n for n in names if trains(n) and not has_window(n)] if num_ranks > 1 else ["one_f_one_b"]
    )


def _stage_counts(schedule: str, num_ranks: int) -> tuple[int, ...]:
    """Return the numbers of stages to try: two or three on a rank, where they share ranks."""
    if shares_ranks(schedule):
        return 2 * num_ranks, 3 * num_ranks
    return num_ranks, num_ranks - 1  # fewer than ranks, where one of them lives on several


def _candidates(
    graph: Graph, profile: Profile, cluster: Cluster, shape: _Shape, clip: bool, wish: Wish
) -> Iterator[Candidate]:
    cuts = balanced_cuts(graph, profile.op_s, shape.stages)
    choices = (False, True) if wish.recompute is None else (wish.recompute,)
    for recompute in choices:
        plan = plan_by_hand(
            graph,
            cuts,
            shape.schedule,
            num_micro_batches=shape.num_micro_batches,
            num_ranks=shape.num_ranks,
            replicas=shape.replicas,
            recompute=(recompute,) * shape.stages,
            clip=clip,
        )
        yield _candidate(graph, profile, cluster, plan)


def _candidate(graph: Graph, profile: Profile, cluster: Cluster, plan: Plan) -> Candidate:
    try:
        candidate, _ = _simulated(graph, profile, cluster, plan, spans=False)
    except (GraphError, ScheduleError) as problem:
        return Candidate(plan, float("inf"), (), 0.0, refused=problem.message)
    for rank, peak in enumerate(candidate.peak_bytes):
        cap = cluster.device_of(rank).memory_bytes
        if peak > cap:
            why = f"rank {rank} would hold {format_bytes(peak)} of {format_bytes(cap)}"
            return replace(candidate, refused=why)
    return candidate


def _simulated(
    graph: Graph, profile: Profile, cluster: Cluster, plan: Plan, *, spans: bool
) -> tuple[Candidate, Timeline]:
    stages = stages_of(plan, graph)

    def window(steps: int, *, spans: bool) -> Timeline:
        program = lower_plan(plan, graph, num_steps=steps, stages=stages)
        several = is_asynchronous(plan)
        alive = weight_copies(schedule_of(plan, num_steps=steps)) if several else ()
        costs = costs_of(graph, stages, profile, alive)
        memory = memory_of(graph, stages, profile, program, alive)
        return simulate(program, costs, cluster, memory=memory, spans=spans)

    if is_asynchronous(plan):
        timeline, half = window(_WINDOW, spans=spans), window(_WINDOW // 2, spans=False)
        seconds = (step_s(timeline) - step_s(half)) / (_WINDOW - _WINDOW // 2)
    else:
        timeline = window(1, spans=spans)
        seconds = step_s(timeline)
    usd_per_s = sum(cluster.device_of(r).usd_per_hour for r in range(plan.total_ranks)) / 3600
    return Candidate(plan, seconds, peak_bytes(timeline), usd_per_s * seconds), timeline


def _polish(
    graph: Graph, profile: Profile, cluster: Cluster, best: Candidate, objective: Objective
) -> Candidate:
    """Move one cut at a time to a neighbouring cut point while that makes the candidate better."""
    improved = True
    while improved:
        improved = False
        for plan in _neighbours(graph, best.plan):
            other = _candidate(graph, profile, cluster, plan)
            if not other.refused and other.score(objective) < best.score(objective):
                best, improved = other, True
                break
    return best


def _neighbours(graph: Graph, plan: Plan) -> Iterator[Plan]:
    for at in range(len(plan.cuts)):
        for by in (-1, 1):
            cuts = list(plan.cuts)
            cuts[at] += by
            if 0 <= cuts[at] < len(graph.cut_points) and cuts == sorted(set(cuts)):
                names = tuple(graph.cut_points[c].name for c in cuts)
                yield replace(plan, cuts=tuple(cuts), cut_names=names)


# -- reasons ------------------------------------------------------------------------------------


def _reasons(
    best: Candidate,
    found: Sequence[Candidate],
    objective: Objective,
    wish: Wish,
    per_stage: Sequence[float],
) -> tuple[Decision, ...]:
    def by(wanted: object) -> By:
        return "user" if wanted is not None else "search"

    def against(name: str, wanted: object, value: Callable[[Plan], object]) -> str:
        if wanted is not None:
            return "asked for"
        return _against(best, found, objective, name, value)

    plan = best.plan
    ranks = against("ranks", wish.ranks, lambda p: p.total_ranks)
    replicas = against("replicas", wish.replicas, lambda p: p.replicas)
    stages = against("number of stages", wish.stages, lambda p: p.num_stages)
    schedule = against("schedule", wish.schedule, lambda p: p.schedule)
    again = against("recompute", wish.recompute, lambda p: any(p.recompute))
    per = f"{plan.num_micro_batches} per replica"
    cuts = ", ".join(plan.cut_names) or "uncut"
    balance = "per micro-batch: " + ", ".join(map(format_seconds, per_stage))
    return (
        Decision("ranks", str(plan.total_ranks), by(wish.ranks), ranks),
        Decision("replicas", str(plan.replicas), by(wish.replicas), replicas),
        Decision("stages", f"{plan.num_stages} on {plan.num_ranks} ranks", by(wish.stages), stages),
        Decision("cuts", cuts, "search", balance),
        Decision("schedule", plan.schedule, by(wish.schedule), schedule),
        Decision("micro-batches", per, "only choice", "the job sets how many make a step"),
        Decision("recompute", _yes_no(plan), by(wish.recompute), again),
    )


def _yes_no(plan: Plan) -> str:
    stages = [str(stage) for stage, again in enumerate(plan.recompute) if again]
    return f"stages {', '.join(stages)}" if stages else "none"


def _against(
    best: Candidate,
    found: Sequence[Candidate],
    objective: Objective,
    name: str,
    value: Callable[[Plan], object],
) -> str:
    """Return the best candidate that decides otherwise, in words."""
    others = [c for c in found if value(c.plan) != value(best.plan)]
    usable = [c for c in others if not c.refused]
    if not others:
        return "nothing else is possible"
    if not usable:
        return f"every other {name} was refused: {others[0].refused}"
    other = min(usable, key=lambda c: c.score(objective))
    plan = other.plan
    what = f"{plan.replicas} x {plan.num_stages} stages, {plan.schedule}"
    if any(plan.recompute):
        what += ", recompute"
    peak = max(other.peak_bytes)
    slower, larger = _times(other.step_s, best.step_s), _times(peak, max(best.peak_bytes))
    return (
        f"the best otherwise ({what}): {format_seconds(other.step_s)}, {slower} of this, and "
        f"{format_bytes(peak)}, {larger}"
    )


def _times(other: float, own: float) -> str:
    return f"{other / own:.2f}x" if own else "against none"


def _nothing_fits(graph: Graph, cluster: Cluster, micro_batches: int, wish: Wish) -> PlanError:
    most = len(graph.cut_points) + 1
    if wish.stages is not None and wish.stages > most:
        message = (
            f"{wish.stages} stages need {wish.stages - 1} cut points; the model has {most - 1}"
        )
        return PlanError(message, hint=f"use at most {most} stages")
    names = [name for name in Wish.__dataclass_fields__ if getattr(wish, name) is not None]
    asked = ", ".join(f"{name} {getattr(wish, name)}" for name in names) or "anything"
    there = f"{cluster.num_ranks} ranks, {most - 1} cut points"
    message = f"no plan fits {asked}: {there}, {micro_batches} micro-batches a step"
    return PlanError(message, hint=_what_would_fit(micro_batches, wish))


def _what_would_fit(micro_batches: int, wish: Wish) -> str:
    if wish.schedule is None or wish.stages is None:
        return "ask for less, or leave more to the search"
    try:
        ranks = ranks_of(wish.schedule, wish.stages, micro_batches)
    except ScheduleError as problem:
        return problem.hint or problem.message
    return f"{wish.schedule} puts {wish.stages} stages on {ranks} ranks: give --ranks {ranks}"


def _why_none(found: Sequence[Candidate]) -> str:
    reasons = sorted({c.refused for c in found})
    return "no plan is possible: " + "; ".join(reasons[:3])
