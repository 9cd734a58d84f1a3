"""Beside: plans and their peers by turns in the same processes, over free links and slow lines.

    python -m bench.beside FOLDER      what torchrun starts for each rank: the plans of FOLDER

AdamW, one micro-batch a rank and step.  Models: the GPT of bench/models.py; the same with a
vocabulary of 16,384, which is one huge embedding and one huge head; the same with four experts in
place of each two-layer network, mixed by a gate; the same with one micro-batch of eight samples a
step, of which each rank takes its part.  Ours is a plan; a peer is fsdp2 (fully_shard of
each block and of the whole, freed after forward), fsdp2_keep (kept for the backward) or ddp
(DistributedDataParallel).  All train the same samples and have to come to the same weights.
Free: all ranks on this host, where ours goes through shared memory.  Else the ranks are in two
places (bench/network.py) with a real line between them, over which all use gloo.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bench.line import at_both_ends
from bench.models import GPT, Block, Pieces, Size, loss, micro_batches
from bench.network import line
from penstock import _compat
from penstock.choose.prepare import joined_step
from penstock.cluster import Cluster, Host, Link
from penstock.graph.trace import Capture, build_model, capture
from penstock.heap import keep_freed_memory
from penstock.job import Job
from penstock.listener import SILENT
from penstock.plan import Plan
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.of_plan import lower
from penstock.profile import Profile
from penstock.runtime.launch import join_torchrun, torchrun_store
from penstock.runtime.rank import Rank
from penstock.simulate.of_program import simulate
from penstock.state.tensor_parts import whole
from penstock.timeline import peak_bytes, step_s
from penstock.transport import Transport

RANKS = (2, 4)
RATES = (float("inf"), 150e6, 20e6)  # bytes/s; the first is free
DELAY_S = 0.0005
STEPS, EXPERTS = 3, 4
SLOW = 100e6  # bytes/s, below which one step of each side is enough
CLOSE = 2e-3  # what weights may differ by: sums are rounded in another order
PEERS = ("fsdp2", "fsdp2_keep", "ddp")
MODELS = ("gpt", "embedding", "experts")
ONE_BATCH = "one batch"


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


class Experts(nn.Module):
    """A two-layer network in four copies, whose outputs a gate mixes for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(EXPERTS))

    def forward(self, x_BTD: Tensor) -> Tensor:
        shares_BTE = self.gate(x_BTD).softmax(-1)
        pairs = zip(self.up, self.down, strict=True)
        made = [down(F.gelu(up(x_BTD))) for up, down in pairs]
        return sum(
            (
                share[..., None] * one
                for share, one in zip(shares_BTE.unbind(-1), made, strict=True)
            ),
            torch.zeros_like(x_BTD),
        )


def model_of(name: str) -> tuple[Size, Callable[[], nn.Module]]:
    size = replace(GPT, vocabulary=16_384) if name == "embedding" else GPT
    size = replace(GPT, micro_batch=8) if name == ONE_BATCH else size

    def make() -> nn.Module:
        model = Pieces(size, range(size.blocks + 2))
        for block in model.modules():
            if name == "experts" and isinstance(block, Block):
                block.up, block.down = Experts(size.width), nn.Identity()
        return model

    return size, make


def job_of(name: str) -> Job:
    size, make = model_of(name)
    return Job(model=make, loss=loss, data=size.data, optimizer=adamw)


class Side(NamedTuple):
    """One of those that take turns: a step, what it holds before one, and its weights."""

    step: Callable[[], object]
    held_bytes: Callable[[], int]
    weights: Callable[[], dict[str, Tensor]]


def ours(job: Job, captured: Capture, plan: Plan, end: Transport) -> Side:
    job, captured = joined_step(job, captured, plan.terms.joined, plan.terms.split, SILENT)
    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    rank, steps = Rank(captured, stages, job, end), itertools.count()
    calls = rank.bind(program)

    def step() -> None:
        with torch.no_grad():
            rank.run(calls, next(steps))

    def weights() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for held in rank.weights.values():
            if held.shard is None:
                found |= {held.names[node]: v.clone() for node, v in held.kept().items()}
                continue
            held.shard.make_room()
            held.shard.gather()
            found |= {held.names[node]: v.clone() for node, v in held.shard.reads.items()}
            held.shard.drop()
        return whole(found)

    return Side(step, rank.held_bytes, weights)


def peer(name: str, kind: str, end: Transport) -> Side:
    model, size = build_model(job_of(name)), model_of(name)[0]
    wrapped: Any = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        frees = kind == "fsdp2"
        mesh = dist.device_mesh.init_device_mesh("cpu", (end.num_ranks,))
        for block in model.pieces.values():  # pyright: ignore
            fully_shard(block, mesh=mesh, reshard_after_forward=frees)
        fully_shard(model, mesh=mesh, reshard_after_forward=frees)
    batches, numbers = micro_batches(size), itertools.count(end.rank, end.num_ranks)
    if name == ONE_BATCH:
        mine = ((each.chunk(end.num_ranks)[end.rank] for each in batch) for batch in batches)
        batches, numbers = [(x, y) for x, y in mine], itertools.count()
    optimizer = adamw(wrapped.parameters())

    def step() -> None:
        loss(wrapped, batches[next(numbers) % len(batches)]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def held_bytes() -> int:
        local = [_local(p) for p in model.parameters()]
        rows = (value for state in optimizer.state.values() for value in state.values())
        local += [_local(value) for value in rows if isinstance(value, Tensor)]
        stores = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in local}
        return sum(store.nbytes() for store in stores.values())

    def weights() -> dict[str, Tensor]:
        named = wrapped.module if kind == "ddp" else wrapped
        return {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in named.named_parameters()}

    return Side(step, held_bytes, weights)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def peak_of(side: Side) -> int:
    """Return the most bytes held in a step.

    What gloo's own threads free is not seen: late in its backward a peer seems to hold more than it
    does.  Most is held early in it.
    """
    now = peak = side.held_bytes()
    with _compat.memory_profile() as events:
        side.step()
    for event in events():
        now += event.size_bytes
        peak = max(peak, now)
    return peak


def _sent_bytes() -> int:
    """Return the bytes that have left this place over lines so far."""
    rows = (row.split() for row in Path("/proc/net/dev").read_text().splitlines()[2:])
    return sum(int(row[9]) for row in rows if row[0] != "lo:")


class Told(NamedTuple):
    """What one side showed: of a step by round seconds on the slowest rank and processor seconds,
    over all its threads, on the busiest; and bytes.
    """

    times_s: list[float]
    peak: int
    sent: float
    cpu_s: list[float]


def by_turns(
    end: Transport,
    name: str,
    plans: Mapping[str, Plan],
    turns: tuple[int, int],
    peers: Sequence[str] = PEERS,
) -> dict[str, Told]:
    """Return the rows of plans and peers; one peer is DDP, with which all are compared.

    turns:    how many rounds, and steps in each.
    """
    rounds, steps = turns
    keep_freed_memory()
    torch.set_num_threads(1)
    job, captured = job_of(name), capture(job_of(name))
    sides = {way: ours(job, captured, plan, end) for way, plan in plans.items()}
    sides |= {kind: peer(name, kind, end) for kind in peers}
    times, busy = ({side: list[float]() for side in sides} for _ in range(2))
    sent = dict.fromkeys(sides, 0.0)
    end.barrier()
    everyone = tuple(range(end.num_ranks))
    for number in range(-1, rounds):  # the first one is not counted
        order = sorted(sides)
        random.Random(number).shuffle(order)
        for side in order:
            end.barrier()
            began, busy_s, before = time.perf_counter(), time.process_time(), _sent_bytes()
            for _ in range(steps):
                sides[side].step()
            both = time.perf_counter() - began, time.process_time() - busy_s
            told = end.all_gather_bytes(json.dumps(both).encode(), everyone)
            taken = [max(each) / steps for each in zip(*map(json.loads, told), strict=True)]
            if number >= 0:
                times[side].append(taken[0])
                busy[side].append(taken[1])
            sent[side] = (_sent_bytes() - before) / steps
    held = {side: sides[side].weights() for side in sides}
    with torch.no_grad():
        for side, theirs in held.items():
            apart = max(float((theirs[n] - held["ddp"][n]).abs().max()) for n in theirs)
            if apart > CLOSE:
                raise ValueError(f"weights of {side} differ by {apart} after the same steps")
    peaks: dict[str, int] = {}
    for side in sides:
        end.barrier()
        told = end.all_gather_bytes(json.dumps(peak_of(sides[side])).encode(), everyone)
        peaks[side] = max(map(json.loads, told))
    return {side: Told(times[side], peaks[side], sent[side], busy[side]) for side in sides}


def hold(folder: Path) -> None:
    """Be one rank that torchrun has started."""
    name, turns, peers = json.loads((folder / "what.json").read_text())
    plans = {path.stem: Plan.load(path) for path in sorted((folder / "plans").iterdir())}
    ranks = int(os.environ["WORLD_SIZE"])
    captured = capture(job_of(name))
    each = (
        joined_step(job_of(name), captured, p.terms.joined, p.terms.split, SILENT)[1]
        for p in plans.values()
    )
    programs = (lower_plan(p, own.graph) for p, own in zip(plans.values(), each, strict=True))
    groups = {one.ranks for program in programs for one in program.code.reductions}

    def work(end: Transport) -> dict[str, Told]:
        if not dist.is_initialized():  # ours goes through shared memory, peers need gloo
            store = dist.FileStore(str(folder / "gloo"), ranks)
            dist.init_process_group("gloo", store=store, rank=end.rank, world_size=ranks)
        return by_turns(end, name, plans, turns, peers)

    found = join_torchrun(work, torchrun_store(), groups=sorted({tuple(range(ranks)), *groups}))
    if os.environ["RANK"] == "0":
        (folder / "told.json").write_text(json.dumps(found))


def played(
    name: str,
    plans: Mapping[str, Plan],
    where: tuple[int, float],
    rounds: int,
    peers: Sequence[str] = PEERS,
) -> dict[str, Told]:
    """Start the ranks, and return what `by_turns` gave."""
    ranks, rate = where
    turns = rounds, 1 if rate < SLOW else STEPS
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        (folder / "plans").mkdir()
        for way, plan in plans.items():
            plan.save(folder / "plans" / f"{way}.json")
        (folder / "what.json").write_text(json.dumps([name, turns, peers]))
        own = ["bench.beside", given]
        if rate == float("inf"):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={ranks}", "-m", *own]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        else:
            with line(rate, DELAY_S) as places:
                at_both_ends(places, own, ranks=ranks // 2)
        told = json.loads((folder / "told.json").read_text())
        return {side: Told(*row) for side, row in told.items()}


def cluster_of(ranks: int, rate: float) -> Cluster:
    """Return the machines that the ranks seem to have; of two places each has half of the cores."""
    here = Cluster.here(ranks)
    if rate == float("inf"):
        return here
    cores = max(1, (os.cpu_count() or 1) // 2)
    hosts = tuple(Host(name, here.hosts[0].device, ranks // 2, cores=cores) for name in "ab")
    return replace(here, hosts=hosts, between=Link(DELAY_S, rate))


def predicted(
    plan: Plan, captured: Capture, profile: Profile, where: tuple[int, float]
) -> dict[str, float]:
    program = lower(plan, captured.graph)
    timeline = simulate(program, profile, cluster_of(*where), spans=False)
    return {"predicted_s": step_s(timeline), "predicted_bytes": max(peak_bytes(timeline))}


def link_of(rate: float) -> str:
    """Return a line's rate in words."""
    return "free" if rate == float("inf") else f"{rate / 1e6:g} MB/s"


def ratio_of(own: Told, other: Told) -> float:
    """Return the median of the rounds' ratios of seconds."""
    return statistics.median(a / b for a, b in zip(own.times_s, other.times_s, strict=True))


if __name__ == "__main__":
    hold(Path(sys.argv[1]))
