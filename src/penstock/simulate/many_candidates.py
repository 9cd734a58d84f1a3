"""Batch: the seconds of one step, exactly, for many candidates that share a schedule.

    end(action) = max(end of the one before it on its rank, end of its source + message) + seconds

The list of actions (`Table`) is made once; then a candidate costs one maximum and two sums per
action.  Candidates run side by side, 64 at a time, so that the processor does eight at once and
all live values stay in its L1 cache.  Threads share the candidates; they are Python
threads that release the interpreter lock, not those of numba's prange, whose pool would outlive the
call, may not be used by two callers at once, and does not survive a fork.

Ignores:  what `simulate` models of links beyond latency: lanes, bytes, computing time lost at the
          ends, slowdown.  For those, `simulate` the best few.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.schedule.compiled import kept
from penstock.schedule.orders import KINDS
from penstock.simulate.wait_table import Table

Floats: TypeAlias = NDArray[np.float64]
Function = TypeVar("Function", bound=Callable[..., object])

_SIDE_BY_SIDE = 64  # candidates
_BLOCK = 1024  # candidates whose prices are gathered at once, by one thread


def step_seconds(
    table: Table,
    seconds: ArrayLike,
    message_s: ArrayLike = 0.0,
    *,
    reduce_s: ArrayLike = 0.0,
    threads: int = 1,
) -> Floats:
    """Return the seconds of one window for every candidate, from its start to its last end.

    seconds    [candidate, kind, stage], kinds in the order of schedule.KINDS; U also where the
               schedule lists no updates: it is then at the end
    message_s  [candidate] or [candidate, stage]: of a message between a stage and the next one,
               either way, where they are on different ranks; the last stage has none to it
    reduce_s   the same shapes: summing the gradients of a stage that lives on several ranks
    threads    that share the candidates; their number does not change the result

    Raises:   ValueError: another shape, seconds that are negative or not a number, threads below 1.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be 1 or more")
    action_s = np.ascontiguousarray(seconds, np.float64)
    if action_s.shape[1:] != (len(KINDS), table.num_stages) or action_s.ndim != 3:
        wanted = f"[candidate, {len(KINDS)}, {table.num_stages}]"
        raise ValueError(f"seconds has shape {action_s.shape}, not {wanted}")
    count = len(action_s)
    given = {"message_s": message_s, "reduce_s": reduce_s}
    shape = count, table.num_stages
    message, reduce = (_by_stage(name, each, shape) for name, each in given.items())
    steps_s = np.empty(count)
    block = max(1, min(_BLOCK, -(-count // threads)))

    def fill(first: int) -> None:
        part = slice(first, min(first + block, count))
        prices = _prices(table, action_s[part], message[part], reduce[part])
        if not 0.0 <= prices.min() <= prices.max() < np.inf:  # also if one is no number
            _refuse(("seconds", action_s), ("message_s", message), ("reduce_s", reduce))
        _fill(table, prices, steps_s[part])

    blocks = range(0, count, block)
    if threads == 1:
        for first in blocks:
            fill(first)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, blocks))
    return steps_s


def _refuse(*given: tuple[str, Floats]) -> None:
    """Raise if a value is not a time.

    Raises:   ValueError: seconds that are negative or not a number.
    """
    for name, array in given:
        wrong = np.argwhere(~((array >= 0) & np.isfinite(array)))
        if len(wrong):
            place = tuple(wrong[0].tolist())
            raise ValueError(f"{name}{list(place)} is {array[place]} s; it must be 0 or more")


def _by_stage(name: str, given: ArrayLike, shape: tuple[int, int]) -> Floats:
    """Return `given`, for all, by candidate, or by candidate and stage, as [candidate, stage]."""
    array = np.asarray(given, np.float64)
    if array.shape not in ((), shape[:1], shape):
        raise ValueError(f"{name} has shape {array.shape}, not {shape[:1]} or {shape}")
    return np.broadcast_to(array[:, None] if array.ndim == 1 else array, shape)


def _prices(table: Table, action_s: Floats, message_s: Floats, reduce_s: Floats) -> Floats:
    """Return the prices [candidate, column] in the columns that the table names."""
    stages = table.num_stages
    prices = np.zeros((len(action_s), table.num_prices))
    prices[:, : 5 * stages] = action_s.reshape(len(action_s), -1)
    prices[:, 5 * stages : 6 * stages] = reduce_s
    prices[:, 6 * stages + 1 :] = message_s[:, :-1]
    return prices


def _fill(table: Table, prices: Floats, steps_s: Floats) -> None:
    columns = table.previous, table.source, table.message, table.cost, table.slot
    rows = tuple(column.view(np.uint32) for column in columns)  # no index is checked for its sign
    if len(prices) > 2:
        _side_by_side(rows, prices, np.zeros((table.num_slots, _SIDE_BY_SIDE)), steps_s)
        return
    for candidate in range(len(prices)):
        steps_s[candidate] = _one(rows, prices[candidate], np.zeros(table.num_slots))


_Rows: TypeAlias = tuple[NDArray[np.uint32], ...]


def _loop(function: Function) -> Function:
    """Return `function` compiled, kept on disk if possible; it lets other threads go on."""
    return kept(function, nogil=True)


@_loop
def _one(rows: _Rows, prices: Floats, ends_s: Floats) -> float:
    """Return the step of one candidate, row after row."""
    previous, source, message, cost, slot = rows
    for row in range(len(slot)):
        come_s = ends_s[source[row]] + prices[message[row]]
        ends_s[slot[row]] = max(ends_s[previous[row]], come_s) + prices[cost[row]]
    step_s = 0.0
    for end_s in ends_s:
        step_s = max(step_s, float(end_s))
    return step_s


@_loop
def _side_by_side(rows: _Rows, prices: Floats, ends_s: Floats, steps_s: Floats) -> None:
    """Fill the steps of many candidates.  `ends_s` is [slot, candidate side by side], at 0 s."""
    previous, source, message, cost, slot = rows
    part = np.zeros((prices.shape[1], _SIDE_BY_SIDE))
    for first in range(0, len(prices), _SIDE_BY_SIDE):
        count = min(_SIDE_BY_SIDE, len(prices) - first)
        for candidate in range(count):
            for column in range(prices.shape[1]):
                part[column, candidate] = prices[first + candidate, column]
        for row in range(len(slot)):
            before_s, made_s = ends_s[previous[row]], ends_s[source[row]]
            sent_s, taken_s, end_s = part[message[row]], part[cost[row]], ends_s[slot[row]]
            for at in range(_SIDE_BY_SIDE):  # those beyond `count` are never looked at
                end_s[at] = max(before_s[at], made_s[at] + sent_s[at]) + taken_s[at]
        for candidate in range(count):
            step_s = 0.0
            for at in range(len(ends_s)):
                step_s = max(step_s, float(ends_s[at, candidate]))
            steps_s[first + candidate] = step_s
