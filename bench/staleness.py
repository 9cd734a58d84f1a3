"""Staleness: what each weight rule costs in learning, beside synchronous training.

    python -m bench.staleness [--json] [--quick] [--seeds N] [--schedules NAME ...] [--svg FILE]

Two studies with S = 4 stages and one micro-batch a step, where staleness is greatest:

quadratic  one weight for each stage, SGD with momentum 0.9; the gradient is
           (h + d) * w_F - d * w_B with h = 1 and d = 1/2, where w_F is what F reads and w_B what B
           reads (arXiv:1910.05124, section 3: d is how much the backward pass depends on its own
           weights).  The highest learning rate at which all stages still come to rest.
gpt        a byte-level GPT (4 blocks of width 32) on the source of the standard library, SGD with
           momentum 0.9: for a row of learning rates the loss after a fixed number of samples, on
           text that is held out.  Pipelines of threads, in the windows of `penstock train`:
           PipeMare begins with synchronous steps.  Each seed has other weights and other text.

rule, schedule      which; "synchronous" first
quadratic_max_rate  highest stable learning rate of the first study
of_synchronous      the same as a share of that of synchronous training
max_rate            of the second study: the last one up to which all seeds end below the start
best_rate, loss     the learning rate that ends lowest in the mean of all seeds, and the mean there
spread              standard deviation of the seeds' losses there; 0 for one seed
losses              [learning rate, mean loss] of all; no number where a seed went astray
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.machine import machine
from bench.models import Size, loss
from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.choose.run_windows import windows_of
from penstock.errors import RunError
from penstock.files import write_text
from penstock.graph.trace import Capture, build, capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import stages_of
from penstock.runtime.finite import NotFiniteError
from penstock.runtime.launch import run_threads
from penstock.runtime.worker import Task, work
from penstock.schedule import SCHEDULES, SYNCHRONOUS, WeightRule, find
from penstock.search.balance import balanced_cuts

STAGES, MICRO_BATCHES = 4, 1
MOMENTUM = 0.9
CURVATURE, BACKWARD_SHARE = 1.0, 0.5
UPDATES = 1500  # of the quadratic, after which it has come to rest or not
RATES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
STEPS, QUICK_STEPS = 96, 8
HELD_OUT = 24  # micro-batches
SEEDS = 5
Row = dict[str, Any]


class Rule(NamedTuple):
    """A weight rule, and the schedule that has it."""

    schedule: str
    rule: WeightRule


def rules() -> list[Rule]:
    """Return the synchronous rule and that of every asynchronous schedule."""
    made = ((make.__name__, make(STAGES, MICRO_BATCHES)) for make in SCHEDULES)
    found = [Rule(name, each.weight_rule) for name, each in made if each.has_updates]
    return [Rule("one_f_one_b", SYNCHRONOUS), *found]


# -- the quadratic --------------------------------------------------------------------------------


def rests(rule: WeightRule, stage: int, rate: float, momentum: float = MOMENTUM) -> bool:
    """Return whether one weight comes to rest under `rule` at this learning rate."""
    sizes = STAGES, MICRO_BATCHES
    delay = rule.staleness(stage, *sizes)
    share = rule.decay ** (1 / delay) if delay else 0.0
    a = momentum**delay if rule.compensate else 1.0
    b = (1 - a) / (1 - momentum)
    weights, adds = [1.0], [0.0]  # by version
    velocity = 0.0
    for step in range(UPDATES):
        reads = rule.law(stage, step, *sizes)
        forward = _read(weights, adds, reads.forward, reads.forward_ahead)
        backward = _read(weights, adds, reads.backward, reads.backward_ahead)
        gradient = (CURVATURE + BACKWARD_SHARE) * forward - BACKWARD_SHARE * backward
        velocity = momentum * velocity + gradient
        moved = -rate * (a * velocity + b * gradient if rule.compensate else velocity)
        weights.append(weights[-1] + moved)
        match rule.predictor:
            case None:
                adds.append(0.0)
            case "optimizer":
                adds.append(-rate * velocity)
            case "difference":
                adds.append(moved)
            case "average":
                adds.append(share * adds[-1] + (1 - share) * moved)
        if abs(weights[-1]) > 1e6:
            return False
    return max(map(abs, weights[-50:])) < 0.5


def _read(weights: Sequence[float], adds: Sequence[float], version: int, ahead: int) -> float:
    at = max(version, 0)
    return weights[at] + ahead * adds[at]


def highest_rate(rule: WeightRule, momentum: float = MOMENTUM) -> float:
    """Return the highest learning rate at which every stage comes to rest, to 1 %."""
    low, high = 1e-4, 8.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if all(rests(rule, stage, middle, momentum) for stage in range(STAGES)):
            low = middle
        else:
            high = middle
    return low


# -- the GPT --------------------------------------------------------------------------------------

SMALL = Size("small", width=32, window=32, micro_batch=8, blocks=4, heads=4, vocabulary=256)


@cache
def text() -> Tensor:
    """Return bytes of the standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = b"".join(path.read_bytes() for path in paths[:60])
    return torch.frombuffer(bytearray(parts), dtype=torch.uint8).long()


def batch(index: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Return micro-batch `index`: windows of the first nine tenths, or of the last one."""
    source = torch.Generator().manual_seed(2 * index + held_out)
    border = len(text()) * 9 // 10
    first, last = (border, len(text())) if held_out else (0, border)
    shape, size = (SMALL.micro_batch, 1), SMALL.window + 1
    starts = torch.randint(first, last - size, shape, generator=source)
    windows = text()[starts + torch.arange(size)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def job_at(rate: float, seed: int) -> Job:
    """Return the job, trained by SGD with momentum at a learning rate."""
    return replace(
        SMALL.job(),
        data=lambda start: map(batch, itertools.count(seed * 1_000_000 + start)),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=rate, momentum=MOMENTUM),
        seed=seed,
    )


@cache
def captured_of(seed: int) -> Capture:
    return capture(job_at(0.0, seed))


def trained_loss(rule: Rule, rate: float, steps: int, seed: int) -> float:
    """Return the held-out loss after so many steps; no number where it went astray."""
    captured, job = captured_of(seed), job_at(rate, seed)
    graph = captured.graph
    cuts = balanced_cuts(graph, [float(node.flop) for node in graph.nodes], STAGES)
    ranks = find(rule.schedule)(STAGES, MICRO_BATCHES).num_ranks
    counts: dict[str, Any] = {"num_micro_batches": MICRO_BATCHES, "num_ranks": ranks}
    plan = plan_by_hand(graph, cuts, rule.schedule, **counts)
    windows = windows_of(graph, plan, range(steps), (steps,))
    with tempfile.TemporaryDirectory() as folder:
        task = Task(captured, stages_of(plan, graph), job, windows, policy=SavePolicy(Path(folder)))
        ranks = partial(work, task)
        try:
            run_threads(ranks, plan.total_ranks, lambda step: None, groups=task.groups)
        except RunError as problem:
            if isinstance(problem.__cause__, NotFiniteError):
                return math.nan
            raise
        newest = checkpoint.latest(Path(folder))
        assert newest is not None, "one is written at the end"
        weights = checkpoint.load(newest).tensors
    model, _ = build(job)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[f"weights/{name}"])
        parts = [loss(model, batch(index, held_out=True)) for index in range(HELD_OUT)]
    return float(torch.stack(parts).mean())


# -- rows -----------------------------------------------------------------------------------------


def rows_of(
    steps: int, rates: Sequence[float], seeds: int = 1, wanted: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield a row for each rule; `wanted`: only for these schedules."""
    start = min(trained_loss(rules()[0], 0.0, 1, seed) for seed in range(seeds))
    synchronous = highest_rate(SYNCHRONOUS)

    def learns(pair: tuple[float, float]) -> bool:
        return math.isfinite(pair[1]) and pair[1] < start

    for rule in (each for each in rules() if not wanted or each.schedule in wanted):
        ends = {
            rate: [trained_loss(rule, rate, steps, seed) for seed in range(seeds)] for rate in rates
        }
        losses = [(rate, _worst_or_mean(each, start)) for rate, each in ends.items()]
        ended = [pair for pair in losses if learns(pair)]
        best_rate, lowest = min(ended, key=lambda pair: pair[1], default=(math.nan, math.nan))
        quadratic = highest_rate(rule.rule)
        yield {
            "rule": rule.rule.name,
            "schedule": rule.schedule,
            "quadratic_max_rate": quadratic,
            "of_synchronous": quadratic / synchronous,
            "max_rate": max((r for r, _ in itertools.takewhile(learns, losses)), default=math.nan),
            "best_rate": best_rate,
            "loss": lowest,
            "spread": statistics.pstdev(ends[best_rate]) if ended else math.nan,
            "start": start,
            "seeds": seeds,
            "samples": steps * MICRO_BATCHES * SMALL.micro_batch,
            "losses": losses,
        }


def _worst_or_mean(ends: Sequence[float], start: float) -> float:
    """Return the mean; the worst where one ends above the start, no number where one has none."""
    if any(math.isnan(end) for end in ends):
        return math.nan
    return statistics.fmean(ends) if max(ends) < start else max(ends)


def picture(rows: Sequence[Row]) -> str:
    """Return an SVG: loss after the fixed number of samples, by learning rate, a panel per rule."""
    wide, high, columns = 210, 150, 4
    floor = min(end for row in rows for _, end in row["losses"] if math.isfinite(end))
    top = rows[0]["start"]

    def place(at: int, end: float) -> str:
        x = 34 + at * (wide - 54) / (len(rows[0]["losses"]) - 1)
        return f"{x:.1f},{high - 32 - (end - floor) / (top - floor) * (high - 60):.1f}"

    def line(row: Row) -> str:
        ends = ((at, end) for at, (_, end) in enumerate(row["losses"]) if math.isfinite(end))
        return " ".join(place(at, end) for at, end in ends if end <= top)

    reference = line(rows[0])
    parts: list[str] = []
    for number, row in enumerate(rows):
        x, y = number % columns * wide, number // columns * high
        own = line(row)
        name = f"{row['schedule'] if number else 'synchronous'}"
        marks = "".join(
            f'<text x="{34 + at * (wide - 54) / (len(row["losses"]) - 1):.0f}" y="{high - 14}" '
            f'class="s" text-anchor="middle">{rate:g}</text>'
            for at, (rate, _) in enumerate(row["losses"])
            if at % 2 == 0
        )
        parts.append(
            f'<g transform="translate({x},{y})"><text x="10" y="16">{name}</text>'
            f'<rect x="34" y="28" width="{wide - 54}" height="{high - 60}" class="f"/>'
            f'<text x="30" y="34" class="s" text-anchor="end">{top:.1f}</text>'
            f'<text x="30" y="{high - 32}" class="s" text-anchor="end">{floor:.1f}</text>'
            f'<polyline points="{reference}" class="r"/><polyline points="{own}" class="o"/>'
            f"{marks}</g>"
        )
    lines = -(-len(rows) // columns)
    style = (
        "text{font:12px sans-serif;fill:#222}.s{font-size:9px;fill:#666}"
        ".f{fill:#f7f7f5;stroke:#ccc}polyline{fill:none}.r{stroke:#bbb;stroke-width:2}"
        ".o{stroke:#1f5fa8;stroke-width:2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * wide} '
        f'{lines * high + 24}"><style>{style}</style>{"".join(parts)}'
        f'<text x="10" y="{lines * high + 14}" class="s">Held-out loss after '
        f"{rows[0]['samples']} samples by learning rate; grey: "
        "synchronous. A line ends where training goes astray.</text></svg>\n"
    )


def show(row: Row) -> None:
    curve = " ".join(f"{end:5.2f}" if math.isfinite(end) else "    -" for _, end in row["losses"])
    print(
        f"{row['rule']:22} {row['quadratic_max_rate']:8.3f} {row['of_synchronous']:7.2f} "
        f"{row['max_rate']:8.2f} {row['best_rate']:8.2f} {row['loss']:7.3f} "
        f"{row['spread']:6.3f}   {curve}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="few steps and learning rates")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of weights and text; default 5")
    parser.add_argument("--schedules", nargs="*", default=(), help="only these; default: all")
    parser.add_argument("--svg", type=Path, help="also draw the curves")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, rates = (QUICK_STEPS, RATES[::3]) if options.quick else (STEPS, RATES)
    rows: list[Row] = []
    if not options.json:
        head = "rule                   quadratic  of sync  max rate  best    loss spread   loss at"
        print(head, " ".join(f"{rate:5g}" for rate in rates))
    seeds = 1 if options.quick else options.seeds
    for row in rows_of(steps, rates, seeds, options.schedules):
        rows.append(row)
        if options.json:
            print(f"{len(rows)} rows", file=sys.stderr)
        else:
            show(row)
    if options.svg is not None:
        write_text(options.svg, picture(rows))
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
