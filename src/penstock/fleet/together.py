"""Together: the speed of a cluster from that of its members, and what holds it back.

    speed = min(sum of the members' speeds, cap of the server, of the link, of the loader)

where ranks get work as they are done, or shares of the batch by their speed; with equal shares all
wait for the slowest.  A step is one member's batch.  Where no cap is known, Gunther's law of
scaling, fitted on a few cluster sizes:  s(n) = n * s(1) / (1 + a * (n - 1) + b * n * (n - 1)).

Source:   arXiv:2004.03072 (sums, the server's cap, and its detection by predicted against
          observed); "Guerrilla Capacity Planning", 2007 (the law of scaling).
Ignores:  that a cap bends the speed before it holds it; ranks of one host that share a card.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.errors import EstimateError
from penstock.minima import least_squares

CapOf: TypeAlias = Literal["server", "link", "loader"]
HeldBy: TypeAlias = Literal["members", "server", "link", "loader"]

CAPS: tuple[CapOf, ...] = ("server", "link", "loader")
_MENDS: dict[HeldBy, str] = {
    "members": "nothing holds them back: more or faster ranks make it faster",
    "server": "add a server, or divide the weights among servers; else take fewer ranks",
    "link": "send less (larger batches, fewer bits), or place ranks nearer; else take fewer ranks",
    "loader": "more readers, a nearer store, or a cache; else take fewer ranks",
}


class ClusterMember(NamedTuple):
    """`ranks` ranks that take so many seconds for a step alone, and the interval of that."""

    device: str
    ranks: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ClusterSpeed:
    """Steps per second of all together, its interval, and what holds it.

    alone:   what the members would do without a cap
    """

    steps_per_s: float
    low: float
    high: float
    alone: float
    held_by: HeldBy

    @property
    def mend(self) -> str:
        """Return the remedy for the bottleneck."""
        return _MENDS[self.held_by]


def together(
    members: Sequence[ClusterMember],
    caps: Mapping[CapOf, float],
    *,
    equal_shares: bool = False,
    law: "Scaling | None" = None,
) -> ClusterSpeed:
    """Return the speed of all members under `caps`, in steps per second.

    law:   by which more ranks give less than their sum
    The ends of the interval are those where all members err to the same side.
    Raises:   EstimateError: no member, or a cap that is not above 0.
    """
    if not members or min(one.ranks for one in members) < 1:
        raise EstimateError("no rank trains nothing", hint="give at least one rank")
    for name, cap in caps.items():
        if not cap > 0:
            message = f"the cap of the {name} is {cap:g} steps per second"
            raise EstimateError(message, hint="it must be above 0")
    held_by, cap = min(caps.items(), key=lambda one: one[1], default=(None, math.inf))
    speeds = [
        _alone(
            [(one.ranks, seconds) for one, seconds in zip(members, of, strict=True)], equal_shares
        )
        for of in zip(*((one.seconds, one.high, one.low) for one in members), strict=True)
    ]
    count = sum(one.ranks for one in members)
    share = 1.0 if law is None else law.speed(count) / (count * law.first)
    middle, low, high = (share * speed for speed in speeds)
    held: HeldBy = "members" if held_by is None or middle <= cap else held_by
    return ClusterSpeed(min(middle, cap), min(low, cap), min(high, cap), middle, held)


def _alone(ranks: Sequence[tuple[int, float]], equal_shares: bool) -> float:
    if equal_shares:
        return sum(count for count, _ in ranks) / max(seconds for _, seconds in ranks)
    return sum(count / seconds for count, seconds in ranks)


class Detected(NamedTuple):
    """What an observed speed says: whether it is as predicted, what holds it, and the mend."""

    as_predicted: bool
    held_by: HeldBy | Literal["something else"]
    ratio: float
    mend: str


def detect(speed: ClusterSpeed, observed: float) -> Detected:
    """Return the bottleneck of a cluster with this observed speed, in steps per second.

    It is as predicted inside the interval, or above it: then what holds it is what was predicted
    to.  Below it something holds it that was not counted: which, the breakdown of a live run tells
    (`penstock train`, timeline/bottleneck.py).

    Raises:   EstimateError: an observed speed that is not above 0.
    """
    if not observed > 0:
        message = f"the observed speed is {observed:g} steps per second"
        raise EstimateError(message, hint="it must be above 0")
    ratio = observed / speed.steps_per_s
    if observed >= speed.low:
        return Detected(True, speed.held_by, ratio, speed.mend)
    mend = (
        "a cap that was not given, most likely the server or link that all share: add one, or take "
        "fewer ranks; the table at the end of `penstock train` names phase and rank"
    )
    return Detected(False, "something else", ratio, mend)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Gunther's law: speed of one rank, contention a and crosstalk b."""

    first: float
    contention: float
    crosstalk: float

    def speed(self, ranks: float) -> float:
        """Return the steps per second of so many ranks."""
        more = ranks - 1
        return ranks * self.first / (1 + self.contention * more + self.crosstalk * ranks * more)


def scaling(points: Mapping[int, float]) -> Scaling:
    """Return the law that fits the speeds of some numbers of ranks best.

    Least squares of n * s(1) / s(n) - 1 = a * (n - 1) + b * n * (n - 1), a and b not below 0; of
    one point beside that of one rank, a alone.

    Raises:   EstimateError: one rank is not among them, or fewer than two points.
    """
    if len(points) < 2 or 1 not in points or min(points.values()) <= 0 or min(points) < 1:
        message = f"speeds of {', '.join(map(str, points)) or 'no'} ranks are no scaling"
        raise EstimateError(message, hint="measure one rank, and at least one larger number")

    counts = np.array([n for n in points if n > 1], float)
    lost = np.array([n * points[1] / points[n] - 1 for n in points if n > 1])
    system = np.stack([counts - 1, counts * (counts - 1)], 1)
    found = [*least_squares(system[:, : len(lost)], lost, 0.0, math.inf).tolist(), 0.0]
    return Scaling(points[1], found[0], found[1])


# -- to the end ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Course:
    """A whole run: its steps, checkpoints, and ranks that are lost and replaced.

    checkpoint_s:   the seconds in which all wait for a checkpoint, each `every` steps; 0: none
    losses:         ranks expected to be lost
    replace_s:      from the loss of a rank until another one takes part
    stays:          share of the speed that is left meanwhile
    """

    steps: int
    checkpoint_s: float = 0.0
    every: int = 0
    losses: float = 0.0
    replace_s: float = 0.0
    stays: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        least = min(self.steps, self.checkpoint_s, self.every, self.losses, self.replace_s)
        if least < 0 or not 0 <= self.stays <= 1:
            message = f"no run has {self.steps} steps, a checkpoint each {self.every}, "
            message += f"{self.losses:g} losses, and {self.stays:g} of its speed left after one"
            raise EstimateError(message, hint="give numbers from 0 up, and a share up to 1")

    def seconds(self, steps_per_s: float) -> float:
        """Return N / speed + ceil(N / I) * T_c + losses * (1 - stays) * T_r."""
        saved = math.ceil(self.steps / self.every) * self.checkpoint_s if self.every else 0.0
        lost = self.losses * (1.0 - self.stays) * self.replace_s
        return self.steps / steps_per_s + saved + lost
