"""Compiling: whether a plan's ops are compiled, decided by what that gains in the run and takes.

Compiling takes seconds before the first step; it pays where steps are many and ops small: what it
saves is calls and passes over memory, not the seconds of products of matrices.  So it is tried
only where it could pay, by a bound; then the compiled plan is predicted from its measured segments,
and takes turns with the plan as it was.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.choose.choose import Choice, Machines, decided, predicted
from penstock.choose.fuse import known, no_compiler, segments_of_plan
from penstock.choose.trial import Timer, tried
from penstock.plan.plan import By, Decision, Plan
from penstock.schedule.recipe import Recipe
from penstock.search.judge import Judge
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.profile.profile import Profile

_LOAD_S, _FIRST_S, _OP_S = 3.0, 9.0, 0.12  # from disk; before and for each op (docs/compiled.md)
_MOST = 0.6  # of the seconds of ops that are no products: what compiling them saves at most
_WORTH = 0.02  # of a step: less is no gain

No = tuple[By, str]  # who says so, and why


def compiled(
    choice: Choice,
    profiles: "tuple[Profile, ...]",
    there: Machines,
    num_steps: int,
    run: Timer,
    *,
    suits: bool = True,
) -> "tuple[Choice, tuple[Profile, ...]]":
    """Return a choice, compiled if that pays in so many steps, with its reason; and its profiles.

    run:      runs some steps of a choice, and returns the seconds of those after the first.
    suits:    whether a schedule that is built for the seconds of its stages is built again, for
              those that they take compiled.
    """
    refusal = _useless(choice, profiles[0], num_steps) or _impossible(choice, profiles)
    if refusal is not None:
        by, why = refusal
        return _said(choice, "no", by, why), profiles
    start = time.perf_counter()
    made = choice._replace(plan=choice.plan.changed(compiled=True))
    with there.listener.busy("compiling"):
        profiles = known(made.job, made.captured, made.plan, profiles)
    took_s = time.perf_counter() - start
    assert there.cluster is not None, "a plan was found for some machines"
    graph, plan = made.captured.graph, made.plan
    if suits and isinstance(plan.schedule, Recipe) and plan.schedule.seconds is not None:
        plan = Judge(graph, profiles, there.cluster).suited(plan)
    made = made._replace(plan=predicted(plan, graph, profiles, there.cluster))
    before, after = (format_seconds(_step_s(each.plan)) for each in (choice, made))
    words = f"{after} a step predicted in place of {before}; compiling took "
    words += format_seconds(took_s)
    if _step_s(made.plan) > (1 - _WORTH) * _step_s(choice.plan):
        return _said(choice, "no", "search", words), profiles
    with there.listener.busy("trying the compiled plan"):
        order = tried([choice, made], run, trusting=False)
    one, other = sorted(order, key=lambda each: not each.choice.plan.terms.compiled)
    words = f"{one.took}, not compiled {other.took}; {words}"
    if order[0] is other:
        return _said(choice, "no", "search", words), profiles
    saved = format_seconds(num_steps * (other.step_s - one.step_s))
    words += f", and {num_steps:,} steps take {saved} less"
    return _said(made, "yes", "search", words), profiles


def _impossible(choice: Choice, profiles: "Sequence[Profile]") -> No | None:
    """Return why a plan cannot be compiled; None if it can."""
    if choice.plan.terms.rounds:
        return "only choice", "ops that are compiled round in the last bit, and so would the wire"
    if choice.plan.tensor > 1:
        return "only choice", "ops that ranks divide are not compiled"
    if len(profiles) > 1:
        return "only choice", "devices of several kinds: what it gains is measured on one"
    why = no_compiler()
    return ("only choice", why) if why else None


def _useless(choice: Choice, profile: "Profile", num_steps: int) -> No | None:
    """Return why compiling cannot pay; None if it may."""
    from penstock.graph.fused_runs import is_light, runs_of

    plan, captured = choice.plan, choice.captured
    rows = zip(profile.op_s, captured.graph.nodes, strict=True)
    share = sum(s for s, node in rows if is_light(node)) / max(profile.micro_batch_s, 1e-12)
    run_s = num_steps * _step_s(plan)
    gain_s, cost_s = _MOST * share * run_s, _LOAD_S
    if gain_s >= cost_s:
        _, segments = segments_of_plan(plan, captured.graph)
        if not {segment.digest for segment in segments} <= {r.segment for r in profile.fused}:
            runs = {r.text: len(r.ops) for each in segments for r in runs_of(each, captured)}
            cost_s = _FIRST_S + _OP_S * sum(runs.values())
            if not runs:
                return "search", "nowhere do two ops that could be one follow each other"
    if gain_s >= cost_s:
        return None
    most, run = format_seconds(gain_s), format_seconds(run_s)
    return "search", f"at most {most} of {run} less, by {format_seconds(cost_s)} of compiling"


def _said(choice: Choice, value: str, by: By, why: str) -> Choice:
    return choice._replace(plan=decided(choice.plan, [Decision("compiled", value, by, why)]))


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None, "a search predicts"
    return plan.predicted.step_s
