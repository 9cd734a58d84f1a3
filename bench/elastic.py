"""Elastic: ranks of a run are killed at random moments; what that costs, beside torchrun's restart.

    python -m bench.elastic [--json] [--kills N] [--rounds N] [--no-peer]
                            [--only data|grid|pipeline|sharded|reroute] [--healthy]

A chain of 16 layers of 256 (1 million parameters, AdamW), 4 ranks as processes of this host, 8
micro-batches a step.  One of the ranks is killed by SIGKILL, 20 times at random; the others go on.

what          "kill": from the kill to the end of the next step, median and worst; "overhead": a
              step of an undisturbed elastic run, the peer the same plan run as usual, after the
              first 20; "overhead, 8 times": so much larger micro-batches; "reroute":
              a step of two replicas of stages without one rank, the peer without its replica,
              whole_s with all ranks; computes sleep for 25 times what they take here, as they would
              on machines of their own
ours_s, worst_s, peer_s   seconds; ratio is ours / peer
more_s        seconds that a healthy step takes more, by turns, median and worst of the rounds
ours_cpu_s, peer_cpu_s, more_cpu_s   of a healthy step, the processor's seconds of a rank; medians
more_cpu_worst_s   of the rounds; ours_switches, peer_switches: how often a rank gave the
              processor away, or lost it, in a step
--healthy     nobody is killed: healthy steps alone, by turns
peer          torchrun: --max-restarts with a checkpoint after every step and
              TORCH_DISABLE_SHARE_RDZV_TCP_STORE set (without, it never recovers in torch 2.13);
              DistributedDataParallel over gloo.  torchft 0.2.0: as it comes, and with its
              --join_timeout_ms at 1000; four replicas, the data topology alone.  It is looked for
              in build/torchft, and left out where it is not there:
                  pip install --no-deps --target build/torchft torchft==0.2.0
                  pip install --target build/torchft opentelemetry-sdk \
                      opentelemetry-exporter-otlp-proto-http
steps_lost    steps that were done again; samples_wrong: micro-batches lost or repeated
equal         whether weights are to the bit those of runs of the same ranks that left in peace
predicted_s   by the simulator
"""

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.machine import machine
from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.choose.choose import Choice, Joining
from penstock.choose.run_windows import windows_of
from penstock.cluster import Cluster
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.members.launch_members import Scribe, Start, run_members
from penstock.members.words import View
from penstock.pilot.losses import PlanBasis, committing, rerouted
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.runtime.calls import StepResult
from penstock.runtime.emulate import sleeping
from penstock.runtime.launch import run_processes
from penstock.runtime.worker import Task, work
from penstock.search import Fixed
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun, RunPilot, text_of
from penstock.training.events import EVENTS

WIDTH, LAYERS, SAMPLES, MICRO_BATCHES, RANKS = 256, 16, 16, 8, 4
STEPS = 30
LARGER = 8  # times the samples of a micro-batch, in further rows of healthy steps
SETTLED, HEALTHY_STEPS = 20, 80  # a log of up to 16 steps takes new memory in the first ones
SLOWER = 25.0  # times what an op takes here, where it is slept: messages are nothing beside it
TOPOLOGIES = {  # stages, replicas, whether they are divided; stages and replicas of three ranks
    "data": (1, 4, False, (1, 3)),
    "grid": (2, 2, False, (3, 1)),
    "pipeline": (4, 1, False, (3, 1)),
    "sharded": (1, 4, True, (1, 3)),
}
_MASTER = "127.0.0.1:29517"
Row = dict[str, float | int | str | bool]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = ((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*itertools.chain(*layers))


def batches(start: int, samples: int = SAMPLES) -> Iterator[Tensor]:
    for index in itertools.count(start):
        yield torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(index))


def loss(net: nn.Module, batch: Tensor) -> Tensor:
    return (net(batch) - batch.roll(1, 1)).square().mean()


def job_of(num_steps: int, micro_batches: int = MICRO_BATCHES, samples: int = SAMPLES) -> Job:
    data = partial(batches, samples=samples)

    def optimizer(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, 1e-3)

    return Job(model, loss, data, optimizer, micro_batches=micro_batches, num_steps=num_steps)


def basis_of(captured: Capture, job: Job) -> PlanBasis:
    """Return the basis of plans: ops measured here."""
    profile = measure(captured, job)
    way = Joining(1, job, captured, (profile,))
    return PlanBasis((way,), Cluster.here(RANKS), Fixed())


def plan_of(basis: PlanBasis, stages: int, replicas: int, *, divided: bool = False) -> Plan:
    """Return 1F1B of evenly cut stages; divided, each in two units that all replicas share."""
    way = basis.ways[0]
    graph, total = way.captured.graph, way.job.micro_batches
    points = len(graph.cut_points)
    units = 2 if divided else 1
    count = stages * units
    cuts = [(points * k) // count for k in range(1, count)]
    shares = tuple(total // replicas + (r < total % replicas) for r in range(replicas))
    options: dict[str, Any] = {"shard": ("shard",) * count} if divided else {}
    made = plan_by_hand(
        graph,
        cuts,
        "one_f_one_b" if units == 1 else "breadth_first",
        num_micro_batches=max(shares),
        num_ranks=stages,
        replicas=replicas,
        shares=shares if len({*shares}) > 1 else (),
        **options,
    )
    return committing(made, basis)


def task_of(choice: Choice, begin: Begin, *, folder: Path) -> Task:
    """Return the task of ranks from a step on."""
    graph, steps = choice.captured.graph, range(begin.step, choice.job.num_steps)
    about = choice.captured, stages_of(choice.plan, graph), choice.job
    windows = windows_of(graph, choice.plan, steps, [])
    policy = SavePolicy(folder / "checkpoints")
    return Task(*about, windows, policy=policy, resume=begin.checkpoint)


# -- ours -----------------------------------------------------------------------------------------


class Killed:
    """One run, of which a rank is killed at a moment that nothing depends on."""

    def __init__(self, basis: PlanBasis, plans: dict[int, Plan], folder: Path, seed: int) -> None:
        self.basis, self.plans, self.folder = basis, plans, folder
        self.source = random.Random(seed)
        self.steps: list[StepResult] = []
        self.killed_at = 0.0
        self.step = self.source.randrange(4, STEPS - 10)
        self.who = self.source.randrange(max(plans))

    def report(self, step: StepResult) -> None:
        self.steps.append(step)
        if step.step == self.step and self.who >= 0:
            delay_s, who, self.who = self.source.random() * step.seconds, self.who, -1
            threading.Timer(delay_s, partial(self._kill, who)).start()

    def _kill(self, who: int) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        self.killed_at = time.time()
        os.kill(int(children[who]), signal.SIGKILL)

    def run(self) -> Row:
        """Return seconds to the end of the next step, and what went wrong."""
        job, first = self.basis.ways[0].job, max(self.plans)
        run = ElasticRun(
            self.basis,
            partial(task_of, folder=self.folder),
            self.plans,
            Begin(),
            job.num_steps,
            self.folder,
        )
        pilot = RunPilot(run)
        pilot.prepare()
        view = View(1, 0, text_of(self.plans[first]), tuple(range(first)))
        start = Start(view, b"bench", lambda: pilot)
        scribe = Scribe(lambda step: None, lambda results: None)
        run_members(start, self.report, scribe)
        events = [json.loads(line) for line in (self.folder / EVENTS).read_text().splitlines()]
        lost = next(event for event in events if event["what"] == "lost")
        steps = [step.step for step in self.steps]
        return {
            "seconds": lost["time"] - self.killed_at,
            "step": lost["step"],
            "steps_lost": sum(event["back_to"] not in ("", "start") for event in events[1:]),
            "samples_wrong": len(set(range(STEPS)) ^ set(steps)) + len(steps) - len(set(steps)),
            "equal": self._is_equal(lost["step"], events),
        }

    def _is_equal(self, step: int, events: Sequence[Any]) -> bool:
        """Return whether ranks that leave in peace after `step` steps come to the same weights."""
        folder, own = self.folder / "peace", checkpoint.latest(self.folder / "checkpoints")
        assert own is not None, "a run ends with a checkpoint"
        way, ran = self.basis.ways[0], Plan.load(self.folder / "plan.json")
        middle: Path | None = None
        for plan, steps in ((self.plans[max(self.plans)], range(step)), (ran, range(step, STEPS))):
            windows = windows_of(way.captured.graph, plan, steps, [])
            about = way.captured, stages_of(plan, way.captured.graph), way.job, windows
            task = Task(*about, policy=SavePolicy(folder), resume=middle)
            count = plan.total_ranks
            run_processes(partial(work, task), count, lambda told: None, groups=task.groups)
            middle = checkpoint.latest(folder)
        assert middle is not None, "a run ends with a checkpoint"
        assert len(events) == 2, "one rank was lost, once"
        ours, theirs = checkpoint.load(own).tensors, checkpoint.load(middle).tensors
        return all(torch.equal(ours[key], value) for key, value in theirs.items())


def kills(name: str, basis: PlanBasis, count: int, told: Any) -> Row:
    """Return a row of a topology: `count` runs, each of which loses one rank."""
    stages, replicas, divided, after = TOPOLOGIES[name]
    plans = {
        RANKS: plan_of(basis, stages, replicas, divided=divided),
        RANKS - 1: plan_of(basis, *after, divided=divided),
    }
    found: list[Row] = []
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            found.append(Killed(basis, plans, Path(folder), number).run())
            told(f"{name} {number + 1}/{count}: {found[-1]['seconds']:.3f} s")
    seconds = [float(row["seconds"]) for row in found]
    return {
        "topology": name,
        "what": "kill",
        "ours_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "kills": count,
        "steps_lost": sum(int(row["steps_lost"]) for row in found),
        "samples_wrong": sum(int(row["samples_wrong"]) for row in found),
        "equal": all(bool(row["equal"]) for row in found),
    }


# -- a healthy step -------------------------------------------------------------------------------


def overhead(name: str, basis: PlanBasis, rounds: int, what: str = "overhead") -> Row:
    """Return a row: a step of an elastic run and of a usual one, by turns."""
    stages, replicas, divided, _ = TOPOLOGIES[name]
    plan = plan_of(basis, stages, replicas, divided=divided)
    pairs: list[tuple[Healthy, Healthy]] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="penstock-") as place:
            pairs.append((_elastic(plan, basis, Path(place)), _usual(plan, basis, Path(place))))
    more_s = [a.step_s - b.step_s for a, b in pairs]
    more_cpu_s = [a.cpu_s - b.cpu_s for a, b in pairs]
    return {
        "topology": name,
        "what": what,
        "rounds": rounds,
        "ours_s": statistics.median(a.step_s for a, _ in pairs),
        "peer": "the same plan, not elastic",
        "peer_s": statistics.median(b.step_s for _, b in pairs),
        "ratio": statistics.median(a.step_s / b.step_s for a, b in pairs),
        "ours_cpu_s": statistics.median(a.cpu_s for a, _ in pairs),
        "peer_cpu_s": statistics.median(b.cpu_s for _, b in pairs),
        "more_cpu_s": statistics.median(more_cpu_s),
        "more_cpu_worst_s": max(more_cpu_s),
        "more_s": statistics.median(more_s),
        "more_worst_s": max(more_s),
        "ours_switches": statistics.median(a.switches for a, _ in pairs),
        "peer_switches": statistics.median(b.switches for _, b in pairs),
    }


class Taken(NamedTuple):
    """What all ranks have had of the processor: seconds, and how often one gave it away."""

    cpu_s: float
    switches: int


class Healthy(NamedTuple):
    """A step: its median seconds, and the processor's seconds and switches of a rank."""

    step_s: float
    cpu_s: float
    switches: float


class _Clock:
    """Takes steps as they are told: when each was, and what ranks had taken of the processor."""

    def __init__(self, last: int) -> None:
        self.at_s: dict[int, float] = {}
        self.taken: dict[int, Taken] = {}
        self._looks = SETTLED, last - 2

    def __call__(self, step: StepResult) -> None:
        self.at_s.setdefault(step.step, time.perf_counter())
        if step.step in self._looks:
            self.taken[step.step] = _taken_by_ranks()

    def healthy(self) -> Healthy:
        """Return a step, without the first ones."""
        times = [self.at_s[step] for step in sorted(self.at_s)]
        step_s = statistics.median(b - a for a, b in itertools.pairwise(times[SETTLED:]))
        first, last = self._looks
        count = RANKS * (last - first)
        before, after = self.taken[first], self.taken[last]
        switches = (after.switches - before.switches) / count
        return Healthy(step_s, (after.cpu_s - before.cpu_s) / count, switches)


def _taken_by_ranks() -> Taken:
    """Return what all threads of this process's children have had of the processor."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    threads = [path for rank in children for path in Path(f"/proc/{rank}/task").glob("*")]
    cpu_ns = (int((path / "schedstat").read_text().split()[0]) for path in threads)
    lines = (line for path in threads for line in (path / "status").read_text().splitlines())
    switches = (int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return Taken(sum(cpu_ns) / 1e9, sum(switches))


def _elastic(plan: Plan, basis: PlanBasis, folder: Path) -> Healthy:
    job = basis.ways[0].job
    clock = _Clock(job.num_steps)
    task = partial(task_of, folder=folder)
    run = ElasticRun(basis, task, {RANKS: plan}, Begin(), job.num_steps, folder)
    view = View(1, 0, text_of(plan), tuple(range(RANKS)))
    scribe = Scribe(lambda step: None, lambda results: None)
    run_members(Start(view, b"bench", lambda: RunPilot(run)), clock, scribe)
    return clock.healthy()


def _usual(plan: Plan, basis: PlanBasis, folder: Path) -> Healthy:
    way = basis.ways[0]
    clock = _Clock(way.job.num_steps)
    graph, own = way.captured.graph, plan.changed(commits=False, guard=None)
    windows = windows_of(graph, own, range(way.job.num_steps), [])
    about = way.captured, stages_of(own, graph), way.job, windows
    usual = Task(*about, policy=SavePolicy(folder / "usual"))
    run_processes(partial(work, usual), RANKS, clock, groups=usual.groups)
    return clock.healthy()


def reroute(stages: int, micro_batches: int, rounds: int) -> Row:
    """Return a row: two replicas of some stages without a rank, rerouted or without its replica.

    Computes sleep for what they take here, times SLOWER: four ranks do not share two cores so.
    """
    job = job_of(STEPS, micro_batches)
    captured = capture(job)
    plain = measure(captured, job)
    op_s = tuple(SLOWER * seconds for seconds in plain.op_s)
    profile = replace(
        plain,
        op_s=op_s,
        update=replace(plain.update, update_s=SLOWER * plain.update.update_s),
    )
    here, count = Cluster.here(2 * stages), 2 * stages
    cluster = replace(here, hosts=tuple(replace(host, cores=count) for host in here.hosts))
    basis = PlanBasis((Joining(1, job, captured, (profile,)),), cluster, Fixed())
    grid = plan_of(basis, stages, 2)
    program = lower_plan(grid, captured.graph)
    made, _ = rerouted(grid, captured.graph, program, list(range(count - 1)))
    plans = [committing(made, basis), plan_of(basis, stages, 1), grid]
    found: list[list[float]] = []
    for _ in range(rounds):
        found.append([_asleep_s(plan, captured, job, profile) for plan in plans])
    ours, peer, whole = (statistics.median(row) for row in zip(*found, strict=True))
    expected = [plan.predicted.step_s if plan.predicted else 0.0 for plan in plans]
    return {
        "topology": f"{stages} stages, 2 replicas",
        "what": f"reroute, {micro_batches} micro-batches",
        "ours_s": ours,
        "peer": "without the replica",
        "peer_s": peer,
        "ratio": statistics.median(row[0] / row[1] for row in found),
        "predicted_s": expected[0],
        "predicted_peer_s": expected[1],
        "whole_s": whole,
        "slowdown": statistics.median(row[0] / row[2] for row in found),
        "predicted_slowdown": expected[0] / expected[2],
        "schedule": str(plans[0].schedule),
    }


def _asleep_s(plan: Plan, captured: Capture, job: Job, profile: Profile) -> float:
    """Return the seconds of a step of ranks that sleep in place of computing."""
    windows = windows_of(captured.graph, plan, range(9), [])
    slow, make = sleeping(job, profile)
    task = Task(captured, stages_of(plan, captured.graph), slow, windows, function_of=make)
    count = plan.total_ranks
    results = run_processes(partial(work, task), count, lambda told: None, groups=task.groups)
    slowest = [max(row) for row in zip(*(r.window_s for r in results), strict=True)]
    return statistics.median(slowest[3:])


# -- torchrun -------------------------------------------------------------------------------------


def peer_rank(folder: Path) -> None:
    """Train by DistributedDataParallel, as a rank that torchrun starts and starts again."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    saved, first = folder / "peer.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        net.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    for step in range(first, STEPS):
        optimizer.zero_grad()
        data = batches(step * MICRO_BATCHES + rank * MICRO_BATCHES // count)
        for _ in range(MICRO_BATCHES // count):
            loss(net, next(data)).backward()
        optimizer.step()
        if rank == 0:
            content = {
                "model": net.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(content, folder / "new.pt")
            os.replace(folder / "new.pt", saved)
            with (folder / "steps").open("a") as file:
                file.write(f"{step} {time.time()}\n")
        time.sleep(0.05)  # the kill comes between two steps


def peer(count: int, told: Any) -> list[float]:
    """Return the seconds from a kill to the end of the next new step, of `count` runs."""
    found: list[float] = []
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            found.append(_peer_once(Path(folder), number))
            told(f"torchrun {number + 1}/{count}: {found[-1]:.2f} s")
    return found


def _peer_once(folder: Path, number: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", _MASTER]
    command += ["-m", "bench.elastic", "--peer-rank", str(folder)]
    kept = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=kept, stderr=subprocess.DEVNULL)
    try:
        steps = folder / "steps"
        while not steps.exists() or len(steps.read_text().splitlines()) < 8:
            time.sleep(0.02)
        victim = int((folder / f"pid-{number % RANKS}").read_text())
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        last = len(steps.read_text().splitlines())
        while process.poll() is None:
            rows = [row.split() for row in steps.read_text().splitlines()[last:]]
            new = [float(at) for _, at in rows if float(at) > killed + 0.5]
            if new:
                return new[0] - killed
            time.sleep(0.02)
        raise RuntimeError("torchrun ended without another step")
    finally:
        process.terminate()
        process.wait()


# -- torchft ---------------------------------------------------------------------------------------

TORCHFT = Path("build/torchft")
_TORCHFT_STEPS = 10**6  # until somebody ends them
_TORCHFT_LIMIT_S = 90.0
_TOGETHER = 12  # steps that all do before one is killed


def torchft_rank(folder: Path, number: int, lighthouse: str) -> None:
    """Train as one replica of torchft's, and write down each step that all agree on.

    All gradients go in one message.  Its DistributedDataParallel ends the replicas that are left,
    in some kills, with an AssertionError of its hook.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    sys.path.append(str(TORCHFT))
    from torchft import Manager, Optimizer, ProcessGroupGloo  # pyright: ignore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = model()
    inner = torch.optim.AdamW(net.parameters(), 1e-3)

    def load(state: Any) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),  # as in its own example
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{number}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    optimizer, weights = Optimizer(manager, inner), [*net.parameters()]
    with (folder / f"steps-{number}").open("a", buffering=1) as file:
        for step in range(_TORCHFT_STEPS):
            optimizer.zero_grad()
            data = batches(step * MICRO_BATCHES + number * MICRO_BATCHES // RANKS)
            for _ in range(MICRO_BATCHES // RANKS):
                loss(net, next(data)).backward()
            flat = torch.cat(
                [weight.grad.view(-1) for weight in weights if weight.grad is not None]
            )
            manager.allreduce(flat).wait()
            for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
                weight.grad = part.view_as(weight)
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                file.write(f"{manager.num_participants()} {time.time()}\n")


def torchft(count: int, told: Any) -> dict[str, list[float]]:
    """Return the seconds from a kill to the end of the next step, as it comes and tuned.

    Nothing where it is not installed, which is said.
    """
    if not (TORCHFT / "torchft").is_dir():
        told(f"torchft is not in {TORCHFT}: see python -m bench.elastic --help")
        return {}
    ways = {"torchft": (), "torchft, join_timeout_ms 1000": ("--join_timeout_ms", "1000")}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(count):
        for name, options in ways.items():
            with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
                found[name].append(_torchft_once(Path(folder), number, options))
            told(f"{name} {number + 1}/{count}: {found[name][-1]:.2f} s")
    return found


def _torchft_once(folder: Path, number: int, options: Sequence[str]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((".", str(TORCHFT))),
        "OMP_NUM_THREADS": "1",
    }
    own = [sys.executable, str(TORCHFT / "bin" / "torchft_lighthouse"), "--min_replicas", "1"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        served = [*own, "--bind", f"[::]:{port}", *options]
        processes.append(_popen(served, kept))
        for rank in range(RANKS):
            command = [sys.executable, "-m", "bench.elastic", "--torchft-rank", str(rank)]
            command += ["--lighthouse", f"http://127.0.0.1:{port}", "--folder", str(folder)]
            processes.append(_popen(command, kept))
        return _next_step_s(folder, processes[1:], number % RANKS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _popen(command: Sequence[str], env: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _next_step_s(folder: Path, ranks: Sequence["subprocess.Popen[bytes]"], who: int) -> float:
    """Kill a replica once all work together; return the seconds until any of the others do a step.

    Not always all of the others: who did not notice joins them later.
    """

    def steps(rank: int) -> list[tuple[int, float]]:
        path = folder / f"steps-{rank}"
        rows = [row.split() for row in path.read_text().splitlines()] if path.exists() else []
        return [(int(row[0]), float(row[1])) for row in rows if len(row) == 2]

    def together(rank: int) -> int:
        return sum(count == RANKS for count, _ in steps(rank))

    others = [rank for rank in range(RANKS) if rank != who]
    until = time.monotonic() + _TORCHFT_LIMIT_S
    while min(map(together, range(RANKS))) < _TOGETHER:
        _check_ft(ranks, until)
    killed = time.time()
    ranks[who].kill()
    while True:
        rows = (row for rank in others for row in steps(rank))
        if new := [at for count, at in rows if at > killed and count < RANKS]:
            return min(new) - killed
        _check_ft([ranks[rank] for rank in others], until)


def _check_ft(ranks: Sequence["subprocess.Popen[bytes]"], until_s: float) -> None:
    ended = [process.returncode for process in ranks if process.poll() is not None]
    if ended or time.monotonic() > until_s:
        raise RuntimeError(f"torchft does not go on: ended with {ended}")
    time.sleep(0.02)


# -- the command ----------------------------------------------------------------------------------


def rows_of(asked: argparse.Namespace, told: Any) -> Iterator[Row]:
    basis, *healthy = (
        basis_of(capture(job), job)
        for job in (
            job_of(STEPS),
            job_of(HEALTHY_STEPS),
            job_of(HEALTHY_STEPS, samples=LARGER * SAMPLES),
        )
    )
    theirs = {} if asked.no_peer or asked.healthy else peers(asked, told)
    for name in [each for each in TOPOLOGIES if asked.only in (None, each)]:
        if not asked.healthy:
            row = kills(name, basis, asked.kills, told)
            yield row
            for peer_name, seconds in theirs.items():
                if name == "data" or not peer_name.startswith("torchft"):
                    yield _beside(row, peer_name, seconds)
        for each, what in zip(healthy, ("overhead", f"overhead, {LARGER} times"), strict=True):
            yield overhead(name, each, asked.rounds, what)
    for stages, count in itertools.product((2, 4), (8, 16, 32)):
        if asked.only in (None, "reroute") and not asked.healthy:
            yield reroute(stages, count, min(asked.rounds, 3))


def peers(asked: argparse.Namespace, told: Any) -> dict[str, list[float]]:
    """Return by name of each peer the seconds of kills that the topologies asked for need."""
    if asked.only == "reroute":
        return {}
    count = min(asked.kills, 3)
    found = {"torchrun": peer(count, told)}
    return found | torchft(count, told) if asked.only in (None, "data") else found


def _beside(row: Row, name: str, seconds: Sequence[float]) -> Row:
    """Return a row of ours beside a peer."""
    own, theirs = float(row["ours_s"]), statistics.median(seconds)
    about = {"peer": name, "peer_s": theirs, "peer_worst_s": max(seconds), "ratio": own / theirs}
    return {"topology": row["topology"], "what": "kill", "ours_s": own, **about}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.elastic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print a row as JSON in each line")
    parser.add_argument("--kills", type=int, default=20, help="of each topology")
    parser.add_argument("--rounds", type=int, default=5, help="of each healthy step")
    names = [*TOPOLOGIES, "reroute"]
    parser.add_argument("--only", choices=names, help="of the topologies, or what is rerouted")
    parser.add_argument("--no-peer", action="store_true", help="without torchrun and torchft")
    parser.add_argument("--healthy", action="store_true", help="healthy steps alone")
    parser.add_argument("--torchft-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peer-rank", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.peer_rank:
        peer_rank(asked.peer_rank)
        return 0
    if asked.torchft_rank is not None:
        torchft_rank(asked.folder, asked.torchft_rank, asked.lighthouse)
        return 0
    torch.set_num_threads(1)
    print(machine(), file=sys.stderr)

    def told(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for row in rows_of(asked, told):
        print(json.dumps(row) if asked.json else row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
