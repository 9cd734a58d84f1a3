"""Instructions: what a step of the tiny GPT takes beyond its computes, instruction by instruction.

    python -m bench.instructions [--json] [--schedule one_f_one_b] [--micro-batches 8] [--steps 300]

Two processes of one thread with a rank each, shared memory between them, without an optimizer.
The clock stands between all calls of a step; what segments compute and gradients add is timed
inside the calls (bench/inside.py) and taken off, and so are the seconds in which a call waits for
the other rank.  A message is handed over in its own call, so waiting is that of takes.

rank, call        F B I W: around the compute; data; take, send: messages; update
count             of such calls in a step
us                microseconds of one call, median over steps of the mean in a step
low_us, high_us   quartiles over steps
us_per_action     count * us / computes of the rank in a step
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.inside import Inside
from bench.machine import machine
from bench.measure import in_ranks
from bench.models import TINY
from bench.ours import Ours, calls_of, lowered
from bench.pipeline import RANKS, join
from penstock.graph.trace import capture
from penstock.runtime.calls import Bound, Call
from penstock.transport import Transport

Row = dict[str, Any]
WARM_UP = 20  # steps that do not count


def rows_of(schedule: str, num_micro_batches: int, steps: int) -> list[Row]:
    """Return the rows of both ranks."""
    ours = lowered(capture(TINY.job()), TINY, schedule, num_micro_batches)
    told = in_ranks(partial(play, ours, steps))
    return [row for rank, table in enumerate(told) for row in summed(ours, rank, table)]


def play(ours: Ours, steps: int, rank: int, folder: Path) -> list[dict[str, list[float]]]:
    """Return of each step, by kind of call, the seconds of each call beyond computes and waits."""
    end, inside = join(rank, folder, gloo=False), Inside()
    own, calls = calls_of(ours, end, inside)
    table: list[dict[str, list[float]]] = []
    taken = defaultdict[str, list[float]](list)
    metered = [replace(each, call=_metered(each, end, inside, taken)) for each in calls]
    with torch.no_grad():
        for step in range(WARM_UP + steps):
            own.run(metered, step)
            table.append({kind: [*seconds] for kind, seconds in taken.items()})
            taken.clear()
    end.barrier()
    end.close()
    return table[WARM_UP:]


def _metered(
    bound: Bound, end: Transport, inside: Inside, taken: defaultdict[str, list[float]]
) -> Call:
    """Return a call that notes what it takes beyond computes and waits."""
    clock, seconds, waited, call = time.perf_counter, inside.seconds, end.waited, bound.call
    kind = bound.kind if bound.lane == "compute" else bound.lane

    def metered() -> None:
        seconds.clear()
        before_s, start = waited.to_receive_s + waited.to_send_s, clock()
        call()
        took_s = clock() - start - (waited.to_receive_s + waited.to_send_s - before_s)
        taken[kind].append(took_s - sum(seconds.values()))

    return metered


def summed(ours: Ours, rank: int, table: Sequence[dict[str, list[float]]]) -> Iterator[Row]:
    """Yield the row of each kind of call of a rank."""
    actions = len(ours.orders()[rank])
    for kind in table[0]:
        means_us = [1e6 * statistics.fmean(step[kind]) for step in table]
        low, middle, high = statistics.quantiles(means_us, n=4)
        count = len(table[0][kind])
        figures = {"us": middle, "low_us": low, "high_us": high}
        each = middle * count / actions
        yield {"rank": rank, "call": kind, "count": count, **figures, "us_per_action": each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--schedule", default="one_f_one_b")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="M")
    parser.add_argument("--steps", type=int, default=300, help="steps that count")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(options.schedule, options.micro_batches, options.steps)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}, indent=1))
        return
    print("rank  call     count      us  (quartiles)     us/action")
    for r in rows:
        quartiles = f"({r['low_us']:.1f} - {r['high_us']:.1f})"
        line = f"{r['rank']:4}  {r['call']:<8} {r['count']:5}  {r['us']:6.1f}  {quartiles:<15}"
        print(f"{line}  {r['us_per_action']:8.1f}")
    for rank in range(RANKS):
        total = sum(r["us_per_action"] for r in rows if r["rank"] == rank)
        print(f"rank {rank}: {total:.1f} us per action")


if __name__ == "__main__":
    main()
