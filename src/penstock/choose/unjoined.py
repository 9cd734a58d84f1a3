"""Unjoined: the plan to train by where one that joins micro-batches was found to differ."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.choose.choose import (
    Choice,
    Joining,
    Machines,
    best_of,
    decided,
    joining_of,
    on_hosts_of,
    save,
)
from penstock.choose.prepare import machines
from penstock.errors import PlanError
from penstock.plan.plan import Decision, Plan
from penstock.schedule.recipe import Recipe
from penstock.search.shapes import Fixed

if TYPE_CHECKING:
    from penstock.examine.examine import Examined
    from penstock.training.session import Session

_SEARCH_S = 1.0


def unjoined_choice(
    session: "Session", choice: Choice, found: "Examined", problem: str
) -> Choice | None:
    """Return the best plan on as many ranks whose micro-batches are the author's, saved.

    In place of a plan that somebody gave it is one with as many stages and replicas.
    None: there is no such plan, or the plan joins none.
    found:    what the job is found to be.
    problem:  what differs, and where.
    """
    if choice.plan.terms.joined == 1:
        return None
    cluster = session.there.cluster or machines(None, choice.plan.total_ranks, session.listener)
    there = session.there._replace(cluster=cluster)
    ways, fixed = _unjoined(session, choice.plan, found, there)
    plan = _planned(ways, fixed, there)
    if plan is None:
        return None
    words = f"{plan.plan.share_words}, none joined"
    made = (Decision("micro-batches", words, "search", f"joined ones were tried: {problem}"),)
    apart = plan._replace(plan=on_hosts_of(decided(plan.plan, made), cluster))
    profiles = joining_of(ways, apart.plan).profiles
    save(session.folder, apart.captured, apart.plan, profiles, cluster)
    if session.basis is not None:  # a plan that is made again joins none either
        session.may_replan_by(session.basis._replace(ways=tuple(ways)))
    session.listener.say("training by a plan that joins no micro-batches")
    return apart


def _unjoined(
    session: "Session", plan: Plan, found: "Examined", there: Machines
) -> tuple[Sequence[Joining], Fixed]:
    """Return the steps of which no micro-batches are joined, measured, and what is fixed.

    A plan that somebody gave, or that of the run that is resumed, was searched among no others.
    """
    from penstock.choose.settle import bounded

    basis = session.basis
    if basis is not None and (ways := [way for way in basis.ways if way.joined == 1]):
        return ways, replace(basis.fixed, ranks=plan.total_ranks)
    captured, cluster = session.trace(), there.cluster
    if captured is None or cluster is None:  # it was traced before, and is for some machines
        return (), session.fixed
    about = session.job, session.key, captured, found
    fixed, _ = bounded(*about, session.fixed, session.listener)
    profiles = there.profile(captured, session.job, cluster, session.listener)
    return [Joining(1, session.job, captured, profiles)], _as_given(fixed, plan)


def _as_given(fixed: Fixed, plan: Plan) -> Fixed:
    """Return `fixed` with the counts and the kind of schedule that a plan has."""
    of = plan.schedule
    alike = replace(of, seconds=None) if isinstance(of, Recipe) else None
    return replace(
        fixed,
        ranks=plan.total_ranks,
        replicas=plan.replicas,
        stages=plan.num_stages,
        schedule=fixed.schedule or alike,
    )


def _planned(ways: Sequence[Joining], fixed: Fixed, there: Machines) -> Choice | None:
    """Return the best plan of these steps; None: only joined does one fit."""
    try:
        return best_of(ways, fixed, there, _SEARCH_S)
    except PlanError:
        return None
