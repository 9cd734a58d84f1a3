"""Exact: the greedy zero-bubble scheduler beside the exact optimum, and what offload gives.

    python -m bench.exact [--json] [--quick] [--time-limit 60]

Random seconds (F 8 to 12, I 8 to 16, W 5 to 14, messages 0 to 2) on 2 to 6 stages with up to 12
micro-batches, always the same ones, with limits from S activations on, then from 1 to S - 1; then
8 stages with 32 micro-batches, too many to be exact about.

greedy_ms     to find the greedy schedule, the least of five calls
greedy, exact, bound   seconds of a step; no schedule takes less than `bound`
proved        whether exact and bound are equal, up to a millionth
exact_s       to find and prove it
ratio         greedy / exact, or greedy / bound where nothing is proved

Then steps where activations may wait on the host (F 10, I 11, W 8, messages 1 second):

none          the exact step without offload
twice, once, half   the exact steps with it, for copies of twice the seconds of F, as many, and half
copies        how many activations are offloaded, of all, for each of these
free          the exact step without a limit
unproved      which of these steps may not be the least
offload_s     to find and prove them all
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator

from bench.machine import machine
from penstock.schedule import Seconds
from penstock.schedule.exact import exact
from penstock.schedule.exact_offload import Copies, exact_offload
from penstock.schedule.zb_greedy import best_of_rules

CASES, BELOW, QUICK = 40, 40, 3
LARGE = (8, 32)
OFFLOAD = ((2, 4, 1), (2, 8, 2), (3, 6, 2), (4, 6, 2), (4, 6, 3), (4, 8, 3), (4, 8, 4))


def cases(number: int, below: int) -> Iterator[tuple[int, int, Seconds, int]]:
    """Yield stages, micro-batches, seconds and limit; `below` of them with less than 1F1B holds."""
    draw = random.Random(2401)
    for _ in range(number):
        stages = draw.randint(2, 6)
        micro_batches = draw.choice((stages, stages + 2, 2 * stages))
        yield stages, micro_batches, _seconds(draw), draw.randint(stages, 2 * stages - 1)
    for limit in (LARGE[0], LARGE[0] + 4, 2 * LARGE[0] - 1):
        yield *LARGE, _seconds(draw), limit
    draw = random.Random(10241)
    for _ in range(below):
        stages = draw.randint(2, 6)
        micro_batches = draw.choice((stages, stages + 2, 2 * stages))
        yield stages, micro_batches, _seconds(draw), draw.randint(1, stages - 1)
    for limit in (LARGE[0] // 2, LARGE[0] - 2):
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


def offload_row(case: tuple[int, int, int], time_limit_s: float) -> dict[str, object]:
    """Return the steps of one case without offload, with it, and without a limit."""
    stages, micro_batches, limit = case
    seconds, begin = Seconds(10, 11, 8, 1), time.perf_counter()
    limits = {"none": limit, "free": micro_batches}
    found = {
        name: exact(stages, micro_batches, seconds=seconds, limit=most, time_limit_s=time_limit_s)
        for name, most in limits.items()
    }
    offloaded = {
        name: exact_offload(
            stages,
            micro_batches,
            Copies(part * 10, part * 10),
            seconds=seconds,
            limit=limit,
            time_limit_s=time_limit_s,
        )
        for name, part in {"twice": 2, "once": 1, "half": 0.5}.items()
    }
    steps = {"none": found["none"], **offloaded, "free": found["free"]}
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "limit": limit,
        **{name: each.step_s for name, each in steps.items()},
        "copies": [len(each.copies) for each in offloaded.values()],
        "unproved": [name for name, each in steps.items() if not each.is_proved],
        "offload_s": time.perf_counter() - begin,
    }


def shown(row: dict[str, object]) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    )


def summary(rows: list[dict[str, object]]) -> str:
    """Return the greedy scheduler's distance from the proved optimum, and its seconds."""
    parts: list[str] = []
    for name, is_below in (("from S on", False), ("below S", True)):
        known = [each for each in rows if "ratio" in each]
        known = [each for each in known if (each["limit"] < each["stages"]) == is_below]
        proved = [float(str(each["ratio"])) for each in known if each["proved"]]
        worst = f"{max(proved):.4f}" if proved else "-"
        parts.append(f"limits {name}: proved {len(proved)} of {len(known)}; worst ratio {worst}")
    slowest = max(float(str(each["greedy_ms"])) for each in rows)
    return "\n".join([*parts, f"greedy {slowest:.1f} ms at most"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="a few cases, and less time for each")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each proof")
    options = parser.parse_args()
    sizes, limit_s = (
        ((QUICK, QUICK), 5.0) if options.quick else ((CASES, BELOW), options.time_limit)
    )
    best_of_rules(2, 2, Seconds(3, 4, 5), 2)  # compiles
    news = sys.stderr if options.json else sys.stdout
    rows: list[dict[str, object]] = []
    for case in cases(*sizes):
        rows.append(row(case, limit_s))
        print(shown(rows[-1]), file=news, flush=True)
    print(summary(rows), file=news, flush=True)
    offload: list[dict[str, object]] = []
    for case in OFFLOAD[:QUICK] if options.quick else OFFLOAD:
        offload.append(offload_row(case, limit_s))
        print(shown(offload[-1]), file=news, flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "offload": offload, "machine": machine()}))


if __name__ == "__main__":
    main()
