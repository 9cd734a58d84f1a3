"""penstock, which measures links less often: python -m tests.bench.hasty doctor --links ..."""

import sys

from penstock.cli import main
from penstock.gauge import links
from penstock.units import KiB

if __name__ == "__main__":
    links.SIZES = (64, 32 * KiB, 512 * KiB)
    links._ROUNDS = links._REPEATS = (3, 3)
    sys.exit(main())
