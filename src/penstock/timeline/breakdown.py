"""Breakdown: where the wall time of a run went, per rank.

    data         waiting for the job's data
    F B I W      computing
    optimizer    updates, and keeping the versions of the weights that they replace
    copies       moving what is kept to far memory and back
    messages     handing messages over: copying them in and out, and the calls themselves
    waiting      for a message to come, or for room to put one
    collectives  sums over ranks, once the last rank has reached them
    meeting      waiting for other ranks to reach a sum or a checkpoint
    checkpoint   writing checkpoints, except the last one
    rest         time between the calls: the runtime itself
    once         what a longer run does not repeat: the first window, the one that is run
                 under the memory profiler, and the last checkpoint

The parts of a rank sum to the wall time of its training loop.  A simulated timeline is broken
down in the same way, so that predicted and measured seconds can be compared.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import TimelineError
from penstock.files import Json
from penstock.timeline.spans import LANES, SPAN_KINDS
from penstock.timeline.timeline import Timeline, num_steps, step_s
from penstock.typed import MisfitError, typed

Part: TypeAlias = Literal[
    "data",
    "F",
    "B",
    "I",
    "W",
    "optimizer",
    "copies",
    "messages",
    "waiting",
    "collectives",
    "meeting",
    "checkpoint",
    "rest",
    "once",
]
PARTS: tuple[Part, ...] = get_args(Part)
PART_WORDS: dict[Part, str] = {
    "data": "waiting for data",
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "optimizer": "optimizer",
    "copies": "to far memory and back",
    "messages": "handing messages over",
    "waiting": "waiting for messages",
    "collectives": "collectives",
    "meeting": "waiting at sums, checkpoints",
    "checkpoint": "checkpoints",
    "rest": "rest",
    "once": "once: warm-up, last checkpoint",
}
WORK: tuple[Part, ...] = ("F", "B", "I", "W")
_SLACK = 1e-6  # of the wall time: what clocks read one after another and sums of floats may miss


class LinkUse(NamedTuple):
    """Messages between two ranks, in seconds of a step of a typical window.

    late_s:    in which one of them waited for a message that the other had begun to send.
    handed_s:  that they took to hand messages over, without waiting for room.
    """

    first: int
    second: int
    late_s: float
    handed_s: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of every part on every rank, over a whole run, or of a simulated window.

    num_steps:  the steps that all parts but "once" are of.
    wall_s:     of each rank.
    seconds:    seconds[rank] is in the order of PARTS; its sum is wall_s[rank].
    links:      the pairs of ranks that send messages; empty where they are unknown.

    Raises:   TimelineError: a part is missing, negative or no number, parts that do not sum to
              the wall time, a link of a rank that is not there.
    """

    num_steps: int
    wall_s: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]
    links: tuple[LinkUse, ...] = ()

    def __post_init__(self) -> None:
        if self.num_steps < 1 or len(self.wall_s) != len(self.seconds) or not self.wall_s:
            counts = f"{self.num_steps} steps, {len(self.wall_s)} wall times"
            raise TimelineError(f"a breakdown of {counts}, {len(self.seconds)} ranks")
        for rank, (wall_s, row) in enumerate(zip(self.wall_s, self.seconds, strict=True)):
            if len(row) != len(PARTS) or not all(map(math.isfinite, (*row, wall_s))):
                raise TimelineError(f"rank {rank} has parts {row} of {wall_s} s")
            slack_s = _SLACK * max(1.0, wall_s)
            if min(row) < -slack_s or abs(sum(row) - wall_s) > slack_s:
                parts = ", ".join(f"{p} {s:g}" for p, s in zip(PARTS, row, strict=True))
                raise TimelineError(f"the parts of rank {rank} are no parts of {wall_s} s: {parts}")
        for link in self.links:
            known = all(0 <= rank < self.num_ranks for rank in link[:2])
            if not known or not all(map(math.isfinite, link)):
                raise TimelineError(f"{link} among {self.num_ranks} ranks")

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.wall_s)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step, checkpoints and data included, on the slowest rank.

        (wall - once) / num_steps
        """
        whole = zip(self.wall_s, self.seconds, strict=True)
        return max(wall_s - row[PARTS.index("once")] for wall_s, row in whole) / self.num_steps

    def of(self, part: Part) -> tuple[float, ...]:
        """Return the seconds of a part on each rank: of one step; "once" of the whole run."""
        steps = 1 if part == "once" else self.num_steps
        return tuple(row[PARTS.index(part)] / steps for row in self.seconds)

    @property
    def work_s(self) -> tuple[float, ...]:
        """Return the seconds that each rank computes in a step: F, B, I and W."""
        return tuple(map(math.fsum, zip(*map(self.of, WORK), strict=True)))

    def __str__(self) -> str:
        """Return the table of `parts_table`, without a prediction."""
        return parts_table(self)

    def to_json(self) -> dict[str, Json]:
        """Return the breakdown as JSON values, which `breakdown_from_json` reads back."""
        return {"parts": list(PARTS), **json.loads(json.dumps(asdict(self)))}


def breakdown_from_json(content: Json) -> Breakdown:
    """Return the breakdown that `to_json` wrote.

    Raises:   TimelineError: not what it writes.
    """
    if not isinstance(content, dict) or content.get("parts") != list(PARTS):
        raise TimelineError(f"no breakdown in the parts {', '.join(PARTS)}")
    try:
        return typed(Breakdown, {key: v for key, v in content.items() if key != "parts"})
    except MisfitError as problem:
        raise TimelineError(f"no breakdown: {problem}") from problem


# -- of a timeline --------------------------------------------------------------------------------


def breakdown_of(timeline: Timeline, each_s: float | None = None) -> Breakdown | None:
    """Return the breakdown of a simulated timeline; None where it has no spans.

    each_s:   from when a rank begins it until it begins the next one, as in a long run without a
              barrier; default: all of it.

    Computes and updates are their spans.  Copies, and collectives, are what their spans last beyond
    what they run beside.  A gap that a collective ends is "meeting".  All else is "waiting": for
    messages, and what messages take of the computing thread.
    """
    spans, whole_s = timeline.spans, step_s(timeline) if each_s is None else each_s
    if not len(spans):
        return None
    lengths_s = spans.ends_s - spans.starts_s
    work = spans.lanes == LANES.index("compute")
    work_lanes = [LANES.index(lane) for lane in ("compute", "update")]
    copies = spans.lanes == LANES.index("copy")
    theirs = np.isin(spans.lanes, work_lanes)
    own, sums = theirs | copies, spans.lanes == LANES.index("collective")
    rows: list[tuple[float, ...]] = []
    for rank in range(timeline.num_ranks):
        here = spans.ranks == rank
        row = dict.fromkeys(PARTS, 0.0)
        for kind in WORK:
            chosen = here & work & (spans.kinds == SPAN_KINDS.index(kind))
            row[kind] = float(lengths_s[chosen].sum())
        row["optimizer"] = float(lengths_s[here & (spans.lanes == LANES.index("update"))].sum())
        times = [
            (spans.starts_s[chosen], spans.ends_s[chosen]) for chosen in (here & own, here & sums)
        ]
        busy_s = covered_s(*times[0])
        if copies.any():
            theirs_s = covered_s(spans.starts_s[here & theirs], spans.ends_s[here & theirs])
            row["copies"] = max(0.0, busy_s - theirs_s)
        starts, ends = (np.concatenate(both) for both in zip(*times, strict=True))
        row["collectives"] = max(0.0, covered_s(starts, ends) - busy_s)
        row["meeting"] = _gaps_s(starts, ends, len(times[0][0]))
        row["waiting"] = max(0.0, whole_s - sum(row.values()))
        rows.append(tuple(row.values()))
    return Breakdown(num_steps(timeline), tuple(map(sum, rows)), tuple(rows))


def _gaps_s(starts_s: NDArray[np.float64], ends_s: NDArray[np.float64], first: int) -> float:
    """Return the seconds of the gaps between spans that one from the `first` one on ends."""
    order = np.argsort(starts_s, kind="stable")
    starts, ends = starts_s[order], np.maximum.accumulate(ends_s[order])
    gaps = np.maximum(0.0, starts[1:] - ends[:-1])
    return float(gaps[order[1:] >= first].sum())


def covered_s(starts_s: NDArray[np.float64], ends_s: NDArray[np.float64]) -> float:
    """Return the seconds in which at least one of the spans runs."""
    order = np.argsort(starts_s, kind="stable")
    starts, ends = starts_s[order], np.maximum.accumulate(ends_s[order])
    before = np.concatenate([starts[:1], ends[:-1]])
    return float(np.maximum(0.0, ends - np.maximum(starts, before)).sum())


# -- as text --------------------------------------------------------------------------------------

MOST_RANKS = 4  # that have a column each
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def parts_table(measured: Breakdown, predicted: Breakdown | None = None) -> str:
    """Return a table: a line for each part, a column for each rank, seconds of a step.

    With a prediction, each figure is "predicted / measured".  Of more than four ranks the mean is
    shown, and the rank that has most of the part.  "once" is of the whole run.
    """
    both = [measured] if predicted is None else [predicted, measured]
    longest_s = max(one.step_s for one in both)
    unit, unit_s = next((u for u in _UNITS if longest_s >= 10 * u[1]), _UNITS[-1])
    rows = [(PART_WORDS[part], [one.of(part) for one in both]) for part in PARTS]
    rows[-1] = PART_WORDS["once"], [measured.of("once")]
    shown = [row for row in rows if any(map(any, row[1]))]
    steps = [tuple(map(math.fsum, zip(*map(one.of, PARTS[:-1]), strict=True))) for one in both]
    shown.insert(len(shown) - any(measured.of("once")), ("a step", steps))
    what = "measured" if predicted is None else "predicted / measured"
    wide = measured.num_ranks > MOST_RANKS
    heads = ("mean", "most") if wide else tuple(f"rank {r}" for r in range(measured.num_ranks))
    cells = ((name, *_cells(figures, unit_s)) for name, figures in shown)
    return _aligned([(f"{what}, {unit}", *heads), *cells])


def _cells(figures: Sequence[tuple[float, ...]], unit_s: float) -> tuple[str, ...]:
    last = figures[-1]
    if len(last) <= MOST_RANKS:
        return tuple(_cell([row[k : k + 1] for row in figures], unit_s) for k in range(len(last)))
    most = max(range(len(last)), key=last.__getitem__)
    at_most = _cell([row[most : most + 1] for row in figures], unit_s)
    return _cell(figures, unit_s), f"{at_most} (rank {most})"


def _cell(figures: Sequence[tuple[float, ...]], unit_s: float) -> str:
    """Return the means of each clock's figures, one after the other."""
    means = (sum(row) / len(row) / unit_s for row in figures if row)
    return " / ".join(f"{mean:,.1f}" for mean in means)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ((name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])) for name, *cells in rows)
    return "\n".join("  ".join(line) for line in lines)
