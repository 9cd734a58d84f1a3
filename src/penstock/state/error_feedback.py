"""Error feedback: gradients summed over ranks in few numbers, and what is not sent kept for later.

    each rank    adds what it has held back to its gradient, and sends the sum in few numbers
    all          add up what was sent, the same to the bit
    each rank    holds back what it has not sent

so that what is summed and what all ranks hold back is together the sum of their gradients.  How
they are sent, and the bytes that takes, says penstock/sums.py:

    int8, sign   each rank gives each other one that one's part, in codes; that one adds them up,
                 gives all the codes of the sum, and holds back what these do not say of it
    top          each rank gives all others its greatest numbers, and their places
    rank         P = M Q and then Q' = M^T P, P made orthonormal, are summed over the ranks; the sum
                 of the gradients is P Q'^T, and the next step begins with Q'
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import count, product, takewhile
from typing import NamedTuple, final

import torch
from torch import Tensor

from penstock.state.delayed import Delayed
from penstock.state.few_numbers import sum_codes, sum_greatest, sum_products
from penstock.state.flat import Flat, count_of
from penstock.sums import SumsWay, as_matrix
from penstock.transport.routed_sums import sum_along
from penstock.transport.transport import Transport

HELD = "held-back-"  # and the number of a rank among those that sum, and age; place of a key
POWER = "power"  # place of the key of Q


class SumRun(NamedTuple):
    """Gradients that lie one behind the other in a flat tensor, and are sent together.

    flat:    which one.
    shapes:  by node: where it begins in the run, and its shape.
    """

    flat: int
    start: int
    end: int
    shapes: Mapping[int, tuple[int, tuple[int, ...]]]


def runs_of(
    layouts: Sequence[Flat],
    shared: AbstractSet[int],
    dtypes: AbstractSet[torch.dtype] = frozenset([torch.float32]),
) -> list[SumRun]:
    """Return the longest runs of gradients of float32 without those that several stages share.

    These are summed as they are: each stage has a copy, and all copies must have the same sum.
    dtypes:  in place of float32.
    """
    runs: list[SumRun] = []
    for number, layout in enumerate(layouts):
        ends = (*layout.starts[1:], layout.size)
        row: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        rows = zip(layout.nodes, layout.starts, ends, layout.shapes, strict=True)
        for node, start, end, shape in rows if layout.dtype in dtypes else ():
            if node not in shared:
                row[node] = start, end, shape
            elif row:
                runs.append(_run(number, row))
                row = {}
        runs += [_run(number, row)] if row else []
    return runs


def _run(flat: int, row: Mapping[int, tuple[int, int, tuple[int, ...]]]) -> SumRun:
    first = min(start for start, _, _ in row.values())
    shapes = {node: (start - first, shape) for node, (start, _, shape) in row.items()}
    return SumRun(flat, first, max(end for _, end, _ in row.values()), shapes)


def _unused(run: SumRun, reached: AbstractSet[int]) -> list[slice]:
    """Return where in a run lie numbers of no gradient: gaps, and what has none."""
    used = sorted(
        (start, start + count_of(shape))
        for node, (start, shape) in run.shapes.items()
        if node in reached
    )
    ends = [0, *(end for pair in used for end in pair), run.end - run.start]
    return [slice(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


class HeldPart(NamedTuple):
    """What a rank holds back of a parameter: of the last step, age 0, or of one before that."""

    rank: int
    age: int
    tensor: Tensor


def held_key(rank: int, age: int) -> str:
    """Return the place of the keys of what a rank holds back: "held-back-0", "held-back-0.1"."""
    return f"{HELD}{rank}.{age}" if age else f"{HELD}{rank}"


def held_in(tensors: Mapping[str, Tensor], name: str) -> Iterator[HeldPart]:
    """Yield what ranks hold back of a parameter, all that a checkpoint has."""
    for rank in count():
        if f"{held_key(rank, 0)}/{name}" not in tensors:
            return
        keys = (f"{held_key(rank, age)}/{name}" for age in count())
        for age, key in enumerate(takewhile(tensors.__contains__, keys)):
            yield HeldPart(rank, age, tensors[key])


@final
class HeldBack:
    """What a stage holds back on one rank, and how it sums.

    shared:  parameters that other stages hold, too; reached: those that have a gradient.
    seed:    by which Q is drawn at first.
    left:    by flat tensor of gradients, as large as it.
    unused:  of each run, where numbers are of no gradient: they are zeros, and stay so.
    powers:  by node, Q of a matrix; the same on all ranks.
    """

    def __init__(
        self,
        way: SumsWay,
        layouts: Sequence[Flat],
        shared: AbstractSet[int],
        reached: AbstractSet[int],
        seed: int,
    ) -> None:
        self.way, self.layouts, self.runs = way, layouts, runs_of(layouts, shared)
        if way.kind == "delayed":
            self.runs = runs_of(layouts, frozenset(), {layout.dtype for layout in layouts})
        self.unused = [_unused(run, reached) for run in self.runs]
        self.left = [layout.new() for layout in layouts]
        self.place, self.count = 0, 1  # of this rank among those that sum
        self.delayed = Delayed(self.left, way.late) if way.late else None
        self.powers: dict[int, Tensor] = {}
        for node, shape in self._matrices():
            columns = way.columns_of(shape)
            drawn = torch.Generator().manual_seed(seed + node)
            first = torch.randn(as_matrix(shape)[1], columns, generator=drawn)
            self.powers[node] = first.to(self.left[0].device)

    def _matrices(self) -> list[tuple[int, tuple[int, ...]]]:
        rows = [(node, shape) for run in self.runs for node, (_, shape) in run.shapes.items()]
        is_split = self.way.kind == "rank"
        return [(node, shape) for node, shape in rows if is_split and self.way.columns_of(shape)]

    def sum_over(
        self,
        transport: Transport,
        flats: Sequence[Tensor],
        ranks: tuple[int, ...],
        topology: str = "",
    ) -> None:
        """Replace flat gradients by their sums over ranks, bitwise the same on all.

        topology:  along whose rounds go products, and what travels as it is.
        Raises:   TransportError.
        """
        for number, flat in enumerate(flats):
            own = [(run, rest) for run, rest in self._rows() if run.flat == number]
            ends = [0, *(end for run, _ in own for end in (run.start, run.end)), len(flat)]
            for start, end in zip(ends[::2], ends[1::2], strict=True):
                if start < end:
                    sum_along(transport, flat[start:end], ranks, topology)
            for run, rest in own:
                pair = flat[run.start : run.end], self.left[number][run.start : run.end]
                self._sum_run(transport, run, pair, (ranks, topology))
                if self.way.kind == "sign":  # which has no zero
                    for each, place in product(pair, rest):
                        each[place] = 0

    def _rows(self) -> list[tuple[SumRun, list[slice]]]:
        return list(zip(self.runs, self.unused, strict=True))

    def _sum_run(
        self,
        transport: Transport,
        run: SumRun,
        pair: tuple[Tensor, Tensor],
        among: tuple[tuple[int, ...], str],
    ) -> None:
        (whole, left), (ranks, _) = pair, among
        whole.add_(left)
        match self.way.kind:
            case "int8" | "sign":
                sum_codes(transport, whole, left, ranks, self.way)
            case "top":
                sum_greatest(transport, whole, left, ranks, self.way)
            case "rank":
                matrices = {n: row for n, row in run.shapes.items() if n in self.powers}
                sum_products(transport, pair, among, matrices, self.powers)
            case "16 bits" | "as they are" | "delayed" | "local" | "diloco" | "easgd" | "gossip":
                raise AssertionError("nothing is held back of a sum")
            case "backup" | "ssp" | "async":
                raise AssertionError("a server sums")

    def state(self) -> tuple[list[dict[int, Tensor]], dict[int, Tensor]]:
        """Return what this rank holds back of each gradient, and Q of each matrix, by node.

        What it holds back is by age, that of the last step first.
        """
        rows = [self.left] if self.delayed is None else self.delayed.by_age
        return [dict(self._by_node(flats)) for flats in rows], self.powers

    def _by_node(self, flats: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        for run in self.runs:
            flat = flats[run.flat][run.start : run.end]
            for node, (start, shape) in run.shapes.items():
                yield node, flat[start : start + count_of(shape)].view(shape)

    def joins(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Note with whom a rank sums."""
        self.place, self.count = ranks.index(rank), len(ranks)

    def load(self, tensors: Mapping[str, Tensor], names: Mapping[int, str]) -> None:
        """Take over what a checkpoint has of what ranks hold back, and of Q; zeros if it has none.

        What rank k of others held back is held back by k modulo the number of them that there are
        now, and what is older than anything that is kept now becomes the oldest: nothing of the sum
        is lost.
        names:   of the parameters, by node.
        """
        by_age, _ = self.state()
        for node in by_age[0]:
            for held in by_age:
                held[node].zero_()
            for rank, age, kept in held_in(tensors, names[node]):
                if rank % self.count == self.place:
                    by_age[min(age, len(by_age) - 1)][node].add_(kept)
        for node, power in self.powers.items():
            kept = tensors.get(f"{POWER}/{names[node]}")
            if kept is not None and kept.shape == power.shape:
                power.copy_(kept)

    def held(self) -> list[Tensor]:
        """Return all tensors that are kept."""
        left = self.left if self.delayed is None else self.delayed.held()
        return [*left, *self.powers.values()]
