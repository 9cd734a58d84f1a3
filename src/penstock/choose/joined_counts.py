"""Joined counts: of how many micro-batches of the job one of the plan's is made; each is searched.

Joined, products are larger and calls fewer.  Divided, there are enough for all ranks where a step
has few: a loop over a DataLoader has one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from penstock.bits import AS_IT_IS
from penstock.job import Job
from penstock.keyed import only_key
from penstock.plan.plan import Plan
from penstock.schedule.recipe import any_schedule, has_window
from penstock.search.tried_kinds import row_of
from penstock.taken import Taken

if TYPE_CHECKING:
    from penstock.choose.choose import Option
    from penstock.search.shapes import Fixed

MOST_JOINED = 4  # micro-batches; more of them make the bubble of a short step too large
_SMALLER = 2, 4, 8, 16
_NEAR = 2  # times as many parts: more of them cost calls
_FOR_A_RANK = (1, 4), (4, 2)  # micro-batches: for replicas, and to fill a pipeline; times as many


def ways_to_join(job: Job) -> list[int]:
    """Return how many micro-batches may be joined; 1 is the first.

    None of those whose steps have one of several shapes, each of which would have to be; nor of
    those that hand tensors on from place to place.
    """
    if only_key(job.data) is not None or job.carry is not None:
        return [1]
    return [k for k in range(1, MOST_JOINED + 1) if job.micro_batches % k == 0]


def ways_to_divide(job: Job, fixed: "Fixed", samples: int, ranks: int) -> list[Fraction]:
    """Return parts of micro-batches that may be the plan's, the largest first.

    samples:  of a micro-batch; a part has as many as any other.
    None where there are two for each rank, or the plan is one that takes whole ones only.
    """
    if ranks < 2 or job.micro_batches >= 2 * ranks or not may_divide(job, fixed):
        return []
    wanted = ((math.ceil(ranks * each / job.micro_batches), most) for each, most in _FOR_A_RANK)
    found = (next(_divisors(samples, max(2, parts), most), 0) for parts, most in wanted)
    return [Fraction(1, parts) for parts in dict.fromkeys(found) if parts]


def ways_to_fit(job: Job, fixed: "Fixed", samples: int) -> list[Fraction]:
    """Return parts of micro-batches to try where nothing fits the memory, the largest first."""
    if not may_divide(job, fixed):
        return []
    return [Fraction(1, parts) for parts in _SMALLER if samples % parts == 0]


def ways_to_weave(job: Job, fixed: "Fixed", samples: int, replicas: int) -> list[Fraction]:
    """Return the parts of micro-batches of which each of so many replicas has two a step: one is
    computed while ranks that divide ops collect of the other.

    None where there are two already, or the plan is one that takes whole ones only.
    """
    parts = 2 * replicas / job.micro_batches
    if parts <= 1 or parts != int(parts) or samples % parts or not may_divide(job, fixed):
        return []
    return [Fraction(1, int(parts))]


def may_divide(job: Job, fixed: "Fixed") -> bool:
    """Return whether a plan of parts can be what is asked for."""
    is_late = fixed.schedule is not None and has_window(any_schedule(fixed.schedule))
    is_rounded = job.sums is not None or job.fewest_bits != (AS_IT_IS, AS_IT_IS)
    return not (is_late or is_rounded or job.carry is not None or job.batch_by_ranks)


def parts_alike(plan: Plan, samples: int, micro_batches: int) -> list[int]:
    """Return into how many parts micro-batches of so many samples may be divided, of steps that
    follow a plan made for others: one way, or what shares the work evenly and what does not.

    The plan's own number, if its replicas then take as many parts each, or one near to it.
    """
    wanted, replicas = round(1 / plan.terms.joined), plan.replicas
    found = [n for n in range(1, samples + 1) if samples % n == 0 and micro_batches * n >= replicas]
    found.sort(key=lambda n: (abs(math.log(n / wanted)), n))
    even = [n for n in found if micro_batches * n % replicas == 0][:1]
    if even and even[0] <= _NEAR * wanted:
        return even
    return [*dict.fromkeys(found[:1] + even)]


def _divisors(samples: int, least: int, times: int) -> Iterator[int]:
    """Yield the divisors of a number from `least` to so many times that: more parts cost calls."""
    return (k for k in range(least, min(samples, times * least) + 1) if samples % k == 0)


def in_words(joined: Taken) -> str:
    """Return what a micro-batch of the plan is."""
    if joined == 1:
        return "none joined"
    return (
        f"{joined} of the job's joined"
        if joined > 1
        else f"each of the job's in {1 / joined} parts"
    )


def with_joined(plan: Plan, first: "Option", options: "Sequence[Option]") -> Plan:
    """Return a plan whose prediction tells of the best with each other size of micro-batch, too.

    Likewise of the best whose ops are divided among other numbers of ranks.  One process is the
    fastest one, whatever its micro-batches.
    first:  of the options that of the plan.
    """
    if plan.predicted is None:
        return plan
    known = [option.found.plan.predicted for option in options]
    alone = [row for each in known if each for row in each.tried if row.ranks == 1]
    fastest = min(alone, key=lambda row: row.step_s, default=None)
    rows = [row for row in plan.predicted.tried if row.ranks > 1]
    rows += [
        row_of(option.best, in_words(option.way.joined) if joined != first.way.joined else "")
        for option in options
        for joined, tensor in [(option.way.joined, option.best.plan.tensor)]
        if (joined, tensor) != (first.way.joined, first.best.plan.tensor)
        and option.best.plan.total_ranks > 1
    ]
    rows += [] if fastest is None else [fastest]
    rows.sort(key=lambda row: row.step_s)
    return replace(plan, predicted=replace(plan.predicted, tried=tuple(rows)))
