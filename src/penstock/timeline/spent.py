"""Spent: what one rank's clock says of its training loop; those of all ranks are the breakdown.

How long a rank waits for others at a sum or a checkpoint, it cannot tell alone: who comes last
spends the least there, and that is what the sum itself takes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Spent:
    """The seconds of one rank, those of a window in the order of the clock of rank 0.

    num_steps:     the steps of the windows that are not "once".
    parts:         what this rank can tell alone, waiting for room and for messages apart.
    meetings:      seconds in sums over each set of ranks, waiting for others included.
    checkpoint_s:  in checkpoints but for the last, waiting for others included.
    steps_sent:    the steps of the typical window, whose messages are `sent` and `taken`.
    free:          the part of the seconds of sending that is not waiting for room.
    """

    num_steps: int
    wall_s: float
    parts: tuple[tuple[Part, float], ...]
    meetings: tuple[tuple[tuple[int, ...], float], ...] = ()
    checkpoint_s: float = 0.0
    steps_sent: int = 1
    sent: tuple[Sent, ...] = ()
    taken: tuple[Taken, ...] = ()
    free: float = 1.0


def spent_from_json(content: Mapping[str, Any]) -> Spent:
    """Return what `dataclasses.asdict` and JSON have made lists of."""
    listed: dict[str, Any] = {
        "parts": tuple((part, seconds) for part, seconds in content["parts"]),
        "meetings": tuple((tuple(ranks), seconds) for ranks, seconds in content["meetings"]),
        "sent": tuple(Sent(*row) for row in content["sent"]),
        "taken": tuple(Taken(*row) for row in content["taken"]),
    }
    return Spent(**{**content, **listed})


def breakdown_of_ranks(spent: Sequence[Spent]) -> Breakdown:
    """Return the breakdown of a run from what its ranks spent, in the order of the ranks.

    Of a sum, and of all checkpoints, the least that a rank spends there counts as "collectives"
    or "checkpoint" on every rank, and what another one spends beyond it as "meeting".
    Ignores:  that another rank may be last each time; that sums take some ranks longer.
    """
    members: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    for one in spent:
        for ranks, seconds in one.meetings:
            members[ranks].append(seconds)
    least_s = {ranks: min(seconds) for ranks, seconds in members.items()}
    written_s = min(one.checkpoint_s for one in spent)
    rows = [_row(one, least_s, written_s) for one in spent]
    walls = tuple(map(sum, rows))
    return Breakdown(spent[0].num_steps, walls, tuple(rows), _links(spent))


def _row(one: Spent, least_s: dict[tuple[int, ...], float], written_s: float) -> tuple[float, ...]:
    row = dict.fromkeys(PARTS, 0.0) | dict(one.parts)
    row["collectives"] = sum(least_s[ranks] for ranks, _ in one.meetings)
    row["checkpoint"] = written_s
    gone_s = sum(seconds for _, seconds in one.meetings) + one.checkpoint_s
    row["meeting"] = gone_s - row["collectives"] - written_s
    row["rest"] = one.wall_s - sum(row.values())
    return tuple(row[part] for part in PARTS)


def _links(spent: Sequence[Spent]) -> tuple[LinkUse, ...]:
    """Return how long messages were late, and took to hand over, between each two ranks."""
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
