"""By ranks: elastic runs whose batch follows the ranks (`Job.batch_by_ranks`).

Each replica keeps its share of micro-batches, so a step with y replicas is the mean over y shares:
the update is the mean over those who are there, and its variance that of one share over y.  Which
micro-batch a step begins with then depends on who was there before; so the cursors of all
stretches with one batch each are part of a view, and of the run's folder.

    cursor (step, number, size)    from `step` on, a step has `size` micro-batches of the job; the
                                   first one is `number`

Source:   "Machine Learning on Volatile Instances", arXiv:2003.05649.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.choose.choose import joining_of
from penstock.errors import PlanError
from penstock.files import read_json, write_text
from penstock.graph.merge import ahead
from penstock.job import Job
from penstock.members.words import Cursor
from penstock.pilot.losses import PlanBasis, committing
from penstock.plan.plan import Plan
from penstock.plan.reshape import Counts, reshaped
from penstock.typed import damage, typed

BATCHES = "batches.json"


def number_at(cursors: Sequence[Cursor], step: int) -> int:
    """Return the micro-batch that a step begins with."""
    before = [each for each in cursors if each.step <= step]
    if not before:
        return 0
    last = before[-1]
    return last.number + (step - last.step) * last.size


def grown(cursors: Sequence[Cursor], step: int, size: int) -> tuple[Cursor, ...]:
    """Return cursors of a run that goes on from a step, with so many micro-batches a step.

    What was read after that step is read again: its steps do not count.
    """
    kept = tuple(each for each in cursors if each.step < step)
    if kept and kept[-1].size == size:
        return kept
    return (*kept, Cursor(step, number_at(cursors, step), size))


def job_at(job: Job, plan: Plan, cursors: Sequence[Cursor], step: int) -> Job:
    """Return what a plan trains from a step on: its batch, at its place in the data.

    job:      joined as the plan says, so that its micro-batch k is number k * `plan.terms.joined`.
    Raises:   PlanError: that place is within micro-batches that the plan joins.
    """
    number, size = number_at(cursors, step), plan.step_micro_batches
    if number % plan.terms.joined:
        message = (
            f"step {step} begins with micro-batch {number}, and {plan.terms.joined} are joined"
        )
        raise PlanError(message, hint="resume with the plan of the run: leave out plan")
    own = replace(job, micro_batches=size)
    return ahead(own, number // plan.terms.joined - step * size)


def check_by_ranks(plan: Plan) -> None:
    """Raise unless ranks of a plan can keep their shares while others come and go.

    Raises:   PlanError: a replica has several ranks or shares what it holds; shares are unlike.
    """
    hint = "leave stages and plan out, or let the batch stay: Job.batch_by_ranks=False"
    what = ""
    if plan.num_ranks > 1:
        what = f"a replica of {plan.num_ranks} ranks"
    elif plan.shards:
        what = "replicas that each keep a part of the state"
    elif plan.offloads:
        what = "replicas with far memory"
    elif plan.place.shares:
        what = f"unlike shares, {plan.share_words},"
        hint = "give Job.micro_batches as a multiple of the ranks"
    if what:
        raise PlanError(f"{what} cannot have a batch that follows the ranks", hint=hint)


def plans_by_ranks(plan: Plan, ways: PlanBasis) -> dict[int, Plan]:
    """Return the plan for each number of ranks up to that of `plan`, each rank with its share.

    Raises:   PlanError: see `check_by_ranks`.
    """
    check_by_ranks(plan)
    graph, found = joining_of(ways.ways, plan).captured.graph, dict[int, Plan]()
    for count in range(1, plan.replicas + 1):
        shares = (plan.num_micro_batches,) * count
        counts = Counts(plan.cuts, plan.schedule, plan.num_ranks, shares)
        found[count] = committing(reshaped(plan, graph, counts), ways)
    return found


def save_cursors(folder: Path, cursors: Sequence[Cursor]) -> None:
    """Write the cursors of a run, before the first step to which the last of them applies."""
    rows = [list(each) for each in cursors]
    write_text(folder / BATCHES, json.dumps({"penstock": "batches", "batches": rows}) + "\n")


def cursors_in(folder: Path) -> tuple[Cursor, ...]:
    """Return the cursors of the run in a folder; none where its batch does not follow the ranks.

    Raises:   PlanError: the file is damaged.
    """
    path = folder / BATCHES
    if not path.exists():
        return ()
    content = read_json(path, PlanError, "batches")
    with damage(f"{path}", PlanError, hint="train without resume"):
        return typed(tuple[Cursor, ...], content.get("batches"))
