"""Simulate: actions and candidates per second, and how large a run can be.

    python -m bench.simulate [--json] [--quick]

one            a schedule with one set of seconds, one thread
many           candidates of one schedule with seconds of their own, side by side
built          schedule built and verified, table made, one step simulated
program        the same through `lower` and `simulate`, which know more: messages, slots, links
replicas       64 stages x 256 replicas = 16,384 ranks, each replica with jitter of its own, then
               the sum over replicas; with `candidates` as one table, else as one program

seconds        best of some runs, wall time; `median_s` of them; `cpu_s` the least CPU time, all
               threads.  Compiling is not counted.  Each row from `built` on is measured in a
               process of its own, whose most memory is `peak_bytes`
aim, reached   what the row should at least or at most be, and whether it is
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.program.lower import lower, lower_schedule
from penstock.schedule import (
    KINDS,
    Schedule,
    chimera,
    dual_pipe_v,
    interleaved,
    one_f_one_b,
    zb_h1,
)
from penstock.simulate import Costs, simulate, step_seconds, table_of
from penstock.timeline import step_s

Row = dict[str, object]

LATENCY_S = 0.01
REDUCE_LATENCY_S = 0.05  # of a link between two replicas
JITTER = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works")
    parser.add_argument("--only", choices=LARGE, help="print one row as JSON (used by itself)")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(large(options.only, quick=options.quick)))
        return
    rows = list(throughput(quick=options.quick))
    rows += [_in_own_process(name, quick=options.quick) for name in LARGE]
    if options.json:
        from bench.machine import machine  # it loads torch, which the large cases should not hold

        print(json.dumps({"rows": rows, "machine": machine()}))
    else:
        show(rows)


def _in_own_process(name: str, *, quick: bool) -> Row:
    command = [sys.executable, "-m", "bench.simulate", "--only", name, *["--quick"] * quick]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def timed(function: Callable[[], object], runs: int) -> tuple[float, float, float]:
    """Return the best and the median wall seconds, and the least CPU seconds."""
    walls: list[float] = []
    cpus: list[float] = []
    for _ in range(runs):
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), statistics.median(walls), min(cpus)


def row_of(  # noqa: PLR0913 - the columns
    case: str,
    actions: int,
    times: tuple[float, float, float],
    *,
    candidates: int = 1,
    threads: int = 1,
    aim: str = "",
    peak_bytes: int | None = None,
) -> Row:
    """Return a row; `aim` is a column, ">=" or "<=", a number, and perhaps the same of another."""
    row: Row = {
        "case": case,
        "threads": threads,
        "actions": actions,
        "candidates": candidates,
        "seconds": times[0],
        "median_s": times[1],
        "cpu_s": times[2],
        "actions_per_s": actions * candidates / times[0],
        "candidates_per_s": candidates / times[0],
        "peak_bytes": peak_bytes,
        "aim": aim,
    }
    parts = [part.split() for part in aim.split(", ") if part]
    reached = [
        float(str(row[column])) >= float(number)
        if sign == ">="
        else float(str(row[column])) <= float(number)
        for column, sign, number in parts
    ]
    return row | {"reached": all(reached) if parts else None}


# -- actions and candidates per second


def throughput(*, quick: bool) -> list[Row]:
    """Return the rows of one schedule, and of many candidates."""
    runs, stages, m, many = (2, 8, 32, 300) if quick else (15, 64, 512, 50_000)
    rows: list[Row] = []
    aim = "" if quick else "actions_per_s >= 200e6"
    for builder in (one_f_one_b, zb_h1, interleaved, chimera, dual_pipe_v):
        rows.append(_rate("one", builder(stages, m), 1, runs=runs, aim=aim))
    for builder in (one_f_one_b, zb_h1):
        for threads in (1, 2):
            aim = "candidates_per_s >= 400e3" if threads == 2 and not quick else ""
            rows.append(
                _rate("many", builder(8, 32), many, runs=runs // 2, aim=aim, threads=threads)
            )
    return rows


def _rate(
    name: str, schedule: Schedule, candidates: int, *, runs: int, aim: str, threads: int = 1
) -> Row:
    table = table_of(schedule)
    shape = (candidates, len(KINDS), schedule.num_stages)
    seconds = np.random.default_rng(0).random(shape)
    message_s = np.full(candidates, LATENCY_S)

    def run() -> None:
        step_seconds(table, seconds, message_s, threads=threads)

    run()  # compiles
    case = f"{name}: {schedule.name} {schedule.num_stages} x {schedule.num_micro_batches}"
    times = timed(run, runs)
    actions = table.num_actions
    return row_of(case, actions, times, candidates=candidates, threads=threads, aim=aim)


# -- large ones


def large(name: str, *, quick: bool) -> Row:
    """Return the row of one large case, with the most memory of this process."""
    measured = MEASURED[name]
    measured(4, 4, 2)  # compiles
    sizes = (64, 256, 256) if "replicas" in name else (1024, 4096, 1)
    case, actions, candidates, times = measured(*((8, 16, 3) if quick else sizes))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    aim = f"seconds <= 5, peak_bytes <= {3 * 2**29}"
    if "replicas" in name:
        aim = "seconds <= 10"
    aim = "" if quick else aim
    return row_of(case, actions, times, candidates=candidates, aim=aim, peak_bytes=peak)


Measured = tuple[str, int, int, tuple[float, float, float]]


def built(stages: int, m: int, _: int) -> Measured:
    """Build, verify, make the table of and simulate 1F1B; F takes 1 s and B 2 s."""
    seconds = _costs(stages)[None]
    made: list[float] = []

    def run() -> None:
        table = table_of(one_f_one_b(stages, m))
        made.append(float(step_seconds(table, seconds)[0]))

    times = timed(run, 3)
    _check(made[0], 3.0 * (m + stages - 1))
    return f"built: 1F1B {stages:,} x {m:,}", 2 * stages * m, 1, times


def program(stages: int, m: int, _: int) -> Measured:
    """Build, verify, lower and simulate the same, as bench.scale does."""
    costs = Costs(_costs(stages)[..., None])
    made: list[float] = []

    def run() -> None:
        made.append(step_s(simulate(lower(one_f_one_b(stages, m)), costs, spans=False)))

    times = timed(run, 3)
    _check(made[0], 3.0 * (m + stages - 1))
    return f"program: 1F1B {stages:,} x {m:,}", 2 * stages * m, 1, times


def replicas_batch(stages: int, m: int, replicas: int) -> Measured:
    """Simulate replicas as candidates; the step is the slowest of them, and then the sum."""
    seconds, sum_s = _with_jitter(stages, replicas), _sum_s(replicas)
    made: list[float] = []

    def run() -> None:
        table = table_of(one_f_one_b(stages, m))
        made.append(step_seconds(table, seconds, LATENCY_S).max() + sum_s)

    times = timed(run, 3)
    case = f"replicas: 1F1B {stages} x {m} x {replicas}, batch"
    return case, 2 * stages * m, replicas, times


def replicas_program(stages: int, m: int, replicas: int) -> Measured:
    """Simulate all ranks of all replicas as one program; check that the batch says the same."""
    seconds = _with_jitter(stages, replicas)
    cluster = _cluster(stages, replicas)
    costs = Costs(np.moveaxis(seconds, 0, 2), tuple(kind.name for kind in cluster.devices))
    made: list[float] = []

    def run() -> None:
        whole = lower_schedule(one_f_one_b(stages, m), replicas=replicas)
        made.append(step_s(simulate(whole, costs, cluster, spans=False)))

    times = timed(run, 2)
    table = table_of(one_f_one_b(stages, m))
    _check(made[0], step_seconds(table, seconds, LATENCY_S).max() + _sum_s(replicas))
    case = f"replicas: 1F1B {stages} x {m} x {replicas}, program"
    return case, 2 * stages * m * replicas, 1, times


def _costs(stages: int) -> NDArray[np.float64]:
    """Return [kind, stage]: F takes 1 s and B 2 s."""
    seconds = np.zeros((len(KINDS), stages))
    seconds[KINDS.index("F")], seconds[KINDS.index("B")] = 1.0, 2.0
    return seconds


def _with_jitter(stages: int, replicas: int) -> NDArray[np.float64]:
    """Return [replica, kind, stage], each a few percent off."""
    rng = np.random.default_rng(0)
    factors = rng.normal(1.0, JITTER, (replicas, len(KINDS), stages)).clip(1.0 - 3 * JITTER)
    return _costs(stages) * factors


def _cluster(stages: int, replicas: int) -> Cluster:
    """Return a host for each replica, with a device for each stage, of a kind of its own."""
    kinds = tuple(DeviceKind(f"replica {number}", 1, (), 1.0) for number in range(replicas))
    hosts = tuple(Host(kind.name, kind.name, stages) for kind in kinds)
    inside, between = (Link(latency_s, float("inf")) for latency_s in (LATENCY_S, REDUCE_LATENCY_S))
    return Cluster(kinds, hosts, inside, between)


def _sum_s(replicas: int) -> float:
    """Return the seconds of a sum over the replicas of a stage, of few bytes."""
    return _cluster(1, replicas).sum_s(0, range(replicas))


def _check(found: float, expected: float) -> None:
    if abs(found - expected) > 1e-9 * expected:
        raise AssertionError(f"the step takes {found} s, not {expected} s")


MEASURED: dict[str, Callable[[int, int, int], Measured]] = {
    "built": built,
    "program": program,
    "replicas_batch": replicas_batch,
    "replicas_program": replicas_program,
}
LARGE = tuple(MEASURED)


def show(rows: list[Row]) -> None:
    head = f"{'':42} {'actions':>12} {'candidates':>10} {'threads':>7} {'best':>9} {'median':>9}"
    print(f"{head} {'CPU':>9} {'actions/s':>10} {'cand./s':>10} {'peak':>9}  aim")
    for row in rows:
        case, aim, reached = row["case"], row["aim"], row["reached"]
        counts = f"{row['actions']:>12,} {row['candidates']:>10,} {row['threads']:>7}"
        times = " ".join(f"{_time(row[key]):>9}" for key in ("seconds", "median_s", "cpu_s"))
        rates = f"{row['actions_per_s']:>10.3g} {row['candidates_per_s']:>10.3g}"
        peak = row["peak_bytes"]
        memory = f"{peak / 2**30:.2f} GiB" if isinstance(peak, int) else ""
        said = {True: "reached", False: "MISSED", None: ""}[reached]  # pyright: ignore
        print(f"{case:42} {counts} {times} {rates} {memory:>9}  {aim} {said}".rstrip())


def _time(value: object) -> str:
    seconds = float(str(value))
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1000 * seconds:.3g} ms"


if __name__ == "__main__":
    main()
