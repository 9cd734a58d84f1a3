"""Policy file: what a running job needs to follow a policy, as TOML that a person can read."""

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.errors import FleetError
from penstock.files import read_bytes, write_text
from penstock.fleet.replay import Replayed
from penstock.typed import damage, typed

_HINT = "penstock fleet advise --policy-file writes one"


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A policy that was chosen, and what it is a choice for.

    policy       as `penstock fleet replay --policy` takes it
    pools        of which machines are taken
    machines     that the job asks for, and `plan` that they run
    deadline_h   hours until the job must be done; budget_usd: 0.0 without one
    expected     what is expected of it: dollars, hours, and the chance to be in time
    reasons      why it was chosen
    hosts        that it begins with, one for each rank in order: preemptible-0, on-demand-1, ...
    """

    policy: str
    pools: tuple[str, ...]
    machines: int
    plan: str
    deadline_h: float
    budget_usd: float
    expected_usd: float
    expected_hours: float
    chance_in_time: float
    reasons: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write it as TOML."""
        rows = (f"{name} = {json.dumps(value)}" for name, value in asdict(self).items())
        write_text(path, "\n".join(["# The policy of a fleet (docs/fleet.md).", *rows, ""]))


def read_policy(path: Path) -> PolicyFile:
    """Return a policy file.

    Raises:   FleetError: no such file, not TOML, or fields that are missing or not known.
    """
    place = f"policy {path}"
    try:
        content = tomllib.loads(read_bytes(path, FleetError, "policy").decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise FleetError(f"{place} is not TOML: {problem}", hint=_HINT) from problem
    with damage(place, FleetError, hint=_HINT):
        return typed(PolicyFile, content)


def begun(run: Replayed) -> tuple[str, ...]:
    """Return names of the hosts that a replay began with, preemptible ones first."""
    held = [row for row in run.timeline.tolist() if row[1] + row[2] > 0]
    if not held:
        return ()
    _, preemptible, sure, *_ = held[0]
    kinds = ["preemptible"] * int(preemptible) + ["on-demand"] * int(sure)
    return tuple(f"{kind}-{rank}" for rank, kind in enumerate(kinds))
