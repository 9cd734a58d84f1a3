"""What it costs to examine and prove a job: seconds and bytes, at its first run and at later ones.

    python -m bench.proof [--json] [--runs 3] [JOB ...]

Each job is trained for a few steps on two ranks as `penstock train` does it, by turns, with an
empty cache and again with what the first run kept.

examine_s   the job and its optimizer, in forks of this process
proof_s     two steps on the ranks, and two of the plain loop
cpu_s       processor time of both, all processes together
step_s      of the run itself; `steps` is (examine_s + proof_s) / step_s
kept_bytes  in the cache; `peak_bytes` is the most that a process held beyond this one's own
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import penstock as ps
from bench.machine import machine

JOBS = ("examples/gpt.py", "examples/hf.py:resnet", "examples/hf.py:llama")
STEPS = 6
EXAMINE = ("examining the job", "examining the optimizer")
PROVE = ("comparing two steps with the plain loop",)


class Watch(ps.Listener):
    """Sums the seconds, on the clock and of processors, of each thing that is done."""

    def __init__(self) -> None:
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.cpu: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def busy(self, what: str) -> Generator[None]:
        wall, cpu = time.perf_counter(), _cpu_s()
        yield
        self.wall[what] += time.perf_counter() - wall
        self.cpu[what] += _cpu_s() - cpu


def _cpu_s() -> float:
    return sum(os.times()[:4])


def row(job: str, cache: Path, out: Path) -> dict[str, object]:
    """Train once and return what it cost to examine and prove."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    watch = Watch()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = ps.train(job, ranks=2, num_steps=STEPS, out=out, trial=False, listener=watch)
    assert done is not None, "no torchrun here"
    examine, prove = (sum(watch.wall[each] for each in parts) for parts in (EXAMINE, PROVE))
    kept = [path.stat().st_size for path in (cache / "penstock" / "proofs").glob("*")]
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "job": job,
        "examine_s": examine,
        "proof_s": prove,
        "cpu_s": sum(watch.cpu[each] for each in (*EXAMINE, *PROVE)),
        "step_s": done.outcome.step_s,
        "steps": (examine + prove) / done.outcome.step_s,
        "kept_bytes": sum(kept),
        "peak_bytes": 1024 * max(0, most - own),
        "checked": done.summary["checked"],
    }


def pairs(job: str, runs: int) -> list[dict[str, object]]:
    """Return the median rows of the first run of a job, and of a later one."""
    found: dict[str, list[dict[str, object]]] = {"first": [], "later": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            for which, rows in found.items():
                rows.append(row(job, Path(folder) / "cache", Path(folder) / which))
    return [{"run": which, **_median(rows)} for which, rows in found.items()]


def _median(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    whole = dict(rows[0])
    for key, value in whole.items():
        if isinstance(value, float | int):
            whole[key] = statistics.median(float(str(each[key])) for each in rows)
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", nargs="*", default=JOBS, metavar="JOB")
    parser.add_argument("--runs", type=int, default=3, help="of each; medians are shown")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    rows = list[dict[str, object]]()
    for job in options.jobs:
        for each in pairs(job, options.runs):
            rows.append(each)
            if not options.json:
                figures = (f"{k} {v:.3g}" for k, v in each.items() if isinstance(v, float))
                print(f"{each['job']:24} {each['run']:6}", *figures, flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
