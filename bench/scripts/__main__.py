"""Scripts as people write them, with odd state in each, by three plans against the plain loop.

    python -m bench.scripts [--json] [--only NAME ...] [--keep FOLDER]

Every script is a function of bench/scripts/zoo that returns a Job.  It is run for ten steps by
`penstock train` as a user would, and weights, buffers, state of the optimizer and losses are
compared with those of the plain loop (bench/scripts/oracle.py).

equal        the same to rounding: 1e-5 of a tensor's largest element, 2e-2 under bfloat16
difference   the greatest of any tensor
refused      the command ended with an error of one line instead
why          the tensor that differs most, the error, or what was run instead of the plan
silent       neither equal nor refused: what must not be
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from bench.machine import machine
from bench.scripts.cases import Script, scripts
from bench.scripts.runs import Bench, Row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names to run")
    parser.add_argument("--plans", nargs="*", default=[], help="plans to run; default: three each")
    parser.add_argument("--zoo", type=Path, help="a folder of other scripts")
    parser.add_argument("--keep", type=Path, help="keep what the runs leave, in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [s for s in scripts(options.zoo) if _is_asked(s, options.only)]
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(options.keep or Path(temporary))
        for script in chosen:
            for row in bench.rows_of(script, options.plans):
                rows.append(row)
                if not options.json:
                    print(row.line(), flush=True)
    if options.json:
        print(json.dumps({"rows": [row.json() for row in rows], "machine": machine()}))
    else:
        print(summary(rows))
    return 1 if any(row.silent for row in rows) else 0


def _is_asked(script: Script, only: list[str]) -> bool:
    return not only or any(part in f"{script.about}:{script.name}" for part in only)


def summary(rows: list[Row]) -> str:
    """Return how many rows came out how."""
    equal = [row for row in rows if row.equal]
    silent = [row for row in rows if row.silent]
    names = ", ".join(sorted({row.script for row in silent}))
    counts = (
        (len(rows), f"runs of {len({row.script for row in rows})} scripts"),
        (len(equal), "equal"),
        (sum(row.ran == "eager" for row in equal), "of them eagerly"),
        (sum(row.refused for row in rows), "refused"),
        (sum(row.unclean for row in rows), "of them uncleanly"),
        (len(silent), f"unequal and silent: {names}" if names else "unequal and silent"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts)


if __name__ == "__main__":
    sys.exit(main())
