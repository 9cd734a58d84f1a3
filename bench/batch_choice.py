"""Ranks and batch that until_loss finds, beside all others, each run to the same loss.

    python -m bench.batch_choice [--json] [--quick] [--loss X] [--rounds N] [--sgd]

A student network learns a noisy teacher (four layers of 256, micro-batches of 8 samples, 8 a step),
by AdamW or SGD, on up to two ranks.  First a run until that loss finds ranks and batch,
once for time and once for cost.  Then each batch is run from the start to the same loss, with the
rate that the rule gives it by the noise scale that the search has found: so many steps it takes,
whatever the ranks.  Then the plans of all (ranks, batch) take turns at some steps: medians of them
are the seconds of a step.

steps         to the loss, from the first step on, with this batch
step_s        median of the rounds' medians; low, high: their range
seconds, rank_s   steps * step_s, and that times the ranks
by_time, by_cost  whether the search has chosen it; ratio_time, ratio_cost: to the best of all
summary       of both searches: what they chose, ratio to the best, what was foreseen, and took
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from bench.machine import machine
from penstock.choose import trial
from penstock.choose.choose import Choice, Joining, Machines, best, best_of
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.pilot.pace import Stretch, paced
from penstock.pilot.phases import until_in
from penstock.profile.noise import gain
from penstock.search import Fixed
from penstock.state.laws.buffers import Laws
from penstock.training.until_loss import grid_of, ways_for

WIDTH, SAMPLES, MICRO_BATCHES, RANKS = 256, 8, 8, 2
NOISE = 0.5  # standard deviation of what the teacher adds to its answer
Row = dict[str, Any]


def student() -> nn.Module:
    layers = ((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*itertools.chain(*layers), nn.Linear(WIDTH, 1))


def lessons(start: int) -> Iterator[dict[str, Tensor]]:
    teacher = torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(-1)) / WIDTH**0.5
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        x = torch.randn(SAMPLES, WIDTH, generator=source)
        noise = NOISE * torch.randn(SAMPLES, 1, generator=source)
        yield {"x": x, "y": (x @ teacher).tanh().sum(1, keepdim=True) + noise}


def loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (net(batch["x"]) - batch["y"]).square().mean()


def adamw(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, 1e-3, weight_decay=0.0)


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.02, momentum=0.9)


def job_of(optimizer: Callable[..., torch.optim.Optimizer], num_steps: int) -> Job:
    about: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "num_steps": num_steps}
    return Job(student, loss, lessons, optimizer, **about)


def searched(job: Job, goal: float, least: Any, folder: Path) -> dict[str, Any]:
    """Return the part of a summary that tells of a run to a loss."""
    about: dict[str, Any] = {"check": False, "trial": False, "out": folder}
    found = ps.train(job, until_loss=goal, objective=least, **about)
    assert found is not None
    told = dict(found.summary["until"])  # type: ignore[call-overload]  # pyright: ignore
    assert told["reached"], f"the loss is {told['reached_loss']} after all steps"
    return told


def steps_to(job: Job, batch: int, goal: float, scale: float, power: float, folder: Path) -> int:
    """Return the steps of a run with one batch, from its first on, to the loss."""
    own = MICRO_BATCHES * SAMPLES
    worth = gain(own, batch * SAMPLES, scale)
    rated = paced(job, [Stretch(0, 0.0, worth, worth**power)])
    most = int(job.num_steps / worth) + 1
    one = replace(rated, micro_batches=batch, batch_range=(batch, batch), num_steps=most)
    about: dict[str, Any] = {"ranks": 1, "check": False, "trial": False, "out": folder}
    found = ps.train(one, until_loss=goal, **about)
    assert found is not None
    assert found.summary["until"]["reached"]  # type: ignore[index]  # pyright: ignore
    return int(found.summary["steps"])  # type: ignore[call-overload]  # pyright: ignore


def choices_of(job: Job, captured: Capture) -> dict[tuple[int, int], Choice]:
    """Return the plan of every (ranks, micro-batches)."""
    there = Machines(Cluster.here(RANKS))
    found = best(job, Fixed(ranks=RANKS), captured, there)
    ways: tuple[Joining, ...] = tuple(option.way for option in found.options)
    return {
        (ranks, batch): best_of(ways_for(ways, batch), Fixed(ranks=ranks), there, 2.0)
        for ranks, batch in grid_of(RANKS, MICRO_BATCHES)
    }


def timed(
    choices: dict[tuple[int, int], Choice], rounds: int, steps: int
) -> dict[tuple[int, int], list[float]]:
    """Return the medians of the rounds of every plan; they take turns."""
    laws: Laws = {}
    found: dict[tuple[int, int], list[float]] = {pair: [] for pair in choices}
    for number in range(rounds):
        for pair, choice in choices.items():
            found[pair].append(statistics.median(trial.seconds_of(laws, choice, steps)))
        face.say(f"round {number + 1} of {rounds}")
    return found


def rows_of(
    steps: dict[int, int],
    seconds: dict[tuple[int, int], list[float]],
    chosen: dict[str, tuple[int, int]],
) -> list[Row]:
    """Return a row for every (ranks, micro-batches)."""
    rows: list[Row] = []
    for (ranks, batch), each in seconds.items():
        step_s = statistics.median(each)
        whole = steps[batch] * step_s
        rows.append(
            {
                "ranks": ranks,
                "micro_batches": batch,
                "steps": steps[batch],
                "step_s": step_s,
                "low": min(each),
                "high": max(each),
                "seconds": whole,
                "rank_s": whole * ranks,
                **{f"by_{least}": pair == (ranks, batch) for least, pair in chosen.items()},
            }
        )
    for row in rows:
        row["ratio_time"] = row["seconds"] / min(other["seconds"] for other in rows)
        row["ratio_cost"] = row["rank_s"] / min(other["rank_s"] for other in rows)
    return rows


def line(row: Row) -> str:
    marks = [least for least in ("time", "cost") if row[f"by_{least}"]]
    chosen = f"  chosen by {' and '.join(marks)}" if marks else ""
    return (
        f"{row['ranks']} ranks, {row['micro_batches']:>3} micro-batches: {row['steps']:>5} steps, "
        f"each {1e3 * row['step_s']:.2f} ms ({1e3 * row['low']:.2f} - {1e3 * row['high']:.2f}): "
        f"{row['seconds']:.1f} s, {row['ratio_time']:.2f} of the best; cost "
        f"{row['ratio_cost']:.2f} of the best{chosen}"
    )


def summary_of(least: str, told: dict[str, Any], rows: list[Row]) -> Row:
    """Return the choice of a search, and its prediction."""
    own, last = next(r for r in rows if r[f"by_{least}"]), told["phases"][-1]
    chosen = told["chosen"] or {}
    searching = sum(each["seconds"] for each in told["phases"][:-1])
    return {
        "least": least,
        "ranks": last["ranks"],
        "micro_batches": last["micro_batches"],
        "ratio": own[f"ratio_{least}"],
        "phases": len(told["phases"]),
        "phases_s": searching,
        "noise_scale": chosen.get("scale"),
        "predicted_s": chosen.get("seconds"),
        "measured_s": told["seconds"],
        "step_s_predicted": chosen.get("step_s"),
        "step_s_measured": told["step_s"],
        "own_steps_predicted": chosen.get("own"),
        "own_steps_measured": told["own_steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one short round, a higher loss")
    parser.add_argument("--loss", type=float, default=0.45)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sgd", action="store_true", help="SGD with momentum, not AdamW")
    options = parser.parse_args()
    torch.set_num_threads(1)
    goal, rounds = (1.2, 1) if options.quick else (options.loss, options.rounds)
    job = job_of(sgd if options.sgd else adamw, 4000)
    chosen: dict[str, tuple[int, int]] = {}
    told: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
        for least in ("time", "cost"):
            face.say(f"searching by {least}")
            told[least] = searched(job, goal, least, Path(name) / least)
            last = told[least]["phases"][-1]
            chosen[least] = last["ranks"], last["micro_batches"]
        kept = until_in(Path(name) / "time")
        assert kept is not None
        scale = (told["time"]["chosen"] or {}).get("scale") or 0.0
        steps: dict[int, int] = {}
        for batch in sorted({batch for _, batch in grid_of(RANKS, MICRO_BATCHES)}):
            folder = Path(name) / f"steps-{batch}"
            steps[batch] = steps_to(job, batch, goal, scale, kept.exponent, folder)
            face.say(f"{batch} micro-batches a step: {steps[batch]} steps to the loss")
        seconds = timed(choices_of(job, capture(job)), rounds, 6 if options.quick else 16)
    rows = rows_of(steps, seconds, chosen)
    summary = [summary_of(least, told[least], rows) for least in told]
    if options.json:
        print(json.dumps({"rows": rows, "summary": summary, "machine": machine()}))
        return
    for row in rows:
        face.show(line(row))
    for one in summary:
        face.show(json.dumps(one))


if __name__ == "__main__":
    main()
