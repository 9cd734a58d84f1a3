"""Key plans: the plans of a choice for several keys as data, and the choice made of them again.

Who takes the plans of another process - a rank that torchrun has started, one that joins - has
traced the steps of all keys itself.  What a plan says of its division is what there was measured.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from penstock.batches.one_key import keys_of
from penstock.choose.choose import Choice, PlannedKey, for_plan
from penstock.errors import GraphError, PlanError
from penstock.graph.merge import merged, unjoined
from penstock.job import Job
from penstock.listener import Listener
from penstock.plan.of_key import for_key
from penstock.plan.plan import Plan
from penstock.typed import damage, typed

if TYPE_CHECKING:
    from penstock.choose.keys import TracedKey
    from penstock.graph.trace import Capture


class KeyPlan(NamedTuple):
    """The plan for the steps of a key, which is at this place among the keys of the job."""

    place: int
    plan: Plan


def key_plans(choice: Choice) -> tuple[KeyPlan, ...]:
    """Return the plans of all keys of a choice, that which it was made for first."""
    author, _ = unjoined(choice.job)
    places = {key: at for at, key in enumerate(keys_of(author))}
    rows = [(choice.key, choice.plan), *((each.key, each.plan) for each in choice.others)]
    return tuple(KeyPlan(places[key], plan) for key, plan in rows)


def text_of_key_plans(plans: Sequence[KeyPlan]) -> str:
    """Return plans of several keys as text."""
    return json.dumps([[place, plan.to_json()] for place, plan in plans])


def read_key_plans(text: str) -> tuple[KeyPlan, ...]:
    """Return the plans in a text.

    Raises:   PlanError: they are damaged.
    """
    with damage("the plans of several shapes", PlanError, hint="is it of this version?"):
        rows = typed(list[tuple[int, dict[str, object]]], json.loads(text))
    return tuple(KeyPlan(place, Plan.from_text(json.dumps(content))) for place, content in rows)


def choice_of_keys(
    job: Job, steps: "Sequence[TracedKey]", plans: Sequence[KeyPlan], listener: Listener
) -> Choice:
    """Return the choice that these plans are of.

    job:      of all keys; steps: its traced ones.
    Raises:   PlanError: they are the plans of another job.
    """
    keys, by_key = list(keys_of(job)), {step.key: step for step in steps}
    if sorted(place for place, _ in plans) != list(range(len(keys))) or len(by_key) != len(keys):
        message = f"the plans are for {len(plans)} kinds of steps; those of the job are {len(keys)}"
        raise PlanError(message, hint="give all ranks the same job file and data")
    (place, plan), *others = plans
    first = by_key[keys[place]]
    _, captured = for_plan(first.job, plan, first.captured, listener)
    rows: list[PlannedKey] = []
    for other, own in others:
        step = by_key[keys[other]]
        divided = _divided_as(own, step, (plan, captured))
        divided = replace(divided, model=captured.model)
        whole = merged(job, own.terms.joined, divided.batch.division)
        rows.append(PlannedKey(step.key, step.share, divided, own, whole))
    own = merged(job, plan.terms.joined, captured.batch.division)
    return Choice(own, captured, plan, first.key, tuple(rows))


def _divided_as(plan: Plan, step: "TracedKey", first: "tuple[Plan, Capture]") -> "Capture":
    """Return the step of a key with its micro-batches divided as its plan says.

    first:    of the key that all others follow.
    Raises:   PlanError: it is the plan of another step.
    """
    from penstock.graph.joined.divided_batch import divided, done_by_each

    parts, problem = int(1 / plan.terms.joined), f"its graph is not {plan.graph}"
    for way in (divided, done_by_each) if parts > 1 else (divided,):  # by 1: it is whole
        try:
            made = way(step.captured, parts)
            _, graph = for_key(first[0], first[1].graph, made.graph)
        except (GraphError, PlanError) as why:
            problem = why.message
            continue
        if graph.digest == plan.graph:
            return replace(made, graph=graph)
    message = f"the plan for steps of {step.key} is of another job: {problem}"
    raise PlanError(message, hint="give all ranks the same job file and data")
