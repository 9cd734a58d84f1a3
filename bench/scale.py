"""Scale: 1F1B on 1,024 ranks with 4,096 micro-batches, built, verified, lowered and simulated.

    python -m bench.scale [--json] [--ranks 1024] [--micro-batches 4096]

One core.  The first call compiles; it is made on a small case and not counted.

schedule_s     building the schedule and verifying its order (8.4 million actions)
program_s      adding messages, slots and updates (25 million instructions), checked
simulate_s     one step, F 1 s and B 2 s, held against the closed form 3 (M + S - 1)
peak_bytes     most memory of the process
"""

import argparse
import itertools
import json
import resource
import time

import numpy as np

from bench.machine import machine
from penstock.program.lower import lower
from penstock.schedule import one_f_one_b
from penstock.schedule.orders import KINDS
from penstock.simulate import Costs, simulate
from penstock.timeline import step_s


def figures(ranks: int, micro_batches: int) -> dict[str, float | int]:
    """Return the seconds of each step for one size."""
    seconds = np.zeros((len(KINDS), ranks, 1))
    seconds[KINDS.index("F")], seconds[KINDS.index("B")] = 1.0, 2.0
    marks = [time.perf_counter()]
    schedule = one_f_one_b(ranks, micro_batches)
    marks.append(time.perf_counter())
    program = lower(schedule)
    marks.append(time.perf_counter())
    timeline = simulate(program, Costs(seconds), spans=False)
    marks.append(time.perf_counter())
    schedule_s, program_s, simulate_s = (b - a for a, b in itertools.pairwise(marks))
    expected = 3.0 * (micro_batches + ranks - 1)
    assert step_s(timeline) == expected, (step_s(timeline), expected)
    return {
        "ranks": ranks,
        "micro_batches": micro_batches,
        "actions": len(schedule.orders.kinds),
        "instructions": program.code.num_instructions,
        "schedule_s": schedule_s,
        "program_s": program_s,
        "simulate_s": simulate_s,
        "total_s": marks[-1] - marks[0],
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=4096)
    options = parser.parse_args()
    figures(2, 3)
    row = figures(options.ranks, options.micro_batches)
    if options.json:
        print(json.dumps({"rows": [row], "machine": machine()}))
        return
    for key, value in row.items():
        print(f"{key:14} {value:,.2f}" if isinstance(value, float) else f"{key:14} {value:,}")


if __name__ == "__main__":
    main()
