"""Offload, placed: where in its order a rank waits for its copies and begins them, as it can run.

What `play` finds begins a copy back at any moment.  A rank begins it between two of its computes,
in a fixed order; before what would hold more than the limit it waits until copies to far memory
have ended, as many as it takes.  So it never holds more, whatever its actions and copies take.

    found    F0 F0 F1 F1 .  .  I0 W0 F2 F2     copy of F0 to the host at 2 s, back at 5 s
    placed   F0.0 F0.0>far F0.1 F0.1>far F0.0<<far I0.0 W0.0 F0.2

Copies back are first put where the found times have them, or behind the compute that then runs;
then one after the other is moved by a few places while that shortens the step.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from penstock.schedule.far_words import FarCopy
from penstock.schedule.greedy import FORWARD, INPUT, WEIGHTS, Floats
from penstock.schedule.offload_play import OFFLOAD, RELOAD
from penstock.schedule.orders import IntArray

_REACH = 3  # places by which a copy back is moved
_GONE = -1  # a rank waits for the end of a copy to far memory

_Row: TypeAlias = tuple[tuple[int, int], ...]  # kind and micro-batch of a rank's F, I, W, RELOAD


class CopyPace(NamedTuple):
    """Seconds by [F, I, W, reload, offload] and [stage], seconds of a message, and the limit."""

    table: Floats
    message_s: float
    limit: int


def placed(
    order: IntArray, away: IntArray, start_s: Floats, pace: CopyPace
) -> tuple[tuple[FarCopy, ...], float]:
    """Return where copies end and begin, and the step then; arguments as of `play` and from it."""
    gone: list[list[bool]] = away.astype(bool).tolist()
    rows = [
        _row(order[stage].tolist(), own, start_s[:, stage].tolist())
        for stage, own in enumerate(gone)
    ]
    step_s, improved = _step_s(rows, gone, pace), True
    while improved:
        improved = False
        for stage in range(len(rows)):
            for row in _neighbours(rows[stage]):
                other = [*rows[:stage], row, *rows[stage + 1 :]]
                if (other_s := _step_s(other, gone, pace)) < step_s * (1 - 1e-12):
                    rows, step_s, improved = other, other_s, True
    return tuple(_copies(rows, gone, pace.limit)), step_s


def _row(order: Sequence[int], away: Sequence[bool], start_s: Sequence[Sequence[float]]) -> _Row:
    """Return the order of a rank, its reloads before the first compute that starts no earlier."""
    count = len(away)
    row: list[tuple[int, int]] = []
    waiting: list[int] = []  # reloads, in their order
    for kind, m in (divmod(each, count) for each in order):
        if kind == RELOAD:
            waiting += [m] * away[m]
            continue
        while waiting and start_s[RELOAD][waiting[0]] <= start_s[kind][m]:
            row.append((RELOAD, waiting.pop(0)))
        row.append((kind, m))
    return tuple(row)


def _neighbours(row: _Row) -> Iterator[_Row]:
    """Yield the orders in which one reload stands some places earlier or later."""
    for at, (kind, m) in enumerate(row):
        if kind != RELOAD:
            continue
        for step in (-1, 1):
            to = at
            for _ in range(_REACH):
                to += step
                if not 0 <= to < len(row) or row[to][0] == RELOAD or row[to][1] == m:
                    break
                rest = [*row[:at], *row[at + 1 :]]
                rest.insert(to, (RELOAD, m))
                yield tuple(rest)


def _waits(row: _Row, away: Sequence[bool], limit: int) -> list[tuple[int, int]] | None:
    """Return the order with waits for copies to far memory; None if a rank would hold too much."""
    items: list[tuple[int, int]] = []
    left: list[int] = []  # whose copy has begun
    held = gone = 0
    for kind, m in row:
        while kind in (FORWARD, RELOAD) and (
            held == limit or (kind == RELOAD and m not in left[:gone])
        ):
            if gone == len(left):
                return None
            items.append((_GONE, left[gone]))
            gone, held = gone + 1, held - 1
        held += (kind in (FORWARD, RELOAD)) - (kind == WEIGHTS)
        left += [m] * (kind == FORWARD and away[m])
        items.append((kind, m))
    return items


def _copies(rows: Sequence[_Row], away: Sequence[Sequence[bool]], limit: int) -> Iterator[FarCopy]:
    for stage, row in enumerate(rows):
        items, place = _waits(row, away[stage], limit), 0
        assert items is not None, "it is what was played"
        for kind, m in items:
            if kind in (_GONE, RELOAD):
                yield FarCopy(stage, place, stage, m, kind == RELOAD)
            else:
                place += 1


class _OnItsWay:
    """A rank on its way through its order: its clocks, and when its copies end."""

    def __init__(self, items: Sequence[tuple[int, int]], seconds: Sequence[float]) -> None:
        self.items, self.seconds, self.at = items, seconds, 0
        self.now_s, self.there_s, self.back_s = 0.0, 0.0, 0.0
        self.gone_s: dict[int, float] = {}
        self.come_s: dict[int, float] = {}


def _step_s(rows: Sequence[_Row], away: Sequence[Sequence[bool]], pace: CopyPace) -> float:
    """Return when the last action of all ends; infinity if a rank would hold too much."""
    table, message_s, limit = pace
    ranks: list[_OnItsWay] = []
    for stage, row in enumerate(rows):
        items = _waits(row, away[stage], limit)
        if items is None:
            return float("inf")
        ranks.append(_OnItsWay(items, table[:, stage].tolist()))
    arrives_s: dict[tuple[int, int, int], float] = {}
    for m in range(len(away[0])):
        arrives_s[FORWARD, 0, m] = arrives_s[INPUT, len(ranks) - 1, m] = 0.0
    moved = True
    while moved:
        before = [rank.at for rank in ranks]
        for stage, rank in (*enumerate(ranks), *reversed([*enumerate(ranks)])):
            _go_on(stage, rank, away[stage], arrives_s, message_s)
        moved = before != [rank.at for rank in ranks]
    assert all(rank.at == len(rank.items) for rank in ranks), "their order is that of a schedule"
    return max(rank.now_s for rank in ranks)


def _go_on(
    stage: int,
    rank: _OnItsWay,
    away: Sequence[bool],
    arrives_s: dict[tuple[int, int, int], float],
    message_s: float,
) -> None:
    """Let a rank go on until it waits for a message that is not sent yet."""
    while rank.at < len(rank.items):
        kind, m = rank.items[rank.at]
        if kind == _GONE:
            rank.now_s = max(rank.now_s, rank.gone_s[m])
        elif kind == RELOAD:
            rank.back_s = max(rank.now_s, rank.back_s) + rank.seconds[RELOAD]
            rank.come_s[m] = rank.back_s
        else:
            start_s = max(rank.now_s, rank.come_s[m] if kind == INPUT and away[m] else 0.0)
            if kind != WEIGHTS:
                if (there_s := arrives_s.get((kind, stage, m))) is None:
                    return
                start_s = max(start_s, there_s)
                onward = stage + 1 if kind == FORWARD else stage - 1
                arrives_s[kind, onward, m] = start_s + rank.seconds[kind] + message_s
            rank.now_s = start_s + rank.seconds[kind]
            if kind == FORWARD and away[m]:
                rank.there_s = max(rank.now_s, rank.there_s) + rank.seconds[OFFLOAD]
                rank.gone_s[m] = rank.there_s
        rank.at += 1
