"""Usable ranks: the best plan on the ranks asked for, or on as many of them as a step can use.

A step of few micro-batches whose model has no place to cut, or whose buffers see every micro-batch
in order, has work for so many ranks and no more.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from penstock.choose.choose import FASTEST, Machines, SearchAim, Searched, best
from penstock.errors import MemoryShortError, PlanError
from penstock.job import Job
from penstock.plan.plan import Decision
from penstock.search.shapes import Fixed

if TYPE_CHECKING:
    from penstock.graph.trace import Capture


class OnRanks(NamedTuple):
    """What a search found, what is fixed for it, and why it is not on all ranks."""

    searched: Searched
    fixed: Fixed
    decisions: tuple[Decision, ...] = ()


def best_on_ranks(
    job: Job, fixed: Fixed, captured: "Capture", there: Machines, aim: SearchAim = FASTEST
) -> OnRanks:
    """Return the best plan on as many ranks as are asked for, or else on as many as there can be.

    Raises:   PlanError: nothing fits what else is fixed, or the memory.
    """
    try:
        return OnRanks(best(job, fixed, captured, there, aim), fixed)
    except MemoryShortError:
        raise
    except PlanError as problem:
        shape = fixed.stages, fixed.replicas, fixed.schedule
        if fixed.ranks in (None, 1) or shape != (None, None, None):
            raise
        searched = best(job, replace(fixed, ranks=None), captured, there, aim)
        ranks = searched.choice.plan.total_ranks
        if ranks > fixed.ranks:
            raise
        why = problem.message
    there.listener.say(f"training on {ranks} of {fixed.ranks} ranks: {why}")
    made = Decision("ranks", str(ranks), "only choice", why)
    return OnRanks(searched, replace(fixed, ranks=ranks), (made,))
