"""Command line: one command per verb.  `penstock --help` lists them.

Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 130 interrupted, 143 terminated.  What goes
wrong is reported in one line `error:` and one line `hint:` on stderr; there is never a traceback.
"""

import os
import sys
from collections.abc import Sequence

from penstock.garbage import collector_waits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's) name; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments is None:
            _let_hashes_be_alike()
        with collector_waits():
            from penstock.cli.app import run  # takes a moment, in which Ctrl-C can come
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ImportError as problem:
        print(f"error: {problem}", file=sys.stderr)
        print("hint: install Penstock again, with all it needs: make setup", file=sys.stderr)
        return 1
    return run(given)


def _let_hashes_be_alike() -> None:
    """Begin anew with a fixed seed of hashes, where Python has drawn one for this process alone.

    It orders sets of text, from which vocabularies are made: ranks that torchrun starts, a run that
    is resumed and ranks that join are other processes, and would have other ones.
    """
    is_random = sys.flags.hash_randomization and "PYTHONHASHSEED" not in os.environ
    if is_random and sys.executable and not sys.flags.ignore_environment:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
