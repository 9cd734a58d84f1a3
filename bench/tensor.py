"""Tensor parallelism beside parallelize_module: ops divided among ranks, by turns.

    python -m bench.tensor [--json] [--model NAME] [--ranks N] [--rounds N] [--way WAY]

One micro-batch a step, AdamW, ranks that torchrun starts on this host; both sides train the same
samples from the same weights.  Ours goes through shared memory, the peer through gloo.

gpt    8 blocks of width 256, two windows of 128 tokens; query, key and value apart, as the peer
       wants them
vgg    six convolutions and two wide layers behind them, 16 pictures of 32 x 32
moe    4 such blocks, each with 8 experts of width 512 in place of its network, 2 a token, none
       left out; the peer divides attention, for torch has nothing that divides experts

--way context: ranks divide the tokens of each sequence; the peer is the plain loop, whole on each
rank at the same time.
gpt-N  the same blocks, one window of N tokens

way         ours: the placements that `tensor` chooses; the peer: by hand, columns then rows,
            convolutions, embedding and head whole
ours_s, peer_s    seconds of a step on the slowest rank, median over the rounds
ratio             the median of the rounds' ratios
predicted_s, predicted_bytes   of ours, by the simulator, from ops and the link measured here
*_peak_bytes      tensors held at most by any rank in a step, under torch's profiler
difference        of the losses, relative: the largest of all steps
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from bench.beside import Side, adamw, peak_of, ratio_of
from bench.beside import Told as Turns
from bench.machine import machine
from bench.models import GPT, Enter, Leave, Size
from bench.models import loss as loss_of_gpt
from penstock.choose.degrees import slices_in_words
from penstock.choose.prepare import divided_step, machines
from penstock.graph.trace import build_model, capture
from penstock.heap import keep_freed_memory
from penstock.job import Job
from penstock.listener import SILENT
from penstock.plan import Plan
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.of_plan import lower
from penstock.profile.measure import measure
from penstock.runtime.calls import StepResult
from penstock.runtime.collects import own_capture
from penstock.runtime.launch import join_torchrun, torchrun_store
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.schedule.grid import InnerAxis
from penstock.search.search import search
from penstock.search.shapes import Fixed
from penstock.simulate.of_program import simulate
from penstock.timeline import peak_bytes, step_s
from penstock.transport import Transport

RANKS, MODELS = (2, 4), ("gpt", "vgg", "moe")
LONG = "gpt-512", "gpt-1024", "gpt-2048"  # with as many tokens, for --way context
ROUNDS, STEPS = 5, 3
Batch = tuple[Tensor, Tensor]
Row = dict[str, float | int | str]


class Block(nn.Module):
    """Attention and a two-layer network; how many heads there are follows from the weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.norm_attention, self.norm_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm_hidden(x_BTD))))

    def attention(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        parts = (layer(x_BTD) for layer in (self.query, self.key, self.value))
        q, k, v = (part.view(B, T, -1, self.head).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(B, T, -1))


class MixedBlock(Block):
    """Attention and eight experts, of which each token sees the two that its router likes most."""

    experts, seen, inner = 8, 2, 512

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.router = nn.Linear(width, self.experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(self.experts, width, 2 * self.inner) * 0.02)
        self.out = nn.Parameter(torch.randn(self.experts, self.inner, width) * 0.02)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        return x_BTD + self.mixed(self.norm_hidden(x_BTD).flatten(0, 1)).view_as(x_BTD)

    def mixed(self, x_ND: Tensor) -> Tensor:
        """Return for each row the sum of what its experts make of it, by their shares."""
        shares, chosen = self.router(x_ND).softmax(-1).topk(self.seen, -1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.histc(chosen.flatten().float(), self.experts, 0, self.experts - 1)
        ends, rows = counts.cumsum(0, dtype=torch.int32), x_ND[order // self.seen]
        gate, up = F.grouped_mm(rows, self.gate_up, offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self.out, offs=ends)
        made = made * shares.flatten()[order, None]
        return torch.zeros_like(x_ND).index_add(0, order // self.seen, made)


def moe() -> nn.Module:
    blocks = (MixedBlock(GPT.width, GPT.heads) for _ in range(4))
    return nn.Sequential(Enter(GPT), *blocks, Leave(GPT))


def gpt(size: Size = GPT) -> nn.Module:
    blocks = (Block(size.width, size.heads) for _ in range(size.blocks))
    return nn.Sequential(Enter(size), *blocks, Leave(size))


def vgg() -> nn.Module:
    widths = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    layers: list[nn.Module] = []
    for at, (before, after) in enumerate(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (at % 2)
    wide = [nn.Linear(128 * 16, 2048), nn.ReLU(), nn.Linear(2048, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *wide)


def pictures(start: int) -> Iterator[Batch]:
    """Yield micro-batches of noise and labels; the same 32 again and again."""
    for number in itertools.count(start):
        drawn = torch.Generator().manual_seed(number % 32)
        x = torch.randn(16, 3, 32, 32, generator=drawn)
        yield x, torch.randint(10, (16,), generator=drawn)


def loss_of_vgg(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def job_of(name: str) -> Job:
    if name in ("gpt", "moe"):
        model = gpt if name == "gpt" else moe
        return Job(model, loss_of_gpt, GPT.data, adamw, micro_batches=1)
    if name in LONG:
        size = replace(GPT, window=int(name.partition("-")[2]), micro_batch=1)
        return Job(partial(gpt, size), loss_of_gpt, size.data, adamw, micro_batches=1)
    return Job(vgg, loss_of_vgg, pictures, adamw, micro_batches=1)


def by_hand(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return how the peer divides a model: columns, then rows, of each pair of layers."""
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, Block):
            for each, _ in module.named_children():
                if each in ("query", "key", "value", "up"):
                    styles[f"{name}.{each}"] = ColwiseParallel()
                elif each in ("mix", "down"):
                    styles[f"{name}.{each}"] = RowwiseParallel()
    if not styles:
        wide = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        styles = {wide[0]: ColwiseParallel(), wide[1]: RowwiseParallel()}
    return styles


class Told(NamedTuple):
    """A side's turns, and the losses of its steps."""

    turns: Turns
    losses: list[float]


def ours(name: str, plan: Plan, end: Transport, losses: list[float]) -> Side:
    job = job_of(name)
    step = divided_step(capture(job), plan.place.axis, SILENT)
    program, stages, steps = lower_plan(plan, step.graph), stages_of(plan, step.graph), 0

    def report(result: StepResult) -> None:
        losses.append(float(result.loss or 0.0))

    own = own_capture(step, program, end.rank)
    rank = Rank(own, stages, job, end, RankTerms(report=report))
    calls = rank.bind(program)

    def make() -> None:
        nonlocal steps
        with torch.no_grad():
            rank.run(calls, steps)
        steps += 1

    return Side(make, rank.held_bytes, dict)


def peer(name: str, end: Transport, losses: list[float]) -> Side:
    job = job_of(name)
    model = build_model(job)
    if name not in LONG:
        mesh = dist.device_mesh.init_device_mesh("cpu", (end.num_ranks,))
        parallelize_module(model, mesh, by_hand(model))
    optimizer, batches = adamw(model.parameters()), job.data(0)

    def make() -> None:
        value = job.loss(model, next(batches))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))

    def held_bytes() -> int:
        rows = (value for state in optimizer.state.values() for value in state.values())
        held = [*model.parameters(), *(value for value in rows if isinstance(value, Tensor))]
        return sum(getattr(each, "to_local", lambda each=each: each)().nbytes for each in held)

    return Side(make, held_bytes, dict)


def by_turns(end: Transport, name: str, plan: Plan, rounds: int) -> dict[str, Told]:
    """Return what each side shows; the first round is not counted."""
    keep_freed_memory()
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {"ours": [], "peer": []}
    sides = {"ours": ours(name, plan, end, losses["ours"]), "peer": peer(name, end, losses["peer"])}
    times, everyone = {side: list[float]() for side in sides}, tuple(range(end.num_ranks))
    for number in range(-1, rounds):
        for side in random.Random(number).sample(sorted(sides), 2):
            end.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                sides[side].step()
            took = json.dumps(time.perf_counter() - began).encode()
            slowest = max(map(json.loads, end.all_gather_bytes(took, everyone)))
            times[side] += [slowest / STEPS] if number >= 0 else []
    made = {side: [*losses[side]] for side in sides}
    peaks: dict[str, int] = {}
    for side in sides:
        end.barrier()
        held = end.all_gather_bytes(json.dumps(peak_of(sides[side])).encode(), everyone)
        peaks[side] = max(map(json.loads, held))
    return {side: Told(Turns(times[side], peaks[side], 0, []), made[side]) for side in sides}


def hold(folder: Path) -> None:
    """Be one rank that torchrun has started."""
    name, rounds = json.loads((folder / "what.json").read_text())
    plan, ranks = Plan.load(folder / "plan.json"), int(os.environ["WORLD_SIZE"])

    def work(end: Transport) -> dict[str, Told]:
        if not dist.is_initialized():
            store = dist.FileStore(str(folder / "gloo"), ranks)
            dist.init_process_group("gloo", store=store, rank=end.rank, world_size=ranks)
        return by_turns(end, name, plan, rounds)

    told = join_torchrun(work, torchrun_store(), groups=[tuple(range(ranks))])
    if os.environ["RANK"] == "0":
        (folder / "told.json").write_text(json.dumps(told))


def played(name: str, plan: Plan, ranks: int, rounds: int) -> dict[str, Told]:
    """Start the ranks, and return what both sides have shown."""
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        plan.save(folder / "plan.json")
        (folder / "what.json").write_text(json.dumps([name, rounds]))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={ranks}", "-m", "bench.tensor", "--held", given]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        rows = json.loads((folder / "told.json").read_text())
    return {side: Told(Turns(*turns), losses) for side, (turns, losses) in rows.items()}


def rows(models: Sequence[str], sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    for name, ranks in itertools.product(models, sizes):
        job, cluster = job_of(name), machines(None, ranks, SILENT)
        axis = InnerAxis(ranks, context=name in LONG)
        step = divided_step(capture(job), axis, SILENT)
        profiles = (measure(step, job, beside=1),)
        asked = Fixed(ranks=ranks, tensor=ranks, context=axis.context)
        found = search(step.graph, profiles, cluster, micro_batches=1, fixed=asked)
        plan = found.plan
        timeline = simulate(lower(plan, step.graph), profiles[0], cluster, spans=False)
        told = played(name, plan, ranks, rounds)
        own, other = told["ours"], told["peer"]
        yield {
            "model": name,
            "ranks": ranks,
            "way": slices_in_words(step.graph),
            "ours_s": statistics.median(own.turns.times_s),
            "peer_s": statistics.median(other.turns.times_s),
            "ratio": ratio_of(own.turns, other.turns),
            "predicted_s": step_s(timeline),
            "predicted_bytes": max(peak_bytes(timeline)),
            "ours_peak_bytes": own.turns.peak,
            "peer_peak_bytes": other.turns.peak,
            "difference": max(
                abs(a - b) / abs(b) for a, b in zip(own.losses, other.losses, strict=True)
            ),
        }


def main() -> None:
    formatter: Callable[..., argparse.HelpFormatter] = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--way", choices=("tensor", "context"), default="tensor")
    parser.add_argument("--model", choices=(*MODELS, *LONG), help="one of the models only")
    parser.add_argument("--ranks", type=int, choices=RANKS, help="so many ranks only")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--held", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.held is not None:
        hold(given.held)
        return
    sizes = RANKS if given.ranks is None else (given.ranks,)
    models = LONG if given.way == "context" else MODELS
    found = rows(models if given.model is None else (given.model,), sizes, given.rounds)
    if given.json:
        print(json.dumps({"machine": machine(), "rows": list(found)}))
        return
    for row in found:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
