"""What a run leaves in a folder that others use at the same time."""

import time
from collections.abc import Set
from pathlib import Path

SHARED = Path("/dev/shm")
_PATIENCE_S = 100


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def stays_in(folder: Path, before: Set[str]) -> set[str]:
    """Return what is new and stays: what tests beside this one make goes again."""
    until = time.monotonic() + _PATIENCE_S
    while (new := names_in(folder) - before) and time.monotonic() < until:
        time.sleep(0.05)
    return new
