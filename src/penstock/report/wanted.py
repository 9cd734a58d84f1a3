"""Wanted: which machines a run's policy wanted, why, what it foresaw, and what followed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.report.figure_words import ABSENT, number_text, seconds_text
from penstock.report.markup import Markup, figure_cell, number_head, section, table, tag

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class FleetDecision:
    """A line of decisions.jsonl: a decision ("wants"), that all of it was there, or the end.

    now_s:    on the run's clock; `time`, on that of the world.
    wanted, held, ready:  machines, by pool; `offered`, by the market.
    usd:      paid by then, and `usd_h` from then on.
    left_h, left_usd:  foreseen, if the market stays as it is; None: it would not end.
    took_s:   from the decision until all was there.
    """

    time: float
    now_s: float
    step: int
    what: str
    wanted: Mapping[str, int]
    usd: float
    usd_h: float
    deadline_h: float
    held: Mapping[str, float] = field(default_factory=dict[str, float])
    ready: Mapping[str, float] = field(default_factory=dict[str, float])
    offered: Mapping[str, float] = field(default_factory=dict[str, float])
    leave: tuple[int, ...] = ()
    left_h: float | None = None
    left_usd: float | None = None
    took_s: float | None = None
    why: str = ""


def wanted_rows(told: Sequence[FleetDecision]) -> list[tuple[str, ...]]:
    """Return a row for each decision and for the end, as texts, in the order of `HEAD`."""
    found: list[tuple[str, ...]] = []
    for at, each in enumerate(told):
        if each.what == "there":
            continue
        ends = next((row for row in told[at + 1 :] if row.what != "ended"), None)
        took_s = ends.took_s if ends is not None and ends.what == "there" else None
        is_over = each.what == "ended"
        found.append(
            (
                seconds_text(each.now_s),
                f"{each.step:,}",
                "the end" if is_over else _counts(each.wanted),
                each.why or ABSENT,
                ABSENT if is_over else "not all of it" if took_s is None else seconds_text(took_s),
                number_text(each.usd),
                ABSENT if each.left_usd is None else number_text(each.left_usd),
                _hours(each.left_h),
                _hours(each.deadline_h),
            )
        )
    return found


HEAD = (
    *("clock", "after step", "wants", "why", "there after"),
    *("paid, usd", "left, usd", "left", "deadline in"),
)


def _counts(machines: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {pool}" for pool, count in machines.items() if count) or "none"


def _hours(hours: float | None) -> str:
    return ABSENT if hours is None else seconds_text(hours * _HOUR_S)


def wanted_section(told: Sequence[FleetDecision]) -> Iterator[Markup]:
    """Yield what a policy wanted in a run; nothing where none was followed."""
    if not told:
        return
    intro = (
        "Machines that the policy of the run wanted.  What is left, in dollars and time, is what a"
        " replay foresaw if the market stayed as it was at that moment."
    )
    first = len(HEAD) - 4
    head = [*HEAD[:first], *map(number_head, HEAD[first:])]
    rows = (
        tag("tr", *(tag("td", text) for text in row[:first]), *map(figure_cell, row[first:]))
        for row in wanted_rows(told)
    )
    yield section("Machines that were wanted", tag("p", intro), table("Decisions", head, rows))
