"""Knapsack: one option of each class, the cheapest that fit into the room together.

    cost, size   [class, option]; a cost of inf: there is no such option

The relaxation prices the room: of each class the option of least cost + price * size.  No choice
that fits costs less than these together less price * room, and the price is the one for which
that bound is highest.  So an option is out if taking it raises the bound above the best known.
What is left is gone through class by class, keeping of all partial choices those that no other
beats in both cost and size, and whose bound is not above the best.

Source:   "Nemhauser and Ullmann, Discrete dynamic programming and capital allocation", 1969, for
          the undominated states; "Dyer, Kayal and Walker, A branch and bound algorithm for
          solving the multiple-choice knapsack problem", 1984, for the bound.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_NEAR = 1e-13  # of a value: rounding of its sum
_LARGE = 1 << 62


class Relaxed(NamedTuple):
    """No choice costs less than `bound`; `price` of a byte; `choice` [class] fits, and is near."""

    bound: float
    price: float
    choice: Ints


class Cheapest(NamedTuple):
    """The cheapest choice found, if any is below what was asked, and what none is below."""

    choice: Ints | None
    bound: float


def total(values: NDArray[np.float64] | Ints, choice: Ints) -> float:
    """Return the sum over all classes of the value that each has by its choice."""
    return values[np.arange(len(choice)), choice].sum().item()


def relaxed(cost: Floats, size: Ints, room: int) -> Relaxed | None:
    """Return the bound by prices, exactly the highest; None if nothing fits.

    The ends of a range of prices are two choices, one that fits and one that does not; the price
    at which both are worth the same is tried next, until no third choice is worth less there.
    """
    small = np.where(np.isfinite(cost), size, _LARGE)
    fits = np.where(small == small.min(axis=1, keepdims=True), cost, np.inf).argmin(axis=1)
    over = np.where(cost == cost.min(axis=1, keepdims=True), small, _LARGE).argmin(axis=1)
    if total(small, fits) > room:
        return None
    if total(small, over) <= room:
        return Relaxed(total(cost, over), 0.0, over)
    while True:
        saved = total(cost, fits) - total(cost, over)
        price = saved / (total(small, over) - total(small, fits))
        worth = cost + price * small
        middle = worth.argmin(axis=1)
        value, known = total(worth, middle), total(worth, fits)
        if value >= known - _NEAR * known:
            return Relaxed(value - price * room, price, _filled(cost, small, room, fits))
        if total(small, middle) <= room:
            fits = middle
        else:
            over = middle


def _filled(cost: Floats, size: Ints, room: int, choice: Ints) -> Ints:
    """Return a choice that uses what room is left: the swap that saves most, again and again."""
    rows, choice = np.arange(len(choice)), choice.copy()
    while True:
        spare = room - total(size, choice)
        gain = cost[rows, choice][:, None] - cost
        gain[size - size[rows, choice][:, None] > spare] = 0.0
        row, option = np.unravel_index(gain.argmax(), gain.shape)
        if not gain[row, option] > 0:
            return choice
        choice[row] = option


def cheapest(cost: Floats, size: Ints, room: int, *, below: float, most_states: int) -> Cheapest:
    """Return the cheapest choice that fits, if it costs less than `below`.

    Exact while no more than `most_states` choices have to be kept side by side; beyond it the
    nearest are, and `bound` says what the others do not cost less than.
    """
    found = relaxed(cost, size, room)
    if found is None or found.bound >= below:
        return Cheapest(None, below)
    best, limit = None, below
    if total(cost, found.choice) < limit:
        best, limit = found.choice, total(cost, found.choice)
    excess = cost + found.price * size
    excess -= excess.min(axis=1, keepdims=True)
    gap = limit - found.bound + _NEAR * limit
    choice, dropped = _nearest(_Left(excess, size, room, found.price), gap, most_states)
    if choice is not None and total(cost, choice) < limit:
        best, limit = choice, total(cost, choice)
    return Cheapest(best, min(limit, found.bound + dropped))


class _Left(NamedTuple):
    """The options, by how much each raises the bound."""

    excess: Floats
    size: Ints
    room: int
    price: float


class _States(NamedTuple):
    """Choices that no other beats: their sizes, excess, and where each came from."""

    size: Ints
    excess: Floats
    parent: Ints
    option: Ints


class _Way(NamedTuple):
    """The order in which classes leave the place where the bound has them.

    added      [class, option]: bytes more than there
    leaving    by place in the order: the least excess of it
    less, more by place: the bytes that all later classes together can take off or add
    """

    base: Ints
    order: Ints
    added: Ints
    leaving: Floats
    less: Ints
    more: Ints


def _way(left: _Left, gap: float) -> _Way:
    """Return the cheapest to leave first; of equal ones that which changes most."""
    rows = np.arange(len(left.size))
    base = left.excess.argmin(axis=1)
    others = left.excess.copy()
    others[rows, base] = np.inf
    leaving = others.min(axis=1)
    added = np.where(left.excess <= gap, left.size - left.size[rows, base][:, None], 0)
    low, high = added.min(axis=1), added.max(axis=1)
    order = np.lexsort((low - high, leaving))
    less, more = low[order], high[order]
    return _Way(base, order, added, leaving[order], less.sum() - less.cumsum(),
                more.sum() - more.cumsum())  # fmt: skip


def _nearest(left: _Left, gap: float, most: int) -> tuple[Ints | None, float]:
    """Return the choice nearest to the bound, if nearer than `gap`, and the least excess dropped.

    A state is a choice for all classes: those not gone through are where the bound has them.  It
    is done where it cannot bear the excess of the next class, and so of no later one; where the
    later ones cannot make it fit; and where they cannot fill the room.
    """
    way = _way(left, gap)
    first = np.array([total(left.size, way.base)], np.int64)
    made = [_States(first, np.zeros(1), first, first)]
    dropped, nearest = np.inf, None
    for step, row in enumerate(way.order.tolist()):
        made[-1] = _kept(made[-1], made[-1].excess + way.leaving[step] <= gap)
        if not len(made[-1].size):
            break
        states = _undominated(_grown(made[-1], left, way, row, gap), left.price)
        spare = left.room - states.size
        unfilled = states.excess + left.price * np.maximum(spare - way.more[step], 0)
        states = _kept(states, (unfilled <= gap) & (spare >= way.less[step]))
        off = states.excess + left.price * np.abs(left.room - states.size)
        if len(off) > most:
            kept = _foremost(states.excess, off, most)
            dropped = min(dropped, float(states.excess[~kept].min()))
            states, off = _kept(states, kept), off[kept]
        made.append(states)
        off[states.size > left.room] = np.inf
        if off.min(initial=np.inf) < gap:
            gap, at = float(off.min()), int(off.argmin())
            nearest = _back(way, made, at)
    return nearest, dropped


def _foremost(excess: Floats, off: Floats, most: int) -> NDArray[np.bool_]:
    """Return half of the states for the bound, by excess, and half for what fills the room."""
    kept = np.zeros(len(off), np.bool_)
    for by in (excess, off):
        kept[np.argsort(by, kind="stable")[: most // 2]] = True
    return kept


def _grown(states: _States, left: _Left, way: _Way, row: int, gap: float) -> _States:
    """Return every state with every option of a class, those within the gap."""
    options = np.flatnonzero(left.excess[row] <= gap)
    count = len(states.size)
    made = _States(
        (states.size[:, None] + way.added[row, options]).ravel(),
        (states.excess[:, None] + left.excess[row, options]).ravel(),
        np.repeat(np.arange(count), len(options)),
        np.tile(options, count),
    )
    return _kept(made, made.excess <= gap)


def _kept(states: _States, where: NDArray[np.bool_] | Ints) -> _States:
    return _States(
        states.size[where], states.excess[where], states.parent[where], states.option[where]
    )


def _undominated(states: _States, price: float) -> _States:
    """Return the states that cost less than all that are as small; of equal ones the first."""
    cost = states.excess - price * states.size
    order = np.lexsort((cost, states.size))
    sorted_cost = cost[order]
    before = np.minimum.accumulate(np.concatenate([[np.inf], sorted_cost[:-1]]))
    return _kept(states, order[sorted_cost < before])


def _back(way: _Way, made: list[_States], at: int) -> Ints:
    """Return the choice of state `at` of the last step."""
    choice = way.base.copy()
    for row, states in zip(way.order[len(made) - 2 :: -1].tolist(), made[:0:-1], strict=True):
        choice[row] = states.option[at]
        at = int(states.parent[at])
    return choice
