"""Plan choice: the plan that a run trains by: given, that of the run to resume, or searched for."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.batches.one_key import is_by_shape
from penstock.choose import trial
from penstock.choose.choose import (
    Choice,
    Machines,
    Rewrites,
    SearchAim,
    Searched,
    decided,
    for_plan,
    found_in_units,
    given,
    on_hosts_of,
    save,
    was_brief,
)
from penstock.choose.compiling import compiled
from penstock.choose.flag_text import to_fill
from penstock.choose.fuse import usable
from penstock.choose.prepare import machines
from penstock.choose.usable_ranks import best_on_ranks
from penstock.errors import PenstockError, PlanError
from penstock.graph.graph import Graph
from penstock.job import Job
from penstock.pilot.replan import SearchBasis
from penstock.plan.plan import Decision, Plan, Units
from penstock.profile.kinds import load_profiles
from penstock.routes import FASTEST
from penstock.rules.ruled import ruled
from penstock.schedule.recipe import Recipe
from penstock.search.shapes import Fixed

if TYPE_CHECKING:
    from penstock.graph.trace import Capture
    from penstock.state.laws.buffers import Laws

_SEARCH_S = 1.0  # of a search, where none was made


class ChoiceTerms(NamedTuple):
    """What a plan is chosen for.

    job:         the steps that were traced.
    asked:       what the user fixed; `bounds`, with what the job itself asks for, and `decisions`,
                 what was decided by that.
    units:       into which stages are cut; None: they stay as they are.
    tries:       whether the best few may take turns at some real steps.
    lets_go:     whether ranks may be lost: then nothing is compiled.
    has_shapes:  whether the job has steps of other shapes too, which follow the plan of this one.
    num_steps:   of the run.
    """

    job: Job
    folder: Path
    there: Machines
    asked: Fixed
    bounds: Fixed
    decisions: Sequence[Decision]
    units: Units | None
    tries: bool
    lets_go: bool
    has_shapes: bool
    num_steps: int


class Chosen(NamedTuple):
    """A plan, and by what one can be made again during the run; None: it cannot."""

    choice: Choice
    basis: SearchBasis | None


def given_choice(terms: ChoiceTerms, captured: "Capture", plan: Plan) -> Choice:
    """Return a plan that was given, for the job's step.

    Raises:   PlanError: it is for another job, or for other ranks.
    """
    about = terms.folder, captured, terms.there
    return given(terms.job, plan, *about, Rewrites(terms.units, terms.bounds.rules))


def kept_choice(terms: ChoiceTerms, captured: "Capture") -> Chosen | None:
    """Return the plan of the run to resume, if it is what was asked for.

    One that was made for what ranks took at the time is not, nor one of a short run for a long one.
    Raises:   PlanError: the folder holds the run of another job.
    """
    asked, path = terms.asked, terms.folder / "plan.json"
    is_fixed = asked.schedule or asked.stages or asked.offload or terms.units
    if is_fixed or asked.exchange.post_validation or asked.memory or not path.exists():
        return None
    plan = usable(on_hosts_of(Plan.load(path), terms.there.cluster))
    is_other = asked.ranks not in (None, plan.total_ranks)
    is_other = is_other or asked.tensor not in (None, plan.tensor)
    is_other = is_other or (asked.tensor is not None and asked.context != plan.place.context)
    is_other = is_other or asked.exchange.topology not in (None, FASTEST, plan.agreement.topology)
    is_other = is_other or was_brief(plan, terms.num_steps)
    if is_other or any(each.what == "replanned" for each in plan.decisions):
        return None
    try:
        job, captured = for_plan(terms.job, plan, captured, terms.there.listener)
    except PlanError as problem:
        words = other_job(terms.folder, captured, problem)
        if is_by_shape(terms.job) and words == problem.message:  # of its shapes another one is most
            return None
        message = f"{terms.folder} holds the run of another job: {words}"
        hint = "give the folder of this job's run, or train without resume"
        raise PlanError(message, hint=hint) from problem
    if ruled(asked.rules, captured.graph).broken(plan, captured.graph):
        return None
    choice = Choice(job, captured, plan)
    basis, profiles = None, terms.folder / "profile.json"
    if profiles.exists() and plan.tensor == 1 and not terms.has_shapes:
        basis = SearchBasis(
            (choice.way(load_profiles(profiles)),), terms.bounds, terms.units, _SEARCH_S
        )
    return Chosen(choice, basis)


def other_job(folder: Path, captured: "Capture", problem: PlanError) -> str:
    """Return how the job differs from that of the run in the folder."""
    try:
        before = {*Graph.load(folder / "graph.json").gradients}
    except PenstockError:
        return problem.message
    now = {*captured.graph.gradients}
    frozen, thawed = sorted(before - now), sorted(now - before)
    words = [f"{', '.join(frozen[:3])} is frozen now"] if frozen else []
    words += [f"{', '.join(thawed[:3])} was frozen"] if thawed else []
    return f"{'; '.join(words)} (requires_grad)" if words else problem.message


def searched_choice(terms: ChoiceTerms, captured: "Capture", laws: "Laws") -> Chosen:
    """Return the plan that the search finds best, or of its best few the fastest in a trial.

    Raises:   PlanError: nothing fits what is fixed, or the memory.
    """
    bounds, there = terms.bounds, terms.there
    if terms.has_shapes:  # the ops of all of them stay whole
        bounds = replace(bounds, tensor=bounds.tensor or 1)
    cluster = there.cluster or machines(None, bounds.ranks, there.listener)
    there = there._replace(cluster=cluster.within(to_fill(bounds.memory)))
    aim = SearchAim(num_steps=terms.num_steps)
    searched, bounds, fewer = best_on_ranks(terms.job, bounds, captured, there, aim)
    decisions = (*terms.decisions, *fewer)
    terms = terms._replace(bounds=bounds, there=there, decisions=decisions)
    choice = _tuned(terms, searched, laws)
    basis = None
    if choice.plan.tensor == 1 and not terms.has_shapes:  # one made again divides no ops
        search_s = sum(option.seconds for option in searched.options)
        basis = SearchBasis(searched.ways(1), bounds, terms.units, search_s)
    profiles = searched.profiles_of(choice)
    if terms.tries and not terms.lets_go and not terms.has_shapes:
        run = partial(trial.seconds_of, laws)
        order, about = bounds.schedule, (there, terms.num_steps, run)
        suits = not (isinstance(order, Recipe) and order.seconds is not None)
        choice, profiles = compiled(choice, profiles, *about, suits=suits)
    save(terms.folder, choice.captured, choice.plan, profiles, cluster.within(bounds.memory))
    return Chosen(choice, basis)


def _tuned(terms: ChoiceTerms, searched: Searched, laws: "Laws") -> Choice:
    """Return the best plan of a search in its units, or of what is open the fastest by trial."""
    cluster = terms.there.cluster
    assert cluster is not None, "a search is of some machines"

    def told(choice: Choice, *more: Decision) -> Choice:
        plan = decided(choice.plan, (*terms.decisions, *more))
        return choice._replace(plan=on_hosts_of(plan, cluster))

    def cut(choice: Choice) -> Choice:
        profiles, units = searched.profiles_of(choice), terms.units
        return found_in_units(choice, units, terms.bounds, profiles=profiles, cluster=cluster)

    first = searched.choice
    is_open = terms.tries and terms.asked.schedule is None
    if not (is_open and trial.is_worth_it(first.plan, terms.num_steps)):
        return cut(told(first))
    choices = trial.finalists(searched, terms.bounds, terms.there)
    in_units = cut(told(first))
    is_cut = terms.units is None and in_units.plan.cuts != first.plan.cuts
    choices += [in_units] if is_cut else []
    if len(choices) == 1:
        return in_units
    with terms.there.listener.busy("trying the best plans"):
        order = trial.tried(choices, partial(trial.seconds_of, laws))
    choice = told(order[0].choice, trial.decision(order))
    is_decided = is_cut and any(order[0].choice is each for each in (first, in_units))
    return choice if is_decided else cut(choice)
