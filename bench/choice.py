"""What a choice costs: the plan that was taken beside all that could have been, run by turns.

    python -m bench.choice [--json] [--runs N] [--quick]

A run measures the ops of a model anew, searches on two ranks, and takes a plan in three ways:

    best      the one that is predicted to be fastest
    simplest  of those predicted within 5 % of it the simplest, as `penstock plan` does
    trial     the one that took its real steps fastest, as `penstock train` does before a long run

Then these, the best plan of each other number of stages, plain replicas and one process take steps
by turns.  Half of the runs have a neighbour, which computes on one core for a random part of each
second.

regret   measured seconds of the plan that was taken / of the fastest of all that took turns - 1
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from bench import zoo
from bench.machine import machine
from penstock.choose import trial
from penstock.choose.choose import Choice, Machines, Searched, best
from penstock.choose.prepare import machines
from penstock.choose.settle import CheckOptions, examined
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.listener import SILENT, Listener
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.schedule.recipe import name_of
from penstock.search import Fixed

RANKS, TURNS = 2, 3
MODELS = ("gpt", "cnn", "uneven", "small gpt")
WAYS = ("best", "simplest", "trial")
Row = dict[str, float | int | str]


def bare(plan: Plan) -> Plan:
    """Return a plan without what it says of itself."""
    return replace(plan, decisions=(), predicted=None)


def fastest_predicted(found: Searched) -> Choice:
    """Return the plan that is predicted to be fastest."""
    rows = [
        (each.step_s, at, option.way, each.plan)
        for at, option in enumerate(found.options)
        for each in option.found.candidates
        if not each.refused
    ]
    _, _, way, plan = min(rows, key=lambda row: row[:2])
    return Choice(way.job, way.captured, plan.changed(joined=way.joined))


@contextmanager
def neighbour(seed: int, *, disturbs: bool) -> Generator[None]:
    """Let a process compute on one core for a random part of each second meanwhile."""
    if not disturbs:
        yield
        return
    process = multiprocessing.get_context("fork").Process(target=_burn, args=(seed,), daemon=True)
    process.start()
    try:
        yield
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def _burn(seed: int) -> None:
    chance = random.Random(seed)
    while True:
        until = time.perf_counter() + chance.random()
        while time.perf_counter() < until:
            pass
        time.sleep(max(0.0, 1.0 - chance.random()))


def measured_anew(
    captured: Capture, job: Job, cluster: Cluster, _: Listener
) -> tuple[Profile, ...]:
    """Return the profile of the step on this host, whatever is kept."""
    profile = measure(captured, job, beside=cluster.num_ranks - 1)
    return (replace(profile, kind=cluster.hosts[0].device),)


def choices_of(job: Job, there: Machines) -> tuple[dict[str, Choice], list[Choice], trial.Timer]:
    """Return the plan of each way, all that are to take turns, and what times them."""
    laws = examined(job, "", CheckOptions(), SILENT).laws
    captured, fixed = capture(job), Fixed()
    found = best(job, fixed, captured, there)
    timer = partial(trial.seconds_of, laws)
    finalists = trial.finalists(found, fixed, there)
    taken = {
        "best": fastest_predicted(found),
        "simplest": found.choice,
        "trial": trial.tried(finalists, timer)[0].choice,
    }
    everything: list[Choice] = []
    for choice in (*taken.values(), *finalists):
        if all(bare(choice.plan) != bare(other.plan) for other in everything):
            everything.append(choice)
    return taken, everything, timer


def measured_s(choices: Sequence[Choice], timer: trial.Timer, turns: int) -> list[float]:
    """Return the median seconds of a step of each, by turns there and back."""
    seconds: list[list[float]] = [[] for _ in choices]
    for turn in range(turns):
        order = range(len(choices)) if turn % 2 == 0 else reversed(range(len(choices)))
        for at in order:
            seconds[at] += timer(choices[at], 5)
    return [statistics.median(each) for each in seconds]


def rows_of(name: str, number: int, *, disturbs: bool, turns: int) -> Iterator[Row]:
    """Yield what each way of choosing cost in one run."""
    with neighbour(number, disturbs=disturbs):
        there = Machines(machines(None, RANKS, SILENT), measured_anew, SILENT)
        taken, everything, timer = choices_of(zoo.JOBS[name], there)
        seconds = measured_s(everything, timer, turns)
    plans = [bare(choice.plan) for choice in everything]
    for way in WAYS:
        plan = bare(taken[way].plan)
        took_s = seconds[plans.index(plan)]
        yield {
            "model": name,
            "run": number,
            "neighbour": "yes" if disturbs else "no",
            "way": way,
            "plan": f"{plan.replicas} x {plan.num_stages} {name_of(plan.schedule)}",
            "step_s": took_s,
            "fastest_s": min(seconds),
            "regret": took_s / min(seconds) - 1,
            "plans": len(plans),
        }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return the regret of each way, quiet and disturbed: mean, median and worst."""
    found: list[Row] = []
    for busy in dict.fromkeys(str(row["neighbour"]) for row in rows):
        for way in WAYS:
            own = [float(r["regret"]) for r in rows if (r["neighbour"], r["way"]) == (busy, way)]
            found.append(
                {
                    "neighbour": busy,
                    "way": way,
                    "runs": len(own),
                    "mean": math.fsum(own) / len(own),
                    "median": statistics.median(own),
                    "worst": max(own),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print rows and summary as JSON")
    parser.add_argument("--runs", type=int, default=30, help="in all, every second one disturbed")
    parser.add_argument("--quick", action="store_true", help="two runs of the smallest model")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    runs, names = (2, MODELS[-1:]) if asked.quick else (asked.runs, MODELS)
    for number in range(runs):
        name = names[number // 2 % len(names)]
        own = list(rows_of(name, number, disturbs=number % 2 == 1, turns=TURNS))
        rows += own
        words = ", ".join(
            f"{row['way']} {row['plan']} {100 * float(row['regret']):.1f} %" for row in own
        )
        face.say(f"run {number + 1} of {runs}, {name}, neighbour {own[0]['neighbour']}: {words}")
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": rows, "summary": summary(rows)}))
        return
    for row in summary(rows):
        figures = ", ".join(f"{k} {100 * float(row[k]):.1f} %" for k in ("mean", "median", "worst"))
        print(
            f"neighbour {row['neighbour']:3}  {row['way']:8}  {row['runs']} runs: regret {figures}"
        )


if __name__ == "__main__":
    main()
