"""Volatile: a real run whose machines drop by a trace and come back, beside what was foreseen.

    python -m bench.volatile [--json] [--steps 1500]

`penstock train --elastic` with a policy twice, with up to three processes of this host as machines,
whose batch follows the ranks (`Job.batch_by_ranks`): first for a while by a trace that offers 1, 3
and 2 of them, which tells steps per second, what a change costs and what a start takes; then by
another trace.  What a replay of that trace foresees with these figures stands beside the second
run.  Two minutes.

The job is a quadratic one of D independent coordinates: w goes to the mean of x, normal with
variance s^2, by SGD with rate a from w = 1.  A step of y ranks is the mean over y n samples, so

    E[w_J^2] = (1 - a)^(2 J) + a^2 s^2 sum_j (1 - a)^(2 (J - j)) / (y_j n)

exactly, and the mean over D coordinates is within sqrt(2 / D) of it.  Reading takes all the time.

seconds         from the first step to the last; `foreseen` by the replay, `measured` by the clock
inverse_ranks   mean of 1 / y over steps: foreseen from the replay, and as it was
error           mean of w^2 in the end: foreseen from the replay's ranks, and as it was; by the
                ranks that there were, by the formula; and of a run that always has all
largest_error   of a step's loss, relative to a plain loop over the same batches: y_j as it was
lost, repeated  steps
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.machine import machine
from penstock.checkpoints.checkpoint import latest, load
from penstock.fleet import policies
from penstock.fleet.job_work import FleetJob, Speed
from penstock.fleet.market import priced
from penstock.fleet.of_run import recorded
from penstock.fleet.policy_file import PolicyFile
from penstock.fleet.replay import Ruler, replay
from penstock.fleet.traces import read_market
from penstock.job import Job
from penstock.pilot.wishes import decisions_in

RANKS, SHARE, SAMPLES, WIDTH = 3, 2, 4, 4096
RATE, NOISE = 0.001, 30.0  # so that drift and noise are alike in the end
READ_S, TICK_S = 0.02, 0.2
FIRST = ((0, 1), (4, 3), (16, 2), (21, 1))  # a generation counts once another follows it
THEN = ((0, 3), (10, 1), (20, 3), (34, 2), (44, 1), (50, 3))
HEAD = "time_s,pool,machines,usd_h,on_demand_usd_h"


class Quadratic(nn.Module):
    """D weights that begin at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.w - x).square().sum(-1).mean()


def batches(start: int) -> Iterator[Tensor]:
    for index in itertools.count(start):
        source = torch.Generator().manual_seed(index)
        yield NOISE * torch.randn(SAMPLES, WIDTH, generator=source, dtype=torch.float64)


def slow_batches(start: int) -> Iterator[Tensor]:
    for batch in batches(start):
        time.sleep(READ_S)
        yield batch


def job() -> Job:
    own = {"micro_batches": RANKS * SHARE, "num_steps": 10**6, "batch_by_ranks": True}
    return Job(Quadratic, lambda net, x: net(x), slow_batches, _sgd, **own)


def _sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, RATE)


# -- a run ----------------------------------------------------------------------------------------


class Volatile(NamedTuple):
    """A run that was made: its rows and decisions, and mean squares of the weights in the end."""

    folder: Path
    rows: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    error: float
    seconds: float

    @property
    def ranks(self) -> list[int]:
        """Return the number of ranks of each step."""
        return [row["micro_batches"] // SHARE for row in self.rows]


def ran(
    place: Path, offered: Sequence[tuple[float, int]], steps: int, figures: FleetJob
) -> Volatile:
    """Return a run by a trace of (seconds, machines)."""
    place.mkdir()
    write_trace(place / "trace.csv", offered)
    PolicyFile(
        policy="transient",
        pools=("here",),
        machines=RANKS,
        plan="",
        deadline_h=1.0,
        budget_usd=0.0,
        expected_usd=0.0,
        expected_hours=0.0,
        chance_in_time=1.0,
        traces=("trace.csv",),
        tick_s=TICK_S,
        job=figures,
    ).save(place / "policy.toml")
    folder = place / "run"
    words = ["train", "bench.volatile:job", "--elastic", "--set", f"policy={place / 'policy.toml'}"]
    words += [
        "--out",
        str(folder),
        "--steps",
        str(steps),
        "--set",
        "trial=false",
        "--set",
        "check=false",
    ]
    environment = {**os.environ, "XDG_CACHE_HOME": str(place.parent / "cache")}
    command = [sys.executable, "-m", "penstock", *words]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    newest = latest(folder / "checkpoints")
    assert newest is not None, "a run ends with a checkpoint"
    weights = load(newest).tensors["weights/w"]
    begins = json.loads((folder / "events.jsonl").read_text().splitlines()[0])
    seconds = (folder / "metrics.jsonl").stat().st_mtime - begins["time"] + begins["stepped_s"]
    error = float(weights.square().mean())
    return Volatile(folder, rows, decisions_in(folder), error, seconds)


def write_trace(path: Path, offered: Sequence[tuple[float, int]]) -> None:
    lines = [HEAD, *(f"{at},here,{count},1.0,3.0" for at, count in offered)]
    path.write_text("\n".join(lines) + "\n")


# -- what is foreseen -----------------------------------------------------------------------------


def figures_of(run: Volatile) -> FleetJob:
    """Return a job with the run's seconds of steps, changes and starts."""
    told = recorded(run.folder).job
    grows = [
        (one["held"]["here"] < one["wanted"]["here"], other["took_s"])
        for one, other in itertools.pairwise(run.decisions)
        if one["what"] == "wants" and other["what"] == "there" and one["step"]
    ]
    starts = [took_s for is_more, took_s in grows if is_more]
    return replace(told, start_s=sum(starts) / len(starts))


def foreseen(path: Path, figures: FleetJob, steps: int) -> tuple[float, list[int]]:
    """Return seconds of the run by a trace, from the first step on, and ranks by step.

    The machines with which it begins are there at once.
    """
    market = priced(read_market(path), 0.0, 0.0)
    wanted = replace(figures, steps=float(steps), machines=RANKS)
    ruler = Ruler("transient", policies.transient)
    # All that is offered at first is ordered a start before the market begins.
    earlier = replace(
        market,
        times_s=[0.0, *(market.times_s[1:] + figures.start_s)],
        until_s=market.until_s + figures.start_s,
    )
    run = replay(earlier, wanted, ruler, deadline_s=3600.0, tick_s=TICK_S, with_timeline=True)
    rows = run.timeline[:, [3, 4]].tolist()  # ready, steps done
    ranks = [0] * steps
    for (ready, done), (_, until) in itertools.pairwise([*rows, [0, steps]]):
        for step in range(int(done), min(steps, int(until))):
            ranks[step] = int(ready)
    return run.hours * 3600 - figures.start_s, ranks


def error_of(ranks: Sequence[int]) -> float:
    """Return E[w^2] after steps of so many ranks."""
    error = 1.0
    for count in ranks:
        error = (1 - RATE) ** 2 * error + (RATE * NOISE) ** 2 / (count * SHARE * SAMPLES)
    return error


def plain_losses(ranks: Sequence[int]) -> Iterator[float]:
    """Yield the losses of a plain loop whose steps read the next micro-batches of so many ranks."""
    net, data = Quadratic(), batches(0)
    update = _sgd(net.parameters())
    for count in ranks:
        update.zero_grad()
        parts = [net(next(data)) for _ in range(count * SHARE)]
        torch.stack(parts).mean().backward()
        update.step()
        yield torch.stack(parts).detach().mean().item()


def measured(steps: int) -> dict[str, Any]:
    """Return the figures of the second run."""
    guess = FleetJob(1.0, tuple(Speed(n, 20.0) for n in range(1, RANKS + 1)), start_s=5.0)
    with tempfile.TemporaryDirectory() as place:
        first = ran(Path(place) / "first", FIRST, steps // 3, guess)
        figures = figures_of(first)
        write_trace(Path(place) / "then.csv", THEN)
        seconds, ranks = foreseen(Path(place) / "then.csv", figures, steps)
        then = ran(Path(place) / "then", THEN, steps, figures)
    numbers = [row["step"] for row in then.rows]
    pairs = zip(then.rows, plain_losses(then.ranks), strict=True)
    return {
        "machine": machine(),
        "steps": steps,
        "start_s": figures.start_s,
        "reform_s": figures.reform_s,
        "steps_per_s": {f"{s.machines}": s.steps_per_s for s in figures.speeds},
        "seconds": _both(seconds, then.seconds),
        "inverse_ranks": _both(_inverse(ranks), _inverse(then.ranks)),
        "error": _both(error_of(ranks), then.error),
        "error_by_ranks_as_they_were": error_of(then.ranks),
        "error_of_all_ranks": error_of([RANKS] * steps),
        "largest_error": max(abs(row["loss"] / loss - 1) for row, loss in pairs),
        "lost": steps - len({*numbers}),
        "repeated": len(numbers) - len({*numbers}),
    }


def _inverse(ranks: Sequence[int]) -> float:
    return sum(1 / count for count in ranks) / len(ranks)


def _both(foreseen: float, measured: float) -> dict[str, float]:
    return {"foreseen": foreseen, "measured": measured, "off": foreseen / measured - 1}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measured(asked.steps)
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, dict) and "off" in value:
            words = f"{value['foreseen']:.5g} foreseen, {value['measured']:.5g} measured"
            print(f"{name:28} {words}, {100 * value['off']:+.1f} %")
        else:
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
