"""Replan log: the plans that were made again during a run, what moved, and what was measured."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from penstock.errors import PlanError
from penstock.files import Json, read_json, write_text
from penstock.pilot.slow_ranks import is_like
from penstock.profile.drift import NEW
from penstock.typed import damage, typed
from penstock.units import format_seconds

NAME = "replans.json"


@dataclass(frozen=True, slots=True)
class Replan:
    """A plan that was made during a run.

    step:        after so many steps.
    factors:     of each rank, what its actions take, by what they took when the run began.
    before_s, after_s:   seconds of a step predicted with these factors, of the plan that ran and of
                 the other one.
    search_s, move_s:    what finding it took, and making ready for its first step.
    changes:     what differs, in words.
    is_back:     whether it is the plan before, as the one in its place was slower.
    links:       two hosts, and how many times as long a large payload takes between them as it
                 took; those that have moved.
    is_shared:   whether only micro-batches were shared otherwise: nothing was moved.
    """

    step: int
    factors: tuple[float, ...]
    before_s: float
    after_s: float
    search_s: float
    move_s: float
    changes: str
    is_back: bool = False
    links: tuple[tuple[str, str, float], ...] = ()
    is_shared: bool = False

    @property
    def why(self) -> str:
        """Return what moved, and what is gained, in words."""
        if self.is_back:
            return self.changes
        slow = [f"rank {r} {f:.2f} times" for r, f in enumerate(self.factors) if not is_like(f)]
        figures = format_seconds(self.after_s), format_seconds(self.before_s)
        gained = f"{figures[0]} a step predicted in place of {figures[1]}"
        costs = f"searching took {format_seconds(self.search_s)}"
        took = f"{', '.join(slow)} what it took" if slow else "all ranks take what they took"
        if self.links:
            rows = (f"{a} to {b} {times:.3g} times" for a, b, times in self.links)
            took += f"; messages from {', '.join(rows)} what they took"
        return f"{took}; {gained}; {costs}; {self.changes}"


def replans_in(folder: Path) -> list[Replan]:
    """Return the plans that were made during the run in `folder`, in order.

    Raises:   PlanError: their file is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return []
    content = read_json(path, PlanError, "replans")
    with damage(f"{path}", PlanError, hint="delete it"):
        return list(typed(tuple[Replan, ...], content.get("replans")))


def measured_s(folder: Path, made: Sequence[Replan]) -> list[tuple[float | None, float | None]]:
    """Return for each plan made during a run the seconds of a step before and after, as measured.

    Medians: of up to 16 steps before, and of all after it that ran by this plan.
    """
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: list[tuple[float | None, float | None]] = []
    for at, each in enumerate(made):
        end = made[at + 1].step if at + 1 < len(made) else None
        after = [r["seconds"] for r in rows if each.step < r["step"] <= (end or r["step"])]
        before = [r["seconds"] for r in rows if each.step - NEW < r["step"] <= each.step]
        found.append((_median(before), _median(after)))
    return found


def _median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def write_replans(folder: Path, made: Sequence[Replan]) -> None:
    write_text(folder / NAME, json.dumps({"penstock": "replans", "replans": [*map(asdict, made)]}))


def replanned(folder: Path) -> list[dict[str, Json]]:
    """Return the plans made again during the run in `folder`, with what was measured, as JSON.

    Raises:   PlanError: their file is damaged.
    """
    made = replans_in(folder)
    return [
        {**json.loads(json.dumps(asdict(each))), "was_measured_s": before, "measured_s": after}
        for each, (before, after) in zip(made, measured_s(folder, made), strict=True)
    ]


def words_of(row: Mapping[str, Json]) -> list[str]:
    """Return lines that tell of a row of `replanned`: what moved, predicted and measured."""
    own = {name: row[name] for name in (each.name for each in fields(Replan))}
    made = typed(Replan, own)
    was, now = (_seconds(row[name]) for name in ("was_measured_s", "measured_s"))
    both = format_seconds(made.before_s), format_seconds(made.after_s)
    moving = f"; moving took {format_seconds(made.move_s)}" if made.move_s else ""
    moving = moving.replace("moving", "changing") if made.is_shared else moving
    how = "micro-batches shared otherwise" if made.is_shared else "made again"
    return [
        f"{how} after {made.step:,} steps: {made.why}{moving}",
        f"  predicted  {both[0]} a step before, {both[1]} after",
        f"  measured   {was} a step before, {now} after",
    ]


def _seconds(value: Json) -> str:
    return format_seconds(value) if isinstance(value, int | float) else "-"
