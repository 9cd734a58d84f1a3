"""Elastically: the main job's ranks as members that may be lost, and may come."""

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cluster import Cluster
from penstock.elastic.launch import Heir, Start, run_members
from penstock.elastic.member import START
from penstock.elastic.words import View
from penstock.profile.kinds import load_profiles
from penstock.runtime.calls import StepResult
from penstock.runtime.worker import RankResult
from penstock.search import Fixed
from penstock.training.choose import Choice, Joining, save
from penstock.training.elastic import (
    ElasticRun,
    RunPilot,
    check_elastic,
    text_of,
    write_addresses,
)
from penstock.training.events import EVENTS
from penstock.training.listener import Listener
from penstock.training.losses import PlanBasis, committing, plans_ahead
from penstock.training.windows import CheckpointInterval

if TYPE_CHECKING:
    from penstock.runtime.control import Board
    from penstock.runtime.worker import Task

SEARCH_S = 2.0  # for the plan of each number of ranks that may be left


def ways_of(folder: Path, choice: Choice, fixed: Fixed) -> PlanBasis:
    """Return what plans for other numbers of ranks are made from.

    folder:  of the run, where profiles and machines are.
    Micro-batches are joined as the plan has them: a newcomer knows no other way.
    """
    profiles = load_profiles(folder / "profile.json")
    own = Joining(choice.plan.joined, choice.job, choice.captured, profiles)
    cluster = Cluster.load(folder / "cluster.toml")
    free = replace(fixed, ranks=None, replicas=None, stages=None, post_validation=False)
    return PlanBasis((own,), cluster, replace(free, as_placed=True))


def run_of(
    ways: PlanBasis,
    choice: Choice,
    task: "Callable[[Choice, int, Path | None], Task]",
    steps: range,
    about: tuple[Path, Path | None, CheckpointInterval, Listener],
) -> ElasticRun:
    """Return what members of a run have alike: above all, a plan for each number of ranks left.

    about:    the run's folder, the checkpoint that it starts from, how often others are written,
              and who listens.
    Raises:   PlanError: the plan is asynchronous.
    """
    folder, resume, every, listener = about
    check_elastic(choice.plan)
    most = choice.plan.total_ranks
    plan = committing(choice.plan, ways)
    with listener.busy("planning for the loss of ranks"):
        plans = {**plans_ahead(ways, most, SEARCH_S), most: plan}
    save_predicted(folder, choice._replace(plan=plan))
    token = secrets.token_bytes(32)
    return ElasticRun(ways, task, plans, steps.start, steps.stop, folder, resume, token, every)


def save_predicted(folder: Path, choice: Choice) -> None:
    """Write a plan by which a run begins, or has ended, and its predicted step."""
    (way,) = (ways := ways_of(folder, choice, Fixed())).ways
    save(folder, choice.captured, choice.plan, way.profiles, ways.cluster)


def run_elastically(
    run: ElasticRun,
    board: "Board",
    report: Callable[[StepResult], None],
    heir: Heir,
) -> list[RankResult] | None:
    """Run the members of a run as processes of this host, from its plan for most of them.

    Raises:   RunError: the job fails, or nobody is left.
    """
    most = max(run.plans)
    pilot = RunPilot(run)
    pilot.prepare()
    resume = START if run.resume is None else str(run.resume)
    members = tuple(range(most))
    view = View(1, run.first_step, text_of(run.plans[most]), members, resume=resume)
    assert run.folder is not None, "a run of the main job has files"
    (run.folder / EVENTS).unlink(missing_ok=True)
    wrote = partial(write_addresses, run)
    return run_members(Start(view, run.token, lambda: pilot, board.asked, wrote), report, heir)


def steps_in(metrics: Path) -> list[StepResult]:
    """Return the steps of a run, as far as its metrics have them."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [StepResult(row["step"] - 1, row["loss"], row["seconds"]) for row in rows]
