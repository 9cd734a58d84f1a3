"""2BW beside the schedules that drain: samples per second, measured and simulated.

    python -m bench.double_buffered [--json] [--quick] [--schedules double_buffered pipedream ...]

On two ranks of this machine (the GPT of bench/models.py, SGD with momentum) PipeDream-2BW, or
another schedule that does not drain, 1F1B and GPipe take turns: a window of it, and as many steps
of the others.  A window is so long that
filling and draining the pipeline, once in it, is a fiftieth of it.  The stages are then simulated
on 2, 8 and 64 ranks, with the seconds and the link measured here: every stage costs what the first
one does, the last one what the last one does.

flush_samples_per_s            of 1F1B or GPipe, whichever is faster
asynchronous_samples_per_s     of 2BW, or of the other `schedule`; for 2BW also under the name
                               double_buffered_samples_per_s
gain                           asynchronous / flush
ideal_gain                     (M + S - 1) / M: equal stages, free links and updates
share                          gain / ideal_gain
simulated                      whether the row is computed instead of measured
kept                           quiet blocks of all blocks: docs/bench.md
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from bench.compute import Segments, seconds_of
from bench.machine import machine
from bench.measure import Side, Turns, chosen_of, figure, in_ranks, take_turns
from bench.models import GPT, Size
from bench.ours import Ours, lowered, rank_of
from penstock.cluster import Cluster
from penstock.gauge.links import measure_link
from penstock.graph.trace import Capture, capture
from penstock.program.edges import Edge, StageGraph
from penstock.program.lower import lower_schedule
from penstock.schedule import KINDS, Schedule, find, gpipe, one_f_one_b, versions
from penstock.simulate import simulate
from penstock.simulate.costs import Costs
from penstock.timeline import step_s
from penstock.transport.shared_memory import SharedMemoryTransport

RANKS = 2
SIMULATED = (2, 8, 64)  # ranks
FLUSH = ("one_f_one_b", "gpipe")
DRAINED = 0.02  # of a window: the time to fill and drain
Row = dict[str, Any]


class Stage(NamedTuple):
    """Seconds of one stage: F, B, an update, and a copy of its weights, which 2BW makes."""

    forward_s: float
    backward_s: float
    update_s: float
    copy_s: float


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def window_of(num_stages: int, num_micro_batches: int) -> int:
    """Return the steps of a window of which filling and draining is a fiftieth."""
    return max(2, round((num_stages - 1) / DRAINED / num_micro_batches))


# -- measured -------------------------------------------------------------------------------------


def play(cases: dict[str, Ours], steps: int, turns: Turns, rank: int, folder: Path) -> Any:
    """Let the three schedules and the bare computes take turns on this rank."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    sides: dict[str, Side] = {}
    ends: list[SharedMemoryTransport] = []
    for name, case in cases.items():
        ends.append(SharedMemoryTransport(rank, RANKS, dist.PrefixStore(name, store)))
        windows = steps // case.program.num_steps
        own, sides[name] = rank_of(case, ends[-1], windows)
        if name not in FLUSH:
            own.weights[rank].reserve(1)  # of which the copy is timed
            sides["update"] = partial(updates, own.weights[rank])
    computes = Segments(cases[FLUSH[0]], rank)
    sides["computes"] = computes.step
    blocks = take_turns(sides, ends[0], turns, seldom=("computes", "update"))
    figures = [list(figure(blocks[name], turns)) for name in cases]
    notes = {name: [n for b in chosen_of(blocks[name], turns) for n in b.notes] for name in sides}
    seconds = seconds_of(computes.order, notes["computes"])
    forward, backward = (
        statistics.median(s for action, s in seconds.items() if action.kind == kind)
        for kind in ("F", "B")
    )
    update, copy = (statistics.median(column) for column in zip(*notes["update"], strict=True))
    for end in ends:
        end.barrier()
        end.close()
    return [figures, Stage(forward, backward, update, copy)]


def updates(weights: Any) -> tuple[float, float]:
    """Return the seconds of an update and of a copy of a stage's weights."""
    clock = time.thread_time
    with torch.no_grad():
        start = clock()
        weights.step(0, 0.0)
        middle = clock()
        weights.keep(1)
        return middle - start, clock() - middle


def measured(
    captured: Capture, size: Size, schedule: str, num_micro_batches: int, turns: Turns
) -> tuple[Row, list[Stage]]:
    """Return the row of two ranks of this machine, and what their stages cost."""
    steps, names = window_of(RANKS, num_micro_batches), (schedule, *FLUSH)
    cases = {
        name: lowered(captured, size, name, num_micro_batches, num_steps=steps, optimizer=momentum)
        for name in names
    }
    told = in_ranks(partial(play, cases, steps, turns))
    samples = steps * num_micro_batches * size.micro_batch
    rates = {name: samples / row[0] for name, row in zip(names, told[0][0], strict=True)}
    row = row_of((RANKS, num_micro_batches), schedule, rates, simulated=False)
    row["kept"] = [list(figures[4:6]) for figures in told[0][0]]
    return row, [Stage(*costs) for _, costs in told]


def row_of(
    sizes: tuple[int, int], schedule: str, rates: dict[str, float], *, simulated: bool
) -> Row:
    num_stages, num_micro_batches = sizes
    flush = max(rates[name] for name in FLUSH)
    gain = rates[schedule] / flush
    ideal = (num_micro_batches + num_stages - 1) / num_micro_batches
    return {
        "schedule": schedule,
        "stages": num_stages,
        "micro_batches": num_micro_batches,
        "flush_samples_per_s": flush,
        "asynchronous_samples_per_s": rates[schedule],
        "gain": gain,
        "ideal_gain": ideal,
        "share": gain / ideal,
        "simulated": simulated,
        **{f"{name}_samples_per_s": rate for name, rate in rates.items()},
    }


# -- simulated ------------------------------------------------------------------------------------


class World(NamedTuple):
    """What was measured, to simulate with: the stages, the link, a message, a micro-batch."""

    stages: Sequence[Stage]
    cluster: Cluster
    message_bytes: int
    micro_batch: int


def simulated(world: World, schedule: str, num_stages: int, num_micro_batches: int) -> Row:
    """Return the row that the simulator gives for `num_stages` ranks."""
    steps = window_of(num_stages, num_micro_batches)
    schedules: dict[str, Schedule] = {
        schedule: window_of_schedule(schedule, num_stages, num_micro_batches, steps),
        **{make.__name__: make(num_stages, num_micro_batches) for make in (one_f_one_b, gpipe)},
    }
    rates = {
        name: made.num_steps
        * num_micro_batches
        * world.micro_batch
        / window_s(world, made, copies=max(versions(made).alive) > 1)
        for name, made in schedules.items()
    }
    return row_of((num_stages, num_micro_batches), schedule, rates, simulated=True)


def window_of_schedule(name: str, num_stages: int, num_micro_batches: int, steps: int) -> Schedule:
    """Return an asynchronous schedule over a window of so many steps."""
    make: Any = find(name)
    return make(num_stages, num_micro_batches, num_steps=steps)


def window_s(world: World, schedule: Schedule, *, copies: bool) -> float:
    """Return the simulated seconds of one window."""
    count, size = schedule.num_stages, world.message_bytes
    edges = [Edge("F", s, s + 1, size) for s in range(count - 1)]
    edges += [Edge("B", s + 1, s, size) for s in range(count - 1)]
    costs = np.zeros((len(KINDS), count, 1))
    for stage in range(count):
        one = world.stages[-1 if stage == count - 1 else 0]
        update_s = one.update_s + (one.copy_s if copies else 0.0)
        for kind, seconds in (("F", one.forward_s), ("B", one.backward_s), ("U", update_s)):
            costs[KINDS.index(kind), stage] = seconds  # type: ignore[arg-type]
    program = lower_schedule(schedule, StageGraph(tuple(edges)))
    there = Cluster.here(count)  # ...but a core for each rank
    hosts = tuple(replace(host, cores=0) for host in there.hosts)
    cluster = replace(there, hosts=hosts, inside=world.cluster.inside)
    return step_s(simulate(program, Costs(costs), cluster, spans=False))


# -- all ------------------------------------------------------------------------------------------


def rows_of(
    size: Size,
    schedule: str,
    micro_batches: Sequence[int],
    ranks: Sequence[int],
    turns: Turns,
    each: Callable[[Row], None],
) -> list[Row]:
    """Return all rows, the measured ones first; `each` is told of one as it comes.

    micro_batches:  of the measured ones.
    ranks:          of the simulated ones.
    """
    captured = capture(size.job())
    rows: list[Row] = []
    stages: list[list[Stage]] = []
    for count in micro_batches:
        row, costs = measured(captured, size, schedule, count, turns)
        stages.append(costs)
        rows.append(row)
        each(row)
    middle = [Stage(*map(statistics.median, zip(*costs))) for costs in zip(*stages)]  # noqa: B905
    cluster = replace(Cluster.here(RANKS), inside=measure_link())
    crossing_bytes = captured.graph.cut_points[0].forward_bytes
    world = World(middle, cluster, crossing_bytes, size.micro_batch)
    for num_stages in ranks:
        for times in (1, 2, 3, 4):
            rows.append(simulated(world, schedule, num_stages, times * num_stages))
            each(rows[-1])
    return rows


COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("", "<9", lambda r: "simulated" if r["simulated"] else "measured"),
    ("schedule", "<18", lambda r: r["schedule"]),
    ("S", ">3", lambda r: str(r["stages"])),
    ("M", ">3", lambda r: str(r["micro_batches"])),
    ("flush, samples/s", ">16", lambda r: f"{r['flush_samples_per_s']:.1f}"),
    ("async, samples/s", ">16", lambda r: f"{r['asynchronous_samples_per_s']:.1f}"),
    ("gain", ">6", lambda r: f"{r['gain']:.3f}"),
    ("ideal", ">6", lambda r: f"{r['ideal_gain']:.3f}"),
    ("share", ">6", lambda r: f"{r['share']:.3f}"),
    ("kept", "<12", lambda r: " ".join(f"{k}/{n}" for k, n in r.get("kept", ()))),
)


def show(row: Row) -> None:
    print("  ".join(f"{text(row):{width}}" for _, width, text in COLUMNS), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="few windows")
    parser.add_argument("--schedules", nargs="+", default=["double_buffered"], metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    turns = Turns(wanted=2, limit=3) if options.quick else Turns(wanted=3, limit=9)
    if not options.json:
        print("  ".join(f"{title:{width}}" for title, width, _ in COLUMNS), flush=True)
    each = (lambda row: print(end=".", file=sys.stderr)) if options.json else show
    counts = [times * RANKS for times in (1, 2, 3, 4)]
    rows: list[Row] = []
    for schedule in options.schedules:
        rows += rows_of(GPT, schedule, counts, SIMULATED, turns, each)
    if options.json:
        print(json.dumps({"rows": rows, "machine": about}, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in about.items()))


if __name__ == "__main__":
    main()
