"""Losses: what a run does when ranks are lost or come: plans made ahead, and which one is taken.

Each way to go on is priced by simulation: the seconds of moving what is missing, and then of all
steps that are left.

    reshape   the best plan that a search finds for the ranks that are left
    reroute   the same cuts; the lost rank's micro-batches go to the ranks of other replicas that
              hold the same stage, and nothing is moved (ReCycle, SOSP 2024, without its split
              backward where the schedule has none); the plan for as many ranks was searched for,
              so what rerouting saves is the moving: it is priced where that takes longer
    go back   to the last checkpoint, where nobody has some of the state any more
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.choose.choose import Choice, Joining, Machines, best_of, decided, joining_of
from penstock.cluster.cluster import Cluster
from penstock.errors import PenstockError, PlanError
from penstock.graph.graph import Graph
from penstock.graph.parts import key_in
from penstock.pilot.redundancy import safe
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.plan import Decision, Plan, is_asynchronous
from penstock.plan.reshape import Counts, reshaped
from penstock.program.program import Program
from penstock.schedule.dapple import words_of_turns
from penstock.schedule.recipe import Recipe
from penstock.search.shapes import Fixed
from penstock.units import format_bytes, format_seconds

MOVE_BYTES_PER_S = 5e8  # until the first move was measured
READY_S = 0.1  # of making ready for any other generation, likewise
PRICED_S = 0.05  # for which all wait while rerouting is priced: what it saves has to be more


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """What plans are made from: ways of joining micro-batches, machines, what is fixed."""

    ways: tuple[Joining, ...]
    cluster: Cluster
    fixed: Fixed

    def choice_of(self, plan: Plan) -> Choice:
        """Return a plan with the job and the step that it is of.

        Raises:   PlanError: it joins micro-batches, or has slices, as none of these does.
        """
        try:
            return joining_of(self.ways, plan).choice(plan)
        except LookupError:
            message = f"the plan has {plan.terms.joined} of the job's micro-batches as one"
            message += f", {dict(plan.terms.split)} in slices"
            raise PlanError(message, hint="give all members the same job file") from None


class WayOn(NamedTuple):
    """A way to go on: a plan, in which order its ranks hold what, and what it will take.

    step_s:   of a step with what these members take now.
    """

    what: str
    plan: Plan
    members: tuple[int, ...]
    moved_bytes: int
    step_s: float
    cost_s: float

    def __str__(self) -> str:
        step = format_seconds(self.step_s)
        moved = f"{format_bytes(self.moved_bytes)} moved"
        return f"{self.what} {step} a step, {moved}, {format_seconds(self.cost_s)} in all"


def committing(plan: Plan, ways: PlanBasis) -> Plan:
    """Return a plan each of whose steps counts only once all ranks say so, with its prediction.

    Where a rank holds something alone, another one has a copy, in the way that costs least.
    """
    own = plan.changed(commits=True, guard=None, compiled=False, post_validation=False)
    return safe(own, joining_of(ways.ways, plan), ways.cluster)


def survives(plan: Plan, ways: Sequence[Joining], cluster: Cluster) -> bool:
    """Return whether a run by a plan goes on with all state when any of its ranks is lost.

    It does by replicas, or where another rank has the memory to keep a copy (a guard).
    """
    if is_asynchronous(plan):
        return False
    if plan.total_ranks == 1:
        return True
    made = committing(plan, PlanBasis(tuple(ways), cluster, Fixed()))
    return all(each.value != "checkpoint" for each in made.decisions if each.what == "redundancy")


def plans_ahead(ways: PlanBasis, most: int, limit_s: float) -> dict[int, Plan]:
    """Return the best plan of each number of ranks below `most` that there is one for.

    limit_s:  of searching for each.
    """
    found: dict[int, Plan] = {}
    there = Machines(ways.cluster)
    for count in range(most - 1, 0, -1):
        fixed = replace(ways.fixed, ranks=count)
        try:
            found[count] = committing(best_of(ways.ways, fixed, there, limit_s).plan, ways)
        except PlanError:  # its memory, or something that is fixed
            continue
    return found


def rerouted(
    plan: Plan, graph: Graph, program: Program, left: Sequence[int]
) -> tuple[Plan, tuple[int, ...]]:
    """Return a plan with the same cuts for the ranks `left` of a plan, and these by its ranks.

    All that were ranks of one stage in any replica take its micro-batches in turn.
    Raises:   PlanError: nobody is left of a stage; or what a rank holds is no run of stages, is
              divided, repeated or in far memory.
    """
    if plan.shards or plan.offloads or any(plan.recompute):
        raise PlanError("what is divided, repeated or in far memory is not rerouted")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(program.num_ranks):
        groups.setdefault(tuple(sorted(program.stages_of(rank))), []).append(rank)
    ordered = sorted(groups)
    if [stage for group in ordered for stage in group] != list(range(plan.num_stages)):
        raise PlanError("a rank holds stages that are no run, or others than its peers do")
    here = [[rank for rank in groups[group] if rank in left] for group in ordered]
    if not all(here) or len(ordered) < 2:
        raise PlanError("nobody is left of a stage")
    ends = [group[-1] for group in ordered[:-1]]
    words = words_of_turns([(1,) * len(ranks) for ranks in here])
    order = tuple(rank for ranks in here for rank in ranks)
    cuts = tuple(plan.cuts[end] for end in ends)
    schedule = Recipe("dapple", (("ranks", words),))
    counts = Counts(cuts, schedule, len(order), (plan.step_micro_batches,))
    made = reshaped(plan, graph, counts)
    return made, order


def needs_of(choice: Choice, program: Program, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return by rank of a plan the bytes of each tensor that it needs, of those that exist.

    sizes:    by key, of weights, buffers and the optimizer's state.
    """
    graph = choice.captured.graph
    stages = stages_of(choice.plan, graph).stages
    by_name: dict[str, dict[str, int]] = {}
    for key, size in sizes.items():
        place, _, rest = key.partition("/")
        name = rest if place in ("weights", "buffers") else rest.rpartition("/")[0]
        by_name.setdefault(name, {})[key] = size
    found: list[dict[str, int]] = []
    for rank in range(program.num_ranks):
        own: dict[str, int] = {}
        for stage in program.stages_of(rank):
            for node in (*stages[stage].parameters, *stages[stage].buffers):
                own |= by_name.get(key_in(graph.nodes[node].name), {})
        found.append(own)
    return found


def fits(plan: Plan, cluster: Cluster) -> bool:
    """Return whether every rank has the memory that was predicted."""
    assert plan.predicted is not None, "it was simulated"
    peaks = plan.predicted.peak_bytes
    return all(peak <= cluster.memory_of(rank) for rank, peak in enumerate(peaks))


def try_rerouted(plan: Plan, program: Program, left: Sequence[int], ways: PlanBasis) -> "_Rerouted":
    """Return `rerouted`, priced; or None where that is impossible, or does not fit."""
    try:
        graph = joining_of(ways.ways, plan).captured.graph
        made, order = rerouted(plan, graph, program, left)
        made = committing(made, ways)
        lower_plan(made, graph)
    except PenstockError:  # no such schedule, shares or memory: another way is taken
        return None
    return (made, order) if fits(made, ways.cluster) else None


_Rerouted = tuple[Plan, tuple[int, ...]] | None


def told_of(plan: Plan, what: str, why: str) -> Plan:
    """Return a plan that says why it is run."""
    return decided(plan, [Decision("generation", what, "search", why)])
