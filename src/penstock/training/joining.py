"""Joining: this process becomes a rank of an elastic run that is under way on this host."""

import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.elastic.launch import Caller, join
from penstock.elastic.mesh import Mesh, listening, where_of
from penstock.job import load_job
from penstock.plan import Plan
from penstock.program.lower_plan import stages_of
from penstock.runtime.hosts import place_key
from penstock.search import Fixed
from penstock.training.choose import Choice, for_plan
from penstock.training.elastic import Addresses, ElasticRun, RunPilot, addresses_in
from penstock.training.elastically import ways_of
from penstock.training.listener import SILENT, Listener
from penstock.training.prepare import traced
from penstock.training.saved import kept_job
from penstock.training.windows import memory_window, windows_of

if TYPE_CHECKING:
    from penstock.runtime.worker import Task

LIMIT_S = 60.0  # for which a run may take to let another rank in


def join_run(
    folder: Path | str,
    *,
    limit_s: float = LIMIT_S,
    listener: Listener = SILENT,
) -> int:
    """Be a rank of the elastic run in `folder` to its end; return how many steps it has then.

    limit_s:  for which to wait to be taken in.
    Raises:   RunError: no such run, or it takes nobody in: it has as many ranks as there are plans
              for, or trains something else.  JobError: its job cannot be loaded.
    """
    folder = Path(folder)
    known = addresses_in(folder)
    author = load_job(kept_job(folder))
    captured = traced(author, listener)
    plan = Plan.load(folder / "plan.json")
    job, captured = for_plan(author, plan, captured, listener)
    choice = Choice(job, captured, plan)
    plans = {made.total_ranks: made for made in map(Plan.from_text, known.plans)}
    run = ElasticRun(
        ways_of(folder, choice, Fixed()),
        partial(_task, folder, known),
        plans,
        0,
        known.steps,
        folder,
        None,
        bytes.fromhex(known.token),
        known.every,
    )
    pilot = RunPilot(run)
    pilot.prepare()
    torch.set_num_threads(1)
    listener.say("joining the run")
    listens = listening()
    number = 2**20 + secrets.randbelow(2**40)  # no other member has it
    caller = Caller(Mesh(number, listens, run.token), where_of(listens, place_key()), pilot.graph)
    return join(caller, tuple(known.members.values()), pilot, limit_s)


def _task(folder: Path, known: Addresses, choice: Choice, step: int, resume: Path | None) -> "Task":
    """Return what a rank does from a step on, as the ranks that began the run do."""
    from penstock.runtime.worker import Task

    graph, job = choice.captured.graph, choice.job
    every = known.every
    windows = windows_of(graph, choice.plan, range(step, known.steps), [every.steps])
    return Task(
        choice.captured,
        stages_of(choice.plan, graph),
        job,
        windows,
        checkpoints=folder / "checkpoints",
        checkpoint_every=every.steps,
        validate_every=job.validate_every or 0,
        every_s=every.seconds,
        resume=resume,
        memory_window=memory_window(windows),
        joined=choice.plan.joined,
    )
