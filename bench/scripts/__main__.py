"""Scripts as people write them, with odd state in each, by three plans against the plain loop.

    python -m bench.scripts [--json] [--only NAME ...] [--keep FOLDER]
    python -m bench.scripts [--json] --sequences [turns|all|NAME,NAME] [--only NAME ...]
        [--part 3/8]

Every script is a function of bench/scripts/zoo that returns a Job.  It is run for ten steps by
`penstock train` as a user would, and weights, buffers, state of the optimizer and losses are
compared with those of the plain loop (bench/scripts/oracle.py).

equal        the same to rounding: 1e-5 of a tensor's largest element, 2e-2 under bfloat16
difference   the greatest of any tensor
refused      the command ended with an error of one line instead
why          the tensor that differs most, the error, or what was run instead of the plan
silent       neither equal nor refused: what must not be

With --sequences a row is what came of several commands on one folder (bench/scripts/sequences.py):
by default one run and another sequence, by turns; with `turns` the other one only.  With --part 3/8
each eighth script is run, from the third on, by the sequences that it has in the whole.

audited_to   the step up to which the run's own audits have proved it; a row that is right up to
             there, and unequal later, is not silent
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.machine import machine
from bench.scripts import sequences
from bench.scripts.cases import Script, scripts
from bench.scripts.runs import Bench, Row
from bench.scripts.sequences import SEQUENCES, sequences_of


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names to run")
    parser.add_argument("--plans", nargs="*", default=[], help="plans to run; default: three each")
    names = ", ".join(SEQUENCES)
    parser.add_argument("--sequences", nargs="?", const="", help=f"all, turns, or some of: {names}")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), help="3/8: each eighth from the third"
    )
    parser.add_argument("--zoo", type=Path, help="a folder of other scripts")
    parser.add_argument("--keep", type=Path, help="keep what the runs leave, in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = options.sequences
    unknown = {n for n in sequences_of(asked or "", 0) if n not in SEQUENCES}
    if unknown:
        parser.error(f"no sequence is called {', '.join(sorted(unknown))}; there are {names}")
    chosen = [s for s in scripts(options.zoo) if _is_asked(s, options.only)]
    first, parts = options.part
    rows = list[Row | sequences.Row]()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(options.keep or Path(temporary))
        for number, script in list(enumerate(chosen))[first - 1 :: parts]:
            if asked is None:
                found = bench.rows_of(script, options.plans)
            else:
                found = sequences.rows_of(bench, script, sequences_of(asked, number))
            for row in found:
                rows.append(row)
                where = sys.stderr if options.json else sys.stdout
                print(f"{number + 1:3}/{len(chosen)} {row.line()}", file=where, flush=True)
    if options.json:
        print(json.dumps({"rows": [row.json() for row in rows], "machine": machine()}))
    else:
        print(summary(rows))
    return 1 if any(row.silent for row in rows) else 0


def _part(text: str) -> tuple[int, int]:
    """Return which part of how many.

    Raises:   ValueError: it is not one of them.
    """
    first, parts = (int(word) for word in text.split("/"))
    if not 1 <= first <= parts:
        raise ValueError(f"{text} is no part; the first of eight is 1/8")
    return first, parts


def _is_asked(script: Script, only: list[str]) -> bool:
    return not only or any(part in f"{script.about}:{script.name}" for part in only)


def summary(rows: Sequence[Row | sequences.Row]) -> str:
    """Return how many rows came out how."""
    equal = [row for row in rows if row.equal]
    silent = [row for row in rows if row.silent]
    names = ", ".join(sorted({row.script for row in silent}))
    counts = (
        (len(rows), f"runs of {len({row.script for row in rows})} scripts"),
        (len(equal), "equal"),
        (sum(_plan(row).endswith("eager") for row in equal), "of them eagerly"),
        (sum(row.refused for row in rows), "refused"),
        (sum(row.unclean for row in rows), "of them uncleanly"),
        (sum(_is_late(row) for row in rows), "unequal after the last audit"),
        (len(silent), f"unequal and silent: {names}" if names else "unequal and silent"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts)


def _plan(row: Row | sequences.Row) -> str:
    return row.ran if isinstance(row, Row) else row.plan


def _is_late(row: Row | sequences.Row) -> bool:
    return not (row.equal or row.refused or row.silent)


if __name__ == "__main__":
    sys.exit(main())
