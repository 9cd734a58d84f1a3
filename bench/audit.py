"""What audits cost, and how soon they find faults that begin in the middle of a run.

    python -m bench.audit --costs [--json] [--runs 2] [--audit 1%] [JOB ...]
    python -m bench.audit --faults [--json] [--steps 4000] [--audit 1%] [--only WORD ...]

Without --costs and --faults both are done, one after the other.

Each job is trained by one plan with audits and without, by turns: processor time of all processes
and time on the clock of the whole command, and the ratios of each pair: least, median, most.
`share` is what the run itself says that audits took.  Jobs are made so long, by what a first run
has shown, that the share pays for three audits at least.

With --faults thirty wrong lines are planted, one a run, each from a step on that is drawn at
random of the first half; `found` is the step at which an audit has named it, `late` how many steps
later, `audits` how many steps were audited.  The last row is a run without a fault: it has to be
equal, and to have been audited.  A share of a short run pays for no audit: then exit code 1.
"""

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import penstock as ps
from bench.audit_faults import FAULTS, Fault
from bench.machine import machine
from penstock.training.audited_run import DiffersError

JOBS = {  # steps to begin with
    "bench/audit_jobs.py:gpt": 1500,
    "bench/audit_jobs.py:resnet": 2000,
    "bench/audit_jobs.py:llama": 2000,
    "bench/audit_faults.py": 4000,
}
LEAST, TRIES, MORE = 3, 3, 1.6  # audits; runs that are tried; times as many steps of the next
FAULTY = "bench/audit_faults.py:job"


def used_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    rows = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(row.ru_utime + row.ru_stime for row in rows)


def ran(job: str, plan: Path, steps: int, audit: str, out: Path) -> dict[str, float]:
    """Train by a plan; return what that took, and what audits of it."""
    cpu_s, wall_s = used_s(), time.perf_counter()
    done = ps.train(job, plan=plan, num_steps=steps, out=out, audit=audit)
    assert done is not None, "no torchrun here"
    counted = done.summary["audits"]
    assert isinstance(counted, dict), "as a summary has it"
    return {
        "cpu_s": used_s() - cpu_s,
        "wall_s": time.perf_counter() - wall_s,
        "step_s": done.outcome.step_s,
        "audits": counted["count"],
        "share": counted["cpu_s"] / counted["of_s"] if counted["of_s"] else 0.0,
    }


def long_enough(job: str, plan: Path, steps: int, audit: str, folder: Path) -> int:
    """Return for how many steps a share pays for so many audits, by runs that are tried first."""
    for number in range(TRIES):
        audits = ran(job, plan, steps, audit, folder / f"try-{number}")["audits"]
        if audits >= LEAST:
            break
        steps = round(MORE * steps)
    return steps


def cost(job: str, steps: int, runs: int, audit: str) -> dict[str, object]:
    """Return the cost of a job's audits."""
    rows: dict[str, list[dict[str, float]]] = {audit: [], "0": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = ps.train(job, ranks=2, num_steps=2, out=folder / "first", trial=False)
        assert first is not None, "no torchrun here"
        plan = folder / "first" / "plan.json"
        steps = long_enough(job, plan, steps, audit, folder)
        for number in range(runs):
            order = [audit, "0"] if number % 2 else ["0", audit]
            for each in order:
                rows[each].append(ran(job, plan, steps, each, folder / f"{number}-{each}"))
    found: dict[str, object] = {"job": job, "steps": steps, "runs": runs}
    for what in ("cpu_s", "wall_s"):
        for each, told in (("with", rows[audit]), ("without", rows["0"])):
            values = [row[what] for row in told]
            found[f"{what}_{each}"] = [min(values), statistics.median(values), max(values)]
        pair = zip(rows[audit], rows["0"], strict=True)
        values = [one[what] / two[what] for one, two in pair]
        found[f"{what}_ratio"] = [min(values), statistics.median(values), max(values)]
    found["step_ms"] = 1e3 * statistics.median(row["step_s"] for row in rows["0"])
    found["audits"] = statistics.median(row["audits"] for row in rows[audit])
    found["share"] = statistics.median(row["share"] for row in rows[audit])
    return found


class Trial(NamedTuple):
    """How faults are looked for: in so many steps of a plan, audited with a share of them."""

    plan: Path
    steps: int
    share: str

    def found_by(self, fault: Fault | None, first: int) -> dict[str, object]:
        """Return when audits found a fault that begins with a step; `fault` None: there is none."""
        name = "none" if fault is None else fault.name
        row: dict[str, object] = {"fault": name, "first": first, "steps": self.steps}
        with tempfile.TemporaryDirectory() as folder:
            asked = {"plan": self.plan, "num_steps": self.steps, "out": folder}
            try:
                with nullcontext() if fault is None else fault.plant(first):
                    done = ps.train(FAULTY, **asked, audit=f"{self.share},stop")
            except DiffersError as problem:
                rows = (Path(folder) / "audits.jsonl").read_text().splitlines()
                step, why = problem.audit.step, problem.audit.problem
                told = {"found": step, "late": step - first, "audits": len(rows), "why": why}
                return {**row, **told}
            assert done is not None, "no torchrun here"
            counted = done.summary["audits"]
            assert isinstance(counted, dict), "as a summary has it"
            why = str(done.summary["audited"])
            told = {"found": None, "late": None, "audits": counted["count"], "why": why}
            return {**row, **told}


def faults(steps: int, seed: int, share: str, only: Sequence[str]) -> list[dict[str, object]]:
    """Return the outcome of each fault, and of a run without one.

    only:     words of the faults that are planted; none: all are.
    """
    chance, rows = random.Random(seed), list[dict[str, object]]()
    planted = [f for f in FAULTS if not only or any(word in f.name for word in only)]
    with tempfile.TemporaryDirectory() as folder:
        first = ps.train(FAULTY, ranks=2, num_steps=2, out=folder, trial=False)
        assert first is not None, "no torchrun here"
        trial = Trial(Path(folder) / "plan.json", steps, share)
        for fault in (*planted, None):
            row = trial.found_by(fault, chance.randrange(10, steps // 2))
            rows.append(row)
            print(f"  {row['fault']}: from {row['first']}, found {row['found']}", file=sys.stderr)
    return rows


def line(row: dict[str, object]) -> str:
    """Return a row as a line."""
    return "  ".join(f"{name} {_words(value)}" for name, value in row.items())


def show(rows: Sequence[dict[str, object]]) -> None:
    """Print rows as lines."""
    for row in rows:
        print(line(row))


def _words(value: object) -> str:
    if isinstance(value, list):
        return "/".join(f"{each:.2f}" for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Return how many faults were found, and how soon; the last row is of a run without one."""
    late = sorted(int(str(row["late"])) for row in rows[:-1] if row["late"] is not None)
    words = f"{len(late)} of {len(rows) - 1} faults found"
    if late:
        words += f", {statistics.median(late):.0f} steps late in the median, {late[-1]} at most"
    return f"{words}; the run without one: {rows[-1]['why']}"


def main() -> int:
    """Run the bench; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("jobs", nargs="*")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--audit", default="1%")
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--only", nargs="*", default=[], help="words of the faults to plant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    is_all = asked.costs == asked.faults
    jobs = (asked.jobs or list(JOBS)) if asked.costs or is_all else []
    costs = list[dict[str, object]]()
    for job in jobs:
        costs.append(cost(job, JOBS.get(job, 1000), asked.runs, asked.audit))
        print(line(costs[-1]), file=sys.stderr, flush=True)
    planted = list[dict[str, object]]()
    if asked.faults or is_all:
        planted = faults(asked.steps, asked.seed, asked.audit, asked.only)
        print(summary(planted), file=sys.stderr)
    if asked.json:
        print(json.dumps({"machine": machine(), "costs": costs, "faults": planted}, indent=2))
    else:
        show([*costs, *planted])
    return int(any(_is_unaudited(row) for row in planted[-1:]))


def _is_unaudited(row: dict[str, object]) -> bool:
    return not row["audits"] or row["found"] is not None


if __name__ == "__main__":
    sys.exit(main())
