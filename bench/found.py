"""Found: schedules that a search finds beside those that were published, with the same memory.

    python -m bench.found [--json] [--moves 2000000] [--seeds 4]

F, I and W take one second each, links are free.  Each published schedule is annealed
(schedule/anneal.py) with as many activations as its fullest rank holds, from several seeds.

schedule, ranks, micro_batches   which; two stages on a rank in those of V shape
activations                      most that a rank holds, of one stage each: before and after
step, found                      seconds of a step: published, and the shortest found
least                            (work of a rank) + (the time until the last rank can start): no
                                 schedule on this placement is shorter
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from bench.machine import machine
from penstock.schedule import Schedule, peak_activations, v_half, v_min, zb_h1, zb_v
from penstock.schedule.anneal import annealed

Row = dict[str, Any]


def cases() -> Iterator[Schedule]:
    """Yield what is annealed."""
    for ranks in (3, 4, 5, 6):
        for make in (v_half, v_min, zb_v):
            yield make(2 * ranks, 2 * ranks)
        yield zb_h1(ranks, 2 * ranks)


def step_s(schedule: Schedule) -> float:
    _, ends_s = schedule.play((1.0, 2.0, 1.0, 1.0, 0.0))
    return float(ends_s.max())


def row_of(published: Schedule, moves: int, seeds: int) -> Row:
    found = [annealed(published, moves=moves, seed=seed) for seed in range(seeds)]
    best = min(found, key=step_s)
    ranks, per_rank = published.num_ranks, published.num_stages // published.num_ranks
    return {
        "schedule": published.name,
        "ranks": ranks,
        "micro_batches": published.num_micro_batches,
        "activations": max(peak_activations(published)),
        "step": step_s(published),
        "found": step_s(best),
        "least": 3.0 * per_rank * published.num_micro_batches + ranks - 1,
        "orders": str(best.orders) if step_s(best) < step_s(published) else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--moves", type=int, default=2_000_000)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    rows: list[Row] = []
    if not options.json:
        print("schedule  ranks   M  activations  step  found  least")
    for published in cases():
        rows.append(row := row_of(published, options.moves, options.seeds))
        if options.json:
            print(f"{len(rows)} rows", file=sys.stderr)
        else:
            shown = (row[key] for key in ("ranks", "micro_batches", "activations"))
            times = "  ".join(f"{row[key]:5.0f}" for key in ("step", "found", "least"))
            print(f"{row['schedule']:8} {'  '.join(f'{n:4}' for n in shown)}  {times}", flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
