"""The rows that offload adds to the problem of the exact scheduler.

For every micro-batch of a stage it is open whether its activation is offloaded, and when the copies
to the host and back start; copies that are not made take no time.  The limit holds whenever an
activation comes to the device, that is, whenever one of these starts:

    F of k       of the micro-batches before k at least k + 1 - limit have ended their W, or are on
                 the host
    reload of m  of all others at least M - limit have ended their W (if they are before m), or have
                 not begun their F or are on the host (if they are behind it)

So for m < k these are choices: F of k before the reload of m, or behind it; m on the host as F of k
starts, or not; k on the host as the reload of m starts, or not.  For j < m: W of j has ended as
the reload of m starts, or not.
"""

from typing import final

import numpy as np
import numpy.typing as npt

from penstock.schedule.exact_problem import Model, Problem
from penstock.schedule.greedy import FORWARD, INPUT, WEIGHTS, Floats
from penstock.schedule.offload_play import OFFLOAD, RELOAD
from penstock.schedule.orders import IntArray

_Terms = dict[int, float]  # variables, each with its factor


@final
class OffloadProblem:
    """The program of `problem`, which knows of no limit, with copies and the limit.

    `table` has the seconds of [F, I, W, reload, offload], [stage].
    """

    def __init__(self, problem: Problem, table: Floats, limit: int, below_s: float):
        _, num_stages, num_micro_batches = problem.shape
        a, b = problem.open_pairs()
        pairs = zip(a.tolist(), b.tolist(), strict=True)
        self._problem, self._table, self._limit = problem, table, limit
        self._pair = {pair: len(problem.took_s) + at for at, pair in enumerate(pairs)}
        self._program = _Growing(problem.model(below_s))
        table_of = (num_stages, num_micro_batches, num_micro_batches)
        self._away, self._out, self._back = np.full((3, *table_of[:2]), -1)
        self._behind = np.full(table_of, -1)  # [m, k]: the reload of m comes behind F of k
        self._hosted = np.full(table_of, -1)  # [m, k]: m is on the host as F of k starts
        self._gone = np.full(table_of, -1)  # [j, m]: j has ended or is on the host at m's reload
        for stage in range(num_stages if num_micro_batches > limit else 0):
            self._copies(stage)
            for m, k in zip(*np.triu_indices(num_micro_batches, 1), strict=True):
                self._pair_of(stage, int(m), int(k))
            for m in range(num_micro_batches):
                self._room_for_forward(stage, m)
                self._room_for_reload(stage, m)
        self.model = self._program.model()

    def _copies(self, stage: int) -> None:
        """Add the copies of a stage, each kind in the order of the micro-batches."""
        program, number = self._program, self._problem.number[:, stage]
        took_s: list[float] = self._table[[FORWARD, RELOAD, OFFLOAD], stage].tolist()
        forward_s, back_s, out_s = took_s
        away, out, back = self._away[stage], self._out[stage], self._back[stage]
        for m in range(len(away)):
            f, i = int(number[FORWARD, m]), int(number[INPUT, m])
            from_s, until_s = program.low[f] + forward_s, program.high[i]
            away[m] = program.choice()
            out[m], back[m] = program.time(from_s, until_s), program.time(from_s, until_s)
            program.row({out[m]: 1, f: -1}, forward_s)
            program.row({back[m]: 1, out[m]: -1, away[m]: -out_s}, 0)
            program.row({i: 1, back[m]: -1, away[m]: -back_s}, 0)
            if m > 0:
                program.row({out[m]: 1, out[m - 1]: -1, away[m - 1]: -out_s}, 0)
                program.row({back[m]: 1, back[m - 1]: -1, away[m - 1]: -back_s}, 0)

    def _pair_of(self, stage: int, m: int, k: int) -> None:
        """Add what can be chosen for m and the later k."""
        program, number = self._program, self._problem.number[:, stage]
        weights_s, out_s = self._table[[WEIGHTS, OFFLOAD], stage].tolist()
        away, out, back = self._away[stage], self._out[stage], self._back[stage]
        behind, hosted, gone = self._behind[stage], self._hosted[stage], self._gone[stage]
        f, w = int(number[FORWARD, k]), int(number[WEIGHTS, m])
        behind[m, k], hosted[m, k] = program.choice(), program.choice()
        gone[k, m], gone[m, k] = program.choice(), program.choice()
        program.follows(back[m], f, 0.0, behind[m, k])
        program.follows(f, back[m], 0.0, behind[m, k], value=0)
        program.follows(f, out[m], out_s, hosted[m, k])
        program.follows(back[m], out[k], out_s, gone[k, m])
        program.follows(back[k], w, weights_s, gone[m, k])
        for one, other in (
            (hosted[m, k], away[m]),
            (hosted[m, k], behind[m, k]),
            (gone[k, m], away[k]),
            (gone[k, m], behind[m, k]),
        ):
            program.implies(one, other)
        if k > m + 1:
            program.implies(behind[m, k], behind[m, k - 1])
        if m > 0:
            program.implies(behind[m - 1, k], behind[m, k])
            program.implies(gone[m, k], gone[m - 1, k])

    def _room_for_forward(self, stage: int, k: int) -> None:
        number, hosted = self._problem.number[:, stage], self._hosted[stage]
        f, terms, least = int(number[FORWARD, k]), _Terms(), k + 1.0 - self._limit
        for m in range(k):
            w, on_host = int(number[WEIGHTS, m]), int(hosted[m, k])
            terms[on_host] = 1.0
            if (f, w) in self._pair:  # 1 where F comes first
                pair = self._pair[f, w]
                terms[pair], least = -1.0, least - 1
                self._program.row({on_host: -1, pair: 1}, 0)
            elif self._problem.lag_s[w, f] > 0:
                least -= 1
                self._program.row({on_host: -1}, 0)
        if k >= self._limit:
            self._program.row(terms, least)

    def _room_for_reload(self, stage: int, m: int) -> None:
        count, gone = self._problem.shape[2], self._gone[stage]
        later = self._behind[stage, m, m + 1 :].tolist()  # 1 where F has begun
        terms: _Terms = dict.fromkeys(later, -1.0)
        terms |= {int(gone[j, m]): 1.0 for j in range(count) if j != m}
        terms[int(self._away[stage, m])] = float(self._limit - count)
        self._program.row(terms, -len(later))

    def solution(self, found: Floats) -> tuple[IntArray, IntArray]:
        """Return the orders and the table of copies, as `play` takes them."""
        _, num_stages, count = self._problem.shape
        away = np.where(self._away < 0, 0, np.rint(found[self._away])).astype(np.int64)
        behind = np.where(self._behind < 0, 1, np.rint(found[self._behind]))
        orders: list[list[int]] = []
        for stage in range(num_stages):
            mine = self._problem.number[:, stage].ravel()
            order: list[int] = []
            reloads = 0
            for action in np.argsort(found[mine], kind="stable").tolist():
                kind, k = divmod(action, count)
                while reloads < count and (
                    (kind == INPUT and reloads == k)
                    or (kind == FORWARD and reloads < k and not behind[stage, reloads, k])
                ):
                    order.append(RELOAD * count + reloads)
                    reloads += 1
                order.append(action)
            orders.append(order)
        return np.array(orders), away


@final
class _Growing:
    """A model that grows."""

    def __init__(self, base: Model):
        self._base = base
        self.low: list[float] = base.low.tolist()
        self.high: list[float] = base.high.tolist()
        self._integrality: list[int] = base.integrality.tolist()
        self._rows: list[_Terms] = []
        self._least: list[float] = []

    def time(self, low_s: float, high_s: float) -> int:
        """Return a new variable in seconds."""
        return self._variable(low_s, high_s, 0)

    def choice(self) -> int:
        """Return a new variable that is 0 or 1."""
        return self._variable(0.0, 1.0, 1)

    def _variable(self, low: float, high: float, integrality: int) -> int:
        self.low.append(low)
        self.high.append(high)
        self._integrality.append(integrality)
        return len(self.low) - 1

    def row(self, terms: _Terms, least: float) -> None:
        """Let the sum of factors times variables be at least `least`."""
        self._rows.append(terms)
        self._least.append(least)

    def implies(self, one: int, other: int) -> None:
        """Let `other` be 1 where `one` is."""
        self.row({other: 1, one: -1}, 0)

    def follows(self, then: int, first: int, took_s: float, choice: int, *, value: int = 1) -> None:
        """Let `then` be `took_s` after `first`, or more, where `choice` is `value`."""
        big_s = max(0.0, self.high[first] + took_s - self.low[then])
        if value == 1:
            self.row({then: 1, first: -1, choice: -big_s}, took_s - big_s)
        else:
            self.row({then: 1, first: -1, choice: big_s}, took_s)

    def model(self) -> Model:
        """Return the model with all rows and variables that were added."""
        from scipy.sparse import csr_array, hstack, vstack  # pyright: ignore  - no types; loading it takes a while

        sizes = [len(terms) for terms in self._rows]
        columns = np.array([at for terms in self._rows for at in terms], np.int64)
        factors = np.array([each for terms in self._rows for each in terms.values()], np.float64)
        lines: npt.NDArray[np.int64] = np.repeat(np.arange(len(sizes)), sizes)
        more = csr_array((factors, (lines, columns)), shape=(len(sizes), len(self.low)))
        wide = csr_array((len(self._base.least), len(self.low) - len(self._base.low)))
        rows = csr_array(vstack([hstack([self._base.rows, wide]), more]))  # pyright: ignore
        arrays = np.array(self.low), np.array(self.high), np.array(self._integrality)
        least = np.concatenate([self._base.least, self._least])
        return Model(*arrays, rows, least, self._base.end)
