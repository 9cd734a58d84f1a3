"""Overlap: sums beside computes, alone, one by one and at once, over links free and slow.

    python -m bench.overlap [--json] [--rates X ...]

Runs `penstock doctor --overlap`: on two processes of this host (free, through shared memory), and
at both ends of a real line (bench/network.py; as root), over gloo, one core each.

link, size_bytes            what is summed
compute_s, sum_s            each alone, medians; 1.5 times as much is computed
one_by_one_s, at_once_s     the computes and the sum
spread                      of at_once: half of what lies between the tenths, over the median
predicted_s                 at once, by the simulator, from the other sizes alone
slowdown, gain              of computes by the sum; of at once over one by one
disturbed                   whether computes alone took unlike times
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.beside import DELAY_S, RATES, link_of
from bench.line import at_both_ends
from bench.machine import machine
from bench.network import can_throttle, line
from penstock.cli import face

DOCTOR = ("penstock", "doctor", "--overlap", "--json")
KEYS = "size_bytes", "predicted_s", "slowdown", "gain"
Row = dict[str, Any]


def measured(rate: float) -> Row:
    """Return what `penstock doctor --overlap` prints."""
    if rate == float("inf"):
        command = [sys.executable, "-m", *DOCTOR]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    with line(rate, DELAY_S) as places:
        return json.loads(at_both_ends(places, DOCTOR))


def rows_of(link: str, found: Row) -> Iterator[Row]:
    for each in found["sizes"]:
        at_once = each["at_once"]
        yield {
            "link": link,
            **{key: each[key] for key in KEYS},
            "compute_s": each["compute"]["median_s"],
            "sum_s": each["sum"]["median_s"],
            "one_by_one_s": each["one_by_one"]["median_s"],
            "at_once_s": at_once["median_s"],
            "spread": (at_once["high_s"] - at_once["low_s"]) / 2 / at_once["median_s"],
            "disturbed": found["disturbed"],
        }


def words(row: Row) -> tuple[str, ...]:
    taken = (f"{1e3 * row[key]:.3g}" for key in ("compute_s", "sum_s", "one_by_one_s", "at_once_s"))
    told = "-", "-"
    if row["predicted_s"] is not None:
        off = row["predicted_s"] / row["at_once_s"] - 1
        told = f"{1e3 * row['predicted_s']:.3g}", f"{100 * off:+.0f} %"
    parts = f"{100 * row['slowdown']:.0f} %", f"{100 * row['gain']:.0f} %"
    return row["link"], f"{row['size_bytes'] / 2**20:g}", *taken, *told, *parts


HEAD = ("link", "MiB", "alone ms", "sum", "one by one", "at once", "said", "off", "slower", "gain")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="bytes/s; inf: free")
    given = parser.parse_args(argv)
    works, why = can_throttle()
    rates = [rate for rate in given.rates if rate == float("inf") or works]
    rows = [row for rate in rates for row in rows_of(link_of(rate), measured(rate))]
    if given.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return 0
    print(face.table(HEAD, map(words, rows)))
    if any(row["disturbed"] for row in rows):
        print("disturbed: computes alone took unlike times")
    if not works:
        print(f"no slow links: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
