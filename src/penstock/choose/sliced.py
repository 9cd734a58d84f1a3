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

_WORTH = 0.02  # of the seconds, or dollars, of a step: less is not worth another step


def in_slices(
    tried: "Sequence[Tried]",
    fixed: Fixed,
    objective: Objective,
    search: "Callable[[Joining, Capture], Option]",
    is_over: Callable[[], bool],
) -> "Iterator[Option]":
    """Yield what is found with the huge parameters of a step in slices, each better than before.

    That is of the best way of joining micro-batches, or where nothing fits of the first one; only
    where some plan lacked memory, and the optimizer updates each number by itself.
    search:   of the step of a way, cut so.
    """
    from penstock.state.shards import updates_by_number

    usable = [(way, found) for way, found in tried if not isinstance(found, PlanError)]
    short = len(usable) < len(tried) or any(found.found.tally.too_full for _, found in usable)
    is_late = fixed.schedule is not None and has_window(any_schedule(fixed.schedule))
    if not short or objective == "memory" or is_late or fixed.stages is not None:
        return
    way, best = min(
        usable, key=lambda row: row[1].best.score(objective), default=(tried[0][0], None)
    )
    names = _can_be_cut(way.captured)
    if not names or not updates_by_number(way.job, way.captured.model):
        return
    for count in COUNTS:
        if is_over():
            return
        try:
            found = search(way, _cut(way.captured, names, count))
        except (GraphError, PlanError):  # too few rows, or it does not fit either
            continue
        if best is not None and not _is_better(found, best, objective):
            return
        best = found
        yield found


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
