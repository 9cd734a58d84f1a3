"""penstock train A B: two jobs on the same ranks; the second computes while the first waits.

Each is a `penstock train` of its own, with a folder of its own.  One after the other makes its
plan; then both are simulated on the same cores, and begin together.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import typer

from penstock.cli import face
from penstock.errors import PlanError, RunError
from penstock.files import Json, read_json, write_text
from penstock.processes.end_with_parent import die_with
from penstock.processes.started import under_torchrun
from penstock.script import script_of
from penstock.training.at_work import folder_of
from penstock.training.options import Options, asked_for
from penstock.units import format_seconds

_LOOK_S = 0.05
_ALONE = "elastic", "until_loss", "plan", "cluster", "turns"  # options that two jobs do not go with
_BEGIN = "import sys; from penstock.cli import main; sys.exit(main())"
BOTH = "both.json"


class _StartedJob(NamedTuple):
    """One of the two: its name among them, its folder, its process, and who shows its words."""

    name: str
    folder: Path
    process: "subprocess.Popen[str]"
    teller: Thread


def train_two(jobs: Sequence[str], options: Options, *, as_json: bool) -> None:
    """Train both, and show what each gave and how long they took together.

    Raises:   PlanError: an option that does not go with two jobs.  RunError: under torchrun.
              typer.Exit: one has failed, or both were interrupted.
    """
    _check(jobs, options)
    names = _names(jobs)
    out = Path(str(options.get("out") or Path("runs") / "+".join(names)))
    with (
        tempfile.TemporaryDirectory(prefix="penstock-cores-") as cores,
        _closed(Path(cores)) as gate,
    ):
        started: list[_StartedJob] = []
        try:
            for number, (job, name) in enumerate(zip(jobs, names, strict=True)):
                which = "second" if number else "first"
                words = _words(job, out / name, f"{which}:{cores}", options)
                started.append(_begun(words, name, out / name))
                _until_ready(started[-1], Path(cores) / f"ready-{which}")
            predicted = _predicted(started, Path(cores))
            began = time.time()
            os.close(gate.pop())
            _wait(started)
        except KeyboardInterrupt:
            _stop(started)
            raise
        finally:
            for each in started:
                if each.process.poll() is None:
                    each.process.kill()
                each.process.wait()
                each.teller.join()
    _show(started, predicted, began, out, as_json=as_json)


def _check(jobs: Sequence[str], options: Options) -> None:
    if under_torchrun():
        hint = "start each by its own torchrun, with --set turns=first:DIR and turns=second:DIR"
        raise RunError("two jobs are started on one host, and torchrun has started this", hint=hint)
    for name in _ALONE:
        if options.get(name):
            raise PlanError(f"{name} is of one job, and here are two", hint=f"leave out {name}")
    if "://" in str(options.get("out") or ""):
        raise PlanError(f"out is {options.get('out')}", hint="two jobs need a folder on this host")
    for job in jobs:
        if script_of(job).arguments:
            raise PlanError(f"{job}: arguments go to one script", hint="train that one alone")


def _names(jobs: Sequence[str]) -> list[str]:
    """Return a name for each, unlike the other's."""
    first, second = (folder_of(job, None).name for job in jobs)
    return [first, second if second != first else f"{second}-2"]


def _words(job: str, folder: Path, turns: str, options: Options) -> list[str]:
    told = asked_for(options) | {"turns": turns}
    sets = [word for name, value in told.items() for word in ("--set", f"{name}={_said(value)}")]
    return ["train", job, "--out", str(folder), *sets]


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _begun(words: Sequence[str], name: str, folder: Path) -> _StartedJob:
    """Start a run, whose words are shown behind its name; it dies with this process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BEGIN, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C comes once, from here
        preexec_fn=partial(die_with, os.getpid()),
    )
    teller = Thread(target=_tell, args=(process, name), daemon=True)
    teller.start()
    return _StartedJob(name, folder, process, teller)


def _tell(process: "subprocess.Popen[str]", name: str) -> None:
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            face.say(f"{name} | {line.rstrip()}")


@contextmanager
def _closed(cores: Path) -> Generator[list[int]]:
    """Hold the gate behind which both wait; closing the descriptor opens it."""
    gate = [os.open(cores / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)]
    fcntl.flock(gate[0], fcntl.LOCK_EX)
    try:
        yield gate
    finally:
        for each in gate:
            os.close(each)


def _until_ready(job: _StartedJob, ready: Path) -> None:
    """Return once a run is about to begin.

    Raises:   typer.Exit: it has ended before.
    """
    while not ready.exists():
        if (code := job.process.poll()) is not None:
            face.say(f"{job.name} has ended before its first step; the other job was not trained")
            raise typer.Exit(code or face.FAILED)
        time.sleep(_LOOK_S)


def _wait(jobs: Sequence[_StartedJob]) -> None:
    for job in jobs:
        while job.process.poll() is None:
            time.sleep(_LOOK_S)


def _stop(jobs: Sequence[_StartedJob]) -> None:
    """Ask both to stop after a checkpoint, and wait for them."""
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGINT)
    _wait(jobs)


def _predicted(jobs: Sequence[_StartedJob], cores: Path) -> dict[str, float]:
    """Return the seconds that both take as simulated; {}: one of them has no plan.

    By turns, both at once without them, and one after the other.
    """
    from penstock.cluster.cluster import Cluster
    from penstock.simulate.two_runs import SideBySide, makespans, share_of
    from penstock.timeline.timeline import Timeline, num_steps

    runs: list[SideBySide] = []
    for job, which in zip(jobs, ("first", "second"), strict=True):
        if not (job.folder / "predicted.trace.json").exists():
            face.say(f"{job.name} has no plan, so nothing is predicted")
            return {}
        timeline = Timeline.load(job.folder / "predicted.trace.json")
        steps = int((cores / f"ready-{which}").read_text()) // num_steps(timeline)
        share = share_of(timeline, Cluster.load(job.folder / "cluster.toml"))
        runs.append(SideBySide(timeline, steps, share))
    found = makespans(runs[0], runs[1])._asdict()
    face.say(f"predicted: {_line(found)}")
    return found


def _line(seconds: dict[str, float]) -> str:
    by_turns, at_once, one_by_one = map(format_seconds, seconds.values())
    less = 100 * (1 - seconds["by_turns_s"] / seconds["one_by_one_s"])
    words = f"by turns {by_turns}, one after the other {one_by_one} ({less:.0f} % less)"
    return f"{words}, both at once without turns {at_once}"


def _show(
    jobs: Sequence[_StartedJob],
    predicted: dict[str, float],
    began: float,
    out: Path,
    *,
    as_json: bool,
) -> None:
    """Show and keep what both gave.

    Raises:   typer.Exit: one has failed.
    """
    last = [path.stat().st_mtime for job in jobs if (path := job.folder / "metrics.jsonl").exists()]
    both: dict[str, Json] = {f"predicted_{name}": value for name, value in predicted.items()}
    both["together_s"] = max(last, default=began) - began
    both["codes"] = {job.name: job.process.returncode for job in jobs}
    write_text(out / BOTH, json.dumps(both, indent=2) + "\n")
    codes = [job.process.returncode for job in jobs]
    if as_json and not any(codes):
        summaries: dict[str, Json] = {}
        for job in jobs:
            summaries[job.name] = read_json(job.folder / "summary.json", RunError, "summary")
        face.show_json({**both, "jobs": summaries})
    elif not as_json:
        took = f"together {format_seconds(float(str(both['together_s'])))}"
        face.show(f"{took}; predicted {_line(predicted)}" if predicted else took)
        face.show("\n".join(f"{job.name}: {job.folder / 'report.html'}" for job in jobs))
    for job, code in zip(jobs, codes, strict=True):
        if code:
            face.say(f"{job.name} ended with {code}")
    if any(codes):
        raise typer.Exit(next(code if code > 0 else face.FAILED for code in codes if code))
