"""Min-cut: what a stage keeps for its backward so that what it repeats takes fewest seconds.

Every value that the backward reads is kept, or its op is repeated; then so is every value that the
op reads.  With y_m whether memory m is kept and r_o whether op o is repeated:

    y_memory(v) + r_op(v) >= 1      for a value v that the backward reads
    y_memory(v) + r_op(v) >= r_o    for a value v that op o reads
    least  sum of r_o seconds_o  with  sum of y_m bytes_m <= budget

For a price of a byte instead of a budget this is a minimum cut of the graph of values; the cuts
for all prices are the corners of the lower hull of (bytes, seconds).  A budget between two corners
is a knapsack besides: a program in whole numbers, solved by HiGHS.

Source:  Checkmate, arXiv:1910.02653, and the min-cut partitioner of PyTorch; here an op may be
         repeated at its measured seconds, and is repeated once.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from penstock.graph.keeping import Keeping

_GAP = 1e-5  # relative, within which a solution is the best
_DEAR = 100.0  # times all seconds: the price of all bytes at which hardly any is kept
_MOST = 12  # corners between the ends

Floats = npt.NDArray[np.float64]


class Repeats(NamedTuple):
    """Ops to repeat, in order, their seconds, and the bytes that are kept for the backward."""

    again: tuple[int, ...]
    again_s: float
    held_bytes: int


def within(keeping: Keeping, op_s: Sequence[float], budget: int) -> Repeats | None:
    """Return the cut of fewest seconds that keeps no more than `budget` bytes; None: there is none.

    op_s:   seconds of each node of the graph.
    Of two with as many seconds to 1e-5 either may be returned.
    """
    return _CutProblem(keeping, op_s).solved(budget=budget)


def corners(keeping: Keeping, op_s: Sequence[float], most: int = _MOST) -> list[Repeats]:
    """Return cuts of the lower hull of (bytes, seconds), from keeping all to keeping least.

    All but the last repeat more than those before and keep less.  Of more than `most`, those
    farthest below the line between their neighbours.
    """
    model = _CutProblem(keeping, op_s)
    first = model.cut(())
    last = model.priced(_DEAR * model.total_s / max(1, first.held_bytes))
    found = [first, last] if last.held_bytes < first.held_bytes else [first]
    gaps = [(first, last)] if len(found) > 1 else []
    while gaps and len(found) < most:
        gaps.sort(key=lambda gap: _area(*gap))
        left, right = gaps.pop()
        price = (right.again_s - left.again_s) / (left.held_bytes - right.held_bytes)
        between = model.priced(price)
        gain = left.again_s + price * left.held_bytes - between.again_s
        if gain - price * between.held_bytes <= 1e-4 * model.total_s:
            continue
        if right.held_bytes < between.held_bytes < left.held_bytes:
            found.append(between)
            gaps += [(left, between), (between, right)]
    return sorted(found, key=lambda cut: -cut.held_bytes)


def _area(left: Repeats, right: Repeats) -> float:
    return (right.again_s - left.again_s) * (left.held_bytes - right.held_bytes)


class _MilpResult(Protocol):
    """What scipy returns."""

    x: Floats | None


class _CutProblem:
    """The program of one stage: variables are its ops, then its memories."""

    def __init__(self, keeping: Keeping, op_s: Sequence[float]) -> None:
        self.keeping, self.op_s = keeping, op_s
        self.ops, memories = sorted(keeping.reads), sorted(keeping.bytes)
        self.place = {op: at for at, op in enumerate(self.ops)}
        self.places = {memory: len(self.ops) + at for at, memory in enumerate(memories)}
        self.seconds = np.array([*(op_s[op] for op in self.ops), *(0.0 for _ in memories)])
        self.bytes = np.array([*(0 for _ in self.ops), *(keeping.bytes[m] for m in memories)])
        self.total_s = float(self.seconds.sum()) or 1.0

    def cut(self, again: Iterable[int]) -> Repeats:
        """Return the cut that repeats those of `again` that are needed."""
        ops, kept = self.keeping.followed(again)
        row = tuple(sorted(ops))
        return Repeats(row, sum(self.op_s[op] for op in row), self.keeping.held_bytes(kept))

    def priced(self, s_per_byte: float) -> Repeats:
        """Return the cut that is best where a byte costs so many seconds."""
        found = self.solved(s_per_byte=s_per_byte)
        assert found is not None, "all can be kept"
        return found

    def solved(self, *, s_per_byte: float = 0.0, budget: int | None = None) -> Repeats | None:
        """Return the best cut; of budgets, as `within`."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # pyright: ignore  - no types; loading it takes a while

        if not self.ops:
            only = self.cut(())
            return only if budget is None or only.held_bytes <= budget else None
        rows = [self._needs]
        if budget is not None:
            rows.append(LinearConstraint(self.bytes[None, :], -np.inf, budget))  # pyright: ignore
        result = milp(  # pyright: ignore
            (self.seconds + s_per_byte * self.bytes) / self.total_s,
            integrality=np.ones(len(self.bytes)),
            bounds=Bounds(0, 1),
            constraints=rows,
            options={"mip_rel_gap": _GAP},
        )
        x = cast(_MilpResult, result).x
        return None if x is None else self.cut(op for op, at in self.place.items() if x[at] > 0.5)

    @cached_property
    def _needs(self) -> Any:
        """Return that what is read is kept or made again, as a LinearConstraint of scipy."""
        from scipy.optimize import LinearConstraint  # pyright: ignore  - no types; loading it takes a while
        from scipy.sparse import csr_array  # pyright: ignore  - no types; loading it takes a while

        made, reads, memory = self.keeping.made, self.keeping.reads, self.keeping.memory
        pairs = [(value, None) for value in sorted(self.keeping.asked)]
        pairs += [(value, op) for op in self.ops for value in reads[op]]
        # A view is there only if what it looks at is: implied, but half a choice of each is not.
        pairs += [(memory[value], by) for value, by in pairs if memory[value] in made]
        pairs = [*dict.fromkeys(pairs)]
        entries: list[tuple[int, int, int]] = []
        for row, (value, by) in enumerate(pairs):
            entries.append((row, self.places[memory[value]], 1))
            maker = made[value]
            entries += [] if maker is None else [(row, self.place[maker], 1)]
            entries += [] if by is None else [(row, self.place[by], -1)]
        rows, columns, values = map(np.array, zip(*entries, strict=True))
        shape = len(pairs), len(self.bytes)
        table = csr_array((values, (rows, columns)), shape=shape)  # pyright: ignore
        least = np.array([float(by is None) for _, by in pairs])
        return LinearConstraint(table, least, np.inf)  # pyright: ignore
