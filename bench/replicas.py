"""Replicas beside torch's DistributedDataParallel: one micro-batch each, sums beside the backward.

    python -m bench.replicas [--json] [--quick] [--rounds N]

The GPT of bench/models.py, AdamW; two and four ranks that torchrun starts.  Ours is one stage in
units, a block each, whose gradients are summed as they are made; the peer is DDP with its default
buckets, over gloo.  Both train the same samples in the same processes by turns, and have to come to
the same weights.  Free: all ranks on this host, where ours sums through shared memory.  Else the
ranks are in two places (bench/network.py) with a real line between them, over which both use gloo.

ours_s, peer_s    seconds of a step on the slowest rank, median over the rounds
ratio             ours_s / peer_s: the median of the rounds' ratios
predicted_s       by the simulator, from ops measured here and the line's rate
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.line import at_both_ends
from bench.machine import machine
from bench.models import GPT, Size, loss, micro_batches
from bench.network import can_throttle, line
from penstock.cluster import Cluster, Host, Link
from penstock.graph.trace import Capture, build_model, capture
from penstock.heap import keep_freed_memory
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.program.lower_plan import lower_plan, stages_of
from penstock.program.of_plan import lower
from penstock.runtime.launch import join_torchrun, torchrun_store
from penstock.runtime.rank import Rank
from penstock.runtime.transport import Transport
from penstock.simulate.of_program import simulate
from penstock.timeline import step_s

RANKS = (2, 4)
RATES = (float("inf"), 150e6, 20e6)  # bytes/s; the first is free
DELAY_S = 0.0005
STEPS, ROUNDS = 3, 5
CLOSE = 1e-3  # what weights may differ by: sums are rounded in another order
Row = dict[str, float | int | str]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def job_of(size: Size) -> Job:
    return replace(size.job(), optimizer=adamw)


def plan_of(captured: Capture, ranks: int) -> Plan:
    """Return plain replicas in units of a block."""
    whole = plan_by_hand(captured.graph, (), "gpipe", num_micro_batches=1, replicas=ranks)
    return whole.refined(captured.graph)


def ours(size: Size, end: Transport) -> tuple[Callable[[], object], Callable[[], dict[str, Any]]]:
    """Return what runs a step, and what gives the weights."""
    job, captured = job_of(size), capture(job_of(size))
    plan = plan_of(captured, end.num_ranks)
    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    rank, steps = Rank(captured, stages, job, end), itertools.count()
    calls = rank.bind(program)

    def step() -> None:
        with torch.no_grad():
            rank.run(calls, next(steps))

    return step, rank.live


def peer(size: Size, rank: int, ranks: int) -> tuple[Callable[[], object], Callable[[], Any]]:
    """Return what runs a step, and what gives the weights."""
    model = build_model(job_of(size))
    wrapped, batches = DistributedDataParallel(model), micro_batches(size)
    optimizer, numbers = adamw(wrapped.parameters()), itertools.count(rank, ranks)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped, batches[next(numbers) % len(batches)]).backward()
        optimizer.step()

    return step, lambda: dict(model.named_parameters())


def by_turns(end: Transport, size: Size, rounds: int) -> list[list[float]]:
    """Return by side the seconds of a step in each round, on the slowest rank."""
    keep_freed_memory()
    torch.set_num_threads(1)
    sides = [ours(size, end), peer(size, end.rank, end.num_ranks)]
    end.barrier()
    times: list[list[float]] = [[], []]
    for number in range(-1, rounds):  # the first one is not counted
        order = [0, 1]
        random.Random(number).shuffle(order)
        for side in order:
            end.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                sides[side][0]()
            taken_s = (time.perf_counter() - began) / STEPS
            everyone = tuple(range(end.num_ranks))
            told = end.all_gather_bytes(json.dumps(taken_s).encode(), everyone)
            times[side] += [max(map(json.loads, told))] if number >= 0 else []
    held, theirs = (weights() for _, weights in sides)
    with torch.no_grad():
        apart = max(float((held[name] - theirs[name]).abs().max()) for name in theirs)
    if apart > CLOSE:
        raise ValueError(f"weights differ by {apart} after the same steps")
    return times


def hold(folder: Path) -> None:
    """Be one rank that torchrun has started."""
    named, rounds = json.loads((folder / "size.json").read_text())
    size, ranks = Size(**named), int(os.environ["WORLD_SIZE"])

    def work(end: Transport) -> list[list[float]]:
        if not dist.is_initialized():  # ours goes through shared memory, the peer needs gloo
            store = dist.FileStore(str(folder / "gloo"), ranks)
            dist.init_process_group("gloo", store=store, rank=end.rank, world_size=ranks)
        return by_turns(end, size, rounds)

    found = join_torchrun(work, torchrun_store(), groups=[tuple(range(ranks))])
    if os.environ["RANK"] == "0":
        (folder / "times.json").write_text(json.dumps(found))


def played(size: Size, ranks: int, rate: float, rounds: int) -> list[list[float]]:
    """Start the ranks, and return what `by_turns` gave."""
    named = {name: getattr(size, name) for name in size.__slots__}
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        (folder / "size.json").write_text(json.dumps([named, rounds]))
        own = ["bench.replicas", "--rank", given]
        if rate == float("inf"):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={ranks}", "-m", *own]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        else:
            with line(rate, DELAY_S) as places:
                at_both_ends(places, own, ranks=ranks // 2)
        return json.loads((folder / "times.json").read_text())


def cluster_of(ranks: int, rate: float) -> Cluster:
    """Return the machines that the ranks seem to have; of two places each has half of the cores."""
    here = Cluster.here(ranks)
    if rate == float("inf"):
        return here
    cores = max(1, (os.cpu_count() or 1) // 2)
    hosts = tuple(Host(name, here.hosts[0].device, ranks // 2, cores=cores) for name in "ab")
    return replace(here, hosts=hosts, between=Link(DELAY_S, rate))


def predicted_s(captured: Capture, profile: Profile, ranks: int, rate: float) -> float:
    program = lower(plan_of(captured, ranks), captured.graph)
    return step_s(simulate(program, profile, cluster_of(ranks, rate), spans=False))


def rows(size: Size, sizes: Sequence[int], rates: Sequence[float], rounds: int) -> Iterator[Row]:
    captured = capture(job_of(size))
    profile = measure(captured, job_of(size), beside=1)
    for ranks, rate in itertools.product(sizes, rates):
        our_s, peer_s = played(size, ranks, rate, rounds)
        ratios = [a / b for a, b in zip(our_s, peer_s, strict=True)]
        yield {
            "model": size.name,
            "ranks": ranks,
            "link": "free" if rate == float("inf") else f"{rate / 1e6:g} MB/s",
            "ours_s": statistics.median(our_s),
            "peer_s": statistics.median(peer_s),
            "ratio": statistics.median(ratios),
            "predicted_s": predicted_s(captured, profile, ranks, rate),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--quick", action="store_true", help="two ranks, three rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        hold(given.rank)
        return
    can, why = can_throttle()
    if not can:
        print(f"only free links: {why}", file=sys.stderr)
    sizes, rounds = (RANKS[:1], 3) if given.quick else (RANKS, given.rounds)
    found = rows(GPT, sizes, RATES if can else RATES[:1], rounds)
    if given.json:
        print(json.dumps({"machine": machine(), "rows": list(found)}))
        return
    print(
        f"{'model':<7}{'ranks':>5}{'link':>11}{'ours':>9}{'peer':>9}{'ratio':>8}{'predicted':>11}"
    )
    for row in found:
        times = "".join(f"{row[name]:>7.3f} s" for name in ("ours_s", "peer_s"))
        own = f"{row['model']:<7}{row['ranks']:>5}{row['link']:>11}{times}"
        print(f"{own}{row['ratio']:>8.3f}{row['predicted_s']:>9.3f} s", flush=True)


if __name__ == "__main__":
    main()
