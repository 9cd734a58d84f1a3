"""Elastic runs of tiny models as threads, which are killed where a test wants it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.checkpoints import checkpoint
from penstock.checkpoints.folders import Keep
from penstock.checkpoints.saver import SavePolicy
from penstock.choose.choose import Choice, Joining
from penstock.choose.run_windows import CheckpointInterval, windows_of
from penstock.cluster import Cluster
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.members import moving, words
from penstock.members.launch_members import Ended, Start, ThreadGenerations, run_threads
from penstock.members.member import RunEvent, RunMember
from penstock.members.mesh import Mesh
from penstock.members.words import View, Where
from penstock.pilot.losses import PlanBasis, committing
from penstock.plan import Plan
from penstock.plan.lower_plan import stages_of
from penstock.profile.estimate import estimated
from penstock.runtime.calls import Bound, StepResult
from penstock.runtime.rank import Rank
from penstock.runtime.worker import Task
from penstock.search import Fixed
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun, RunPilot, text_of
from penstock.training.task import TaskTerms
from penstock.training.task import task_of as made_task
from penstock.transport.threads import ThreadTransport
from tests.parity.models import MODELS, OPTIMIZERS, data, loss, plan_of

MICRO_BATCHES, STEPS = 4, 5


class Killed(BaseException):
    """What a test kills a member with."""


def job_of(name: str, optimizer: str = "adamw", **options) -> Job:
    """Return the job of one of the parity models, in float64."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return MODELS[name]().to(torch.float64)

    own = {"micro_batches": MICRO_BATCHES, "num_steps": STEPS, "seed": 3, **options}
    return Job(make, loss, data, OPTIMIZERS[optimizer], **own)


@cache
def captured_of(name: str) -> Capture:
    return capture(job_of(name))


@cache
def ways_of(name: str, optimizer: str, ranks: int) -> PlanBasis:
    captured = captured_of(name)
    here = Cluster.here(ranks)
    device = replace(here.devices[0], flop_per_s=(("float64", 1e10),))
    cluster = replace(here, devices=(device,))
    profile = estimated(captured.graph, cluster.devices[0], 2.0)
    way = Joining(1, job_of(name, optimizer), captured, (profile,))
    return PlanBasis((way,), cluster, Fixed())


def plan_for(ways: PlanBasis, stages: int, replicas: int, schedule: str = "one_f_one_b", **options):
    """Return a plan of so many stages and replicas that commits its steps."""
    graph = ways.ways[0].captured.graph
    share = MICRO_BATCHES // replicas
    shares = [MICRO_BATCHES // replicas + (r < MICRO_BATCHES % replicas) for r in range(replicas)]
    if len({*shares}) > 1:
        share, options = max(shares), {**options, "shares": tuple(shares)}
    guard = options.pop("guard", None)
    made = plan_of(graph, schedule, stages, share, replicas=replicas, **options)
    plan = committing(made, ways)
    return plan if guard is None or plan.agreement.guard is None else plan.changed(guard=guard)


def task_of(choice: Choice, begin: Begin, *, folder: Path, every: int = 0) -> Task:
    """Return what ranks do from a step on; a checkpoint is written after `every` steps."""
    graph = choice.captured.graph
    windows = windows_of(graph, choice.plan, range(begin.step, choice.job.num_steps), [])
    return Task(
        choice.captured,
        stages_of(choice.plan, graph),
        choice.job,
        windows,
        policy=SavePolicy(folder / "checkpoints", every),
        resume=begin.checkpoint,
    )


def keyed_task(choice: Choice, begin: Begin, *, folder: Path, every: int = 0) -> Task:
    """Return what ranks do of steps of several shapes."""
    keep, steps = Keep(), choice.job.num_steps
    terms = TaskTerms(folder, steps, CheckpointInterval(every), keep, 1, None, False)
    return replace(made_task(terms, choice, begin), memory_window=None)  # threads have one profiler


@dataclass
class Told:
    """What an elastic run told."""

    steps: list[StepResult] = field(default_factory=list[StepResult])
    events: list[RunEvent] = field(default_factory=list[RunEvent])
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    ended: Mapping[int, Ended] = field(default_factory=dict[int, Ended])


Kill = Callable[[int, RunMember], contextlib.AbstractContextManager[None]]


def run(  # noqa: PLR0913 - what a run is made of
    ways: PlanBasis,
    plans: dict[int, Plan],
    first: int,
    folder: Path,
    killed: Kill | None = None,
    *,
    every: int = 0,
    joins: Callable[[Start, list[Mapping[int, Where]]], None] | None = None,
    by_ranks: bool = False,
    token: bytes = b"token",
    members: tuple[int, ...] = (),
    keyed: Mapping[int, Choice] = {},
) -> Told:
    """Run `first` ranks, by `plans` of so many ranks; return what happened.

    every:  steps after which a checkpoint is written.
    joins:  is called in a thread of its own when the run begins.
    by_ranks:  whether the batch follows the ranks.
    members:   by rank of the first plan; empty: as they are numbered.
    keyed:     the plans of all shapes, where steps have several.
    """
    told, task = Told(), partial(keyed_task if keyed else task_of, folder=folder, every=every)
    folder.mkdir(exist_ok=True)
    job = ways.ways[0].job
    about = ways, task, plans, Begin(), job.num_steps, folder
    own = ElasticRun(*about, by_ranks=by_ranks, keyed=keyed)

    def pilot() -> RunPilot:
        made = RunPilot(own)
        made.happened = told.events.append
        return made

    cursors = own.cursors_from((), 0, plans[first])
    view = View(1, 0, text_of(plans[first]), members or tuple(range(first)), cursors=cursors)
    found: list[Mapping[int, Where]] = []

    def meet(where: Mapping[int, Where]) -> Mapping[int, Where]:
        found.append(where)
        return where

    start = Start(view, token, pilot, meet=meet, generations=ThreadGenerations())
    threads = [threading.Thread(target=joins, args=(start, found))] if joins else []
    for thread in threads:
        thread.start()
    told.ended = run_threads(start, told.steps.append, killed=killed)
    for thread in threads:
        thread.join()
    newest = checkpoint.latest(folder / "checkpoints")
    if newest is not None:
        told.weights = dict(checkpoint.load(newest).tensors)
    return told


class Doom(threading.local):
    """When the member of this thread dies: before a call of a step, or never.

    together:  is called before it does: others die at the same moment.
    points:    how many things that others notice it still does while a generation follows another;
               None: it does not die there.
    """

    at: tuple[int, int] | None = None
    points: int | None = None
    is_between: bool = False
    together: Callable[[], object] = staticmethod(lambda: None)
    waits: Callable[[int], None] = staticmethod(lambda step: None)
    ran: Callable[[int], None] = staticmethod(lambda calls: None)


_doom = Doom()


def doomed(who: int, step: int, call: int) -> Kill:
    """Kill member `who` before call number `call` of its step `step`."""
    return doomed_all({who: (step, call)})


def doomed_all(when: Mapping[int, tuple[int, int]], *, at_once: bool = False) -> Kill:
    """Kill members before a call of a step: (step, call), by member; or none before all may die.

    at_once:  nobody may have to wait, before its own end, for one that stands at its.
    """
    barrier = threading.Barrier(len(when), timeout=300.0)

    @contextlib.contextmanager
    def killed(number: int, member: RunMember) -> Iterator[None]:
        _doom.at, _doom.points = when.get(number), None
        _doom.together = barrier.wait if at_once else lambda: None
        yield

    return killed


def doomed_between(first: tuple[int, int, int], who: int, points: int) -> Kill:
    """Kill a member before a call: (who, step, call); and `who` after so many points of re-forming.

    A point is whatever others may notice of a member: that it says something, comes to a meeting,
    sends or receives.
    """

    @contextlib.contextmanager
    def killed(number: int, member: RunMember) -> Iterator[None]:
        _doom.at = first[1:] if number == first[0] else None
        _doom.points, _doom.is_between = points if number == who else None, False
        yield

    return killed


def counting(noted: Callable[[int, int], None]) -> Kill:
    """Kill nobody; note how many calls each member makes in its steps."""

    @contextlib.contextmanager
    def killed(number: int, member: RunMember) -> Iterator[None]:
        _doom.at, _doom.points = None, None
        _doom.ran = lambda calls: noted(number, calls)
        yield

    return killed


def _is_asked(member: RunMember) -> bool:
    return bool(member.mesh.asks)


def patient(step: int, until: Callable[[RunMember], bool] = _is_asked) -> Kill:
    """Let members wait before a step until that is so: as a rule, somebody asks to join."""

    @contextlib.contextmanager
    def killed(number: int, member: RunMember) -> Iterator[None]:
        def waits(now: int) -> None:
            if now == step:
                assert member.mesh.wait(lambda: until(member), 300.0)

        _doom.at, _doom.waits = None, waits
        yield

    return killed


def mortal(patched: pytest.MonkeyPatch) -> None:
    """Let members that are doomed die."""

    def run(rank: Rank, calls: Sequence[Bound], first_step: int) -> list[float]:
        rank.progress.first_step = first_step
        for carried in rank.carried.values():
            carried.begin(rank._first_number(first_step))
        marks = [time.perf_counter()]
        rank.progress.last_update_s = marks[0]
        _doom.waits(first_step)
        _doom.ran(len(calls))
        for number, bound in enumerate(calls):
            if _doom.at is not None and _doom.at <= (first_step, number):
                _doom.together()
                raise Killed
            bound.call()
            marks.append(time.perf_counter())
        return marks

    patched.setattr(Rank, "run", run)
    _make_points(patched)


def _make_points(patched: pytest.MonkeyPatch) -> None:
    """Let members that are doomed die between two generations."""

    def passes(call: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*given: Any, **named: Any) -> Any:
            if _doom.points is not None and _doom.is_between:
                if _doom.points == 0:
                    _doom.points = None
                    raise Killed
                _doom.points -= 1
            return call(*given, **named)

        return passing

    def agreed(member: RunMember, view: View) -> View:
        _doom.is_between = True
        return agree(member, view)

    def counts(member: RunMember, told: words.Told, rank: Rank) -> None:
        _doom.is_between = False
        count(member, told, rank)

    agree, count = RunMember._agreed, RunMember.counts
    patched.setattr(RunMember, "_agreed", agreed)
    patched.setattr(RunMember, "counts", counts)
    for name in ("tell", "wait", "put", "give_up"):
        patched.setattr(Mesh, name, passes(getattr(Mesh, name)))
    for name in ("bind_send", "bind_receive", "bind_memory", "all_reduce", "all_gather"):
        patched.setattr(ThreadTransport, name, passes(getattr(ThreadTransport, name)))
    for name in ("reduce_scatter", "all_gather_bytes", "barrier"):
        patched.setattr(ThreadTransport, name, passes(getattr(ThreadTransport, name)))
    patched.setattr(moving, "receiver", _passing_pieces(moving.receiver, passes))
    patched.setattr(moving, "sender", _passing_pieces(moving.sender, passes))


def _passing_pieces(bind: Callable[..., Any], passes: Callable[..., Any]) -> Callable[..., Any]:
    """Return `bind`, whose calls pass a point behind each piece."""

    def bound(*about: Any) -> Any:
        call = bind(*about)

        def pieces(tensors: Any) -> Iterator[None]:
            for _ in call(tensors):
                passes(lambda: None)()
                yield

        return pieces

    return bound
