"""All that waits for a real GPU, on one in under eight minutes.

    bench/gpu/all.sh FOLDER [--small] [--only NAME ...]      or  python -m bench.gpu.all FOLDER

Each line runs in a process of its own, in this order, until the time is over; it gives figures and
says what is wrong with them.  FOLDER/gpu.json has all of it, FOLDER/gpu.md a page with pass, fail
or not run for each line.  Exits 1 where a line fails.

proof      ten jobs (jobs.py) by `penstock train`: equal to the plain loop, or trained without plan
waits      a step of a plan: at most one host synchronisation, no copy from pageable memory,
           at most 2 % more bytes held than the rank accounts for
speed      GPT of 124 M and of 1 B in bfloat16 beside the usual loop and torch.compile: seconds, as
           predicted and as measured
memory     the largest micro-batch of a GPT in 8 GiB: plans with activations copied away, and
           recomputed, beside save_on_cpu and torch.utils.checkpoint
overlap    products and a copy to pinned memory at once
told       a run of 200 steps with all that can be in far memory: audited to its end, in the memory
           that its plan leaves; far memory as predicted; a breakdown of time; peaks by purpose
several    two ranks, where there are as many GPUs: replicas, stages, ops divided, and sums in int8,
           by `penstock train`

With --small sizes are tiny.  On a device that only pretends seconds are not judged.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu import jobs

LIMIT_S = 450.0  # of all lines together
_PATIENCE = 5.0  # times that, with --small: a pretend device may share two cores with others
_JOBS = Path(jobs.__file__)
_PRETENDS, _EQUAL = "Rehearsal GPU", "equal to the plain loop"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What became of a line: pass, fail or not run; what is wrong, and its figures."""

    name: str
    state: str
    wrong: tuple[str, ...]
    seconds: float
    figures: Figures


@dataclass(frozen=True)
class Line:
    """A line: what it measures, given whether sizes are small, and what is wrong with that."""

    name: str
    limit_s: float
    figures: Callable[[bool], Figures]
    wrong: Callable[[Figures], list[str]]


def command(module: str, *arguments: object) -> list[str]:
    """Return a command that runs a module as this one is run."""
    start = shlex.split(os.environ.get("PY", f"{sys.executable} -m"))
    return [*start, module, *map(str, arguments)]


# -- proofs ---------------------------------------------------------------------------------------


def trained(name: str, *arguments: str) -> Figures:
    """Return how `penstock train` ends with a job."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        asked = (
            "train",
            f"{_JOBS}:{name}",
            "--out",
            f"{folder}/run",
            "--set",
            "trial=false",
            *arguments,
        )
        done = subprocess.run(command("penstock", *asked), capture_output=True, text=True)
    text = done.stdout + done.stderr
    said = judgement_in(text)
    return {"code": done.returncode, "said": said, "tail": "" if said else text[-2000:]}


def judgement_in(text: str) -> str:
    """Return the line of a run that says how its first steps compare; else the last word on it."""
    lines = [line for line in text.splitlines() if "plain loop" in line]
    return next((line for line in lines if line.startswith(_EQUAL)), lines[-1] if lines else "")


def proof_of(name: str) -> Line:
    def wrong(found: Figures) -> list[str]:
        needs = "" if name == jobs.untraced.__name__ else _EQUAL
        problems = [] if found["code"] == 0 else [f"exit code {found['code']}: {found['tail']}"]
        return problems + ([] if needs in found["said"] else [f"not {needs}: {found['said']}"])

    return Line(f"proof of {name}", 60.0, lambda small: trained(name), wrong)


# -- one process on the GPU -----------------------------------------------------------------------


def is_pretended() -> bool:
    from penstock.device import here

    return here().is_cpu or here().name == _PRETENDS


def waits(small: bool) -> Figures:
    """Return what a warm step of a plan in units makes the host wait for, and what it holds."""
    import torch

    from bench.gpu import counted, one
    from penstock.graph.trace import capture

    job = replace(jobs.plain(), validation=None)
    captured = capture(job)
    plan = one.plan_of(captured, "units", job.micro_batches).changed(clip=True)
    rank, step = counted.rank_of(job, captured, plan)
    for _ in range(3):
        step()
    found = counted.count(step)
    torch.cuda.synchronize()
    captured.model.to("cpu")
    return {**found, "live_bytes": counted.live_bytes(), "held_bytes": rank.held_bytes()}


def wrong_waits(found: Figures) -> list[str]:
    problems = [f"{found['syncs']} synchronisations"] if found["syncs"] > 1 else []
    problems += [f"{found['pageable']} pageable copies"] if found["pageable"] else []
    more = found["live_bytes"] / max(1, found["held_bytes"]) - 1
    return problems + ([f"{100 * more:.1f} % more held than accounted for"] if more > 0.02 else [])


def speed(name: str, small: bool) -> Figures:
    """Return the seconds of a step in bfloat16: ours, the usual loop's, torch.compile's."""
    from bench.gpu import one
    from bench.gpu.sizes import SIZES
    from penstock.graph.trace import capture
    from penstock.profile.measure import measure

    size = replace(SIZES["tiny" if small else name], name=name)
    job = one.job_of(size, precision="bfloat16")
    captured = capture(job)
    profile = measure(captured, job)
    ways = ("whole", "compiled") if one.compiles() else ("whole",)
    rows = [one.of_way(size, way, captured, profile, 3, precision="bfloat16") for way in ways]
    return {"rows": rows, "judged": not is_pretended()}


def wrong_speed(found: Figures) -> list[str]:
    problems: list[str] = []
    for row in found["rows"]:
        off, over = (
            row["predicted_s"] / row["ours_s"] - 1,
            row["ours_bytes"] - row["predicted_bytes"],
        )
        if found["judged"] and row["ratio"] > 1.05:
            problems.append(f"{row['way']} takes {row['ratio']:.2f} of {row['peer']}")
        if found["judged"] and abs(off) > 0.15:
            problems.append(f"{row['way']} predicted {100 * off:+.0f} %")
        if over > 0.02 * row["predicted_bytes"]:
            problems.append(f"{row['way']} holds {over} bytes more than predicted")
    return problems


def memory(small: bool) -> Figures:
    """Return the most windows of a micro-batch that fit, ours and the peer's."""
    import torch

    from bench.gpu import one
    from bench.gpu.sizes import SIZES
    from penstock.device import here

    size = SIZES["tiny" if small else "gpt"]
    cap = (24 << 20) if small else (8 << 30)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / here().total_bytes))
    ways = ("activations",) if small else ("activations", "recompute")
    rows = [
        {"way": way, **{side: one.largest(size, way, is_ours=side == "ours") for side in _SIDES}}
        for way in ways
    ]
    return {"rows": rows}


_SIDES = "ours", "peer"


def wrong_memory(found: Figures) -> list[str]:
    return [
        f"{row['way']}: {row['ours']} windows, the peer {row['peer']}"
        for row in found["rows"]
        if row["ours"] < row["peer"]
    ]


def overlap(small: bool) -> Figures:
    from bench.gpu import one

    sizes = (64, 2**12) if small else (8192, 2**28)
    return {**one.overlap(*sizes), "judged": not is_pretended()}


def wrong_overlap(found: Figures) -> list[str]:
    longer = max(found["products_s"], found["copy_s"])
    gained = found["both_s"] <= 1.15 * longer or not found["judged"]
    return [] if gained else [f"{found['both_s']:.4f} s at once, the longer alone {longer:.4f} s"]


def told(small: bool) -> Figures:
    """Return what a run says of its audits, of far memory and of its time."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        asked = "train", f"{_JOBS}:plain", "--out", f"{folder}/run", "--set", "trial=false", *_TOLD
        done = subprocess.run(command("penstock", *asked), capture_output=True, text=True)
        file = Path(folder) / "run" / "summary.json"
        summary = json.loads(file.read_text()) if file.exists() else {}
    names = ("audited", "audited_to", "steps", "held_bytes", "peak_bytes_measured", "mfu")
    found = {name: summary.get(name) for name in names}
    found |= {name: summary.get(name) for name in ("far_bytes_predicted", "far_bytes_measured")}
    found["breakdown_s"] = [sum(row) for row in (summary.get("breakdown") or {}).get("seconds", ())]
    return {"code": done.returncode, **found, "tail": (done.stdout + done.stderr)[-2000:]}


_TOLD = (
    "--steps",
    "200",
    "--set",
    "audit=100%",
    "--set",
    "units=2",
    "--set",
    "offload=all",
    "--ranks",
    "1",
)


def wrong_told(found: Figures) -> list[str]:
    if found["code"]:
        return [f"exit code {found['code']}: {found['tail']}"]
    problems = [] if found["audited_to"] == found["steps"] else [str(found["audited"])]
    pairs = zip(found["far_bytes_predicted"] or (), found["far_bytes_measured"] or (), strict=True)
    off = [abs(expected / own - 1) for expected, own in pairs]
    problems += [] if off and max(off) <= _FAR_OFF else [f"far memory is {off} off"]
    parts = [sum(held.values()) for held in found["held_bytes"] or ()]
    if parts != found["peak_bytes_measured"]:
        problems.append(f"peaks are {found['peak_bytes_measured']}, their parts {parts}")
    return problems + ([] if sum(found["breakdown_s"]) > 0 else ["no breakdown of time"])


_FAR_OFF = 0.03  # rooms of a small job begin at pages


def several(small: bool) -> Figures:
    """Return how replicas, stages, divided ops and sums in few numbers end on two GPUs."""
    from penstock.device import all_here

    count = len(all_here())
    if count < 2:
        return {"count": count, "runs": []}
    runs = [trained("plain", "--ranks", "2", *each) for each in _SEVERALLY]
    return {"count": count, "runs": runs}


_SEVERALLY = (
    ("--set", "stages=1", "--set", "units=2"),
    ("--set", "stages=2", "--schedule", "zb_h1"),
    ("--set", "tensor=2"),
    ("--set", "stages=1", "--set", "sums=int8"),
)


def wrong_several(found: Figures) -> list[str]:
    runs = found["runs"]
    return [str(run) for run in runs if run["code"] or _EQUAL not in run["said"]]


LINES = (
    *(proof_of(job.__name__) for job in jobs.PROVED),
    Line("waits", 60.0, waits, wrong_waits),
    Line("overlap", 60.0, overlap, wrong_overlap),
    Line("speed of 124 M", 120.0, lambda small: speed("gpt-124m", small), wrong_speed),
    Line("memory", 120.0, memory, wrong_memory),
    Line("speed of 1 B", 150.0, lambda small: speed("gpt-1b", small), wrong_speed),
    Line("told", 90.0, told, wrong_told),
    Line("several", 150.0, several, wrong_several),
)


# -- the page -------------------------------------------------------------------------------------


def run_line(line: Line, *, small: bool, left_s: float) -> Result:
    """Return what becomes of a line in a process of its own, which ends when the time is over."""
    start = time.monotonic()
    limit_s = min(line.limit_s * (_PATIENCE if small else 1.0), left_s)
    asked = ["--line", line.name, *(["--small"] if small else [])]
    code, said, problem = _over(command("bench.gpu.all", "-", *asked), limit_s)
    taken_s = time.monotonic() - start
    if code:
        return Result(line.name, "fail", (problem[-2000:],), taken_s, {})
    figures = json.loads(said.splitlines()[-1])
    wrong = tuple(line.wrong(figures))
    return Result(line.name, "fail" if wrong else "pass", wrong, taken_s, figures)


def _over(asked: list[str], limit_s: float) -> tuple[int, str, str]:
    """Return exit code and both outputs of a command, which ends in time with all that it began."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(asked, text=True, start_new_session=True, **pipes) as process:
        try:
            said, problem = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 1, "", f"not over after {limit_s:.0f} s"
    return process.returncode, said, problem


def page(results: Sequence[Result], about: Figures) -> str:
    """Return all lines as a table, then their figures."""
    counts = {state: sum(each.state == state for each in results) for state in _STATES}
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    rows = [
        f"| {each.name} | {each.state} | {each.seconds:.0f} s | {_short('; '.join(each.wrong))} |"
        for each in results
    ]
    head = ["# On a GPU", "", f"{about['device']}, torch {about['torch']}: {said}.", ""]
    table = ["| line | | took | wrong |", "| --- | --- | --- | --- |", *rows, ""]
    figures = [f"- {each.name}: `{json.dumps(each.figures)}`" for each in results if each.figures]
    return "\n".join([*head, *table, *figures, ""])


_STATES = "pass", "fail", "not run"


def _short(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[-300:]


def everything(folder: Path, only: Sequence[str], *, small: bool) -> int:
    """Run the lines, write both files; return the exit code."""
    import torch

    from penstock.device import here

    about = {"device": here().name, "torch": torch.__version__}
    until = time.monotonic() + LIMIT_S * (_PATIENCE if small else 1.0)
    results = list[Result]()
    for line in LINES:
        left_s = until - time.monotonic()
        if only and line.name not in only:
            continue
        if left_s < 5.0:
            result = Result(line.name, "not run", ("the time was over",), 0.0, {})
        else:
            result = run_line(line, small=small, left_s=left_s)
        results.append(result)
        print(f"{result.state:8}{result.name:24}{result.seconds:6.0f} s", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)  # after each line: nobody waits in vain
        rows = [asdict(each) for each in results]
        (folder / "gpu.json").write_text(json.dumps({**about, "lines": rows}, indent=1))
        (folder / "gpu.md").write_text(page(results, about))
    return int(any(result.state == "fail" for result in results))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--only", nargs="+", default=(), choices=[line.name for line in LINES])
    parser.add_argument("--line", help=argparse.SUPPRESS)  # one, here; prints its figures
    given = parser.parse_args()
    if given.line is None:
        return everything(given.folder, given.only, small=given.small)
    (line,) = (line for line in LINES if line.name == given.line)
    figures = line.figures(given.small)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
