"""Rulers: policies by the words that a user writes, with what each is fitted on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import FleetError
from penstock.fleet import policies
from penstock.fleet.futures import stretches
from penstock.fleet.job_work import FleetJob
from penstock.fleet.liveput import liveput_of
from penstock.fleet.look_ahead import expecting, look_ahead
from penstock.fleet.market import Market
from penstock.fleet.one_future import Floats, Policy
from penstock.fleet.replay import Ruler

_PLAIN: tuple[tuple[Policy, tuple[str, ...]], ...] = (
    (policies.on_demand, ()),
    (policies.greedy, ()),
    (policies.uniform_progress, ()),
    (policies.transient, ()),
    (policies.anchored, ("machines on demand",)),
    (policies.auto_scaling, ("margin of the pace",)),
    (policies.growing, ("first machines", "factor per step")),
    (policies.bidding, ("machines in the first group", "its bid", "bid of the others")),
)
_FITTED: dict[str, Policy] = {"look_ahead": expecting, "liveput": policies.liveput}
_OWN, _OWN_SEED = 60, 2**31  # futures that policies are fitted on: not those they are judged by
NAMES = (*(policy.__name__ for policy, _ in _PLAIN), *_FITTED)


class PolicyBasis(NamedTuple):
    """What policies that look ahead are fitted on."""

    futures: Sequence[Market]
    deadline_s: float


def basis_of(market: Market, deadline_s: float) -> PolicyBasis:
    """Return the futures, drawn from a trace, that policies are fitted on."""
    own = stretches(market, _OWN, seed=_OWN_SEED, lasts_s=deadline_s)
    return PolicyBasis([*own], deadline_s)


def ruler_of(text: str, job: FleetJob, basis: PolicyBasis, read: Callable[[str], Policy]) -> Ruler:
    """Return the policy that a text names: "greedy", "growing,4,1.0001" or "module:function".

    read   finds the function of the last form
    Raises:   FleetError: no such policy, or not the numbers that it takes.
    """
    name, *given = (part.strip() for part in text.split(","))
    try:
        numbers = tuple(float(part) for part in given)
    except ValueError as problem:
        hint = "write it like growing,4,1.0001"
        raise FleetError(f"policy {text!r} has what is no number", hint=hint) from problem
    if ":" in name:
        return Ruler(text, read(name), numbers)
    if name in _FITTED and not numbers:
        return _fitted(name, job, basis)
    for policy, wanted in _PLAIN:
        if policy.__name__ == name:
            if len(numbers) != len(wanted):
                takes = f"it takes {', '.join(wanted)}" if wanted else "it takes no numbers"
                raise FleetError(f"policy {text!r} has {len(numbers)} numbers", hint=takes)
            return Ruler(text, policy, numbers)
    hint = f"there are {', '.join(NAMES)}, and module:function"
    raise FleetError(f"there is no policy {text!r}", hint=hint)


def _fitted(name: str, job: FleetJob, basis: PolicyBasis) -> Ruler:
    if name == "liveput":
        return liveput_of(basis.futures, job)
    return look_ahead(basis.futures, job, deadline_s=basis.deadline_s)


def table_of(ruler: Ruler) -> Floats:
    """Return the numbers of a policy, as `ruler_from` takes them."""
    return np.concatenate([np.array(ruler.args, np.float64), ruler.table])


def ruler_from(text: str, table: Floats) -> Ruler:
    """Return the built-in policy that a text names, with the numbers that `table_of` has given.

    Raises:   FleetError: no built-in policy.
    """
    name = text.partition(",")[0].strip()
    plain = {policy.__name__: policy for policy, _ in _PLAIN}
    if name not in {**plain, **_FITTED}:
        hint = f"a run can follow {', '.join(NAMES)}"
        raise FleetError(f"{text!r} is no built-in policy", hint=hint)
    return Ruler(text, {**plain, **_FITTED}[name], (), np.ascontiguousarray(table))
