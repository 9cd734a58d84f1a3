"""Figures of a schedule: the seconds its ranks idle, the activations and weights they hold."""

import itertools

import numpy as np

from penstock.schedule.ledger import Changes, levels, peaks
from penstock.schedule.orders import B, F, W
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


def _idle_s(schedule: Schedule, seconds: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    orders = schedule.orders
    _, end_s = schedule.play(seconds)
    window_s = float(end_s.max())
    idle_s: list[float] = []
    for rank in range(len(orders)):
        counts = np.bincount(orders.kinds[orders.slice_of(rank)], minlength=len(seconds))
        idle_s.append(window_s - float(counts @ np.array(seconds)))
    return tuple(idle_s), window_s


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, the most activations that it holds.

    One is held for a (stage, micro-batch) from its F until its B, or its W, is done; none if the
    schedule has no backward.
    """
    orders = schedule.orders
    if not np.isin(orders.kinds, (B, W)).any():
        return (0,) * len(orders)
    change = np.zeros(5, np.int64)
    change[[F, B, W]] = 1, -1, -1
    start, changes = np.zeros(len(orders), np.int64), change[orders.kinds]
    held = levels(Changes(0 * changes, changes, changes), orders.offsets, start)
    return tuple(peaks(held, orders.offsets, start).tolist())


def num_messages(schedule: Schedule) -> int:
    """Return the messages between ranks in one window of a chain: activations and gradients.

    A micro-batch that goes on to a stage on the same rank sends none.
    """
    stages, window = schedule.num_stages, schedule.num_steps * schedule.num_micro_batches
    crossing = sum(
        schedule.rank_of(stage, m) != schedule.rank_of(stage + 1, m)
        for stage in range(stages - 1)
        for m in range(window)
    )
    has_backward = bool((schedule.orders.kinds != F).any())
    return crossing * (1 + has_backward)


def weight_copies(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage how many weight-sized tensors a rank holds, the live one included.

    Versions that are alive, predictions that are kept at once, and what these are made from.
    A version of which only predictions are read is held as those.
    """
    table, sizes = versions(schedule), (schedule.num_stages, schedule.num_micro_batches)
    kept = [schedule.weight_rule.kept(stage, *sizes) for stage in range(schedule.num_stages)]
    predicted = [_predictions(schedule, table, stage) for stage in range(schedule.num_stages)]
    return tuple(
        (1 if some else alive) + some + more
        for alive, some, more in zip(table.alive, predicted, kept, strict=True)
    )


def _predictions(schedule: Schedule, table: VersionTable, stage: int) -> int:
    """Return how many predictions are kept at once: from the first F or B that reads each on."""
    ahead = {"F": table.forward_ahead[stage], "B": table.backward_ahead[stage]}
    version = {"F": table.forward[stage], "B": table.backward[stage]}
    most = 0
    for order in schedule.orders if ahead["F"].any() or ahead["B"].any() else ():
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        for at, (kind, of, m) in enumerate(order):
            side = "F" if kind == "F" else "B"
            if of == stage and kind != "U" and ahead[side][m]:
                key = int(version[side][m]), int(ahead[side][m])
                first.setdefault(key, at)
                last[key] = at
        changes = sorted(
            [(at, 1) for at in first.values()] + [(at + 0.5, -1) for at in last.values()]
        )
        most = max([most, *itertools.accumulate(change for _, change in changes)])
    return most
