"""Policy file: what a running job needs to follow a policy, as TOML that a person can read."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.errors import FleetError
from penstock.files import read_bytes, write_text
from penstock.fleet.job_work import FleetJob
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

    What a run that follows it needs besides:
    traces       files in which the market goes on, and `prices` on demand and preemptible where
                 they have none: () or both, in dollars per hour
    tick_s       between two questions to the policy
    provision    a command that is called when other machines are wanted; "": processes of this host
                 are the machines
    job          what starts, pauses and steps take; steps are those of the run
    Raises:   FleetError: a number that cannot be.
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
    traces: tuple[str, ...] = ()
    prices: tuple[float, ...] = ()
    tick_s: float = 30.0
    provision: str = ""
    job: FleetJob | None = None

    def __post_init__(self) -> None:
        for name in ("deadline_h", "tick_s"):
            value: float = getattr(self, name)
            if not 0 < value < math.inf:
                raise FleetError(f"{name} of the policy is {value}", hint="give more than 0")
        if len(self.prices) not in (0, 2) or not all(0 < price < math.inf for price in self.prices):
            hint = "give those on demand and preemptible, prices = [3.06, 0.92]"
            raise FleetError(f"prices of the policy are {self.prices}", hint=hint)

    def save(self, path: Path) -> None:
        """Write it as TOML."""
        values = asdict(self)
        values.pop("job")
        rows = _rows(values)
        if self.job is not None:
            job = asdict(self.job)
            speeds: list[dict[str, object]] = job.pop("speeds")
            rows += ["", "[job]", *_rows(job)]
            for speed in speeds:
                rows += ["", "[[job.speeds]]", *_rows(speed)]
        write_text(path, "\n".join(["# The policy of a fleet (docs/fleet.md).", *rows, ""]))


def _rows(values: Mapping[str, object]) -> list[str]:
    """Return lines of TOML; what is None is left out."""
    given = ((name, value) for name, value in values.items() if value is not None)
    return [f"{name} = {json.dumps(value)}" for name, value in given]


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
