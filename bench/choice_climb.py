"""Climbing from a plan by every single and every double change of what it decides of its stages.

In another form than the search's, and without its help: all words of all stages, none left out by
what it should do, taken as often as one makes the step shorter under the memory that there is.
Pairs are simulated in the order of what both should take together.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, get_args

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.program.passes.offload import Offloaded
from penstock.program.passes.shard import Sharding
from penstock.search.candidate import Candidate
from penstock.search.judge import Judge

Change = tuple[str, int, Any]

_AWAY: tuple[Offloaded, ...] = get_args(Offloaded)
_SHARED: tuple[Sharding, ...] = get_args(Sharding)


class Climb:
    """Climbs on one judge; at most `most` plans are simulated for it."""

    def __init__(self, judge: Judge, *, beside: bool, most: int) -> None:
        self.judge, self.beside, self.most = judge, beside, most
        self.known: dict[Plan, Candidate] = {}

    def top(self, plan: Plan) -> Candidate:
        """Return the fastest that is reached from a plan that fits."""
        best = self.judge.candidate(plan)
        while (better := self._single(best) or self._double(best)) is not None:
            best = better
        return best

    def _single(self, best: Candidate) -> Candidate | None:
        made = [self._tried(best.plan, change) for change in changes(best.plan, self.beside)]
        fits = [each for each in made if each is not None and not each.refused]
        least = min(fits, key=lambda each: each.step_s, default=best)
        return least if _is_shorter(least, best) else None

    def _double(self, best: Candidate) -> Candidate | None:
        rows = list(changes(best.plan, self.beside))
        tried = [(change, self._tried(best.plan, change)) for change in rows]
        there = [(change, made.step_s) for change, made in tried if made and made.peak_bytes]
        pairs = sorted(
            ((a_s + b_s, a, b) for (a, a_s), (b, b_s) in itertools.combinations(there, 2)),
            key=lambda pair: pair[0],
        )
        for _, a, b in pairs:
            if len(self.known) >= self.most:
                return None
            first = changed(best.plan, a)
            made = None if first is None else self._tried(first, b)
            if made is not None and not made.refused and _is_shorter(made, best):
                return made
        return None

    def _tried(self, plan: Plan, change: Change) -> Candidate | None:
        made = changed(plan, change)
        if made is None:
            return None
        if made not in self.known:
            self.known[made] = self.judge.candidate(made)
        return self.known[made]


def brute(judge: Judge, plan: Plan, *, beside: bool) -> float:
    """Return the shortest step of all choices of all stages of a plan, as it is cut."""
    stages, least = plan.num_stages, float("inf")
    shared = _SHARED if plan.replicas > 1 else _SHARED[:1]
    ways = itertools.product((False, True), _AWAY, shared)
    rows = itertools.product(list(ways), repeat=stages)
    for row, ahead, aside in itertools.product(rows, (0, 1), (False, True)[: 1 + beside]):
        again, away, parts = zip(*row, strict=True)
        made = _made(
            lambda again=again, away=away, parts=parts, ahead=ahead, aside=aside: plan.changed(
                recompute=again, offload=away, shard=parts, prefetch=ahead, beside=aside, parts=()
            )
        )
        if made is not None:
            candidate = judge.candidate(made)
            least = least if candidate.refused else min(least, candidate.step_s)
    return least


def changes(plan: Plan, beside: bool) -> Iterator[Change]:
    """Yield all single changes."""
    words: dict[str, tuple[Any, ...]] = {"recompute": (False, True), "offload": _AWAY}
    if plan.replicas > 1:
        words["shard"] = _SHARED
    for stage in range(plan.num_stages):
        for what, values in words.items():
            yield from ((what, stage, value) for value in values)
        yield from (("ahead", stage, ahead) for ahead in (0, 1, 2))
    yield from (("prefetch", -1, ahead) for ahead in (0, 1, 2))
    yield from (("beside", -1, aside) for aside in (False, True)[: 1 + beside])


def changed(plan: Plan, change: Change) -> Plan | None:
    """Return the plan with a change, and what has to go with it; None where there is none."""
    what, stage, value = change
    if stage < 0:
        return _made(lambda: plan.changed(**{what: value}), plan)
    if what == "ahead":
        ahead = [*plan.ahead]
        ahead[stage] = value
        return _made(lambda: plan.changed(prefetch=ahead), plan)
    row = list(getattr(plan, what) or (_AWAY if what == "offload" else _SHARED)[:1] * 99)
    row = [*row[: plan.num_stages]]
    row[stage] = value
    return _made(lambda: plan.changed(**{what: tuple(row)}, **_with(plan, what, row)), plan)


def _with(plan: Plan, what: str, row: list[Any]) -> dict[str, Any]:
    """Return what else is changed: weights of replicas leave in parts, and none fetches nothing."""
    away = row if what == "offload" else list(plan.offload)
    parts = row if what == "shard" else list(plan.shard)
    also: dict[str, Any] = {}
    if plan.replicas > 1 and what == "offload":
        parts = parts or ["replicate"] * plan.num_stages
        leaves = [word in ("weights", "all") for word in away]
        parts = [
            "shard" if gone and part == "replicate" else part
            for gone, part in zip(leaves, parts, strict=True)
        ]
        also["shard"] = tuple(parts)
    if all(word == "none" for word in away):
        also["beside"] = False
    if all(part == "replicate" for part in parts):
        also["parts"] = ()
        if not {"weights", "all"} & {*away}:
            also["prefetch"] = 0
    return also


def _made(make: Callable[[], Plan], before: Plan | None = None) -> Plan | None:
    try:
        made = make()
    except PlanError:
        return None
    return None if made == before else made


def _is_shorter(candidate: Candidate, best: Candidate) -> bool:
    return candidate.step_s < best.step_s * (1 - 1e-9)
