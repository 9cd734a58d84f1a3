"""Figures of a schedule: the seconds its ranks idle, the activations and weights they hold."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.schedule.far_words import with_far
from penstock.schedule.ledger import Changes, levels, peaks
from penstock.schedule.orders import B, F, Kind, W
from penstock.schedule.schedule import Schedule
from penstock.schedule.weight_rule import VersionTable, versions


def bubble(
    schedule: Schedule, *, forward_s: float = 1.0, input_s: float = 1.0, weights_s: float = 1.0
) -> tuple[float, ...]:
    """Return, for each rank, the seconds that it idles in the window.

    That is the end of the last action of all ranks less the time the rank itself works, if F takes
    `forward_s`, I `input_s`, W `weights_s` and B, which is I and W, the sum of these two.

    Ignores:  updates, messages, and differences between stages, ranks and micro-batches.
    """
    idle_s, _ = _idle_s(schedule, (forward_s, input_s + weights_s, input_s, weights_s, 0.0))
    return idle_s


def bubble_fraction(
    schedule: Schedule, *, forward_s: float = 1.0, input_s: float = 1.0, weights_s: float = 1.0
) -> float:
    """Return the idle part of all ranks' time in the window: `bubble` without its unit."""
    seconds = (forward_s, input_s + weights_s, input_s, weights_s, 0.0)
    idle_s, window_s = _idle_s(schedule, seconds)
    return sum(idle_s) / (window_s * schedule.num_ranks) if window_s > 0 else 0.0


class Step(NamedTuple):
    """A step of a long run: its seconds, and the idle part of all ranks' time in it."""

    step_s: float
    idle_fraction: float


def added_step(window: Schedule, longer: Schedule) -> Step:
    """Return the step that `longer` has more often than `window`, for f = i = w = 1.

    Both are windows of one asynchronous schedule, and long enough to be full: what filling and
    draining take is in both.
    """
    (idle_s, end_s), (longer_idle_s, longer_end_s) = (
        _idle_s(each, (1.0, 2.0, 1.0, 1.0, 0.0)) for each in (window, longer)
    )
    added_s = longer_end_s - end_s
    idle = (sum(longer_idle_s) - sum(idle_s)) / (added_s * window.num_ranks) if added_s > 0 else 0.0
    return Step(added_s / (longer.num_steps - window.num_steps), idle)


def _idle_s(schedule: Schedule, seconds: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    orders, group = schedule.orders, schedule.together
    forward_s, both_s, input_s, weights_s, update_s = seconds
    seconds = (forward_s, group * both_s, input_s, group * weights_s, update_s)
    _, end_s = schedule.play(seconds)
    window_s = float(end_s.max())
    idle_s: list[float] = []
    for rank in range(len(orders)):
        counts = np.bincount(orders.kinds[orders.slice_of(rank)], minlength=len(seconds))
        idle_s.append(window_s - float(counts @ np.array(seconds)))
    return tuple(idle_s), window_s


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, the most activations that it holds.

    One is held for a (stage, micro-batch) from its F until its B, or its W, is done, but for
    while it is in far memory; none if the schedule has no backward.
    """
    orders = schedule.orders
    if not np.isin(orders.kinds, (B, W)).any():
        return (0,) * len(orders)
    change = np.zeros(5, np.int64)
    change[[F, B, W]] = 1, -schedule.together, -schedule.together
    start = np.zeros(len(orders), np.int64)
    changes, offsets = with_far(change[orders.kinds], orders, schedule.far)
    held = levels(Changes(0 * changes, changes, changes), offsets, start)
    return tuple(peaks(held, offsets, start).tolist())


def num_messages(schedule: Schedule) -> int:
    """Return the messages between ranks in one window of a chain: activations and gradients.

    A micro-batch that goes on to a stage on the same rank sends none.  B of several micro-batches
    together sends one.
    """
    stages, window = schedule.num_stages, schedule.num_steps * schedule.num_micro_batches
    crossing = sum(
        schedule.rank_of(stage, m) != schedule.rank_of(stage + 1, m)
        for stage in range(stages - 1)
        for m in range(window)
    )
    kinds = schedule.orders.kinds
    if not (kinds != F).any():
        return crossing
    return crossing + crossing // (schedule.together if (kinds == B).any() else 1)


def weight_copies(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage how many weight-sized tensors a rank holds, the live one included.

    Versions that are alive, predictions that outlive the version that they are made from and are
    kept at once, and what predictions are made from.  Others are made as an action reads them,
    parameter by parameter (`made_in_passing`).  Also gradients that wait until an earlier step is
    updated.
    """
    table, sizes = versions(schedule), (schedule.num_stages, schedule.num_micro_batches)
    kept = [schedule.weight_rule.kept(stage, *sizes) for stage in range(schedule.num_stages)]
    parked = _parked(schedule)
    return tuple(
        (1 if table.forward_ahead[stage].any() or table.backward_ahead[stage].any() else alive)
        + max(_most_kept(own) for own in _predictions(schedule, table, stage))
        + more
        + parked[stage]
        for stage, (alive, more) in enumerate(zip(table.alive, kept, strict=True))
    )


def _parked(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most steps whose gradients wait on a rank for an earlier update."""
    most = [0] * schedule.num_stages
    for order in schedule.orders if schedule.has_updates else ():
        updates = [0] * schedule.num_stages
        begun: list[set[int]] = [set() for _ in updates]
        for kind, stage, number in order:
            if kind == "U":
                updates[stage] += 1
                begun[stage].discard(updates[stage])
            elif kind in "BW" and (step := number // schedule.num_micro_batches) > updates[stage]:
                begun[stage].add(step)
                most[stage] = max(most[stage], len(begun[stage]))
    return tuple(most)


def reads_alike(schedule: Schedule) -> bool:
    """Return whether B of each micro-batch reads the very weights that its F read."""
    if schedule.weight_rule.predictor is not None:
        return False
    table = versions(schedule) if schedule.has_updates else None
    return table is None or bool((table.forward == table.backward).all())


def made_in_passing(schedule: Schedule) -> frozenset[tuple[Kind, int]]:
    """Return kind and stage of the actions that read weights which are predicted as they go."""
    if schedule.weight_rule.predictor is None:
        return frozenset()
    table = versions(schedule)
    return frozenset(
        (kind, stage)
        for stage in range(schedule.num_stages)
        for own in _predictions(schedule, table, stage)
        for uses in own
        if not uses.outlives
        for kind in uses.kinds
    )


@dataclass(slots=True)
class _Uses:
    """Where a rank reads a prediction first and last; whether its version is replaced before."""

    first: int
    last: int
    kinds: set[Kind]
    outlives: bool = False


def _most_kept(predictions: Sequence[_Uses]) -> int:
    """Return the most predictions kept at once; each is kept from its first reader on."""
    kept = [each for each in predictions if each.outlives]
    changes = sorted([(each.first, 1) for each in kept] + [(each.last + 0.5, -1) for each in kept])
    return max([0, *itertools.accumulate(change for _, change in changes)])


def _predictions(schedule: Schedule, table: VersionTable, stage: int) -> list[list[_Uses]]:
    """Return for each rank the predictions of a stage that it reads."""
    ahead = {"F": table.forward_ahead[stage], "B": table.backward_ahead[stage]}
    version = {"F": table.forward[stage], "B": table.backward[stage]}
    if not (ahead["F"].any() or ahead["B"].any()):
        return [[]]
    found: list[list[_Uses]] = []
    for order in schedule.orders:
        uses: dict[tuple[int, int], _Uses] = {}
        updates = 0
        for at, (kind, of, m) in enumerate(order):
            side = "F" if kind == "F" else "B"
            if of == stage and kind == "U":
                updates = m + 1
            elif of == stage and ahead[side][m]:
                key = int(version[side][m]), int(ahead[side][m])
                own = uses.setdefault(key, _Uses(at, at, set()))
                own.last, own.outlives = at, own.outlives or updates > key[0]
                own.kinds.add(kind)
        found.append(list(uses.values()))
    return found
