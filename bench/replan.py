"""A run of which one rank is slowed: a step before, then, and after the plan was made again.

    python -m bench.replan [--json] [--quick] [--model NAME] [--steps N] [--since N] [--ahead]

A model of bench/zoo.py, or that of examples/gpt.py, on two ranks, each pinned to a core of its own;
from step `since` on a process that does nothing but compute shares the core of rank 1.  Once with
the plan that was searched for, to the end; once as `penstock train` does it.

plan              "stays", or "is made again"
before_s          median seconds of a step without the neighbour, from the fifth on
slowed_s          with it, until the plan is made again, or to the end
after_s           by the new plan; None: there is none
made_after        the step
predicted_before_s, predicted_slowed_s, predicted_after_s    of these, where the run predicts them
search_s, move_s  that searching and moving took
gain, predicted_gain   slowed_s / after_s, measured and predicted
sampled, share    windows that were sampled, and what part of the time sampling took
plan_before, plan_after   in words
factor            by which the slowest rank was slower than the fastest, to what they were before
times, back       how often the plan was made again, and of these went back to the one before
loss              of the last step
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import penstock as ps
from bench import zoo
from bench.machine import machine
from penstock.cli import face
from penstock.listener import Row as StepRow
from penstock.pilot.replan_log import measured_s, replans_in
from penstock.plan import Plan
from penstock.units import format_seconds

GPT = Path(__file__).parent.parent / "examples" / "gpt.py"
RANKS, UNUSUAL = 2, 4  # the first steps are not like the others
Row = dict[str, float | int | str | None]


def _burn(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def disturbed(since: int) -> Generator[Callable[[StepRow], None]]:
    """Yield what, told of each step, pins the ranks, and starts a neighbour after `since`."""
    context, started = multiprocessing.get_context("fork"), list[int]()

    def told(row: StepRow) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if row["step"] == 1:
            ranks = sorted(child.pid or 0 for child in multiprocessing.active_children())
            for rank, pid in enumerate(ranks[-RANKS:]):
                os.sched_setaffinity(pid, {cores[rank % len(cores)]})
        if row["step"] == since:
            process = context.Process(target=_burn, args=(cores[1 % len(cores)],), daemon=True)
            process.start()
            started.append(process.pid or 0)

    try:
        yield told
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)


@contextmanager
def ahead() -> Generator[None]:
    """Let what this process starts get most of the cores that others use too (as root)."""
    group = Path("/proc/self/autogroup")  # where there is one, it alone counts between sessions
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -15)
        if group.exists():
            group.write_text("-15")
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        if group.exists():
            group.write_text("0")


def run(folder: Path, name: str, *, replan: bool, steps: int, since: int) -> Row:
    """Return the row of a run of a model."""
    with disturbed(since) as told:
        found = ps.train(
            zoo.JOBS[name] if name in zoo.JOBS else str(GPT),
            ranks=RANKS,
            num_steps=steps,
            out=folder,
            check=False,
            trial=False,
            replan=replan,
            on_step=told,
        )
    assert found is not None
    assert found.plan is not None
    seconds = [each.seconds for each in found.outcome.steps]
    made = replans_in(folder)
    back = sum(each.is_back for each in made)
    end = made[0].step if made else steps
    first = made[0] if made else None
    ((_, after_s),) = measured_s(folder, made[:1]) if made else ((None, None),)
    before_s, slowed_s = (
        statistics.median(part) for part in (seconds[UNUSUAL:since], seconds[since + 1 : end])
    )
    sampling = json.loads((folder / "summary.json").read_text())["sampling"]
    own = None if found.plan.predicted is None else found.plan.predicted.step_s
    return {
        "model": name,
        "plan": "is made again" if replan else "stays",
        "before_s": before_s,
        "slowed_s": slowed_s,
        "after_s": after_s,
        "made_after": first.step if first else None,
        "predicted_before_s": None if first else own,
        "predicted_slowed_s": first.before_s if first else None,
        "predicted_after_s": first.after_s if first else None,
        "search_s": first.search_s if first else None,
        "move_s": first.move_s if first else None,
        "gain": slowed_s / after_s if after_s else None,
        "predicted_gain": first.before_s / first.after_s if first else None,
        "sampled": sampling["sampled"],
        "share": sampling["share"],
        "changes": first.changes if first else _words(found.plan),
        "factor": max(first.factors) / min(first.factors) if first else None,
        "times": len(made),
        "back": back,
        "loss": found.outcome.steps[-1].loss,
    }


def _words(plan: Plan) -> str:
    return str(plan).splitlines()[0].partition(": ")[2]


def line(row: Row) -> str:
    def shown(key: str) -> str:
        value = row[key]
        return format_seconds(value) if isinstance(value, float) else "-"

    words = f"plan {row['plan']}: {shown('before_s')} a step, slowed {shown('slowed_s')}"
    if row["made_after"]:
        words += f", after step {row['made_after']} {shown('after_s')} (predicted "
        words += f"{shown('predicted_slowed_s')} and {shown('predicted_after_s')}); searching "
        words += f"{shown('search_s')}, moving {shown('move_s')}"
    share = float(row["share"] or 0.0)
    return f"{words}; {row['sampled']} windows sampled: {share:.3%} of the time\n  {row['changes']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="short runs, which may end too soon")
    parser.add_argument("--model", choices=("example", *zoo.JOBS), default="example")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--since", type=int, default=20)
    parser.add_argument("--ahead", action="store_true", help="on a machine in use (as root)")
    options = parser.parse_args()
    steps = 24 if options.quick else options.steps
    since = 8 if options.quick else options.since
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")  # the first run teaches the second
        for replan in (False, True):
            with ahead() if options.ahead else nullcontext():
                folder = Path(name) / str(replan)
                row = run(folder, options.model, replan=replan, steps=steps, since=since)
            rows.append(row)
            if not options.json:
                face.show(line(row))
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
