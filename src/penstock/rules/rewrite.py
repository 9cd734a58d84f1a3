"""Rewrite: a plan made to keep to rules.

A cut that it lacks divides a stage into units on the same rank, and so does the end of what a rule
is about; units that may not be apart become one.  Ranks, order of work and messages stay.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.graph.stages import Recompute
from penstock.plan.overlap import Prefetch, prefetch_of
from penstock.plan.plan import Plan, check_fits, divided
from penstock.program.passes.offload import Offloaded
from penstock.program.passes.shard import Sharding
from penstock.rules.rule import Rule
from penstock.rules.ruled import ASPECTS, Aspect, Ruled, ruled, stages_in_pieces, value_of
from penstock.schedule.recipe import Recipe, name_of, units_of


def rewritten(plan: Plan, graph: Graph, rules: Sequence[Rule]) -> Plan:
    """Return `plan` as `rules` say, with a decision of the user for each.

    Raises:   PlanError: the plan is for another graph, a rule is not possible with it, or `ruled`
              refuses the rules.
    """
    found = ruled(rules, graph)
    made = made_to_keep(plan, graph, found)
    names = {decision.what for decision in found.decisions()}
    others = (each for each in made.decisions if each.what not in names)
    return replace(made, decisions=(*others, *found.decisions()))


def made_to_keep(plan: Plan, graph: Graph, rules: Ruled) -> Plan:
    """Return `plan` as rules that are for this graph say; its decisions stay.

    Raises:   PlanError: what has to be one stage runs on several ranks, or in another order.
    """
    check_fits(plan, graph)
    if not rules.broken(plan, graph):
        return plan
    if rules.whole:
        hint = "make the plan with this rule: it is of another step then"
        raise PlanError(rules.whole, hint=hint)
    plan = _undivided(plan, graph, rules)
    plan = divided(plan, graph, {*rules.required, *_ends_inside(plan, graph, rules)})
    for aspect in ASPECTS:
        values = _stage_values(plan, graph, rules, aspect)
        try:
            plan = _with_values(plan, aspect, values)
        except PlanError as problem:
            rule = next(iter(rules.values[aspect].values())).rule
            raise PlanError(f"{rule}: {problem.message}", hint=problem.hint) from problem
    return plan


def _with_values(plan: Plan, aspect: Aspect, values: tuple[str, ...]) -> Plan:
    """Return the plan with what `values` say of its stages.

    Raises:   PlanError: something else of the plan does not go with it.
    """
    match aspect:
        case "recompute":
            rows = zip(plan.recompute, values, strict=True)
            again = tuple(ops if value == "in part" else value == "yes" for ops, value in rows)
            return plan.changed(recompute=again, predicted=None)
        case "offload":
            away = cast("tuple[Offloaded, ...]", values)
            some = any(word != "none" for word in away)
            beside, ahead = plan.overlap.beside and some, _ahead(plan, plan.shard, away)
            return plan.changed(offload=away, beside=beside, prefetch=ahead, predicted=None)
        case "shard":
            parts = cast("tuple[Sharding, ...]", values)
            some = any(word != "replicate" for word in parts)
            ahead, uneven = _ahead(plan, parts, plan.offload), plan.place.parts if some else ()
            return plan.changed(shard=parts, prefetch=ahead, parts=uneven, predicted=None)


def _ahead(plan: Plan, parts: tuple[Sharding, ...], away: tuple[Offloaded, ...]) -> Prefetch:
    """Return how many stages ahead one is gathered or loaded; none where none is."""
    some = {*parts} - {"replicate"} or {"weights", "all"} & {*away}
    return plan.overlap.prefetch if some else 0


def _stage_values(plan: Plan, graph: Graph, rules: Ruled, aspect: Aspect) -> tuple[str, ...]:
    said = rules.of_stages(aspect, plan, graph)
    return tuple(
        value_of(plan, aspect, stage) if value is None else value
        for stage, value in enumerate(said)
    )


def _ends_inside(plan: Plan, graph: Graph, rules: Ruled) -> Iterable[int]:
    """Yield the cut points in the middle of stages at whose sides something else is to be."""
    for stage, (first, end) in enumerate(stages_in_pieces(plan, graph)):
        own = {aspect: value_of(plan, aspect, stage) for aspect in ASPECTS}
        rows = [
            tuple(rules.said(aspect, piece) or own[aspect] for aspect in ASPECTS)
            for piece in range(first, end)
        ]
        yield from (first + at for at, (a, b) in enumerate(itertools.pairwise(rows)) if a != b)


def _undivided(plan: Plan, graph: Graph, rules: Ruled) -> Plan:
    """Return the plan with units that may not be apart as one.

    Raises:   PlanError: they are whole stages of the schedule, or unlike in the plan.
    """
    apart = {cut for cut in plan.cuts if cut in rules.forbidden}
    if not apart:
        return plan
    units = units_of(plan.schedule) or (1,) * plan.num_stages
    own = [0, *itertools.accumulate(units)]  # where the stages of the schedule itself begin
    first = [0, *(k + 1 for k, cut in enumerate(plan.cuts) if cut not in apart), plan.num_stages]
    for stage, cut in enumerate(plan.cuts, 1):
        if cut in apart and stage in own:
            name = graph.cut_points[cut].name
            message = f"{rules.ends[cut].rule}: {name_of(plan.schedule)} cuts {name!r} itself"
            raise PlanError(message, hint="give another plan, or leave it to the search")
    for a, b in itertools.pairwise(first):
        for aspect in ASPECTS:
            values = {value_of(plan, aspect, stage) for stage in range(a, b)}
            values -= {"no"} if "in part" in values else set()
            if len(values) > 1 and rules.of_stages(aspect, plan, graph)[a] is None:
                rule = rules.ends[plan.cuts[a]].rule
                unlike = " and ".join(sorted(values))
                message = f"{rule}: {aspect} of stages {a} to {b - 1} is {unlike}"
                raise PlanError(message, hint=f"say {aspect} of these modules in another rule")
    assert isinstance(plan.schedule, Recipe), "only a recipe has units"
    fewer = tuple(sum(a <= stage < b for stage in first) for a, b in itertools.pairwise(own))
    runs = [plan.stages[a:b] for a, b in itertools.pairwise(first)]
    repeats = [_joined([unit.recompute for unit in run]) for run in runs]
    stages = tuple(
        replace(run[-1], far=run[0].far, weights=run[0].weights, recompute=again)
        for run, again in zip(runs, repeats, strict=True)
    )
    schedule = replace(plan.schedule, units=() if set(fewer) == {1} else fewer)
    ahead = prefetch_of([max(plan.ahead[a:b]) for a, b in itertools.pairwise(first)])
    overlap = replace(plan.overlap, prefetch=ahead)
    return replace(plan, stages=stages, schedule=schedule, overlap=overlap, predicted=None)


def _joined(units: Sequence[Recompute]) -> Recompute:
    """Return what a stage repeats of which the units repeat this: all or nothing, or some ops."""
    ops = {op for again in units if not isinstance(again, bool) for op in again}
    return tuple(sorted(ops)) or units[0]
