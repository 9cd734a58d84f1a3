"""Agree: ways in which two replicas agree on gradients, beside torch's communication hooks.

    python -m bench.agree [--json] [--quick] [--rounds N] [--seeds N] [--steps N] [--models ...]
    python -m bench.agree --table [--json]    which ways go with what else plans have
    python -m bench.agree --slow [--json]     ways where a rank is slow (bench/slow_rank.py)
    python -m bench.agree --learned [--json]  ways and what is learned by them (bench/learned.py)
    python -m bench.agree FOLDER       what torchrun starts for each rank

The small GPT and the CNN of bench/zoo.py, AdamW, four micro-batches a rank and step, ours in one
stage as `sums` has it; beside it DistributedDataParallel over gloo, one all-reduce a step, as
it is and with torch's hook for float16 (for bfloat16 torch asks for NCCL, and its PowerSGD stands
still over gloo); and PostLocalSGDOptimizer, which averages weights every 8 steps.  What averages
every 8 steps runs 8 steps a turn, all else one or two.  They take turns in the same processes: on
one host (free; ours through shared memory), and in two places with a real line between them
(bench/network.py; all over gloo).

way, topology          how gradients are summed; who sends to whom
bits                   sent of a number of the gradients, on average; a sum of 32 bits has 32
samples_per_s          on the slowest rank, median over the rounds
predicted_samples_per_s    by the simulator, from ops measured here and the line's rate
sent_bytes             of a rank in a step, by the formula of docs/agree.md
measured_bytes         that left a rank's place in a step, headers and all; null: links are free
loss, loss_spread      of 32 steps at the end of training on data that can be learned (tokens of a
                       chain, images of ten classes): mean over the seeds, and standard deviation;
                       null for peers
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from bench.beside import DELAY_S, cluster_of, link_of, ours
from bench.line import at_both_ends
from bench.machine import machine
from bench.network import can_throttle, line
from bench.zoo import JOBS, Batch
from penstock.cli import face
from penstock.errors import PlanError
from penstock.graph.trace import Capture, build_model, capture
from penstock.heap import keep_freed_memory
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile.measure import measure
from penstock.program.reductions import AverageWeights, Reduction
from penstock.runtime.launch import join_torchrun, torchrun_store
from penstock.runtime.run import run
from penstock.search import evaluate
from penstock.sums import sums_way
from penstock.transport import Transport

WAYS = (
    *(None, "bfloat16", "int8", "sign", "top:0.01", "rank:4", "delayed", "delayed:3"),
    *("local:8", "diloco:8", "easgd:8", "gossip"),
)
AS_THEY_COME = "backup:1", "ssp:2", "ssp:2:aware", "async:aware"  # each rank at its own pace
PEERS = (
    "ddp",
    "ddp float16",
    "local sgd",
)  # over gloo torch's bfloat16 is refused, its PowerSGD stands still
MODELS = ("small gpt", "cnn")
RATES = (float("inf"), 150e6, 20e6)
RANKS, LAST = 2, 32  # of which each has half of a step's micro-batches; steps that losses are of
TOPOLOGY = {
    **{"bfloat16": "parts", "int8": "parts", "sign": "parts", "top:0.01": "all", "gossip": "pairs"},
    **{None: "ring"},
}
EVERY = 8  # steps, of which the peer averages weights after one, as "local:8" does
Row = dict[str, float | int | str | None]


def job_of(name: str, sums: str | None, seed: int = 0) -> Job:
    """Return the job of a model, with data that can be learned."""
    data = _tokens if "gpt" in name else _images
    job = replace(JOBS[name], data=lambda start: data(start, seed), sums=sums, seed=seed)
    return replace(job, optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3))


def _tokens(start: int, seed: int) -> Iterator[Batch]:
    follows = torch.randint(0, 256, (256, 4), generator=torch.Generator().manual_seed(1))
    while True:
        drawn = torch.Generator().manual_seed(10**6 * seed + start)
        which = torch.randint(0, 4, (65, 4), generator=drawn)
        ids = [torch.randint(0, 256, (4,), generator=drawn)]
        for row in which[1:]:
            ids.append(follows[ids[-1], row])
        rows = torch.stack(ids, 1)
        yield {"x": rows[:, :-1].contiguous(), "y": rows[:, 1:].contiguous()}
        start += 1


def _images(start: int, seed: int) -> Iterator[Batch]:
    classes = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    while True:
        drawn = torch.Generator().manual_seed(10**6 * seed + start)
        y = torch.randint(0, 10, (16,), generator=drawn)
        x = 0.3 * classes[y] + torch.randn(16, 3, 32, 32, generator=drawn)
        yield {"x": x, "y": y}
        start += 1


def plan_of(job: Job, captured: Capture) -> Plan:
    """Return two replicas of one stage that agree as the job says."""
    count = job.micro_batches // RANKS
    plan = plan_by_hand(captured.graph, [], "gpipe", num_micro_batches=count, replicas=RANKS)
    return plan.changed(sums=job.sums, buffers="per replica" if captured.graph.written else "exact")


@cache
def captured_of(name: str) -> Capture:
    return capture(job_of(name, None))


def traced(name: str, sums: str | None, seed: int = 0) -> tuple[Job, Capture, Plan]:
    captured = captured_of(name)
    buffers = "per replica" if captured.graph.written else "exact"
    job = replace(job_of(name, sums, seed), buffers=buffers)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = build_model(job).state_dict()
    captured.model.load_state_dict(fresh)
    return job, captured, plan_of(job, captured)


# -- who takes turns ------------------------------------------------------------------------------


def peer(name: str, kind: str, end: Transport) -> Any:
    """Return a step of DDP: its micro-batches without sums, but for the last; or of local SGD."""
    job = job_of(name, None)
    model = build_model(job)
    if kind == "local sgd":
        return _local(job, model, end)
    wrapped = DistributedDataParallel(model)
    if kind == "ddp float16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer, each = torch.optim.AdamW(model.parameters(), lr=1e-3), job.micro_batches // RANKS
    batches = job.data(end.rank * each)

    def step() -> None:
        for number in range(each):
            wrapped.require_backward_grad_sync = number == each - 1
            loss: Any = job.loss(wrapped, next(batches))
            (loss / each).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _local(job: Job, model: torch.nn.Module, end: Transport) -> Any:
    """Return a step of torch's local SGD: a model of its own, averaged every few steps."""
    # they warn when they are imported: torch.jit
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    own, each = torch.optim.AdamW(model.parameters(), lr=1e-3), job.micro_batches // RANKS
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
    optimizer, batches = PostLocalSGDOptimizer(own, averager), job.data(end.rank * each)

    def step() -> None:
        for _ in range(each):
            (job.loss(model, next(batches)) / each).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps_of(side: str, steps: int) -> int:
    """Return how many steps of a side are timed together: all of those from average to average."""
    way = None if side in (*PEERS, "None") else side
    return EVERY if side == "local sgd" else max(steps, sums_way(way).every)


def sent_so_far() -> int:
    rows = (row.split() for row in Path("/proc/net/dev").read_text().splitlines()[2:])
    return sum(int(row[9]) for row in rows if row[0] != "lo:")


class Told(NamedTuple):
    """Seconds of a step by round, and the bytes that left the place of the first rank in one."""

    times_s: list[float]
    sent: float


def by_turns(end: Transport, name: str, rounds: int, steps: int) -> dict[str, Told]:
    keep_freed_memory()
    torch.set_num_threads(1)
    sides: dict[str, Any] = {kind: peer(name, kind, end) for kind in PEERS}
    for way in WAYS:
        sides[str(way)] = ours(*traced(name, way), end).step
    times: dict[str, list[float]] = {side: [] for side in sides}
    sent = dict.fromkeys(sides, 0.0)
    everyone = tuple(range(end.num_ranks))
    for number in range(-1, rounds):  # the first one is not counted
        order = sorted(sides)
        random.Random(number).shuffle(order)
        for side in order:
            if number < 0:
                sides[side]()
                sides[side]()
            end.barrier()
            began, before = time.perf_counter(), sent_so_far()
            count = steps_of(side, steps)
            for _ in range(count):
                sides[side]()
            took = json.dumps(time.perf_counter() - began).encode()
            slowest = max(map(json.loads, end.all_gather_bytes(took, everyone))) / count
            if number >= 0:
                times[side].append(slowest)
                sent[side] = (sent_so_far() - before) / count
    return {side: Told(times[side], sent[side]) for side in sides}


def hold(folder: Path) -> None:
    """Be one rank that torchrun has started."""
    name, rounds, steps = json.loads((folder / "what.json").read_text())

    def work(end: Transport) -> dict[str, Told]:
        if not dist.is_initialized():  # ours goes through shared memory, peers need gloo
            store = FileStore(str(folder / "gloo"), RANKS)
            dist.init_process_group("gloo", store=store, rank=end.rank, world_size=RANKS)
        return by_turns(end, name, rounds, steps)

    found = join_torchrun(work, torchrun_store(), groups=[tuple(range(RANKS))])
    if os.environ["RANK"] == "0":
        (folder / "told.json").write_text(json.dumps(found))


def played(name: str, rate: float, rounds: int) -> dict[str, Told]:
    """Start the ranks, and return what `by_turns` gave."""
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        (folder / "what.json").write_text(json.dumps([name, rounds, 2 if rate > 1e8 else 1]))
        if rate == float("inf"):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={RANKS}", "-m", "bench.agree", given]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        else:
            with line(rate, DELAY_S) as places:
                at_both_ends(places, ["bench.agree", given])
        told = json.loads((folder / "told.json").read_text())
        return {side: Told(*row) for side, row in told.items()}


# -- what is told ---------------------------------------------------------------------------------


def losses(name: str, way: str | None, seeds: int, steps: int) -> tuple[float, float]:
    """Return the mean loss at the end over the seeds, and the standard deviation."""
    found: list[float] = []
    for seed in range(seeds):
        job, captured, plan = traced(name, way, seed)
        program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
        done = run(program, captured, stages, job, num_steps=steps)
        found.append(statistics.fmean(each.loss or 0.0 for each in done.steps[-LAST:]))
    return statistics.fmean(found), statistics.stdev(found) if seeds > 1 else 0.0


def bytes_of_a_step(each: Reduction) -> float:
    return each.size_bytes / (each.every if isinstance(each, AverageWeights) else 1)


def rows(name: str, rates: Sequence[float], rounds: int, seeds: int, steps: int) -> Iterator[Row]:
    learned = {way: losses(name, way, seeds, steps) for way in WAYS}
    job, captured, _ = traced(name, None)
    profile, samples = measure(captured, job, beside=1), job.micro_batches * captured.graph.samples
    for rate in rates:
        told = played(name, rate, rounds)
        cluster = cluster_of(RANKS, rate)
        kind = replace(profile, kind=cluster.devices[0].name)
        dense = 0
        for way in WAYS:
            plan = plan_of(replace(job, sums=way), captured)
            program = lower_plan(plan, captured.graph)
            size = sum(map(bytes_of_a_step, program.code.reductions))
            dense = dense or size
            step_s = evaluate(captured.graph, kind, cluster, plan)[0].step_s
            yield {
                **_row(name, rate, str(way), told[str(way)], samples),
                "topology": TOPOLOGY.get(way, "ring"),
                "bits": 32 * size / dense,
                "predicted_samples_per_s": samples / step_s,
                "sent_bytes": int(2 * (RANKS - 1) * size // RANKS),
                "loss": learned[way][0],
                "loss_spread": learned[way][1],
            }
        for kind_ in PEERS:
            yield _row(name, rate, kind_, told[kind_], samples)


def _row(name: str, rate: float, way: str, told: Told, samples: int) -> Row:
    sent = None if rate == float("inf") else told.sent
    empty = dict.fromkeys(("bits", "predicted_samples_per_s", "sent_bytes", "loss", "loss_spread"))
    head: Row = {"model": name, "link": link_of(rate), "way": way, "topology": "ring", **empty}
    speed = samples / statistics.median(told.times_s)
    return {**head, "samples_per_s": speed, "measured_bytes": sent}


WITH: dict[str, dict[str, Any]] = {  # what a plan has besides, as its words
    "replicas": {},
    "a pipeline by 1F1B": {"schedule": "one_f_one_b"},
    "a pipeline by ZB-H1": {"schedule": "zb_h1"},
    "a bidirectional pipeline": {"schedule": "chimera"},
    "an asynchronous pipeline": {"schedule": "pipedream"},
    "clipping": {"clip": True},
    "post-validation": {"clip": True, "post_validation": True},
    "shards": {"shard": ("shard", "shard")},
    "far activations": {"offload": ("activations", "activations")},
    "far state": {"offload": ("state", "state")},
    "far weights": {"offload": ("weights", "weights"), "shard": ("shard", "shard")},
    "8 bits between stages": {"wire": (8, 8)},
    "divided micro-batches": {"joined": Fraction(1, 2)},
    "parameters in slices": {"split": (("head.weight", 2),)},
    "compiled stages": {"compiled": True},
    "elastic ranks": {"commits": True},
    "divided ops": {"tensor": 2},
}


def combinations() -> Iterator[Row]:
    """Yield for each way and each other feature of a plan: works, or the reason of FITS."""
    graph = captured_of(MODELS[0]).graph
    middle = len(graph.cut_points) // 2
    for what, words in WITH.items():
        words = dict(words)
        schedule = words.pop("schedule", "gpipe")
        plan = plan_by_hand(graph, [middle], schedule, num_micro_batches=4, replicas=2, num_ranks=2)
        row: Row = {"with": what}
        for way in (*WAYS, *AS_THEY_COME):
            own = words
            if way in AS_THEY_COME and schedule == "gpipe":  # of replicas of one rank
                own = {"num_ranks": 1, "schedule": "breadth_first", **words}
            try:
                plan.changed(sums=way, **own)
            except PlanError as problem:
                row[str(way)] = f"refused: {problem.message}"
            else:
                row[str(way)] = "works"
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one model, free links, one seed")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of training, for losses")
    parser.add_argument("--table", action="store_true", help="what goes together, and why not")
    parser.add_argument("--slow", action="store_true", help="ways where a rank is slow")
    parser.add_argument("--learned", action="store_true", help="losses and accuracies on digits")
    parser.add_argument("--ranks", type=int, default=2, help="of --learned")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.table:
        table = list(combinations())
        print(json.dumps(table) if given.json else _matrix(table))
        return
    if given.slow:
        print(_slow_ranks(is_json=given.json))
        return
    if given.learned:
        print(_digits(given.ranks, given.seeds, given.steps, is_json=given.json))
        return
    can, why = can_throttle()
    if not can:
        print(f"only free links: {why}", file=sys.stderr)
    rates = RATES if can and not given.quick else RATES[:1]
    models = MODELS[:1] if given.quick else given.models
    own = (1, 1, 8) if given.quick else (given.rounds, given.seeds, given.steps)
    found = [row for name in models for row in rows(name, rates, *own)]
    if given.json:
        print(json.dumps({"machine": machine(), "rows": found}))
        return
    keys = list(found[0])
    print(face.table(keys, [[_shown(row[key]) for key in keys] for row in found]))


def _digits(ranks: int, seeds: int, steps: int, *, is_json: bool) -> str:
    from bench import learned  # which reads ways from here

    return _told(list(learned.rows(ranks, seeds, steps)), is_json=is_json)


def _slow_ranks(*, is_json: bool) -> str:
    from bench import slow_rank  # which reads ways from here, by bench.convex

    return _told(list(slow_rank.rows(4, 48)), is_json=is_json)


def _told(found: Sequence[Row], *, is_json: bool) -> str:
    if is_json:
        return json.dumps({"machine": machine(), "rows": found})
    return face.table(list(found[0]), [[_shown(value) for value in row.values()] for row in found])


def _matrix(table: Sequence[Row]) -> str:
    """Return the table, the reasons numbered below it."""
    reasons = dict.fromkeys(v for row in table for v in row.values() if _is_refusal(v))
    numbers = {reason: f"({at})" for at, reason in enumerate(reasons, 1)}
    cells = [[numbers.get(value, f"{value}") for value in row.values()] for row in table]
    below = [f"{number} {reason}" for reason, number in numbers.items()]
    return "\n".join([face.table(list(table[0]), cells), "", *below])


def _is_refusal(value: object) -> bool:
    return isinstance(value, str) and value.startswith("refused")


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        hold(Path(sys.argv[1]))
    else:
        main()
