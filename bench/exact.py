"""Exact: the greedy zero-bubble scheduler beside the exact optimum.

    python -m bench.exact [--json] [--quick] [--time-limit 60]

Random seconds (F 8 to 12, I 8 to 16, W 5 to 14, messages 0 to 2) and limits from S activations on,
on 2 to 6 stages with up to 12 micro-batches, always the same ones; then 8 stages with 32
micro-batches, too many to be exact about.

greedy_ms     to find the greedy schedule, the least of five calls
greedy, exact, bound   seconds of a step; no schedule takes less than `bound`
proved        whether exact and bound are equal, up to a millionth
exact_s       to find and prove it
ratio         greedy / exact, or greedy / bound where nothing is proved
"""

import argparse
import json
import random
import time
from collections.abc import Iterator

from bench.machine import machine
from penstock.schedule import Seconds
from penstock.schedule.exact import exact
from penstock.schedule.zb_greedy import best_of_rules

CASES, QUICK = 60, 6
LARGE = (8, 32)


def cases(number: int) -> Iterator[tuple[int, int, Seconds, int]]:
    """Yield stages, micro-batches, seconds and limit."""
    draw = random.Random(2401)
    for _ in range(number):
        stages = draw.randint(2, 6)
        micro_batches = draw.choice((stages, stages + 2, 2 * stages))
        yield stages, micro_batches, _seconds(draw), draw.randint(stages, 2 * stages - 1)
    for limit in (LARGE[0], LARGE[0] + 4, 2 * LARGE[0] - 1):
        yield *LARGE, _seconds(draw), limit


def _seconds(draw: random.Random) -> Seconds:
    ends = ((8, 12), (8, 16), (5, 14), (0, 2))
    return Seconds(*(float(draw.randint(*each)) for each in ends))


def row(case: tuple[int, int, Seconds, int], time_limit_s: float) -> dict[str, object]:
    """Return the figures of one case."""
    stages, micro_batches, seconds, limit = case
    took_s: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        greedy_s = best_of_rules(*case).step_s
        took_s.append(time.perf_counter() - start)
    figures = {
        "stages": stages,
        "micro_batches": micro_batches,
        "seconds": list(seconds),
        "limit": limit,
        "greedy_ms": 1e3 * min(took_s),
        "greedy": greedy_s,
    }
    if (stages, micro_batches) == LARGE:
        return figures
    start = time.perf_counter()
    found = exact(stages, micro_batches, seconds=seconds, limit=limit, time_limit_s=time_limit_s)
    return figures | {
        "exact": found.step_s,
        "bound": found.bound_s,
        "proved": found.is_proved,
        "exact_s": time.perf_counter() - start,
        "ratio": greedy_s / (found.step_s if found.is_proved else found.bound_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="a few cases, and less time for each")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each proof")
    options = parser.parse_args()
    number, limit_s = (QUICK, 5.0) if options.quick else (CASES, options.time_limit)
    best_of_rules(2, 2, Seconds(3, 4, 5), 2)  # compiles
    rows = [row(case, limit_s) for case in cases(number)]
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))
        return
    for each in rows:
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in each.items()
            )
        )
    proved = [each for each in rows if each.get("proved")]
    worst = max(float(str(each["ratio"])) for each in proved)
    slowest = max(float(str(each["greedy_ms"])) for each in rows)
    print(f"proved {len(proved)} of {number}; worst ratio {worst:.4f}")
    print(f"greedy {slowest:.1f} ms at most")


if __name__ == "__main__":
    main()
