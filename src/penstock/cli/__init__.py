"""Command line: one command per verb.  `penstock --help` lists them.

Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 130 interrupted, 143 terminated.  What goes
wrong is reported in one line `error:` and one line `hint:` on stderr; there is never a traceback.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's) name; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from penstock.cli.app import run  # takes half a second, in which Ctrl-C can come
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ImportError as problem:
        print(f"error: {problem}", file=sys.stderr)
        print("hint: install Penstock again, with all it needs: make setup", file=sys.stderr)
        return 1
    return run(given)
