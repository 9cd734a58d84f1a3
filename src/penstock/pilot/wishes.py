"""Wishes: what a run that follows a policy keeps in its folder, and who reads it.

wanted.json      how many machines of which pool are wanted now, and who is to leave
decisions.jsonl  a line for each decision, with what was predicted then, and for what followed
policy.toml      the policy, as it was given (docs/fleet.md)
.policy.npy      its numbers, fitted on the trace as it stood when the run began
machines.log     what those say that provide machines
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import FleetError
from penstock.files import read_json, write_text
from penstock.typed import damage, typed

POLICY, WANTED, DECISIONS = "policy.toml", "wanted.json", "decisions.jsonl"
TABLE, LOG = ".policy.npy", "machines.log"
ELSEWHERE = ":"  # a command that does nothing: who provides machines reads wanted.json
POOL, ON_DEMAND = "PENSTOCK_POOL", ":on-demand"  # which stands behind the name of a pool


@dataclass(frozen=True, slots=True)
class WantedPool:
    """Machines of one pool and kind: wanted, ordered and not lost, and there.

    called_s:  when they were last asked for, on the run's clock.
    """

    pool: str
    wanted: int = 0
    held: int = 0
    there: int = 0
    called_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run wants now, and what its next decision has to know.

    begun_s:  when the run began, in seconds since 1970: its clock counts from then.
    members:  machines that were there at the last tick, by number; their pools.
    leave:    those that are not wanted any more.
    usd:      paid by `now_s`, and `usd_h` from then on.
    offered:  by pool.
    join:     what a machine has to run, with PENSTOCK_POOL set.
    settled:  whether all that is wanted was there.
    """

    begun_s: float
    join: str
    now_s: float = 0.0
    step: int = 0
    pools: tuple[WantedPool, ...] = ()
    members: dict[str, str] | None = None
    leave: tuple[int, ...] = ()
    usd: float = 0.0
    usd_h: float = 0.0
    offered: dict[str, float] | None = None
    decided_s: float = 0.0
    settled: bool = False


def pool_here() -> str:
    """Return the pool of which this process's machine is, as its environment says."""
    return os.environ.get(POOL, "")


def wanted_in(folder: Path) -> Wanted:
    """Return what the run in a folder wants.

    Raises:   FleetError: it follows no policy, or its file is damaged.
    """
    path = folder / WANTED
    content = read_json(path, FleetError, "machines that are wanted")
    with damage(f"{path}", FleetError, hint="delete it: the run counts from its beginning then"):
        return typed(Wanted, content)


def is_followed(folder: Path) -> bool:
    """Return whether the run in a folder follows a policy."""
    return (folder / POLICY).exists() and (folder / WANTED).exists()


def is_to_leave(folder: Path, member: int) -> bool:
    """Return whether a machine that waits to be taken in is not wanted any more."""
    try:
        return is_followed(folder) and member in wanted_in(folder).leave
    except FleetError:  # somebody has put another file there
        return False


def write_wanted(folder: Path, state: Wanted) -> None:
    """Write what a run wants."""
    write_text(folder / WANTED, json.dumps(asdict(state), indent=1) + "\n")


def decisions_in(folder: Path) -> list[dict[str, Any]]:
    """Return the lines about decisions of the run in a folder that are whole."""
    path = folder / DECISIONS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
