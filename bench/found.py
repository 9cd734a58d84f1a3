"""Found: the shortest schedules under limits of activations, beside those of the authors' code.

    python -m bench.found [--json] [--quick] [--ranks 4 6 8 16] [--tries 400] [--within 60]

At the activations of V-Min, V-Half and ZB-V, below, and at limits in between, on 4, 6, 8 and 16
ranks with M = 2 R micro-batches.  F, I and W of half a rank's layers take one second each, links
are free.  For every limit the best of the authors' code (bench/published.py), and `found`
(schedule/wave_search.py) with two stages on each rank and with four, which take half a second each.

ranks, limit   a rank holds at most `limit` activations, of half its layers each; in ZB-V 2 R
stages         on a rank
drained        seconds of a step that begins and ends with all ranks idle
steady         seconds per step of a long run without a barrier
..._code       of the authors' generator, the least of all its building blocks; none below V-Min
..._bound      no schedule of stages in these waves takes less: from the work of a rank, and where
               it can be had in `within` seconds from the exact solver (schedule/exact_waves.py)
orders         of the one with the least steady seconds
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.machine import machine
from bench.published import V_CODE
from penstock.schedule import Schedule, found, steady_s
from penstock.schedule.exact_waves import TickCounts, drained_s
from penstock.schedule.stage_placement import wave
from penstock.schedule.wave_search import Objective

Row = dict[str, Any]
PER_RANK = (2, 4)
LIMITS = {
    4: (3, 4, 5, 6, 7, 8),
    6: (5, 6, 7, 8, 10, 12),
    8: (7, 8, 9, 10, 13, 16),
    16: (12, 15, 18, 25, 32),
}
QUICK = {3: (4, 6)}


class Case(NamedTuple):
    ranks: int
    limit: int
    per_rank: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Stages and micro-batches."""
        return self.per_rank * self.ranks, 2 * self.ranks

    @property
    def most(self) -> int:
        """Activations that a rank may hold, each of one stage."""
        return self.limit * self.per_rank // 2

    @property
    def second(self) -> float:
        """What an action takes."""
        return 2 / self.per_rank


def cases(limits: dict[int, tuple[int, ...]]) -> Iterator[Case]:
    """Yield what is looked for."""
    for ranks, row in limits.items():
        for limit in row:
            yield from (Case(ranks, limit, per_rank) for per_rank in PER_RANK)


def row_of(case: Case, tries: int, within_s: float) -> Row:
    made = {each: best(case, each, tries) for each in ("drained", "steady")}
    drained, steady = drained_s(made["drained"]), steady_s(made["steady"])
    code = V_CODE.get(case.ranks, {}).get(case.limit, (None, None))
    return {
        "ranks": case.ranks,
        "limit": case.limit,
        "stages": case.per_rank,
        "drained_code": code[0],
        "drained": drained * case.second,
        "drained_bound": bound(case, "drained", drained, within_s) * case.second,
        "steady_code": code[1],
        "steady": steady * case.second,
        "steady_bound": bound(case, "steady", steady, within_s) * case.second,
        "orders": str(made["steady"].orders),
    }


def best(case: Case, objective: Objective, tries: int) -> Schedule:
    """Return the schedule that is found for a case."""
    return found(
        *case.sizes, num_ranks=case.ranks, limit=case.most, objective=objective, tries=tries
    )


def bound(case: Case, objective: Objective, ticks: float, within_s: float) -> float:
    """Return ticks that no schedule is shorter than: whole counts, relaxed ones, or the work."""
    homes = wave(case.sizes[0], case.ranks)
    counts = TickCounts(homes, case.sizes[1], case.most, objective)
    return counts.bound_s(counts.shortest(math.ceil(ticks), within_s)[0])


def shown(row: Row) -> str:
    """Return a row as a line; * says that nothing is shorter, + that nothing is by a whole tick."""
    parts = [f"{row['ranks']:5} {row['limit']:5} {row['stages']:6}"]
    for what in ("drained", "steady"):
        code, ours, least = row[f"{what}_code"], row[what], row[f"{what}_bound"]
        mark = "*" if ours <= least else "+" if ours < least + 2 / row["stages"] else " "
        parts.append(f"{'-' if code is None else f'{code:g}':>5} {ours:7g}{mark} {least:7.5g}")
    return "   ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="three ranks, two limits")
    parser.add_argument("--ranks", type=int, nargs="+", choices=LIMITS, default=[*LIMITS])
    parser.add_argument("--tries", type=int, default=400)
    parser.add_argument("--within", type=float, default=60.0, help="seconds to prove each figure")
    options = parser.parse_args()
    rows: list[Row] = []
    if not options.json:
        print("ranks limit stages   drained: code, found, bound   steady: the same")
    limits = QUICK if options.quick else {ranks: LIMITS[ranks] for ranks in options.ranks}
    for case in cases(limits):
        rows.append(row := row_of(case, options.tries, options.within))
        print(shown(row), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
