"""Under torchrun: every rank runs the command; rank 0 plans, shows progress and reports.

What ranks have to tell rank 0 (the plan, each step's loss, the results) goes through the
store that torchrun's rendezvous gives them.
"""

import json
import os
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.cli.choose import Choice, for_plan
from penstock.errors import GraphError, PlanError
from penstock.plan import Plan

if TYPE_CHECKING:
    from penstock.cli.train import Session
    from penstock.runtime.launch import Groups, Work
    from penstock.runtime.rank import StepResult
    from penstock.runtime.worker import RankResult, Report

_PLAN = "penstock/plan"


def train_under_torchrun(session: "Session") -> dict[str, object] | None:
    """Train as the rank that this process is; return the summary on rank 0.

    Raises:   GraphError: the model cannot be traced (start it with `penstock train` instead).
              PlanError: the plan is for another number of ranks.
    """
    from penstock.runtime.launch import torchrun_store

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torchrun_store()
    first_step, checkpoint = session.start()
    captured = session.trace()
    if captured is None:
        hint = "`penstock train` without torchrun trains it as plain data parallel"
        raise GraphError("this model cannot be traced, so no plan can be made", hint=hint)
    session.wish = replace(session.wish, ranks=world)
    if rank == 0:
        session.set_aside()
        choice = session.choose(captured, checkpoint)
        store.set(_PLAN, (session.folder / "plan.json").read_bytes())
    else:
        plan = Plan.from_text(store.get(_PLAN).decode())
        choice = Choice(*for_plan(session.job, plan, captured), plan)
    plan = choice.plan
    if plan.total_ranks != world:
        hint = f"start torchrun with --nproc-per-node {plan.total_ranks}, or give another plan"
        raise PlanError(
            f"the plan is for {plan.total_ranks} ranks; torchrun started {world}", hint=hint
        )
    launch = partial(
        _launch,
        store=store,
        steps=(first_step, session.num_steps),
        micro_batches=plan.replicas * plan.num_micro_batches,
    )
    return session.train(choice, first_step, checkpoint, launch, leader=rank == 0)


def _launch(  # noqa: PLR0913 - a launcher, bound to one torchrun job
    work: "Work",
    num_ranks: int,
    report: "Report",
    *,
    store: Any,
    steps: tuple[int, int],
    micro_batches: int,
    groups: "Groups" = (),
) -> "list[RankResult]":
    """Run this rank; on rank 0 return all results, elsewhere none."""
    from penstock.runtime.launch import as_json, from_json, run_torchrun

    rank = int(os.environ["RANK"])
    told = threading.Lock()

    def tell(result: "StepResult") -> None:
        if result.loss is not None:
            with told:
                place = store.add(f"penstock/told/{result.step}", 1)
            row = [result.step, result.loss, result.seconds, result.micro_batches]
            store.set(f"penstock/step/{result.step}/{place}", json.dumps(row))

    listener = threading.Thread(
        target=_listen, args=(store.clone(), steps, micro_batches, report), daemon=True
    )
    if rank == 0:
        listener.start()
    own = run_torchrun(work, store, tell, groups=groups)
    if rank != 0:
        store.set(f"penstock/result/{rank}", json.dumps(as_json(own)))
        return []
    listener.join()
    others = (store.get(f"penstock/result/{other}") for other in range(1, num_ranks))
    return [own, *(from_json(json.loads(text)) for text in others)]


def _listen(store: Any, steps: tuple[int, int], micro_batches: int, report: "Report") -> None:
    """Pass the reports of every step on, in order, until they are of all its micro-batches."""
    from penstock.runtime.rank import StepResult

    for step in range(*steps):
        place = told = 0
        while told < micro_batches:
            place += 1
            key = f"penstock/step/{step}/{place}"
            result = StepResult(*json.loads(store.get(key)))
            store.delete_key(key)
            told += result.micro_batches
            report(result)
