"""The problem that exact schedulers give to the solver: actions, their bounds, and open choices.

The greedy schedule bounds the step from above.  What each action needs before and after it, on its
rank and elsewhere, then leaves few pairs of a rank open; which of the two comes first is a variable
of a mixed-integer program, and when each action starts is another.
"""

from typing import Any, NamedTuple, Protocol, cast, final

import numpy as np
import numpy.typing as npt

from penstock.extras import need
from penstock.schedule.greedy import FORWARD, INPUT, WEIGHTS, Floats, Seconds
from penstock.schedule.orders import Action, Kind

_KINDS: tuple[Kind, ...] = ("F", "I", "W")
_INFEASIBLE = 2  # scipy's status code


class Model(NamedTuple):
    """A mixed-integer program: the least `end` with low <= x <= high and rows @ x >= least."""

    low: Floats
    high: Floats
    integrality: npt.NDArray[np.int64]  # 1 for a variable that is 0 or 1
    rows: Any  # a csr_array of scipy
    least: Floats
    end: int  # the variable that is the end of the step


def solve(model: Model, time_limit_s: float) -> tuple[Floats | None, float]:
    """Return the best variables found, None if none were, and a lower bound of the step.

    time_limit_s:  more than 0.
    The bound is infinity where nothing exists.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # pyright: ignore  - no types; loading it takes a while

    bounds = Bounds(model.low, np.maximum(model.high, model.low))  # pyright: ignore  - takes arrays
    solved = milp(  # pyright: ignore
        np.eye(1, len(model.low), model.end).ravel(),
        integrality=model.integrality,
        bounds=bounds,
        constraints=LinearConstraint(model.rows, model.least, np.inf),  # pyright: ignore
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    result = cast(_Solved, solved)
    if result.status == _INFEASIBLE:
        return None, np.inf
    return result.x, max(float(model.low[model.end]), result.mip_dual_bound or 0.0)


class _Solved(Protocol):
    """What scipy returns."""

    status: int
    x: Floats | None
    mip_dual_bound: float | None


@final
class Problem:
    """Actions by number, (kind * S + stage) * M + micro-batch, and what is known of them.

    took_s   seconds of each action
    lag_s    [a, b]: b starts at least this long after a starts; minus infinity: not known
    """

    def __init__(self, num_stages: int, num_micro_batches: int, seconds: Seconds, limit: int):
        table = seconds.table(num_stages, split=True)
        self.shape = (3, num_stages, num_micro_batches)
        self.number = np.arange(table.size * num_micro_batches).reshape(self.shape)
        self.took_s = np.repeat(table.ravel(), num_micro_batches)
        self.stage = np.repeat(np.tile(np.arange(num_stages), 3), num_micro_batches)
        self.lag_s = np.full((self.number.size, self.number.size), -np.inf)
        self.edges: list[tuple[int, int]] = []
        self._fixed = np.zeros(self.lag_s.shape, np.bool_)  # also where the first takes no time
        np.fill_diagonal(self.lag_s, 0.0)
        number, message_s = self.number, float(seconds.message_s)
        self._follow(number[:, :, :-1], number[:, :, 1:])
        self._follow(number[FORWARD], number[INPUT])
        self._follow(number[INPUT], number[WEIGHTS])
        self._follow(number[FORWARD, :-1], number[FORWARD, 1:], message_s)
        self._follow(number[INPUT, 1:], number[INPUT, :-1], message_s)
        self._follow(number[WEIGHTS, :, :-limit], number[FORWARD, :, limit:])
        for middle in range(len(self.lag_s)):
            self._through(middle)

    def _follow(
        self, first: npt.NDArray[np.int64], then: npt.NDArray[np.int64], more_s: float = 0.0
    ) -> None:
        a, b = first.ravel(), then.ravel()
        self.lag_s[a, b] = np.maximum(self.lag_s[a, b], self.took_s[a] + more_s)
        self.edges += zip(a.tolist(), b.tolist(), strict=True)

    def _through(self, middle: int) -> None:
        both = self.lag_s[:, middle, None] + self.lag_s[None, middle, :]
        np.maximum(self.lag_s, both, out=self.lag_s)

    def tighten(self, below_s: float) -> bool:
        """Fix the pairs that a step of `below_s` leaves no choice; False if none is that short."""
        while True:
            self.head_s = self._heads(self.lag_s)
            self.tail_s = self._tails()
            if (self.head_s + self.took_s + self.tail_s > below_s).any():
                return False
            a, b = self.open_pairs()
            least_s = self.head_s[:, None] + (self.took_s + self.tail_s)[None, :]
            a_first = least_s[a, b] + self.took_s[a] <= below_s
            b_first = least_s[b, a] + self.took_s[b] <= below_s
            if not (a_first | b_first).all():
                return False
            fixed = [*zip(a[~b_first].tolist(), b[~b_first].tolist(), strict=True)]
            fixed += [*zip(b[~a_first].tolist(), a[~a_first].tolist(), strict=True)]
            if not fixed:
                return True
            for first, then in fixed:
                lag_s = self.lag_s[:, first, None] + self.took_s[first] + self.lag_s[None, then, :]
                np.maximum(self.lag_s, lag_s, out=self.lag_s)
            self.edges += fixed
            for pair in fixed:
                self._fixed[pair] = True
            if (np.diagonal(self.lag_s) > 0).any():
                return False

    def open_pairs(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return the pairs of a rank that can come in either order, each once."""
        known = self._fixed | (np.isfinite(self.lag_s) & (self.lag_s > 0))
        same = self.stage[:, None] == self.stage[None, :]
        a, b = np.nonzero(np.triu(same & ~known & ~known.T, 1))
        return a, b

    def _heads(self, lag_s: Floats) -> Floats:
        """Return the earliest start of every action, given those of all that come before it."""
        head_s = np.maximum(lag_s.max(axis=0), 0.0)
        before = (lag_s > 0) & (self.stage[:, None] == self.stage[None, :])
        for b in np.argsort(head_s, kind="stable"):
            some = np.flatnonzero(before[:, b])
            some = some[np.argsort(head_s[some], kind="stable")]
            after_s = head_s[some] + np.cumsum(self.took_s[some][::-1])[::-1]
            head_s[b] = max(head_s[b], after_s.max(initial=0.0))
        return np.maximum(head_s, (head_s[:, None] + lag_s).max(axis=0))

    def _tails(self) -> Floats:
        """Return the fewest seconds from the end of every action to the end of the step."""
        return self._heads(self.lag_s.T + self.took_s[:, None] - self.took_s[None, :])

    def model(self, below_s: float) -> Model:
        """Return the program that looks for the shortest step below `below_s`.

        Its variables: the starts; for each open pair, 1 if its first comes first; the end.
        """
        a, b = self.open_pairs()
        size, pairs = len(self.took_s), len(a)
        rows, least = self._rows(a, b, below_s)
        latest_s = below_s - self.tail_s - self.took_s
        low = np.concatenate([self.head_s, np.zeros(pairs), [self.least_s()]])
        high = np.concatenate([latest_s, np.ones(pairs), [below_s]])
        integrality = np.repeat([0, 1, 0], [size, pairs, 1])
        return Model(low, high, integrality, rows, least, size + pairs)

    def least_s(self) -> float:
        """Return a bound of the step, by what must come before and after each action."""
        return float((self.head_s + self.took_s + self.tail_s).max())

    def _rows(
        self, a: npt.NDArray[np.intp], b: npt.NDArray[np.intp], below_s: float
    ) -> tuple[Any, Floats]:
        """Return the coefficients of the constraints, and the least value of each row."""
        need("scipy", "solvers", "an exact schedule")
        from scipy.sparse import csr_array  # pyright: ignore  - no types; loading it takes a while

        size, pairs, took_s = len(self.took_s), len(a), self.took_s
        order, at = np.arange(pairs), size + np.arange(pairs)
        big_s = below_s - self.tail_s[:, None] - self.head_s[None, :]  # a ends after b starts
        one, other = np.zeros((2, pairs, size + pairs + 1))
        one[order, a], one[order, b], one[order, at] = -1, 1, -big_s[a, b]
        other[order, b], other[order, a], other[order, at] = -1, 1, big_s[b, a]
        first, then = np.array(self.edges).T
        known = np.zeros((len(first), size + pairs + 1))
        edge = np.arange(len(first))
        known[edge, first], known[edge, then] = -1, 1
        load, load_s = self._loads(a, b)
        rows = csr_array(np.concatenate([one, other, known, load]))
        some = (took_s[a] - big_s[a, b], took_s[b], self.lag_s[first, then], load_s)
        return rows, np.concatenate(some)

    def _loads(self, a: npt.NDArray[np.intp], b: npt.NDArray[np.intp]) -> tuple[Floats, Floats]:
        """Return rows that say: an action starts after all that its rank does before it, and the
        step ends after all that it does later."""
        size, pairs, took_s = len(self.took_s), len(a), self.took_s
        at = size + np.arange(pairs)
        begins, ends = np.zeros((2, size, size + pairs + 1))
        begins[np.arange(size), np.arange(size)], ends[:, -1] = 1, 1
        ends[np.arange(size), np.arange(size)] = -1
        begins[b, at], begins[a, at] = -took_s[a], took_s[b]
        ends[a, at], ends[b, at] = -took_s[b], took_s[a]
        same = self.stage[:, None] == self.stage[None, :]
        before = ((self.lag_s > 0) & same).astype(np.float64)
        begins_s = np.array([self.head_s[self.stage == stage].min() for stage in self.stage])
        begins_s += took_s @ before + np.bincount(a, took_s[b], size)
        ends_s = np.array([self.tail_s[self.stage == stage].min() for stage in self.stage])
        ends_s += took_s + before @ took_s + np.bincount(b, took_s[a], size)
        return np.concatenate([begins, ends]), np.concatenate([begins_s, ends_s])

    def orders(self, starts_s: Floats) -> list[list[Action]]:
        """Return the orders in which the actions start."""
        made: list[list[Action]] = []
        for stage in range(self.shape[1]):
            mine = np.flatnonzero(self.stage == stage)
            mine = mine[np.argsort(starts_s[mine], kind="stable")]
            kinds, _, numbers = np.unravel_index(mine, self.shape)
            made.append(
                [Action(_KINDS[k], stage, int(m)) for k, m in zip(kinds, numbers, strict=True)]
            )
        return made
