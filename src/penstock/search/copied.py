"""Copied: where memory is short, plans that let activations wait in far memory, one by one.

Of plans of one stage on each rank that lack memory, an order is found for the seconds of their
stages, and of a copy there and back, in which no rank holds more activations than it has room for
(exact_offload.py).  It is written into the plan, so the plan stays what it is; a new search with
other seconds finds another one.

Source:  OptPipe, arXiv:2510.05186.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from penstock.extras import lacks
from penstock.plan.plan import Plan
from penstock.program.codes import COST_ROW, OFFLOAD, RELOAD
from penstock.schedule.exact_offload import Copies, exact_offload
from penstock.schedule.greedy import Seconds
from penstock.schedule.orders import F, I, W
from penstock.schedule.recipe import Recipe
from penstock.schedule.zb_greedy import zb_greedy
from penstock.search.candidate import Candidate
from penstock.search.field import Field
from penstock.search.judge import Judge
from penstock.search.recompute import keeps_all
from penstock.simulate.price import DeviceMemory

_MOST_FORWARDS = 64  # of a replica
_MOST_PLANS = 3
_TRIES = 3  # limits, from what should fit downwards


def with_copies(field: Field, copies_beside: Callable[[Plan], bool]) -> Iterator[Candidate]:
    """Yield plans with copies, for those of the field that lack memory; some may lack it still.

    copies_beside:  whether copies of a plan can run beside its computes.
    Ignores:  that other cuts may suit an order with copies better.
    """
    if field.objective == "memory" or not field.effort.rescues:
        return
    short = {_shape(each.plan) for each in field.simulated if each.refused and each.peak_bytes}
    if not short or lacks("numba", "fast", "orders that copy activations to far memory"):
        return
    best = min(
        (each.score(field.objective)[0] for each in field.simulated if not each.refused),
        default=np.inf,
    )
    tried = 0
    for plan in field.plans:
        if _shape(plan) not in short or not _is_meant(field.judge, plan) or not copies_beside(plan):
            continue
        if field.judge.bound(plan, field.objective) > best:
            continue
        if tried == _MOST_PLANS or field.is_over():
            return
        tried += 1
        yield from _fitted(field.judge, plan)


def _shape(plan: Plan) -> tuple[object, ...]:
    place = plan.place
    sizes = place.hosts, place.num_ranks, place.replicas, plan.num_stages, place.shares
    return *sizes, plan.terms.wire


def _is_meant(judge: Judge, plan: Plan) -> bool:
    """Return whether a plan is one of each shape: an order is found in place of its own."""
    own = isinstance(plan.schedule, Recipe) and plan.schedule.builder == zb_greedy.__name__
    few = plan.num_stages * plan.num_micro_batches <= _MOST_FORWARDS
    each = plan.num_stages == plan.num_ranks > 1 and not plan.place.shares
    return own and few and each and keeps_all(judge, plan)


def _fitted(judge: Judge, plan: Plan) -> Iterator[Candidate]:
    """Yield the first that fits its memory, or the last that was tried."""
    limit, made = _limit(judge, plan), None
    for each in range(limit, max(0, limit - _TRIES), -1):
        found = order_with_copies(judge, plan, each)
        if found is not None:
            made = judge.candidate(found)
            if not made.refused:
                break
    if made is not None:
        yield made


def order_with_copies(judge: Judge, plan: Plan, limit: int) -> Plan | None:
    """Return `plan` with an order that holds `limit` activations a rank; None if none is copied.

    plan:  of one stage on each rank; the same again each time, whatever the machine is busy with.
    """
    fitted = judge.suited(replace(plan, schedule=Recipe(zb_greedy.__name__)))
    assert isinstance(fitted.schedule, Recipe), "it was one"
    assert fitted.schedule.seconds is not None, "it takes them"
    costs = judge.price(_moving(plan)).costs.action_s
    rows = costs[COST_ROW[[OFFLOAD, RELOAD], F]].max(axis=2)  # on the slowest device of any stage
    made = exact_offload(
        *(plan.num_stages, plan.num_micro_batches),
        Copies(*map(tuple, rows.tolist())),
        seconds=Seconds(*fitted.schedule.seconds[:4]),
        limit=limit,
        time_limit_s=0.0,
    )
    return replace(plan, schedule=made.schedule) if made.schedule.far else None


def _moving(plan: Plan) -> Plan:
    return plan.changed(offload=("activations",) * plan.num_stages)


def _limit(judge: Judge, plan: Plan) -> int:
    """Return how many activations each rank has room for, but for what of others cannot go."""
    held = judge.price(_moving(plan)).held
    rooms = (
        _most(held[kind], stage, cap)
        for stage, row in enumerate(judge.caps(plan))
        for kind, cap in row
    )
    return min(plan.num_micro_batches - 1, *rooms)


def _most(held: DeviceMemory, stage: int, cap: int) -> int:
    """Return the largest number of activations of a stage with which an action fits `cap`."""
    net, during = int(held.net[F, stage]), held.transient[:, stage]
    most_during = max(int(during[F]) - net, int(during[I]), int(during[W]))
    room = cap - held.start[stage] - most_during
    return max(1, room // net) if net > 0 else int(np.iinfo(np.int64).max)
