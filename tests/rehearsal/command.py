"""Command: `penstock` on rehearsal GPUs in processes of its own, and what these saw."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from tests.rehearsal.library import CUDA, built, cache_folder

ROOT = Path(__file__).parent.parent.parent
SRC = Path(penstock.__file__).parent.parent  # what is tested, which may be a copy
LIMIT_S = 360.0
PATHS = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(SRC))), "OMP_NUM_THREADS": "1"}
_LAUNCHER = ("-m", "tests.rehearsal.launcher")


@dataclass(frozen=True)
class Rehearsed:
    """What a command gave, and the rows of its processes (launcher.py)."""

    code: int
    text: str
    rows: tuple[dict[str, Any], ...]

    @property
    def windows(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == "window"]

    @property
    def kept(self) -> list[dict[str, Any]]:
        """Return what keeping steps for audits has cost, before and after each."""
        return [row for row in self.rows if row["kind"] == "kept"]

    @property
    def races(self) -> list[str]:
        return [race for row in self.rows for race in row["races"]]

    @property
    def devices(self) -> set[int]:
        """Return the numbers of the devices on which steps were made."""
        return {row["device"] for row in self.windows}

    @property
    def last_windows(self) -> list[dict[str, Any]]:
        """Return the newest window of each process that has made one: all is warm by then."""
        return list({row["pid"]: row for row in self.windows}.values())


def rehearse(  # noqa: PLR0913 - a command, and the machine on which it runs
    arguments: Sequence[str],
    folder: Path,
    *,
    gpus: int = 1,
    bytes_of_each: int = 1 << 30,
    torchrun: int = 0,
    kind: str = CUDA,
    wrong: int = 0,
) -> Rehearsed:
    """Run `penstock ARGUMENTS` on so many rehearsal GPUs; nothing of other runs is found again.

    torchrun:  how many ranks torchrun starts; 0: none does.
    wrong:     the window of a run before which a weight goes wrong; 0: none does.
    kind:      what torch calls such a device; Penstock knows it, unless it is "idle".
    """
    seen = folder / "seen"
    seen.mkdir(parents=True, exist_ok=True)
    own = {"REHEARSAL_GPUS": str(gpus), "REHEARSAL_BYTES": str(bytes_of_each)}
    own |= {"REHEARSAL_KIND": kind, "REHEARSAL_WRONG": str(wrong)}
    own |= {"REHEARSAL_SEEN": str(seen), "REHEARSAL_CACHE": str(cache_folder())}
    built(kind)
    own["XDG_CACHE_HOME"] = str(folder / "cache")
    starts = ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)] if torchrun else []
    done = subprocess.run(
        [sys.executable, *starts, *_LAUNCHER, *arguments],
        cwd=folder,
        env={**os.environ, **own, **PATHS},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    files = sorted(seen.glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for file in files:
        file.unlink()
    return Rehearsed(done.returncode, done.stdout + done.stderr, tuple(rows))
