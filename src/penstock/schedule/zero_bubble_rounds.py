"""Rounds: zero-bubble orders for given seconds and memory, laid a micro-batch at a time.

Warm-up: F of the first micro-batch on every rank; then, from the last rank to the first, as many
more F as pass the time until the first I, as far as memory goes, and on no rank as many as on the
rank before it.  In round m every rank lays one F, from the first rank to the last, and I of
micro-batch m, from the last to the first.  W are laid where an F would not fit into memory, where
one fits into a wait, and where the wait would make the rank the one that has idled most.  What is
left of them comes at the end.

Three things are a matter of taste, and all eight ways are tried: whether the last F of the warm-up
may delay the first I; whether a rank may leave out an F while it is two or more ahead of the
next rank, where the F would delay its I; and whether W go into waits that cost nothing.

Source: Zero Bubble, arXiv:2401.10241, section 3.1 (the heuristic; its B is our I).
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.schedule.clock import FORWARD, INPUT, WEIGHTS, Floats
from penstock.schedule.compiled import compiled
from penstock.schedule.orders import IntArray

BoolArray: TypeAlias = npt.NDArray[np.bool_]

ROUNDING = 1e-9  # of an activation


class Room(NamedTuple):
    """Activations that a rank may hold, and the part of one that is left from I until W."""

    limit: float
    weight_share: float


class _Laid(NamedTuple):
    seconds: Floats  # [F, I, W], [rank]
    message_s: float
    change: Floats  # [F, I, W]: of what is held
    limit: float
    done: IntArray  # [F, I, W], [rank]: how many are laid
    ends_s: Floats  # [F, I, W], [rank], [micro-batch]
    clock_s: Floats  # [rank]
    idle_s: Floats  # [rank]: since its first action
    held: Floats  # [rank]
    numbers: IntArray  # [rank, place]: of the actions, as in clock.py


def lay(
    seconds: Floats, message_s: float, num_micro_batches: int, room: Room, taste: tuple[bool, ...]
) -> IntArray | None:
    """Return the numbers of the actions in order, [rank, place]; None if they do not fit.

    `seconds` is of [F, I, W], [rank]; `taste`: a late first I, left out F, W into every wait.
    """
    num_ranks = seconds.shape[1]
    clock_s, idle_s, held = np.zeros((3, num_ranks))
    laid = _Laid(
        np.ascontiguousarray(seconds),
        float(message_s),
        np.array([1.0, room.weight_share - 1.0, -room.weight_share]),
        room.limit + ROUNDING,
        np.zeros((3, num_ranks), np.int64),
        np.zeros((3, num_ranks, num_micro_batches)),
        clock_s,
        idle_s,
        held,
        np.empty((num_ranks, 3 * num_micro_batches), np.int64),
    )
    late, leave_out, eager = taste
    return laid.numbers if _rounds(laid, late, leave_out, eager) else None


@compiled
def _rounds(laid: _Laid, late: bool, leave_out: bool, eager: bool) -> bool:
    """Lay everything; return whether it fits."""
    num_ranks, num_micro_batches = laid.ends_s.shape[1:]
    if laid.limit < 1.0:
        return False
    _warm_up(laid, late)
    for m in range(1, num_micro_batches):
        has_forward = _forwards(laid, leave_out)
        for rank in range(num_ranks):
            if has_forward[rank] and not _fill_and_put(laid, FORWARD, rank, eager):
                return False
        for rank in range(num_ranks - 1, -1, -1):
            if rank == 0 and laid.done[FORWARD, 0] == num_micro_batches:  # nobody waits for its I
                while laid.done[WEIGHTS, 0] < m:
                    _put(laid, WEIGHTS, 0)
            if not _fill_and_put(laid, INPUT, rank, eager):
                return False
    for rank in range(num_ranks):
        while laid.done[WEIGHTS, rank] < num_micro_batches:
            _put(laid, WEIGHTS, rank)
    return True


@compiled
def _warm_up(laid: _Laid, late: bool) -> None:
    """Lay the F before the first I, and the first I, on every rank."""
    num_ranks, num_micro_batches = laid.ends_s.shape[1:]
    for rank in range(num_ranks):
        _put(laid, FORWARD, rank)
    more, gradient_s = np.zeros(num_ranks, np.int64), 0.0
    for rank in range(num_ranks - 1, -1, -1):
        took_s, now_s = laid.seconds[FORWARD, rank], laid.clock_s[rank]
        while rank + 1 < num_ranks:
            forwards = 1 + more[rank]
            if forwards == num_micro_batches or forwards + 1.0 > laid.limit:
                break
            if now_s >= gradient_s or (not late and now_s + took_s > gradient_s):
                break
            now_s += took_s
            more[rank] += 1
        gradient_s = max(now_s, gradient_s) + laid.seconds[INPUT, rank] + laid.message_s
    for rank in range(num_ranks):
        if rank > 0:
            is_all = more[rank - 1] + 1 == num_micro_batches
            more[rank] = min(more[rank], max(0, more[rank - 1] - (0 if is_all else 1)))
        for _ in range(more[rank]):
            _put(laid, FORWARD, rank)
    for rank in range(num_ranks - 1, -1, -1):
        _put(laid, INPUT, rank)


@compiled
def _forwards(laid: _Laid, leave_out: bool) -> BoolArray:
    """Return for each rank whether it lays an F in this round: no rank before one that does not."""
    num_ranks, num_micro_batches = laid.ends_s.shape[1:]
    lays = laid.done[FORWARD] < num_micro_batches
    for rank in range(num_ranks - 2, -1, -1):
        is_ahead = laid.done[FORWARD, rank] >= laid.done[FORWARD, rank + 1] + 2
        lays[rank] &= lays[rank + 1] and not (leave_out and is_ahead and _delays(laid, rank))
    return lays


@compiled
def _delays(laid: _Laid, rank: int) -> bool:
    """Return whether an F would delay the next I, and to wait for that I instead is for nothing."""
    took_s, after = laid.seconds[:, rank], rank + 1
    gradient_s = laid.clock_s[after] + laid.seconds[FORWARD, after] + laid.seconds[INPUT, after]
    left_s = gradient_s + laid.message_s - laid.clock_s[rank]
    held, num_weights = laid.held[rank] + 1.0, 0
    while held > laid.limit and laid.done[WEIGHTS, rank] + num_weights < laid.done[INPUT, rank]:
        held, num_weights = held + laid.change[WEIGHTS], num_weights + 1
    if left_s <= 0.0 or took_s[FORWARD] + num_weights * took_s[WEIGHTS] <= left_s:
        return left_s <= 0.0
    return left_s <= laid.idle_s.max() - laid.idle_s[rank]


@compiled
def _fill_and_put(laid: _Laid, kind: int, rank: int, eager: bool) -> bool:
    """Lay an F or I, and before it W, as far as they are needed or welcome; False if none fits."""
    while laid.held[rank] + laid.change[kind] > laid.limit:
        if laid.done[WEIGHTS, rank] == laid.done[INPUT, rank]:
            return False
        _put(laid, WEIGHTS, rank)
    ready_s, took_s = _ready_s(laid, kind, rank), laid.seconds[WEIGHTS, rank]
    while laid.done[WEIGHTS, rank] < laid.done[INPUT, rank] and laid.clock_s[rank] < ready_s:
        left_s = ready_s - laid.clock_s[rank]
        is_worst = left_s > laid.idle_s.max() - laid.idle_s[rank]
        if took_s > left_s and not eager and not is_worst:
            break
        _put(laid, WEIGHTS, rank)
    _put(laid, kind, rank)
    return True


@compiled
def _put(laid: _Laid, kind: int, rank: int) -> None:
    """Lay the next action of that kind."""
    num_ranks, num_micro_batches = laid.ends_s.shape[1:]
    m, begin_s = laid.done[kind, rank], max(laid.clock_s[rank], _ready_s(laid, kind, rank))
    if laid.done[FORWARD, rank] > 0:
        laid.idle_s[rank] += begin_s - laid.clock_s[rank]
    laid.clock_s[rank] = laid.ends_s[kind, rank, m] = begin_s + laid.seconds[kind, rank]
    laid.held[rank] += laid.change[kind]
    laid.numbers[rank, laid.done[:, rank].sum()] = (kind * num_ranks + rank) * num_micro_batches + m
    laid.done[kind, rank] += 1


@compiled
def _ready_s(laid: _Laid, kind: int, rank: int) -> float:
    """Return when the input of the next action of that kind is on its rank."""
    m = laid.done[kind, rank]
    if kind == FORWARD and rank > 0:
        return float(laid.ends_s[FORWARD, rank - 1, m] + laid.message_s)
    if kind == INPUT and rank + 1 < laid.ends_s.shape[1]:
        return float(laid.ends_s[INPUT, rank + 1, m] + laid.message_s)
    return 0.0
