"""Unjoined: the plan to train by where one that joins micro-batches was found to differ."""

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import PlanError
from penstock.plan.plan import Decision
from penstock.training.choose import Choice, best_of, decided, on_hosts_of, save
from penstock.training.prepare import machines

if TYPE_CHECKING:
    from penstock.training.session import Session

_SEARCH_S = 1.0


def unjoined_choice(session: "Session", choice: Choice, problem: str) -> Choice | None:
    """Return the best plan on as many ranks whose micro-batches are the author's, saved.

    None: there is no such plan, the plan joins none, or it is one that somebody gave.
    problem:  what differs, and where.
    """
    basis = session.basis
    ways = [] if basis is None else [way for way in basis.ways if way.joined == 1]
    if choice.plan.joined == 1 or basis is None or not ways:
        return None
    ranks = choice.plan.total_ranks
    cluster = session.there.cluster or machines(None, ranks, session.listener)
    fixed, there = replace(basis.fixed, ranks=ranks), session.there._replace(cluster=cluster)
    try:
        found = best_of(ways, fixed, there, _SEARCH_S)
    except PlanError:  # only joined does it fit
        return None
    words = f"{found.plan.share_words}, none joined"
    made = (Decision("micro-batches", words, "only choice", problem),)
    plan = on_hosts_of(decided(found.plan, made), cluster)
    profiles = next(way.profiles for way in ways if way.is_of(plan))
    save(session.folder, found.captured, plan, profiles, cluster)
    session.listener.say("training by a plan that joins no micro-batches")
    return found._replace(plan=plan)
