"""One GPU: plans of one rank beside plain PyTorch, and what was predicted beside what was measured.

    python -m bench.gpu.one [--json] [--size tiny|gpt|large] [--rounds N] [--cap BYTES]

A GPT and AdamW; every way trains the same micro-batches, by turns.  Ours: a Program of one rank.
Peers: the usual loop; `torch.utils.checkpoint` of each block; `save_on_cpu` with pinned memory;
`torch.compile` of the model.  Then the largest micro-batch that each can hold (windows, doubled),
the seconds of classes of ops as estimated for this device and as measured, and how well copies to
pinned memory and computes go side by side.  Without a GPU it runs on the CPU, which tests it.

way            whole: one stage; units: a stage for each block; recompute: all of these;
               activations, state, both: copied to far memory beside computes; compiled: by Inductor
peer           what it is compared with
ours_s, peer_s seconds of a step, median over the rounds; ratio: the median of the rounds' ratios
*_bytes        most that is held in a step, on the device; without one, what a step allocates
windows        largest micro-batch that fits, ours and the peer's; None: not asked for
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from bench.beside import adamw
from bench.gpu.sizes import SIZES
from bench.machine import machine
from bench.models import Size, loss, micro_batches
from penstock import _compat
from penstock.choose.fuse import known
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.device import here
from penstock.far import FarMemory
from penstock.graph.code import function_of
from penstock.graph.fused_runs import fused_function_of
from penstock.graph.trace import Capture, build_model, capture
from penstock.heap import keep_freed_memory
from penstock.job import Job, Precision
from penstock.plan import Offloaded, Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import Profile
from penstock.profile.estimate import estimated
from penstock.profile.measure import measure
from penstock.profile.roofline import CLASSES, works_of
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.recipe import Recipe
from penstock.search import evaluate
from penstock.transport.threads import thread_transports

MICRO_BATCHES, STEPS, ROUNDS = 2, 3, 5
PEERS = {
    "whole": "loop",
    "units": "loop",
    "recompute": "checkpoint",
    "activations": "save_on_cpu",
    "state": "loop",
    "both": "save_on_cpu",
    "compiled": "compile",
}
Row = dict[str, float | int | str | None]
Step = Callable[[], object]


def job_of(size: Size, *, precision: Precision | None = None) -> Job:
    job = replace(size.job(), optimizer=adamw, micro_batches=MICRO_BATCHES)
    return replace(job, precision=precision)


def compiles() -> bool:
    """Return whether Inductor can make code for the device that is here."""
    return not _compat.why_no_compiler(here().place)


def plan_of(captured: Capture, way: str, count: int = MICRO_BATCHES) -> Plan:
    """Return one rank's plan; in units it takes all micro-batches through each."""
    whole = plan_by_hand(captured.graph, (), "gpipe", num_micro_batches=count)
    if way in ("whole", "compiled"):
        return whole.changed(compiled=way == "compiled")
    units = whole.refined(captured.graph).changed(schedule=Recipe(breadth_first.__name__))
    count = units.num_stages
    units = units.changed(num_ranks=1, recompute=(way == "recompute",) * count)
    words: dict[str, Offloaded] = {"activations": "activations", "state": "state", "both": "both"}
    if way in words:
        return units.changed(offload=(words[way],) * count, beside=True)
    return units


def ours(job: Job, captured: Capture, plan: Plan) -> Step:
    (end,) = thread_transports(1)
    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    make = partial(fused_function_of, folder=None) if plan.terms.compiled else function_of
    rank, steps = Rank(captured, stages, job, end, RankTerms(make=make)), itertools.count()
    calls = rank.bind(program)

    def step() -> None:
        with torch.no_grad():
            rank.run(calls, next(steps))

    return step


def peer(job: Job, size: Size, kind: str) -> Step:
    """Return a step of plain PyTorch, whose loss is the mean over the micro-batches.

    Under autocast where the job has a precision: the usual way.
    """
    model: Any = build_model(job).to(here().place)
    narrow = torch.bfloat16 if job.precision else None
    batches = [tuple(each.to(here().place) for each in pair) for pair in micro_batches(size)]
    optimizer, numbers = adamw(model.parameters()), itertools.count()
    if kind == "checkpoint":
        for block in list(model.pieces.values())[1:-1]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    run = torch.compile(model) if kind == "compile" else model
    saves = partial(save_on_cpu, pin_memory=not here().is_cpu)

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            batch = batches[next(numbers) % len(batches)]
            around = saves() if kind == "save_on_cpu" else nullcontext()
            with around, torch.autocast(here().kind, narrow, enabled=narrow is not None):
                value = loss(run, batch)
            (value / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(step: Step) -> float:
    wait()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    return (time.perf_counter() - began) / STEPS


def peak_of(make: Callable[[], Step]) -> int:
    """Return the bytes that a step and what it needs hold at most.

    On a CPU only what a step allocates, beyond what is held before it.
    """
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    step = make()
    step()
    if torch.cuda.is_available():
        wait()
        torch.cuda.reset_peak_memory_stats()
        step()
        wait()
        return torch.cuda.max_memory_allocated() - before
    with _compat.memory_profile() as events:
        step()
    return max(itertools.accumulate(event.size_bytes for event in events()), default=0)


def of_way(
    size: Size,
    way: str,
    captured: Capture,
    profile: Profile,
    rounds: int,
    *,
    precision: Precision | None = None,
) -> Row:
    """Return the row of one way beside its peer."""
    job, plan = job_of(size, precision=precision), plan_of(captured, way)
    if plan.terms.compiled:
        (profile,) = known(job, captured, plan, (profile,))
    said, _ = evaluate(captured.graph, profile, Cluster.here(1), plan)
    makers = partial(ours, job, captured, plan), partial(peer, job, size, PEERS[way])
    peaks = [peak_of(make) for make in makers]
    sides = [make() for make in makers]
    times: list[list[float]] = [[], []]
    for number in range(-2, rounds):  # the first two are not counted
        for side in (0, 1) if number % 2 else (1, 0):
            taken_s = seconds_of(sides[side])
            times[side] += [taken_s] if number >= 0 else []
    return {
        "way": way,
        "peer": PEERS[way],
        "ours_s": statistics.median(times[0]),
        "peer_s": statistics.median(times[1]),
        "ratio": statistics.median([a / b for a, b in zip(*times, strict=True)]),
        "predicted_s": said.step_s,
        "ours_bytes": peaks[0],
        "peer_bytes": peaks[1],
        "predicted_bytes": max(said.peak_bytes),
    }


def largest(size: Size, way: str, *, is_ours: bool) -> int:
    """Return the most windows of a micro-batch, a power of two, with which a step fits."""
    windows = 1
    while True:
        again = replace(size, micro_batch=windows)
        try:
            job = job_of(again)
            if is_ours:
                captured = capture(job)
                step = ours(job, captured, plan_of(captured, way))
            else:
                step = peer(job, again, PEERS[way])
            step()
            step()
            wait()
        except torch.OutOfMemoryError:
            return windows // 2
        finally:
            step = None
            torch.cuda.empty_cache()
        windows *= 2


def classes(captured: Capture, profile: Profile) -> list[Row]:
    """Return the seconds of each class of ops, as estimated for this device and as measured."""
    (device,) = Cluster.here(1).devices
    guess = estimated(captured.graph, device, profile.update.state_bytes_per_byte)
    sums = {name: [0.0, 0.0] for name in CLASSES}
    for at, work in enumerate(works_of(captured.graph)):
        if work is not None:
            sums[work.of][0] += guess.op_s[at]
            sums[work.of][1] += profile.op_s[at]
    return [
        {"class": name, "estimated_s": a, "measured_s": b} for name, (a, b) in sums.items() if b
    ]


def overlap(width: int = 8192, numbers: int = 2**28) -> Row:
    """Return the seconds of products, of a copy to pinned memory, and of both on two streams."""
    if not torch.cuda.is_available():
        return {}
    device = here().place
    a = torch.randn(width, width, device=device)
    near = torch.randn(numbers, device=device)
    far = FarMemory(device).room([near.nbytes]).blocks[0].view(torch.float32)
    side = torch.cuda.Stream()

    def products() -> None:
        for _ in range(8):
            torch.mm(a, a)

    def copy() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            far.copy_(near, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            far.copy_(near, non_blocking=True)
        products()
        torch.cuda.current_stream().wait_stream(side)

    rows = {"products_s": products, "copy_s": copy, "both_s": both}
    found: Row = {name: min(seconds_of(each) for _ in range(5)) for name, each in rows.items()}
    return {**found, "copied_bytes": near.nbytes}


def figures(size: Size, ways: Sequence[str], rounds: int, cap: int | None) -> dict[str, Any]:
    """Return all that is measured here."""
    if cap is not None:
        total = torch.cuda.get_device_properties(here().place).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total)
    job = job_of(size)
    captured = capture(job)
    face.say("measuring every op")
    profile = measure(captured, job)
    rows = list[Row]()
    for way in ways:
        face.say(f"{way} beside {PEERS[way]}")
        row = of_way(size, way, captured, profile, rounds)
        if torch.cuda.is_available() and way != "compiled":
            row["windows"] = largest(size, way, is_ours=True)
            row["peer_windows"] = largest(size, way, is_ours=False)
        rows.append(row)
    return {"rows": rows, "classes": classes(captured, profile), "overlap": overlap()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--size", choices=SIZES, default="gpt")
    parser.add_argument("--ways", nargs="+", choices=PEERS, default=tuple(PEERS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cap", type=int, help="bytes of the GPU that may be used")
    given = parser.parse_args()
    if given.cap is not None and not torch.cuda.is_available():
        parser.error("--cap is for a GPU; there is none here")
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        os.environ["XDG_CACHE_HOME"] = folder
        found = figures(SIZES[given.size], given.ways, given.rounds, given.cap)
    if given.json:
        print(json.dumps({"machine": machine(), "device": str(here().place), **found}))
        return
    for row in found["rows"]:
        mib = (f"{row[key] / 2**20:.1f}" for key in ("ours_bytes", "peer_bytes", "predicted_bytes"))
        fits = f"  {row['windows']} and {row['peer_windows']} windows" if "windows" in row else ""
        print(
            f"{row['way']:12}{row['peer']:12}{row['ours_s']:9.4f}{row['peer_s']:9.4f} s"
            f"{row['ratio']:7.3f}{row['predicted_s']:9.4f} s  {', '.join(mib)} MiB{fits}"
        )
    for each in found["classes"]:
        print(f"{each['class']:16}{each['estimated_s']:10.5f}{each['measured_s']:10.5f} s")
    print(found["overlap"] or "")


if __name__ == "__main__":
    main()
