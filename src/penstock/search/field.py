"""Field: plans among which the best is found, simulating only those that can be it.

A plan has a rough bound, then a bound, which its score cannot be below (judge.py).  In the order
of the rough ones, plans are simulated until the next one cannot be better than the best; so what
is found is what simulating all of them would find.
"""

import bisect
from collections.abc import Callable, Sequence

from penstock.plan import Plan
from penstock.search.candidate import Candidate, Objective
from penstock.search.judge import Judge


class Field:
    """Plans, in the order in which equally good ones are preferred, and what is known of them.

    prune:     whether a plan whose bound is above the best is left unsimulated.
    progress:  is told how many plans are dealt with, and of how many.
    """

    def __init__(
        self,
        judge: Judge,
        plans: Sequence[Plan],
        objective: Objective,
        *,
        prune: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.judge, self.plans = judge, plans
        self.objective: Objective = objective
        self._progress = progress
        self._made: dict[int, Candidate] = {}
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
        return tuple(self._made[number] for number in sorted(self._made))

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
            made = self.made(number)
            if not made.refused:
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
        if self._progress is not None:
            self._progress(done, len(self.plans))

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
            self._made[number] = self.judge.candidate(self.plans[number])
        return self._made[number]
