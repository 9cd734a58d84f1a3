"""Field: plans among which the best is found, simulating only those that can be it.

A plan has a rough bound, then a bound, which its score cannot be below (judge.py).  In the order
of the rough ones, plans are simulated until the next one cannot be better than the best; so what
is found is what simulating all of them would find.  A plan that keeps all activations, and for
which there is not enough memory, is tried again with recompute where ranks need it.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.plan import Plan
from penstock.search.candidate import Candidate, Objective
from penstock.search.judge import Judge
from penstock.search.recompute import as_needed


class Tally(NamedTuple):
    """What became of plans: each is one of `simulated`, `slower` and `late`.

    simulated   `too_full` of them do not fit the memory, `impossible` ones cannot be built
    slower      not simulated: by their busiest rank alone they cannot be better
    late        not simulated: there was no more time
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


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried.

    prune      whether a plan whose bound is above the best is left unsimulated
    rescues    whether a plan may recompute as needed
    is_over    whether there is no more time: the best of those simulated then counts
    progress   is told how many plans are dealt with, and of how many
    """

    prune: bool = True
    rescues: bool = True
    is_over: Callable[[], bool] = _never
    progress: Callable[[int, int], None] | None = None


class Field:
    """Plans, in the order in which equally good ones are preferred, and what is known of them."""

    def __init__(
        self, judge: Judge, plans: Sequence[Plan], objective: Objective, effort: Effort
    ) -> None:
        self.judge, self.plans, self.effort = judge, plans, effort
        self.objective: Objective = objective
        prune = effort.prune
        self.was_cut_short = False
        self._made: dict[int, Candidate] = {}
        self._rescued: dict[int, Candidate] = {}  # those that did not fit before
        self._rough = [judge.rough(plan, objective) for plan in plans] if prune else []
        self._bounds: dict[int, float] = {}
        numbers = range(len(plans))
        self._order = sorted(numbers, key=self._rough.__getitem__) if prune else list(numbers)
        if not prune:
            for number in numbers:
                self.made(number)
                self._tell(number + 1)

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
        """Return the usable candidates that none beats in seconds, bytes and dollars."""
        kept: list[Candidate] = []
        for done, number in enumerate(self._order):
            self._tell(done)
            if number not in self._made:
                if self._no_time():
                    continue
                least = self._least(self.plans[number])
                if any(_beats(_figures(other), least) for other in kept):
                    continue
            kept = list(front_of([*kept, self.made(number)]))
        self._tell(len(self.plans))
        return kept

    def tally(self) -> Tally:
        """Return what became of the plans so far."""
        made = self._made.values()
        left = len(self.plans) - len(self._made)
        return Tally(
            simulated=len(self._made),
            too_full=sum(bool(each.refused and each.peak_bytes) for each in made),
            impossible=sum(bool(each.refused and not each.peak_bytes) for each in made),
            slower=0 if self.was_cut_short else left,
            late=left if self.was_cut_short else 0,
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
            limit = kept[-1][0][0] if len(kept) == count else float("inf")
            if self._rough and self._rough[number] > limit:
                break
            if not among(self.plans[number]) or self._is_above(number, limit):
                continue
            if number not in self._made and self._no_time():
                continue
            made = self.made(number)
            if not made.refused and among(made.plan):
                bisect.insort(kept, (made.score(self.objective), number))
                del kept[count:]
        self._tell(len(self.plans))
        return [self._made[number] for _, number in kept]

    def overfull(self, count: int) -> list[Candidate]:
        """Return the first `count` of those simulated so far that do not fit their memory."""
        numbers = (number for number in self._order if number in self._made)
        rows = [self._made[number] for number in numbers]
        return [made for made in rows if made.refused and made.peak_bytes][:count]

    def _tell(self, done: int) -> None:
        if self.effort.progress is not None:
            self.effort.progress(done, len(self.plans))

    def _is_above(self, number: int, limit: float) -> bool:
        """Return whether a plan that is not simulated yet cannot be within `limit`."""
        if not self._rough or number in self._made or limit == float("inf"):
            return False
        if number not in self._bounds:
            self._bounds[number] = self.judge.bound(self.plans[number], self.objective)
        return self._bounds[number] > limit

    def made(self, number: int) -> Candidate:
        """Return what the plan of this number gives, simulated now if it was not yet."""
        if number not in self._made:
            plan = self.plans[number]
            made = self._made[number] = self.judge.candidate(plan)
            if self.effort.rescues and made.refused and made.peak_bytes and not any(plan.recompute):
                fitted = as_needed(self.judge, plan)
                if fitted is not None:
                    self._rescued[number], self._made[number] = made, self.judge.candidate(fitted)
        return self._made[number]

    def _least(self, plan: Plan) -> tuple[float, float, float]:
        seconds, peak, usd = self.judge.least(plan)
        fits = all(peak <= cap for row in self.judge.caps(plan) for _, cap in row)
        return seconds, peak if fits else 0.0, usd  # with recompute it may hold less

    def _no_time(self) -> bool:
        """Return whether no other plan may be simulated; there has to be one that is usable."""
        usable = any(not made.refused for made in self._made.values())
        self.was_cut_short |= usable and self.effort.is_over()
        return self.was_cut_short


def front_of(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the usable ones that none beats in seconds, bytes and dollars, by seconds.

    Of equal ones, the one that comes first.
    """
    kept: list[Candidate] = []
    for each in candidates:
        if not each.refused and not any(_beats(_figures(other), _figures(each)) for other in kept):
            kept = [other for other in kept if not _beats(_figures(each), _figures(other))] + [each]
    return tuple(sorted(kept, key=_figures))


def _figures(candidate: Candidate) -> tuple[float, float, float]:
    return candidate.step_s, float(max(candidate.peak_bytes)), candidate.usd


def _beats(own: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether no figure is larger: what equals an earlier candidate adds nothing."""
    return all(a <= b for a, b in zip(own, other, strict=True))
