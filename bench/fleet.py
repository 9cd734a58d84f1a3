"""The fleet against what was measured and published.

    python -m bench.fleet [--json] [--data ../shared/data]
    python -m bench.fleet --policies [--json] [--futures 1000] [TRACE ...]
    python -m bench.fleet --scale [--json]

Learning (bench/fleet_predict.py): what `penstock fleet predict` foresees of groups left out.
Takes about six minutes on one core.
--policies   (bench/policies.py): dollars and missed deadlines beside the omniscient's
--scale      seconds of the replay of a month of 64 machines, and of 1,000 futures
"""

import argparse
import json
import sys
from pathlib import Path

from bench import fleet_predict, policies
from penstock.cli import face


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("traces", nargs="*", type=Path, help="of --policies; else public ones")
    parser.add_argument("--policies", action="store_true")
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--futures", type=int, default=1000, help="of each kind for each trace")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=fleet_predict.DATA)
    asked = parser.parse_args()
    if asked.policies:
        table = policies.table(asked.traces, asked.futures, data=asked.data, told=_say)
        print(json.dumps(table) if asked.json else policies.words(table))
    elif asked.scale:
        print(json.dumps(policies.scale()))
    else:
        rows = list(fleet_predict.rows(asked.data))
        if asked.json:
            print(json.dumps([row._asdict() for row in rows]))
        else:
            print(face.table(fleet_predict.Row._fields, map(fleet_predict.words, rows)))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
