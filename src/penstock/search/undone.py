"""Undone: a plan with one of its decisions taken otherwise, for what that decision gains.

Each is simulated as the plan itself is, with everything else as the plan has it.  Ignores: that a
search would then decide other things otherwise too; its reasons have the best of those.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from penstock.bits import AS_IT_IS
from penstock.errors import GraphError, PlanError, ProfileError, ScheduleError
from penstock.graph.graph import Graph
from penstock.plan.plan import Plan, is_asynchronous
from penstock.plan.reshape import Counts, reshaped
from penstock.rules.rewrite import made_to_keep, rewritten
from penstock.rules.rule import Rule
from penstock.rules.ruled import Ruled, Said
from penstock.schedule.grid import evenly
from penstock.schedule.recipe import (
    Recipe,
    as_cut,
    built_on,
    is_woven,
    name_of,
    trains,
    units_of,
)
from penstock.search.balance import balanced_cuts
from penstock.search.candidate import Candidate
from penstock.search.judge import Judge
from penstock.search.polish import with_cuts

_SIMPLE = "gpipe", "one_f_one_b"


class Undone(NamedTuple):
    """One decision taken otherwise: in words, and what the simulation of the plan then says."""

    what: str
    otherwise: str
    candidate: Candidate


def undone(judge: Judge, plan: Plan) -> Iterator[Undone]:
    """Yield what `plan` would give with each decision, alone, undone: those that can be."""
    for what, otherwise, make in _others(judge, plan):
        try:
            other = make()
            if other is None or other == plan:
                continue
            candidate = judge.candidate(replace(other, decisions=(), predicted=None))
        except (PlanError, GraphError, ScheduleError, ProfileError):  # no such plan, or no price
            continue
        yield Undone(what, otherwise, candidate)


_Other = tuple[str, str, Callable[[], Plan | None]]


def _others(judge: Judge, plan: Plan) -> Iterator[_Other]:
    """Yield decisions, what else could have been decided, and how that plan is made."""
    graph, count = judge.graph, plan.num_stages
    yield "ranks", "one rank alone", lambda: _as_replicas(graph, plan, 1)
    if plan.num_ranks > 1:
        words = f"{plan.total_ranks} replicas of one stage"
        yield "replicas", words, lambda: _as_replicas(graph, plan, plan.total_ranks)
    elif plan.replicas > 1:
        words = f"one pipeline of {plan.total_ranks} stages"
        yield "replicas", words, lambda: _as_pipeline(judge, plan)
    yield "cuts", "evenly many pieces in each stage", lambda: _evenly_cut(graph, plan)
    for name in _SIMPLE:
        if name not in name_of(plan.schedule).split(" "):
            yield "schedule", name, lambda name=name: _scheduled(plan, name)
            break
    again = not any(plan.recompute)
    words = "in all stages" if again else "in none"
    yield "recompute", words, lambda: plan.changed(recompute=(again,) * count)
    if any(word != "none" for word in plan.offload):
        yield "offload", "none", lambda: _near(plan)
        words = "between computes" if plan.overlap.beside else "beside computes"
        yield "copies", words, lambda: plan.changed(beside=not plan.overlap.beside)
    yield from _undivided(plan)
    if plan.agreement.sums is not None:
        yield "sums", "gradients as they are", lambda: plan.changed(sums=None)
    if plan.topology:
        yield "topology", "as the transport sums", lambda: plan.changed(topology=None)
    if plan.terms.rounds:
        yield "wire", "numbers as they are", lambda: plan.changed(wire=(AS_IT_IS, AS_IT_IS))
    waits = plan.agreement.clip and graph.copy_dtype != "float16"  # there a step may be left out
    if waits and plan.num_ranks > 1 and not is_asynchronous(plan):
        words = "no" if plan.agreement.post_validation else "yes"
        other = not plan.agreement.post_validation
        yield "post-validation", words, lambda: plan.changed(post_validation=other)
    if plan.terms.compiled:
        yield "compiled", "op by op", lambda: plan.changed(compiled=False)
    if plan.overlap.early:
        yield "receives", "when they are needed", lambda: plan.changed(early=0)
    yield from _otherwise_in_units(graph, plan)
    yield from _without_rules(graph, plan)


def _otherwise_in_units(graph: Graph, plan: Plan) -> Iterator[_Other]:
    recipe = plan.schedule
    if isinstance(recipe, Recipe) and is_woven(recipe):
        words = "those of one micro-batch after the other"
        yield "units", words, lambda: plan.changed(schedule=replace(recipe, woven=False))
    elif units_of(recipe):
        yield "units", "whole stages", lambda: _whole(graph, plan)


def _undivided(plan: Plan) -> Iterator[_Other]:
    if plan.shards:
        yield "shard", "replicated", lambda: plan.changed(shard=(), prefetch=0, parts=())
    if plan.place.parts:
        yield "parts", "equal", lambda: plan.changed(parts=())


def _without_rules(graph: Graph, plan: Plan) -> Iterator[_Other]:
    for decision in plan.decisions:
        verb, _, pattern = decision.what.partition(" ")
        if decision.by != "user" or not pattern:
            continue
        if verb == "recompute":
            how = "no" if decision.value == "yes" else "yes"
        elif verb == "offload" and decision.value != "none":
            how = "none"
        elif verb in ("shard", "keep"):
            verb, how = "replicate", ""
        else:
            continue
        rule = Rule(verb, pattern, how)
        yield decision.what, how or verb, lambda rule=rule: _ruled(graph, plan, rule)


def _ruled(graph: Graph, plan: Plan, rule: Rule) -> Plan:
    made = rewritten(plan, graph, [rule])
    return replace(made, decisions=plan.decisions)


def _near(plan: Plan) -> Plan:
    ahead = plan.overlap.prefetch if plan.shards else 0
    return plan.changed(offload=(), beside=False, prefetch=ahead)


def _as_replicas(graph: Graph, plan: Plan, replicas: int) -> Plan | None:
    """Return so many replicas of the whole model; None where that is the plan, or cannot be."""
    is_it = plan.num_ranks == plan.num_stages == 1 and plan.replicas == replicas
    if is_it or plan.step_micro_batches < replicas or not trains(plan.schedule):
        return None
    shares = evenly(plan.step_micro_batches, replicas)
    return reshaped(plan, graph, Counts((), Recipe("one_f_one_b"), 1, shares))


def _as_pipeline(judge: Judge, plan: Plan) -> Plan:
    cuts = balanced_cuts(judge.graph, judge.profiles[0].op_s, plan.total_ranks)
    shares = (plan.step_micro_batches,)
    counts = Counts(tuple(cuts), Recipe("one_f_one_b"), plan.total_ranks, shares)
    return reshaped(plan, judge.graph, counts)


def _evenly_cut(graph: Graph, plan: Plan) -> Plan | None:
    pieces, count = len(graph.cut_points) + 1, plan.num_stages
    if count == 1 or units_of(plan.schedule):
        return None
    return with_cuts(graph, plan, (k * pieces // count - 1 for k in range(1, count)))


def _scheduled(plan: Plan, name: str) -> Plan | None:
    asked = as_cut(Recipe(name), plan.schedule)
    shares = {*plan.grid.shares}
    made = [built_on(asked, plan.num_stages, share, plan.num_ranks) for share in shares]
    return replace(plan, schedule=asked) if plan.num_ranks > 1 and all(made) else None


def _whole(graph: Graph, plan: Plan) -> Plan:
    own, at = set[int](), 0
    for units in units_of(plan.schedule):
        at += units
        own.add(at)
    said = Said("may not", Rule("fuse", "units"))
    inner = {cut: said for stage, cut in enumerate(plan.cuts, 1) if stage not in own}
    return made_to_keep(plan, graph, Ruled(ends=inner))
