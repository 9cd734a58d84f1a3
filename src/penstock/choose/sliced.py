"""Sliced: where memory is short, huge parameters in slices: another step, which is searched too."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import GraphError, PlanError
from penstock.plan.plan import Decision
from penstock.schedule.recipe import any_schedule, has_window
from penstock.search.candidate import Objective
from penstock.search.huge import COUNTS, huge, words_of
from penstock.search.shapes import Fixed
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.choose.choose import Joining, Option
    from penstock.graph.trace import Capture

    Tried = tuple[Joining, Option | PlanError]  # what a search of a way has found
    Awaited = Callable[[], Option]

_WORTH = 0.02  # of the seconds, or dollars, of a step: less is not worth another step


class SliceSearch:
    """The searches of a step with its huge parameters in slices, in more and more of them.

    That is of the best way of joining micro-batches, or where nothing fits of the first one; only
    where some plan lacked memory, and the optimizer updates each number by itself.
    tried:    what was found of the whole step, by the way of joining micro-batches.
    search:   begins one of the step of a way, cut so, and returns what waits for it.
    hands:    searches that are begun before one is waited for.
    """

    def __init__(
        self,
        tried: "Sequence[Tried]",
        fixed: Fixed,
        objective: Objective,
        search: "Callable[[Joining, Capture], Awaited]",
        hands: int,
    ) -> None:
        self._objective: Objective = objective
        self._search = search
        usable = [(way, found) for way, found in tried if not isinstance(found, PlanError)]
        self._way, self._best, self._names = None, None, list[str]()
        if _may_be_cut(tried, fixed) and objective != "memory":
            first = tried[0][0], None
            self._way, self._best = min(
                usable, key=lambda row: row[1].best.score(objective), default=first
            )
            self._names = _names_to_cut(self._way)
        self._begun: list[Awaited | None] = []
        if hands > 1:
            self._begin(hands)

    def _begin(self, count: int) -> None:
        """Begin the first so many searches; None where there are too few rows."""
        for slices in COUNTS[len(self._begun) : count] if self._names else ():
            assert self._way is not None, "its parameters can be cut"
            try:
                cut = _cut(self._way.captured, self._names, slices)
                self._begun.append(self._search(self._way, cut))
            except (GraphError, PlanError):
                self._begun.append(None)

    def options(self, is_over: Callable[[], bool]) -> "Iterator[Option]":
        """Yield what is found, each better than before."""
        for at in range(len(COUNTS)) if self._names else ():
            if at >= len(self._begun) and is_over():
                return
            self._begin(at + 1)
            try:
                if (awaited := self._begun[at]) is None:
                    continue
                found = awaited()
            except (GraphError, PlanError):  # it does not fit either
                continue
            if self._best is not None and not _is_better(found, self._best, self._objective):
                return
            self._best = found
            yield found


def _may_be_cut(tried: "Sequence[Tried]", fixed: Fixed) -> bool:
    """Return whether memory was short, and nothing is fixed that no plan in slices has."""
    usable = [found for _, found in tried if not isinstance(found, PlanError)]
    short = len(usable) < len(tried) or any(found.found.tally.too_full for found in usable)
    is_late = fixed.schedule is not None and has_window(any_schedule(fixed.schedule))
    return short and not is_late and fixed.stages is None


def _names_to_cut(way: "Joining") -> list[str]:
    """Return the huge parameters of a way's step that can be in slices, and be updated so."""
    from penstock.state.shards import updates_by_number

    names = _can_be_cut(way.captured)
    return names if names and updates_by_number(way.job, way.captured.model) else []


def _is_better(found: "Option", best: "Option", objective: Objective) -> bool:
    return found.best.score(objective)[0] < (1 - _WORTH) * best.best.score(objective)[0]


def _can_be_cut(captured: "Capture") -> list[str]:
    """Return the huge parameters of a step that can be in slices."""
    found: list[str] = []
    for name in huge(captured.graph):
        try:
            _cut(captured, [name], COUNTS[0])
        except GraphError:  # an op reads it whole
            continue
        found.append(name)
    return found


def _cut(captured: "Capture", names: Sequence[str], count: int) -> "Capture":
    from penstock.graph.split import split

    return split(captured, dict.fromkeys(names, count))


def reason(found: "Option", tried: "Sequence[Tried]", objective: Objective) -> Decision:
    """Return the decision of an option in slices: what it gains over the best that has none."""
    from penstock.graph.graph import Graph

    rows = [row for _, row in tried]
    options = [row for row in rows if not isinstance(row, PlanError)]
    whole: Graph = next(w for w, _ in tried if w.joined == found.way.joined).captured.graph
    value = words_of(dict(found.way.captured.graph.slices), huge(whole))
    if not options:
        (problem,) = [row for row in rows if isinstance(row, PlanError)][:1]
        return Decision("split", value, "search", f"whole, {problem.message}")
    other, own = min(options, key=lambda o: o.best.score(objective)).best, found.best
    peaks = (format_bytes(max(each.peak_bytes)) for each in (own, other))
    held, was = peaks
    why = f"{format_seconds(own.step_s)} and {held} a rank, in place of "
    return Decision(
        "split", value, "search", f"{why}{format_seconds(other.step_s)} and {was} whole"
    )
