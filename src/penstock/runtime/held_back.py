"""Held back: gradients summed over ranks in few numbers, and what is not sent kept for later.

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
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor

from penstock.runtime.flat import Flat, count_of
from penstock.runtime.transport.transport import Transport
from penstock.sums import BLOCK, SumsWay, as_matrix, block_bytes, blocks_of

HELD = "held-back-"  # and the number of a rank among those that sum; place of a key
POWER = "power"  # place of the key of Q
_INDEPENDENT = 1e-5  # of a column: less than that of it is left by the columns before: rounding


class SumRun(NamedTuple):
    """Gradients that lie one behind the other in a flat tensor, and are sent together.

    flat:    which one.
    shapes:  by node: where it begins in the run, and its shape.
    """

    flat: int
    start: int
    end: int
    shapes: Mapping[int, tuple[int, tuple[int, ...]]]


def runs_of(layouts: Sequence[Flat], shared: AbstractSet[int]) -> list[SumRun]:
    """Return the longest runs of gradients of float32 without those that several stages share.

    These are summed as they are: each stage has a copy, and all copies must have the same sum.
    """
    runs: list[SumRun] = []
    for number, layout in enumerate(layouts):
        ends = (*layout.starts[1:], layout.size)
        row: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        rows = zip(layout.nodes, layout.starts, ends, layout.shapes, strict=True)
        for node, start, end, shape in rows if layout.dtype == torch.float32 else ():
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


def _unused(run: SumRun, reached: AbstractSet[int]) -> Tensor:
    rest = torch.ones(run.end - run.start, dtype=torch.bool)
    for node, (start, shape) in run.shapes.items():
        rest[start : start + count_of(shape)] = node not in reached
    return rest


def held_in(tensors: Mapping[str, Tensor], name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, what it holds back of a parameter) of all that a checkpoint has."""
    rank = 0
    while (key := f"{HELD}{rank}/{name}") in tensors:
        yield rank, tensors[key]
        rank += 1


@final
class HeldBack:
    """What a stage holds back on one rank, and how it sums.

    shared:  parameters that other stages hold, too; reached: those that have a gradient.
    seed:    by which Q is drawn at first.
    left:    by flat tensor of gradients, as large as it.
    unused:  of each run, which numbers are of no gradient: they are zeros, and stay so.
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
        self.unused = [_unused(run, reached).to(layouts[run.flat].device) for run in self.runs]
        self.left = [layout.new() for layout in layouts]
        self.place, self.count = 0, 1  # of this rank among those that sum
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
        self, transport: Transport, flats: Sequence[Tensor], ranks: tuple[int, ...]
    ) -> None:
        """Replace flat gradients by their sums over ranks, bitwise the same on all.

        Raises:   TransportError.
        """
        for number, flat in enumerate(flats):
            own = [(run, rest) for run, rest in self._rows() if run.flat == number]
            ends = [0, *(end for run, _ in own for end in (run.start, run.end)), len(flat)]
            for start, end in zip(ends[::2], ends[1::2], strict=True):
                if start < end:
                    transport.all_reduce(flat[start:end], ranks)
            for run, rest in own:
                pair = flat[run.start : run.end], self.left[number][run.start : run.end]
                self._sum_run(transport, run, pair, ranks)
                if self.way.kind == "sign":  # which has no zero
                    for each in pair:
                        each[rest] = 0

    def _rows(self) -> list[tuple[SumRun, Tensor]]:
        return list(zip(self.runs, self.unused, strict=True))

    def _sum_run(
        self, transport: Transport, run: SumRun, pair: tuple[Tensor, Tensor], ranks: tuple[int, ...]
    ) -> None:
        whole, left = pair
        whole.add_(left)
        match self.way.kind:
            case "int8" | "sign":
                sum_codes(transport, whole, left, ranks, self.way)
            case "top":
                sum_greatest(transport, whole, left, ranks, self.way)
            case "rank":
                matrices = {n: row for n, row in run.shapes.items() if n in self.powers}
                sum_products(transport, pair, ranks, matrices, self.powers)
            case "16 bits" | "as they are":
                raise AssertionError("nothing is held back")

    def state(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return what this rank holds back of each gradient, and Q of each matrix, by node."""
        held: dict[int, Tensor] = {}
        for run in self.runs:
            flat = self.left[run.flat][run.start : run.end]
            for node, (start, shape) in run.shapes.items():
                held[node] = flat[start : start + count_of(shape)].view(shape)
        return held, self.powers

    def joins(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Note with whom a rank sums."""
        self.place, self.count = ranks.index(rank), len(ranks)

    def load(self, tensors: Mapping[str, Tensor], names: Mapping[int, str]) -> None:
        """Take over what a checkpoint has of what ranks hold back, and of Q; zeros if it has none.

        What rank k of others held back is held back by k modulo the number of them that there are
        now: nothing of the sum is lost.
        names:   of the parameters, by node.
        """
        held, _ = self.state()
        for node, value in held.items():
            value.zero_()
            for rank, kept in held_in(tensors, names[node]):
                if rank % self.count == self.place:
                    value += kept
        for node, power in self.powers.items():
            kept = tensors.get(f"{POWER}/{names[node]}")
            if kept is not None and kept.shape == power.shape:
                power.copy_(kept)

    def held(self) -> list[Tensor]:
        """Return all tensors that are kept."""
        return [*self.left, *self.powers.values()]


def sum_codes(
    transport: Transport, whole: Tensor, left: Tensor, ranks: tuple[int, ...], way: SumsWay
) -> None:
    """Replace `whole` by its sum in codes; put what they do not say into `left`."""
    own, count, size = ranks.index(transport.rank), len(ranks), block_bytes(way.kind)
    blocks = [blocks_of(len(whole)) * at // count for at in range(count + 1)]
    ends = [min(BLOCK * at, len(whole)) for at in blocks]
    parts = [whole[a:b] for a, b in pairwise(ends)]
    given = [coded(part, way) for part in parts]
    came = [torch.empty_like(given[own]) for _ in ranks]
    came[own] = given[own]
    transport.swap(given, came, ranks)
    left.copy_(whole)
    for at, codes in enumerate(given):
        left[ends[at] : ends[at + 1]] -= meant(codes, len(parts[at]), way)
    total = meant(came[0], len(parts[own]), way)
    for codes in came[1:]:
        total += meant(codes, len(parts[own]), way)
    whole_codes = torch.empty(blocks[-1] * size, dtype=torch.uint8, device=whole.device)
    cuts = [size * at for at in blocks]
    mine = coded(total, way)
    whole_codes[cuts[own] : cuts[own + 1]] = mine
    left[ends[own] : ends[own + 1]] += total - meant(mine, len(total), way)
    transport.all_gather(whole_codes, cuts, ranks)
    for at, part in enumerate(parts):
        part.copy_(meant(whole_codes[cuts[at] : cuts[at + 1]], len(part), way))


def coded(values: Tensor, way: SumsWay) -> Tensor:
    """Return numbers as bytes, block by block: first the scales of all, then all codes.

    A block with a number that is not finite has a scale that is not, either.
    """
    rows = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    if way.kind == "sign":
        scales = rows.abs().mean(1)
        bits = (rows >= 0).view(-1, BLOCK // 8, 8).to(torch.uint8)
        codes = (bits << _shifts(values)).sum(2, dtype=torch.uint8)
    else:
        scales = rows.abs().amax(1) / 127 if len(rows) else rows.sum(1)
        steps = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        codes = steps.round_().nan_to_num_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    return torch.cat([scales.float().view(torch.uint8), codes.reshape(-1)])


def meant(codes: Tensor, count: int, way: SumsWay) -> Tensor:
    """Return the `count` numbers that codes stand for."""
    blocks = blocks_of(count)
    scales = codes[: 4 * blocks].clone().view(torch.float32)[:, None]
    rows = codes[4 * blocks :].view(blocks, block_bytes(way.kind) - 4)
    if way.kind == "sign":
        bits = ((rows[:, :, None] >> _shifts(codes)) & 1).view(blocks, BLOCK)
        return (bits.float().mul_(2).sub_(1) * scales).view(-1)[:count]
    return (rows.view(torch.int8) * scales).view(-1)[:count]


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def sum_greatest(
    transport: Transport, whole: Tensor, left: Tensor, ranks: tuple[int, ...], way: SumsWay
) -> None:
    """Replace `whole` by the sum of the greatest numbers of each rank; put the rest into `left`."""
    own, kept = ranks.index(transport.rank), way.kept_of(len(whole))
    places = torch.topk(whole.abs(), kept, sorted=False).indices
    numbers = whole[places]
    left.copy_(whole)
    left[places] = 0
    row = torch.cat([numbers.view(torch.uint8), places.to(torch.int32).view(torch.uint8)])
    rows = torch.empty(len(ranks) * len(row), dtype=torch.uint8, device=whole.device)
    cuts = [len(row) * at for at in range(len(ranks) + 1)]
    rows[cuts[own] : cuts[own + 1]] = row
    transport.all_gather(rows, cuts, ranks)
    whole.zero_()
    for row in rows.view(len(ranks), 2, -1):  # one rank after the other, as its places are unlike
        whole.index_add_(0, row[1].view(torch.int32).long(), row[0].view(torch.float32))


def sum_products(
    transport: Transport,
    pair: tuple[Tensor, Tensor],
    ranks: tuple[int, ...],
    matrices: Mapping[int, tuple[int, tuple[int, ...]]],
    powers: dict[int, Tensor],
) -> None:
    """Replace matrices by the products that ranks agree on, and all else by its sum.

    pair:      the gradients of a run, and what is held back of them.
    matrices:  by node, where one begins and its shape.  powers: Q of each; replaced.
    """
    whole, left = pair
    places = {n: slice(start, start + count_of(shape)) for n, (start, shape) in matrices.items()}
    views = {n: whole[places[n]].view(as_matrix(shape)) for n, (_, shape) in matrices.items()}
    rest = torch.ones(len(whole), dtype=torch.bool, device=whole.device)
    for place in places.values():
        rest[place] = False
    others = whole[rest]
    firsts = [view @ powers[node] for node, view in views.items()]
    flat = torch.cat([*(first.view(-1) for first in firsts), others])
    transport.all_reduce(flat, ranks)
    *summed, others = _cut(flat, [*(first.numel() for first in firsts), len(others)])
    bases = [orthonormal(each.view_as(p)) for each, p in zip(summed, firsts, strict=True)]
    seconds = [v.T @ p for v, p in zip(views.values(), bases, strict=True)]
    if seconds:
        flat = torch.cat([second.reshape(-1) for second in seconds])
        transport.all_reduce(flat, ranks)
        summed = _cut(flat, [second.numel() for second in seconds])
    left.zero_()
    for (node, view), base, total in zip(views.items(), bases, summed, strict=True):
        powers[node] = total.view_as(powers[node]).clone()
        product = base @ powers[node].T
        left[places[node]] = (view - product / len(ranks)).reshape(-1)
        view.copy_(product)
    whole[rest] = others


def _cut(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [flat[a:b] for a, b in pairwise([0, *accumulate(sizes)])]


def orthonormal(columns: Tensor) -> Tensor:
    """Return columns made orthonormal, one by one; zeros where one depends on those before it.

    What is left of such a one is rounding, and would be another direction on each machine.
    """
    made = columns.clone()
    for at in range(made.shape[1]):
        own, before = made[:, at], made[:, :at]
        size = (own * own).sum().sqrt()
        for _ in range(2):  # once leaves what rounding has made of the first time
            own -= before @ (before.T @ own)
        left = (own * own).sum().sqrt()
        own *= torch.where(left > _INDEPENDENT * size, 1 / left, 0.0)
    return made
