"""Worked: layer_pipe on fewer ranks than stages, divided by what its stages take.

The schedule gives all ranks equal work: a stage at the border of two ranks is on both.  What work
each stage is, is known once the plan is cut; it is measured, and rounded to two digits.

Source:  LayerPipe, arXiv:2108.06629.
"""

from dataclasses import replace

from penstock.errors import GraphError
from penstock.plan.plan import Plan
from penstock.schedule.layer_pipe import layer_pipe
from penstock.schedule.orders import B, F
from penstock.schedule.recipe import Recipe
from penstock.search.judge import Judge

_MOST = 99  # work of the longest stage


def by_work(judge: Judge, plan: Plan) -> Plan:
    """Return the plan with the work of its stages in its schedule, where that divides stages.

    As it is where it does not, where the work is said, or the plan cannot be cut.
    """
    recipe = plan.schedule
    if not isinstance(recipe, Recipe) or recipe.builder != layer_pipe.__name__ or recipe.units:
        return plan
    arguments = dict(recipe.arguments)
    if "processors" not in arguments or "work" in arguments:
        return plan
    try:
        action_s = judge.price(plan).costs.action_s
    except GraphError:
        return plan
    seconds = action_s[[F, B]].sum(axis=0).max(axis=1)
    work = (_MOST * seconds / seconds.max()).round().clip(min=1).astype(int)
    arguments["work"] = "-".join(map(str, work.tolist()))
    return replace(plan, schedule=replace(recipe, arguments=tuple(arguments.items())))
