"""Closed forms: what planners take for the seconds of a 1F1B step, beside its exact simulation.

    python -m bench.closed_forms [--json] [--samples 400]

A case is an imbalance and a message time.  Each of its samples has 4, 8 or 16 stages, and 1, 2, 4
or 8 micro-batches per stage; a forward takes 1 s give or take the imbalance, evenly spread, a
backward twice as long; a message takes its percents of 1 s, beside the computes.

mean, p95   of |formula / exact - 1|, in percent
bias        mean of formula / exact - 1, in percent: below 0 the formula promises too much
earlier     mean of a study of the same setup made apart from this code, on other random samples
"""

import argparse
import json
from collections.abc import Iterator

import numpy as np

from bench.formulas import FORMULAS, Floats, Pipeline
from penstock.schedule import KINDS, one_f_one_b
from penstock.simulate import Table, step_seconds, table_of

Row = dict[str, object]

STAGES, PER_STAGE = (4, 8, 16), (1, 2, 4, 8)
IMBALANCES, MESSAGES = (0, 10, 30), (1, 10, 30)  # percent of a forward
SEED = 0

# By (imbalance, message); in the order of FORMULAS.
EARLIER = {
    (0, 1): (0.6, 0.4, 0.6, 0.6, 0.2, 0.6, 0.4, 25.9),
    (10, 1): (0.8, 0.9, 4.4, 2.9, 1.3, 4.2, 4.2, 23.8),
    (10, 10): (2.1, 1.0, 7.0, 1.3, 4.1, 7.0, 5.4, 25.4),
    (10, 30): (10.4, 5.9, 14.9, 8.4, 7.0, 15.1, 10.1, 32.4),
    (30, 10): (1.5, 2.0, 13.2, 6.5, 6.1, 12.4, 4.8, 21.9),
}


def rows_of(samples: int) -> list[Row]:
    """Return a row for every case and formula; the same at every call."""
    tables: dict[tuple[int, int], Table] = {}
    rows: list[Row] = []
    for case in ((imbalance, message) for imbalance in IMBALANCES for message in MESSAGES):
        errors = np.array(list(_errors(case, samples, tables)))
        for at, formula in enumerate(FORMULAS):
            row: Row = {
                "case": f"+-{case[0]} %, message {case[1]} %",
                "formula": formula.__name__,
                "mean": float(np.abs(errors[:, at]).mean()),
                "p95": float(np.percentile(np.abs(errors[:, at]), 95)),
                "bias": float(errors[:, at].mean()),
                "earlier": EARLIER[case][at] if case in EARLIER else None,
            }
            rows.append(row)
    return rows


def _errors(
    case: tuple[int, int], samples: int, tables: dict[tuple[int, int], Table]
) -> Iterator[Floats]:
    """Yield the errors of all formulas in each sample, in percent."""
    rng = np.random.default_rng((SEED, *case))
    for _ in range(samples):
        stages = int(rng.choice(STAGES))
        m = stages * int(rng.choice(PER_STAGE))
        forward_s = 1.0 + case[0] / 100 * rng.uniform(-1.0, 1.0, stages)
        message_s = np.full(stages - 1, case[1] / 100)
        given = Pipeline(forward_s, 2.0 * forward_s, message_s, m)
        if (stages, m) not in tables:
            tables[stages, m] = table_of(one_f_one_b(stages, m))
        exact_s = exact(tables[stages, m], given)
        yield np.array([100 * (formula(given) / exact_s - 1) for formula in FORMULAS])


def exact(table: Table, given: Pipeline) -> float:
    """Return the seconds of the step, simulated; updates take no time."""
    seconds = np.zeros((1, len(KINDS), table.num_stages))
    seconds[0, KINDS.index("F")] = given.forward_s
    seconds[0, KINDS.index("B")] = given.backward_s
    return float(step_seconds(table, seconds, [[*given.message_s, 0.0]])[0])


def show(rows: list[Row]) -> None:
    """Print a line per case: mean (p95) and the sign of the bias; below it the earlier means."""
    names = [formula.__name__ for formula in FORMULAS]
    print(f"{'':22}" + "".join(f"{name:>14}" for name in names))
    for first in range(0, len(rows), len(names)):
        own = rows[first : first + len(names)]
        print(f"{own[0]['case']:22}" + "".join(f"{_cell(row):>14}" for row in own))
        if own[0]["earlier"] is not None:
            print(f"{'  earlier':22}" + "".join(_beneath(row) for row in own).rstrip())


def _cell(row: Row) -> str:
    sign = "+" if float(str(row["bias"])) > 0 else "-"
    return f"{row['mean']:.1f} ({row['p95']:.1f}) {sign}"


def _beneath(row: Row) -> str:
    """Return the earlier mean as wide as a cell, its point under that of the mean."""
    rest = _cell(row).partition(" ")[2]
    return f"{row['earlier']:>{13 - len(rest)}.1f} {'':{len(rest)}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--samples", type=int, default=400, help="random samples of each case")
    options = parser.parse_args()
    rows = rows_of(options.samples)
    if options.json:
        from bench.machine import machine

        print(json.dumps({"rows": rows, "machine": machine()}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
