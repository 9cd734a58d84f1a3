"""Again: an order with copies to far memory, found once more for the seconds that were measured.

Seconds change: another neighbour on the machine, another model of a device, a slower disk.  An
order that was the shortest for the profile's seconds need not be for those of the run.

Source:  OptPipe, arXiv:2510.05186 (solved again as a run goes on; here: after it).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import PlanError
from penstock.program.codes import COST_ROW, OFFLOAD, RELOAD, WORKS
from penstock.program.passes.offload import Offloaded
from penstock.schedule.exact_offload import Copies, exact_offload
from penstock.schedule.far_words import FarCopy
from penstock.schedule.figures import peak_activations
from penstock.schedule.greedy import Seconds
from penstock.schedule.orders import Action, F, I, Orders, W
from penstock.schedule.recipe import built, copied_of
from penstock.schedule.schedule import Schedule
from penstock.simulate.recorded import UNDER_WAY
from penstock.simulate.what_if import Change, Run, lowered

_LEFT: dict[Offloaded, Offloaded] = {"activations": "none", "both": "state"}


class RunSeconds(NamedTuple):
    """Seconds of the stages of a run, and the most activations that one of its ranks holds."""

    seconds: Seconds
    copies: Copies
    limit: int


def measured(run: Run) -> RunSeconds:
    """Return the means of what a run measured of its stages: F, I, W, a message, copies.

    What was not run - I and W apart, copies - is as the run's profile says.
    Raises:   PlanError: not one stage on each rank.  ProfileError: the run has no profile.
    """
    plan = run.plan
    made = built(plan.schedule, plan.num_stages, plan.num_micro_batches, num_ranks=plan.num_ranks)
    if plan.num_stages != plan.num_ranks or made.has_updates:
        message = f"{plan.num_stages} stages on {plan.num_ranks} ranks, by {made.name}"
        hint = "give a run of a schedule that drains, with one stage on each rank"
        raise PlanError(message, hint=hint)
    kept: tuple[Offloaded, ...] = tuple(_LEFT.get(word, word) for word in plan.offload)
    beside = plan.overlap.beside and any(word != "none" for word in kept)
    own = run._replace(plan=plan.changed(offload=kept, beside=beside))
    program, recorded, _ = lowered(own, Change(schedule=_all_kinds(made)))
    code = program.code
    rows = np.flatnonzero(WORKS[code.op])
    costs, stages = COST_ROW[code.op[rows], code.kind[rows]], code.stage[rows]

    def mean(cost: int) -> tuple[float, ...]:
        of = [recorded.work_s[(costs == cost) & (stages == s)] for s in range(plan.num_stages)]
        return tuple(float(each.mean()) for each in of)

    messages = recorded.message_s
    message_s = 0.0
    if messages is not None and len(messages):
        message_s = float(messages[:, UNDER_WAY].mean())
    seconds = Seconds(mean(F), mean(I), mean(W), message_s)
    copies = Copies(*(mean(int(COST_ROW[op, F])) for op in (OFFLOAD, RELOAD)))
    return RunSeconds(seconds, copies, max(peak_activations(made)))


def _all_kinds(like: Schedule) -> Schedule:
    """Return a schedule of these sizes with F, I, W and both copies of every pair."""
    count = like.num_micro_batches
    orders: list[Sequence[Action]] = []
    far: list[FarCopy] = []
    for stage in range(like.num_stages):
        ends = [Action(kind, stage, m) for m in range(count) for kind in ("I", "W")]
        orders.append([*(Action("F", stage, m) for m in range(count)), *ends])
        far += [FarCopy(stage, count, stage, m, back=False) for m in range(count)]
        far += [FarCopy(stage, count + 2 * m, stage, m, back=True) for m in range(count)]
    return Schedule(like.num_stages, count, Orders.of(orders), far=tuple(far))


def copies_again(run: Run) -> Iterator[tuple[str, Change]]:
    """Yield the change to copies found again, in words, where the run's schedule lists some."""
    plan = run.plan
    if not copied_of(plan.schedule) or plan.num_stages != plan.num_ranks:
        return
    seconds, copies, limit = measured(run)
    sizes = plan.num_stages, plan.num_micro_batches
    found = exact_offload(*sizes, copies, seconds=seconds, limit=limit, time_limit_s=0.0)
    yield "copies found again for these seconds", Change(schedule=found.schedule)
