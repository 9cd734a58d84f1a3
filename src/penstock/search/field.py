"""Field: plans among which the best is found, simulating only those that can win.

A plan has a rough bound, then a bound, which its score cannot be below (judge.py).  In the order
of the rough ones, plans are simulated until the next one cannot be better than the best; so what
is found is what simulating all of them would find.  A plan that keeps all activations, and for
which there is not enough memory, is tried again with recompute where ranks need it.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.plan.plan import Plan
from penstock.search.candidate import Candidate, Objective
from penstock.search.judge import Judge
from penstock.search.recompute import as_needed, keeps_all


class Tally(NamedTuple):
    """What became of plans: each is one of `simulated`, `slower` and `late`.

    simulated   `too_full` of them do not fit the memory, `impossible` ones cannot be built
    slower      not simulated: by their busiest rank alone they cannot be better
    late        not simulated: the time limit was reached
    """

    simulated: int
    too_full: int
    impossible: int
    slower: int
    late: int

    def __add__(self, other: object) -> "Tally":
        if not isinstance(other, Tally):
            return NotImplemented
        return Tally(*map(sum, zip(self, other, strict=True)))

    def __str__(self) -> str:
        """Return one line: "12 plans: 9 simulated, 2 of them ...; 3 cannot be better ..."."""
        words = [f"{self.simulated} simulated"]
        words += [f"{self.too_full} of them need more memory than there is"] * bool(self.too_full)
        words += [f"{self.impossible} of them cannot be built"] * bool(self.impossible)
        parts = [", ".join(words)]
        parts += [f"{self.slower} cannot be better by their busiest rank"] * bool(self.slower)
        parts += [f"{self.late} not tried for lack of time"] * bool(self.late)
        return f"{self.simulated + self.slower + self.late} plans: " + "; ".join(parts)


_FIRST = 16  # plans that are simulated however short the run is
_SHARE, _PLAN_S = 0.1, 0.005  # of a run, that searching on may take; what simulating a plan takes


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried.

    prune      whether a plan whose bound is above the best is left unsimulated
    rescues    whether what does not fit is tried with less kept, copied away or in shards
    is_over    whether the time is up: the best of those simulated then counts
    progress   called with how many plans are dealt with, and of how many
    num_steps  of the run that is planned: what trying more may take depends on what it takes
    """

    prune: bool = True
    rescues: bool = True
    is_over: Callable[[], bool] = _never
    progress: Callable[[int, int], None] | None = None
    num_steps: float = math.inf

    @property
    def worth_s(self) -> float:
        """Return the seconds a step must gain for a plan to be worth simulating.

        All steps of the run gain ten times what simulating it takes.
        """
        return _PLAN_S / (_SHARE * self.num_steps)


class Field:
    """Plans, in the order in which equally good ones are preferred, and what is known of them."""

    def __init__(
        self, judge: Judge, plans: Sequence[Plan], objective: Objective, effort: Effort
    ) -> None:
        self.judge, self.plans, self.effort = judge, plans, effort
        self.objective: Objective = objective
        self.was_cut_short = False
        self._made: dict[int, Candidate] = {}
        self._rescued: dict[int, Candidate] = {}  # those that did not fit before
        self._late: set[int] = set()
        self._bounds: dict[int, float] = {}  # of the objective
        self._held: dict[int, float] = {}
        self._rough = [judge.rough(plan, objective) for plan in plans]
        self._order = sorted(range(len(plans)), key=self._rough.__getitem__)
        if not effort.prune:
            for done, number in enumerate(self._order):
                if self._has_time(number):
                    self.made(number)
                self._tell(done + 1)

    @property
    def simulated(self) -> tuple[Candidate, ...]:
        """Return the candidates that were simulated so far, in the order of the plans."""
        rows = (self._made[number] for number in sorted(self._made))
        return (*rows, *(self._rescued[number] for number in sorted(self._rescued)))

    def refusal(self, among: Callable[[Plan], bool]) -> str:
        """Return why the first of the plans `among` that is refused is, or was before recompute."""
        for number, plan in enumerate(self.plans):
            if among(plan):
                made = self.made(number)
                if why := self._rescued.get(number, made).refused:
                    return why
        return ""

    def front(self) -> list[Candidate]:
        """Return the usable candidates that no other beats in seconds, bytes and dollars."""
        kept = _Front()
        for done, number in enumerate(self._order):
            self._tell(done)
            if number not in self._made:
                if not self._has_time(number):
                    continue
                seconds, usd = self.judge.least(self.plans[number])
                if kept.beats((seconds, self._peak(number), usd)):
                    continue
            kept.add(self.made(number))
        self._tell(len(self.plans))
        return kept.by_seconds()

    def tally(self) -> Tally:
        """Return what became of the plans so far."""
        made, late = self._made.values(), len(self._late - self._made.keys())
        return Tally(
            simulated=len(made),
            too_full=sum(bool(each.refused and each.peak_bytes) for each in made),
            impossible=sum(bool(each.refused and not each.peak_bytes) for each in made),
            slower=len(self.plans) - len(made) - late,
            late=late,
        )

    def best(
        self, count: int, among: Callable[[Plan], bool] = lambda plan: True
    ) -> list[Candidate]:
        """Return the `count` best usable candidates of the plans `among`, or as many as there are.

        Of equally good ones, those that come first.
        """
        kept: list[tuple[tuple[float, float], int]] = []
        for done, number in enumerate(self._order):
            self._tell(done)
            limit = kept[-1][0][0] - self._least_s() if len(kept) == count else math.inf
            if self.effort.prune and self._rough[number] > limit:
                break
            if not self._has_time(number):
                continue
            if self._is_none_of(number, among) or self._is_above(number, limit):
                continue
            made = self.made(number)
            if not made.refused and among(made.plan):
                bisect.insort(kept, (made.score(self.objective), number))
                del kept[count:]
        self._tell(len(self.plans))
        return [self._made[number] for _, number in kept]

    def overfull(self, count: int) -> list[Candidate]:
        """Return the first `count` candidates that do not fit their memory, by their bounds."""
        found: list[Candidate] = []
        for number in self._order:
            if len(found) == count:
                break
            if not self._has_time(number) or self._fits(number):
                continue
            made = self.made(number)
            found += [made] if made.refused and made.peak_bytes else []
        return found

    def short(self, count: int) -> list[Candidate]:
        """Return the first `count` candidates that keep all and do not fit, by their bounds."""
        found: list[Candidate] = []
        for number in self._order:
            if len(found) == count:
                break
            if not (self.effort.rescues and keeps_all(self.judge, self.plans[number])):
                continue
            if self._has_time(number) and (number in self._made or not self._fits(number)):
                made = self.made(number)
                made = self._rescued.get(number, made)
                found += [made] if made.refused and made.peak_bytes else []
        return found

    def is_over(self) -> bool:
        """Return whether the time is up, and remember that something was left out."""
        self.was_cut_short |= self.effort.is_over()
        return self.was_cut_short

    def _least_s(self) -> float:
        """Return what a plan has to gain to be simulated, once there are a few."""
        is_for_time = self.objective == "time" and len(self._made) >= _FIRST
        return self.effort.worth_s if is_for_time else 0.0

    def _tell(self, done: int) -> None:
        if self.effort.progress is not None:
            self.effort.progress(done, len(self.plans))

    def _is_none_of(self, number: int, among: Callable[[Plan], bool]) -> bool:
        """Return whether a plan, recomputed as needed, is surely none of those `among`."""
        made = self._made.get(number)
        if among(self.plans[number] if made is None else made.plan):
            return False
        return made is not None or not self._may_be_rescued(number)

    def _is_above(self, number: int, limit: float) -> bool:
        """Return whether a plan that is not simulated yet cannot be within `limit`."""
        if not self.effort.prune or number in self._made or limit == float("inf"):
            return False
        if self.objective == "memory":
            return self._peak(number) > limit
        if number not in self._bounds:
            self._bounds[number] = self.judge.bound(self.plans[number], self.objective)
        return self._bounds[number] > limit

    def _peak(self, number: int) -> float:
        """Return a lower bound of the bytes of a plan, recomputed as needed."""
        return 0.0 if self._may_be_rescued(number) else self._bytes(number)

    def _may_be_rescued(self, number: int) -> bool:
        may = self.effort.rescues and keeps_all(self.judge, self.plans[number])
        return may and not self._fits(number)

    def _fits(self, number: int) -> bool:
        """Return whether a plan fits its memory, but for messages that wait."""
        peak, caps = self._bytes(number), self.judge.caps(self.plans[number])
        return all(peak <= cap for row in caps for _, cap in row)

    def _bytes(self, number: int) -> float:
        if number not in self._held:
            self._held[number] = self.judge.bound(self.plans[number], "memory")
        return self._held[number]

    def made(self, number: int) -> Candidate:
        """Return what the plan of this number gives, simulated now if it was not yet."""
        if number not in self._made:
            plan = self.plans[number]
            made = self._made[number] = self.judge.candidate(plan)
            is_full = bool(made.refused and made.peak_bytes)
            if self.effort.rescues and is_full and keeps_all(self.judge, plan):
                fitted = as_needed(self.judge, plan)
                if fitted is not None:
                    self._rescued[number], self._made[number] = made, self.judge.candidate(fitted)
        return self._made[number]

    def _has_time(self, number: int) -> bool:
        """Return whether a plan may be simulated: at least until one is usable."""
        if number in self._made:
            return True
        is_late = any(not made.refused for made in self._made.values()) and self.is_over()
        if is_late:
            self._late.add(number)
        return not is_late


def front_of(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the usable ones that no other beats in seconds, bytes and dollars, by seconds.

    Of equal ones, the one that comes first.
    """
    kept = _Front()
    for each in candidates:
        kept.add(each)
    return tuple(kept.by_seconds())


_Figures = tuple[float, float, float]


class _Front:
    """Candidates of which none beats another, with their figures."""

    def __init__(self) -> None:
        self._rows: list[tuple[_Figures, Candidate]] = []

    def add(self, candidate: Candidate) -> None:
        """Take a candidate that can be used and that none beats, in place of those that it beats.

        What equals one that is there adds nothing.
        """
        if candidate.refused or self.beats(own := _figures(candidate)):
            return
        a, b, c = own
        rows = [
            (figures, each)
            for figures, each in self._rows
            if a > figures[0] or b > figures[1] or c > figures[2]
        ]
        self._rows = [*rows, (own, candidate)]

    def beats(self, figures: _Figures) -> bool:
        """Return whether one of them has no larger figure."""
        a, b, c = figures
        return any(x <= a and y <= b and z <= c for (x, y, z), _ in self._rows)

    def by_seconds(self) -> list[Candidate]:
        """Return the candidates, the fastest first."""
        return [candidate for _, candidate in sorted(self._rows, key=lambda row: row[0])]


def _figures(candidate: Candidate) -> _Figures:
    return candidate.step_s, float(max(candidate.peak_bytes)), candidate.usd
