"""A run of which one rank is slowed by a known factor, and recovers: a step in each state.

    python -m bench.straggler [--json] [--quick] [--factor F] [--steps N] [--since A] [--until B]
                              [--stays] [--elastic] [--ahead]
    python -m bench.straggler --walk

A GPT of bench/zoo.py in 16 micro-batches, two replicas.  From step A to step B the process of rank
1 is stopped for (F - 1) / F of each 50 ms: it takes F times as long, however busy the machine is.

before_s, slowed_s, shared_s, recovered_s, back_s    median seconds of a step: before A; slowed,
                until micro-batches move; then; after B, until they are taken back; after that
predicted       of the same, by the simulator, for the factors that the ranks have told
shares          of the micro-batches, in the three states; steps: after which they changed
changing_s      that a change took, finding it included
gain, predicted_gain    slowed_s / shared_s
left            of what the slow rank costs at best: (shared_s - ideal) / (slowed_s - ideal), with
                ideal = 2 before_s / (1 + 1 / F)
--stays         the plan stays, for comparison

--walk simulates ways to move: straight to the balanced shares, or by one micro-batch after the
other, each after 16 more samples, or each after one step; the factor that is found is off by 5 %
in the mean.  Rows: micro_batches, factor, way, lost_steps (of 500, beside the balanced shares at
once, in steps of a healthy run).
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench import zoo
from bench.machine import machine
from bench.replan import ahead
from penstock.cli import face
from penstock.listener import Row as StepRow
from penstock.pilot.replan_log import Replan, replans_in
from penstock.training.events import EVENTS
from penstock.units import format_seconds

RANKS, UNUSUAL, MICRO_BATCHES = 2, 4, 16
_SLICE_S = 0.05
Row = dict[str, Any]


def _throttle(pid: int, factor: float, over: threading.Event) -> None:
    """Let a process run for 1 / factor of the time."""
    while not over.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_SLICE_S * (1 - 1 / factor))
        os.kill(pid, signal.SIGCONT)
        time.sleep(_SLICE_S / factor)


@contextmanager
def slowed(options: argparse.Namespace) -> Iterator[Callable[[StepRow], None]]:
    """Yield what, told of each step, slows rank 1 for some of them."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def told(row: StepRow) -> None:
        step = int(row["step"] or 0)
        pids = sorted(child.pid or 0 for child in multiprocessing.active_children())[-RANKS:]
        for pid in pids if options.ahead and step == 1 else ():  # they have a session of their own
            if (group := Path(f"/proc/{pid}/autogroup")).exists():
                group.write_text("-15")
        if step == options.since:
            about = pids[1], options.factor, over
            threads.append(threading.Thread(target=_throttle, args=about, daemon=True))
            threads[0].start()
        if step == options.until:
            over.set()

    try:
        yield told
    finally:
        over.set()
        for thread in threads:
            thread.join()


def run(folder: Path, options: argparse.Namespace) -> Row:
    """Return the row of a run."""
    job = replace(zoo.JOBS["small gpt"], micro_batches=MICRO_BATCHES)
    since, until, factor = options.since, options.until, options.factor
    with slowed(options) as told:
        found = ps.train(
            job,
            ranks=RANKS,
            stages=1,
            num_steps=options.steps,
            out=folder,
            check=False,
            trial=False,
            replan=not options.stays,
            elastic=options.elastic,
            on_step=told,
        )
    assert found is not None
    seconds = [each.seconds for each in found.outcome.steps]
    made = [each for each in replans_in(folder) if each.is_shared]
    if options.elastic:
        made = [_as_replan(each) for each in events_in(folder)[1:]]
    away = next((each for each in made if since <= each.step < until), None)
    back = next((each for each in made if each.step >= until), None)
    ends = away.step if away else until, back.step if back else options.steps
    parts = {
        "before_s": seconds[UNUSUAL:since],
        "slowed_s": seconds[since + 1 : ends[0]],
        "shared_s": seconds[ends[0] + 1 : until] if away else [],
        "recovered_s": seconds[until + 1 : ends[1]] if away else seconds[until + 1 :],
        "back_s": seconds[ends[1] + 1 :] if back else [],
    }
    row: Row = {n: statistics.median(each) if each else None for n, each in parts.items()}
    ideal = RANKS * row["before_s"] / (1 + 1 / factor)
    shared = row["shared_s"]
    gain = row["slowed_s"] / shared if shared else None
    left = (shared - ideal) / (row["slowed_s"] - ideal) if shared else None
    return {
        "factor": factor,
        "plan": str(found.plan).splitlines()[0].partition(": ")[2],
        **row,
        "predicted": [[each.before_s, each.after_s] for each in made],
        "found_factors": [each.factors for each in made],
        "changes": [each.changes for each in made],
        "steps": [each.step for each in made],
        "changing_s": [each.move_s + each.search_s for each in made],
        "gain": gain,
        "predicted_gain": away.before_s / away.after_s if away and away.before_s else None,
        "left": left,
        "loss": found.outcome.steps[-1].loss,
    }


def events_in(folder: Path) -> list[Any]:
    """Return the generations of an elastic run."""
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


def _as_replan(event: Any) -> Replan:
    """Return a generation whose micro-batches were shared otherwise, as plain runs tell of it."""
    move_s = event["agreed_s"] + event["ready_s"]
    figures = 0.0, event["predicted_step_s"], 0.0, move_s
    return Replan(event["step"], (), *figures, event["plan"], is_shared=True)


# -- ways to move ----------------------------------------------------------------------------------

WAYS = {"straight": (10**6, 16), "one by one, after 16 samples": (1, 16), "one by one": (1, 1)}
_STEPS, _CHANGE, _OFF = 500, 0.3, 0.05  # steps that a change takes; error of the factor found


def lost_steps(micro_batches: int, factor: float, way: tuple[int, int], off: float) -> float:
    """Return the steps of a healthy run that are lost beside balanced shares at once.

    way:   the most micro-batches of a change, and the steps between two.
    off:   by how much the factor that is found is wrong.
    """

    def step(given: int) -> float:
        """Return the length of a step, the slow one of two ranks having given so many."""
        half = micro_batches / 2
        return max(half + given, (half - given) * factor) / half

    def best(seen: float) -> int:
        half = micro_batches // 2
        return min(
            range(half), key=lambda given: max(half + given, (half - given) * seen)
        )  # fmt: skip

    goal, most, pause = best(factor * (1 + off)), *way
    lost, given, since = 0.0, 0, 16  # until it is noticed
    for at in range(_STEPS):
        if at >= since and given != goal:
            given += int(np.clip(goal - given, -most, most))
            lost, since = lost + _CHANGE, at + pause
        lost += step(given) - step(best(factor))
    return lost


def walk() -> list[Row]:
    """Return the steps that are lost by each way to move."""
    offs = np.random.default_rng(0).normal(0.0, _OFF, 200)
    return [
        {
            "micro_batches": count,
            "factor": factor,
            "way": name,
            "lost_steps": float(np.mean([lost_steps(count, factor, way, o) for o in offs])),
        }
        for count in (8, 16, 32)
        for factor in (1.3, 2.0, 4.0)
        for name, way in WAYS.items()
    ]


def line(row: Row) -> str:
    def shown(name: str) -> str:
        return "-" if row[name] is None else format_seconds(row[name])

    states = "before_s", "slowed_s", "shared_s", "recovered_s", "back_s"
    words = ", ".join(f"{name.removesuffix('_s')} {shown(name)}" for name in states)
    gain = "" if row["gain"] is None else f"; gain {row['gain']:.2f}, left {row['left']:.2f}"
    gain += f", predicted {row['predicted_gain']:.2f}" if row["predicted_gain"] else ""
    return f"slowed by {row['factor']:g}: {words}{gain}; {'; '.join(row['changes'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="a short run, which may end too soon")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--since", type=int, default=60)
    parser.add_argument("--until", type=int, default=160)
    parser.add_argument("--stays", action="store_true", help="the plan stays")
    parser.add_argument("--ahead", action="store_true", help="on a machine in use (as root)")
    parser.add_argument("--elastic", action="store_true", help="by an elastic run")
    parser.add_argument("--walk", action="store_true", help="simulate ways to move")
    options = parser.parse_args()
    if options.walk:
        rows = walk()
        if not options.json:
            for row in rows:
                face.show(
                    f"{row['micro_batches']:>3} micro-batches, factor {row['factor']:g}, "
                    f"{row['way']}: {row['lost_steps']:.1f} steps lost"
                )
    else:
        if options.quick:
            options.steps, options.since, options.until = 24, 8, 16
        with tempfile.TemporaryDirectory(prefix="penstock-") as name:
            os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
            with ahead() if options.ahead else nullcontext():
                rows = [run(Path(name) / "run", options)]
        if not options.json:
            face.show(line(rows[0]))
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
