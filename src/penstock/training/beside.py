"""Beside: what was tried with other sizes of micro-batches, among what is told of a plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.plan.plan import Plan
from penstock.search.tried import row_of
from penstock.training.ways import in_words

if TYPE_CHECKING:
    from penstock.training.choose import Option


def with_joined(plan: Plan, first: "Option", options: "Sequence[Option]") -> Plan:
    """Return a plan whose prediction tells of the best with each other size of micro-batch, too.

    One process is the fastest one, whatever its micro-batches.
    first:  of the options that of the plan.
    """
    if plan.predicted is None:
        return plan
    known = [option.found.plan.predicted for option in options]
    alone = [row for each in known if each for row in each.tried if row.ranks == 1]
    fastest = min(alone, key=lambda row: row.step_s, default=None)
    rows = [row for row in plan.predicted.tried if row.ranks > 1]
    rows += [
        row_of(option.best, in_words(option.way.joined))
        for option in options
        if option.way.joined != first.way.joined and option.best.plan.total_ranks > 1
    ]
    rows += [] if fastest is None else [fastest]
    rows.sort(key=lambda row: row.step_s)
    return replace(plan, predicted=replace(plan.predicted, tried=tuple(rows)))
