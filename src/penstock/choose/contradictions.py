"""Contradictions: what job and options ask for that no plan has together, before a model is built.

A search finds it out of its first plan, when all is traced and measured.  Here the smallest plans
of what is asked for check themselves by the table of what goes together (plan/fits.py): a stage for
each rank, and a pipeline of two stages.  If no such plan can be, no larger one can.

Ignores:  what the search decides, as shards and joined micro-batches, and what follows from the
          traced step.
"""

from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import PlanError
from penstock.job import Job
from penstock.plan.decision_words import Words
from penstock.plan.plan import Plan
from penstock.routes import FASTEST
from penstock.schedule.recipe import AnySchedule, Recipe, any_schedule, check_trains, has_window
from penstock.search.shapes import Fixed
from penstock.sums import sums_way

_MOST = 65_536  # replicas that are tried


def check_asked(job: Job, fixed: Fixed, ranks: int, *, commits: bool = False) -> None:
    """Raise where no plan can be what is asked for, whatever the model is.

    ranks:    that there are, or are asked for.
    commits:  whether a step has to count only once all ranks have come to its end.
    Raises:   PlanError: it names what does not go together.
              ScheduleError: there is no such schedule.
    """
    order = _order(fixed)
    problem: PlanError | None = None
    asked = _asked(job, fixed, order, commits=commits)
    for num_ranks, replicas in _sizes(job, fixed, ranks):
        try:
            Plan.of(**(asked | _sized(fixed, num_ranks, replicas)))
        except PlanError as why:
            problem = problem or why
        else:
            return
    if problem is not None:
        raise problem


def check_given(plan: Plan) -> None:
    """Raise where the steps of a plan that is given cannot count once all ranks say so.

    Raises:   PlanError: it names what does not go with it.
    """
    plan.changed(commits=True, guard=None, compiled=False, post_validation=False)


def _order(fixed: Fixed) -> AnySchedule:
    """Return a schedule of any sizes that does what the one asked for does.

    Raises:   PlanError: it does not train.  ScheduleError: there is no such schedule.
    """
    if fixed.schedule is None:
        return any_schedule("one_f_one_b")
    order = any_schedule(fixed.schedule)
    check_trains(order)
    if isinstance(order, Recipe):
        return replace(order, units=(), woven=False, seconds=None)
    return order if has_window(order) else any_schedule("one_f_one_b")


def _sizes(job: Job, fixed: Fixed, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks of a pipeline and the replicas of the smallest plan of each kind."""
    across, served = ranks // (fixed.tensor or 1), sums_way(job.sums).served
    if across <= 1:
        yield 1, 1
        return
    if not served and fixed.replicas in (None, 1):
        yield 2, 1
    if fixed.replicas != 1:
        yield 1, fixed.replicas or min(across, _MOST)


def _asked(job: Job, fixed: Fixed, order: AnySchedule, *, commits: bool) -> Words:
    """Return what every plan says of what is asked for."""
    topology = None if fixed.exchange.topology == FASTEST else fixed.exchange.topology
    return Words(
        graph="",
        schedule=order,
        clip=job.awaits_all,
        post_validation=job.awaits_all and fixed.exchange.post_validation and not commits,
        commits=commits,
        sums=job.sums,
        topology=topology,
        tensor=fixed.tensor or 1,
        context=fixed.context,
    )


def _sized(fixed: Fixed, num_ranks: int, replicas: int) -> Words:
    """Return the sizes, with a stage on each rank, and what of each is in far memory."""
    cuts, what = range(num_ranks - 1), fixed.offload
    words = Words(num_ranks=num_ranks, replicas=replicas, num_micro_batches=2)
    words |= Words(cuts=cuts, cut_names=[str(cut) for cut in cuts])
    if what is None:
        return words
    divided = what in ("weights", "all") and replicas > 1
    shard = Words(shard=("shard",) * num_ranks) if divided else Words()
    return words | Words(offload=(what,) * num_ranks) | shard
