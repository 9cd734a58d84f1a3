"""Tried: a plan in one plain line, and what was tried beside it, as a table.

data parallel on 2 processes: 1.9x one process, 107 MiB each
  tried                              step     peak
  data parallel on 2 processes     232 ms  107 MiB  this plan
  pipeline of 2 stages (zb_h1)     239 ms   88 MiB  a tie
  one process                      440 ms  190 MiB  1.90x as long
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.schedule.recipe import name_of
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.plan.plan import Plan

OWN = "this plan"
TIE = 0.05  # of a step: predictions are no closer than that (docs/figures.md)
_ALIKE = 0.01  # of the bytes of ranks


@dataclass(frozen=True, slots=True)
class Tried:
    """What the simulation says of another plan: of its fullest rank, and dollars a step.

    what:   in words.
    ranks:  processes that it takes.
    """

    what: str
    ranks: int
    step_s: float
    peak_bytes: int
    usd: float = 0.0


def in_words(plan: "Plan") -> str:
    """Return who does what, as one would say it."""
    count = plan.total_ranks
    on = "one process" if count == 1 else f"{count} processes"
    if plan.num_ranks == 1:
        words = on if count in (1, plan.tensor) else f"data parallel on {on}"
    else:
        stages, name = f"{plan.num_stages} stages", name_of(plan.schedule)
        many = f"{plan.replicas} pipelines" if plan.replicas > 1 else "pipeline"
        words = f"{many} of {stages} on {on} ({name})"
    what = "tokens of each sequence" if plan.place.context else "ops of each stage"
    parts = [f"{what} divided among {plan.tensor}"] if plan.tensor > 1 else []
    parts += ["in shards"] if plan.shards else []
    parts += ["recompute"] if any(plan.recompute) else []
    parts += ["far memory"] if plan.offloads else []
    return ", ".join([words, *parts])


def headline(plan: "Plan") -> str:
    """Return the plan, how fast it is beside one process, and what each process holds."""
    predicted = plan.predicted
    if predicted is None:
        return in_words(plan)
    low, high = min(predicted.peak_bytes), max(predicted.peak_bytes)
    each = " each" if plan.total_ranks > 1 else ""
    held = f"{format_bytes(high)}{each}"
    if high - low > _ALIKE * high:
        held = f"{format_bytes(low)} to {format_bytes(high)}{each}"
    alone = alone_step_s(plan)
    speed = f"{format_seconds(predicted.step_s)} a step"
    if plan.total_ranks > 1 and alone and predicted.step_s:
        speed = f"{times_of(alone, predicted.step_s)} one process"
    return f"{in_words(plan)}: {speed}, {held}"


def times_of(other_s: float, own_s: float) -> str:
    """Return how many times as fast a step is as another, in words: "1.9x", "as fast as"."""
    times = other_s / own_s
    return "as fast as" if is_tie(other_s, own_s) else f"{times:.{1 if times >= 1 else 2}f}x"


def is_tie(other_s: float, own_s: float) -> bool:
    """Return whether two predicted steps are as long as each other, as far as is known."""
    return abs(other_s / own_s - 1) <= TIE if own_s else other_s == own_s


def alone_step_s(plan: "Plan") -> float | None:
    """Return the seconds of a step in one process; None where nobody knows."""
    rows = () if plan.predicted is None else plan.predicted.tried
    return min((row.step_s for row in rows if row.ranks == 1), default=None)


def tried_rows(plan: "Plan") -> list[tuple[Tried, str]]:
    """Return the plan and what was tried beside it, the fastest first, each with a word on it."""
    predicted = plan.predicted
    if predicted is None or not predicted.tried:
        return []
    about = predicted.step_s, max(predicted.peak_bytes), predicted.usd
    own = Tried(in_words(plan), plan.total_ranks, *about)
    rows = [(own, OWN), *((row, _verdict(row, own)) for row in predicted.tried)]
    return sorted(rows, key=lambda row: row[0].step_s)


def tried_lines(plan: "Plan") -> list[str]:
    """Return the table of what was tried in lines; [] where nothing was."""
    rows = tried_rows(plan)
    cells = [("tried", "step", "peak", "")] if rows else []
    cells += [
        (row.what, format_seconds(row.step_s), format_bytes(row.peak_bytes), word)
        for row, word in rows
    ]
    wide = [max((len(row[at]) for row in cells), default=0) for at in range(3)]
    return [
        f"  {what:<{wide[0]}}  {step:>{wide[1]}}  {peak:>{wide[2]}}  {word}".rstrip()
        for what, step, peak, word in cells
    ]


def _verdict(row: Tried, own: Tried) -> str:
    if is_tie(row.step_s, own.step_s):
        return "a tie"
    return f"{row.step_s / own.step_s:.2f}x as long" if own.step_s else ""
