"""Spent: what one rank's clock says of its training loop; those of all ranks are the breakdown.

How long a rank waits for others at a sum or a checkpoint, it cannot tell alone: the last to come
spends the least there, and that is what the sum itself takes.  Who comes last changes from sum to
sum, so each is compared by itself.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import TimelineError
from penstock.timeline.breakdown import PARTS, Breakdown, LinkUse, Part, covered_s


class Sent(NamedTuple):
    """A message of the typical window: when its sender began and ended to hand it over."""

    edge: int
    receiver: int
    micro_batch: int
    begun_s: float
    ended_s: float


class Taken(NamedTuple):
    """A message of the typical window: when its receiver began to ask for it, and had it."""

    edge: int
    sender: int
    micro_batch: int
    asked_s: float
    had_s: float


class Meetings(NamedTuple):
    """The sums over one set of ranks: all seconds in them, waiting for others included.

    sample_s:  of each sum of every n-th window, in their order; the same sums on all ranks.
    """

    ranks: tuple[int, ...]
    total_s: float
    sample_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spent:
    """The seconds of one rank; times inside a window are by the clock of rank 0.

    num_steps:     the steps of the windows that are not "once".
    parts:         what this rank can tell alone, waiting for room and for messages apart.
    meetings:      sums over each set of ranks.
    checkpoint_s:  in checkpoints but for the last, waiting for others included.
    steps_sent:    the steps of the typical window, whose messages are `sent` and `taken`.
    free:          the part of the seconds of sending that is not waiting for room.
    """

    num_steps: int
    wall_s: float
    parts: tuple[tuple[Part, float], ...]
    meetings: tuple[Meetings, ...] = ()
    checkpoint_s: float = 0.0
    steps_sent: int = 1
    sent: tuple[Sent, ...] = ()
    taken: tuple[Taken, ...] = ()
    free: float = 1.0


def breakdown_of_ranks(spent: Sequence[Spent]) -> Breakdown:
    """Return the breakdown of a run from what its ranks spent, in the order of the ranks.

    Of each sum, the least that a rank spends there counts as "collectives" on every rank, and what
    another one spends beyond it as "meeting"; of many sums, a sample tells the part of each.  The
    same holds for "checkpoint", of all checkpoints together.
    Ignores:  that sums take some ranks longer.
    Raises:   TimelineError: ranks have met unequally often.
    """
    samples: defaultdict[tuple[int, ...], list[tuple[float, ...]]] = defaultdict(list)
    for one in spent:
        for ranks, _, sample_s in one.meetings:
            samples[ranks].append(sample_s)
    least_s = {ranks: _least_s(ranks, rows) for ranks, rows in samples.items()}
    written_s = min(one.checkpoint_s for one in spent)
    rows = [_row(one, least_s, written_s) for one in spent]
    walls = tuple(map(sum, rows))
    return Breakdown(spent[0].num_steps, walls, tuple(rows), _links(spent))


def _least_s(ranks: tuple[int, ...], samples: Sequence[tuple[float, ...]]) -> float:
    """Return the seconds of all sums of the samples, each on the rank that spends least."""
    if len(counts := {len(sample_s) for sample_s in samples}) > 1:
        raise TimelineError(
            f"ranks {ranks} have met {' and '.join(map(str, sorted(counts)))} times"
        )
    return sum(map(min, zip(*samples, strict=True)))


def _row(one: Spent, least_s: dict[tuple[int, ...], float], written_s: float) -> tuple[float, ...]:
    row = dict.fromkeys(PARTS, 0.0) | dict(one.parts)
    for ranks, total_s, sample_s in one.meetings:
        sampled_s = sum(sample_s)
        row["collectives"] += total_s * least_s[ranks] / sampled_s if sampled_s else 0.0
    row["checkpoint"] = written_s
    gone_s = sum(meetings.total_s for meetings in one.meetings) + one.checkpoint_s
    row["meeting"] = max(0.0, gone_s - row["collectives"] - written_s)
    row["rest"] = one.wall_s - sum(row.values())
    return tuple(row[part] for part in PARTS)


def _links(spent: Sequence[Spent]) -> tuple[LinkUse, ...]:
    """Return for each two ranks the seconds that messages were late, and took to hand over."""
    handed: defaultdict[tuple[int, int], float] = defaultdict(float)
    late: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    begun: dict[tuple[int, int, int, int], float] = {}
    for rank, one in enumerate(spent):
        for edge, receiver, micro_batch, begun_s, ended_s in one.sent:
            begun[edge, rank, receiver, micro_batch] = begun_s
            pair = min(rank, receiver), max(rank, receiver)
            handed[pair] += (ended_s - begun_s) * one.free / one.steps_sent
    for rank, one in enumerate(spent):
        for edge, sender, micro_batch, asked_s, had_s in one.taken:
            since_s = max(asked_s, begun.get((edge, sender, rank, micro_batch), had_s))
            pair = min(rank, sender), max(rank, sender)
            late[pair].append((min(since_s, had_s), had_s))
    pairs = sorted(handed.keys() | late.keys())
    steps = spent[0].steps_sent
    return tuple(LinkUse(*pair, _late_s(late[pair]) / steps, handed[pair]) for pair in pairs)


def _late_s(times: Sequence[tuple[float, float]]) -> float:
    columns = np.array(times, np.float64).reshape(-1, 2)
    return covered_s(columns[:, 0], columns[:, 1])
