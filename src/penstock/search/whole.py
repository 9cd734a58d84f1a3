"""Whole: the stages of a plan whose ops are divided, without the cuts at which ranks collect."""

import itertools

from penstock.plan.plan import Plan
from penstock.schedule.recipe import units_of


def whole_stages(plan: Plan) -> int:
    """Return the number of stages; units between collects are parts of one."""
    return plan.num_stages if plan.tensor == 1 else len(units_of(plan.schedule)) or plan.num_stages


def whole_cuts(plan: Plan) -> tuple[str, ...]:
    """Return the names of the cuts between stages."""
    units = units_of(plan.schedule) if plan.tensor > 1 else ()
    ends = set(itertools.accumulate(units))
    return tuple(name for at, name in enumerate(plan.cut_names, 1) if not units or at in ends)
