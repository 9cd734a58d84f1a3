"""Under torchrun: every rank runs the command; rank 0 plans, shows progress and reports.

On several hosts the ranks first measure the links between them, and the step is measured on each
kind of device that there is.  What ranks have to tell rank 0 (profiles, each step's loss, the
results), and it them (the plan), goes through the store that torchrun's rendezvous gives them.
"""

import itertools
import json
import os
import platform
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import face
from penstock.cli.choose import Choice, There, for_plan, trace_job
from penstock.cli.doctor import HERE
from penstock.cli.prepare import measured_as
from penstock.cluster import Cluster
from penstock.cluster.order import placed
from penstock.errors import GraphError, PlanError, RunError
from penstock.files import Json
from penstock.graph.merge import merged
from penstock.job import Job
from penstock.plan import Plan
from penstock.profile import Profile

if TYPE_CHECKING:
    from penstock.cli.train import Session
    from penstock.graph.trace import Capture
    from penstock.runtime.launch import Groups, Work
    from penstock.runtime.rank import StepResult
    from penstock.runtime.worker import RankResult, Report

_PLAN = "penstock/plan"
_ASK, _TOLD = "penstock/measure/{}", "penstock/profile/{}/{}"  # number; number, kind of device
_ENOUGH = "enough"  # in place of how many micro-batches are joined in the step to measure


def train_under_torchrun(session: "Session") -> dict[str, object] | None:
    """Train as the rank that this process is; return the summary on rank 0.

    Raises:   GraphError: the model cannot be traced (start it with `penstock train` instead).
              PlanError: the plan is for another number of ranks.
              RunError: GPUs on several hosts, and nothing says what their links are; or
              another rank failed while the plan was made.
    """
    from penstock.runtime.launch import on_one_host, torchrun_store

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torchrun_store()
    first_step, checkpoint = session.start()
    captured = session.trace()
    if captured is None:
        hint = "`penstock train` without torchrun trains it as plain data parallel"
        raise GraphError("this model cannot be traced, so no plan can be made", hint=hint)
    session.wish = replace(session.wish, ranks=world)
    cluster = session.there.cluster
    if cluster is None and not on_one_host():
        cluster = _surveyed(store)
    if rank == 0:
        choice = _led(session, store, cluster, captured, checkpoint)
    else:
        _serve(store, session.job, captured, cluster)
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
        plan_rank=_plan_rank(cluster, plan, rank),
        steps=(first_step, session.num_steps),
        micro_batches=plan.replicas * plan.num_micro_batches,
    )
    return session.train(choice, first_step, checkpoint, launch, leader=rank == 0)


# -- the machines that torchrun started it on -----------------------------------------------------


def _surveyed(store: Any) -> Cluster:
    """Return the hosts of all ranks and the links between them; every rank calls it.

    Raises:   RunError: the ranks compute on GPUs.
    """
    import torch

    from penstock.runtime.hosts import seat_here, survey
    from penstock.runtime.launch import join_torchrun, under

    if torch.cuda.is_available():
        hint = "write hosts and links by hand (docs/cluster.md) and give them as --cluster FILE"
        raise RunError("links between GPUs of several hosts are not measured", hint=hint)
    seat = seat_here(platform.node() or "host", HERE)
    with face.busy("measuring the links between hosts"):
        found = join_torchrun(lambda end: survey(end, seat), under(store, "survey"))
    return found.cluster


def _led(
    session: "Session",
    store: Any,
    cluster: Cluster | None,
    captured: "Capture",
    checkpoint: Path | None,
) -> Choice:
    """Return what rank 0 chooses, told to all; where it fails, all are told that."""
    numbers, word = itertools.count(), "it left"
    session.there = There(cluster, partial(_profiled, store, numbers, session.job))
    try:
        session.set_aside()
        choice = session.choose(captured, checkpoint)
        store.set(_PLAN, json.dumps(choice.plan.to_json()))
        word = _ENOUGH
    except BaseException as problem:
        word = f"{type(problem).__name__}: {problem}"
        raise
    finally:
        store.set(_ASK.format(next(numbers)), word)
    return choice


def _leaders(cluster: Cluster) -> dict[str, int]:
    """Return the first rank on each kind of device: it measures for all others."""
    leaders: dict[str, int] = {}
    for rank in range(cluster.num_ranks):
        leaders.setdefault(cluster.device_of(rank).name, rank)
    return leaders


def _profiled(
    store: Any,
    numbers: Iterator[int],
    whole: Job,
    captured: "Capture",
    job: Job,
    cluster: Cluster,
) -> tuple[Profile, ...]:
    """Return a profile of the step for each kind of device, measured where it is; on rank 0.

    whole:    the job without any of its micro-batches joined.
    """
    number, leaders = next(numbers), _leaders(cluster)
    store.set(_ASK.format(number), str(whole.micro_batches // job.micro_batches))
    own, *others = leaders
    profile = measured_as(own, captured, job, cluster)
    told = ((kind, json.loads(store.get(_TOLD.format(number, kind)))) for kind in others)
    return (profile, *(_told(kind, answer) for kind, answer in told))


def _told(kind: str, answer: Json) -> Profile:
    """Return the profile that the leader of a kind of device answers.

    Raises:   RunError: it failed.
    """
    if isinstance(answer, str):
        hint = f"the errors of the first rank on a {kind} say more"
        raise RunError(f"no profile of {kind}: {answer}", hint=hint)
    return Profile.from_json(answer, kind)


def _serve(store: Any, job: Job, captured: "Capture", cluster: Cluster | None) -> None:
    """Measure the step for rank 0 until it has enough, where this rank leads a kind of device.

    Raises:   RunError: rank 0 failed.  What measuring raises, which rank 0 is told.
    """
    rank, leaders = int(os.environ["RANK"]), {} if cluster is None else _leaders(cluster)
    own = next((kind for kind, leader in leaders.items() if leader == rank), None)
    for number in itertools.count():
        text = store.get(_ASK.format(number)).decode()
        if text == _ENOUGH:
            return
        if not text.isdecimal():
            raise RunError(f"rank 0 made no plan: {text}", hint="its own errors say more")
        if own is not None and cluster is not None:
            answer: Json = "it left"
            try:
                joined = merged(job, int(text))
                step = captured if text == "1" else trace_job(joined)
                answer = measured_as(own, step, joined, cluster).to_json()
            except BaseException as problem:
                answer = f"{type(problem).__name__}: {problem}"
                raise
            finally:
                store.set(_TOLD.format(number, own), json.dumps(answer))


def _plan_rank(cluster: Cluster | None, plan: Plan, rank: int) -> int:
    """Return which rank of the plan runs where torchrun has `rank`: the plan may reorder hosts."""
    if cluster is None:
        return rank
    ranks, there = range(cluster.num_ranks), placed(cluster, plan.hosts)
    own = cluster.host_of(rank)
    first = next(r for r in ranks if cluster.host_of(r) == own)
    return rank - first + next(r for r in ranks if there.host_of(r) == own)


# -- running --------------------------------------------------------------------------------------


def _launch(  # noqa: PLR0913 - a launcher, bound to one torchrun job
    work: "Work",
    num_ranks: int,
    report: "Report",
    *,
    store: Any,
    plan_rank: int,
    steps: tuple[int, int],
    micro_batches: int,
    groups: "Groups" = (),
) -> "list[RankResult]":
    """Run rank `plan_rank` of the plan; return all results on torchrun's rank 0, elsewhere none."""
    from penstock.runtime.launch import as_json, from_json, run_torchrun, under

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
    own = run_torchrun(work, under(store, "run"), tell, groups=groups, rank=plan_rank)
    if rank != 0:
        store.set(f"penstock/result/{rank}", json.dumps(as_json(own)))
        return []
    listener.join()
    others = (store.get(f"penstock/result/{other}") for other in range(1, num_ranks))
    results = [own, *(from_json(json.loads(text)) for text in others)]
    return sorted(results, key=lambda result: result.rank)


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
