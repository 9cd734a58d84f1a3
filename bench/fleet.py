"""The fleet against what was measured and published.

    python -m bench.fleet [--json] [--data ../shared/data]

Learning (bench/fleet_predict.py): what `penstock fleet predict` foresees of groups left out.
Takes about six minutes on one core.
"""

import argparse
import json
from pathlib import Path

from bench import fleet_predict
from penstock.cli import face


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=fleet_predict.DATA)
    asked = parser.parse_args()
    rows = list(fleet_predict.rows(asked.data))
    if asked.json:
        print(json.dumps([row._asdict() for row in rows]))
    else:
        print(face.table(fleet_predict.Row._fields, map(fleet_predict.words, rows)))


if __name__ == "__main__":
    main()
