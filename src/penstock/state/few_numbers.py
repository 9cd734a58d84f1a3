"""Few numbers: how ranks sum a row of gradients by codes, by the greatest, or by products.

Each puts the sum, bitwise the same on all ranks, in place of the row, and what this rank has not
sent of it into another (held_back.py).
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from penstock.device import of
from penstock.state.flat import count_of
from penstock.sums import BLOCK, SumsWay, as_matrix, block_bytes, blocks_of
from penstock.transport.routed_sums import sum_along
from penstock.transport.transport import Transport

_SCALE_BYTES = 4
_MOST, _TINY = 127, 1e-37  # of a code; of a scale that is divided by
_CHUNK = 256  # blocks at once, which a core keeps near
_PIECE = BLOCK << 12  # numbers at once, which ranks send to each other
_GATHERING = 0x0102040810204080  # times eight bytes of 0 or 1: these are the bits of the last byte
_INDEPENDENT = 1e-5  # of a column: less than that of it is left by the columns before: rounding
_SEARCHED, _HALVINGS = 4096, 20  # numbers from which a threshold is searched, and how often


def sum_codes(
    transport: Transport, whole: Tensor, left: Tensor, ranks: tuple[int, ...], way: SumsWay
) -> None:
    """Replace `whole` by its sum in codes; put what they do not say into `left`.

    Piece by piece: what codes and their meanings hold meanwhile does not grow with the stage.
    """
    for first in range(0, len(whole), _PIECE):
        piece = slice(first, first + _PIECE)
        _sum_piece(transport, whole[piece], left[piece], ranks, way)


def _sum_piece(
    transport: Transport, whole: Tensor, left: Tensor, ranks: tuple[int, ...], way: SumsWay
) -> None:
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
    blocks, size = blocks_of(len(values)), block_bytes(way.kind) - _SCALE_BYTES
    made = torch.empty(blocks * (_SCALE_BYTES + size), dtype=torch.uint8, device=values.device)
    scales = made[: _SCALE_BYTES * blocks].view(torch.float32)
    codes = made[_SCALE_BYTES * blocks :].view(blocks, size)
    for first in range(0, blocks, _CHUNK):
        some = values[BLOCK * first : BLOCK * (first + _CHUNK)]
        if len(some) % BLOCK:
            some = torch.nn.functional.pad(some, (0, -len(some) % BLOCK))
        place, rows = slice(first, first + _CHUNK), some.view(-1, BLOCK)
        if way.kind == "sign":
            scales[place] = rows.abs().mean(1)
            eights = (rows >= 0).view(torch.int64)
            codes[place] = ((eights * _GATHERING) >> 56).to(torch.uint8).view(-1, size)
        else:
            scales[place] = rows.abs().amax(1).div_(_MOST)
            steps = rows / scales[place].clamp(min=_TINY)[:, None]
            codes[place] = steps.round_().to(torch.int8).view(torch.uint8)
    return made


def meant(codes: Tensor, count: int, way: SumsWay) -> Tensor:
    """Return the `count` numbers that codes stand for."""
    blocks, size = blocks_of(count), block_bytes(way.kind) - _SCALE_BYTES
    scales = codes[: _SCALE_BYTES * blocks].clone().view(torch.float32)
    scales = torch.where(scales.isfinite(), scales, math.nan)[:, None]
    rows = codes[_SCALE_BYTES * blocks :].view(blocks, size)
    made = torch.empty(blocks, BLOCK, device=codes.device)
    for first in range(0, blocks, _CHUNK):
        place = slice(first, first + _CHUNK)
        if way.kind == "sign":
            signs = _signs(codes).index_select(0, rows[place].reshape(-1).int())
            torch.mul(signs.view(-1, BLOCK), scales[place], out=made[place])
        else:
            made[place] = rows[place].view(torch.int8)
            made[place] *= scales[place]
    return made.view(-1)[:count]


@cache
def _signs_on(device: torch.device) -> Tensor:
    numbers = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (2 * (numbers & 1) - 1).float()


def _signs(like: Tensor) -> Tensor:
    """Return [byte, bit]: 1 where a bit of a byte is set, else -1."""
    return _signs_on(like.device)


def sum_greatest(
    transport: Transport, whole: Tensor, left: Tensor, ranks: tuple[int, ...], way: SumsWay
) -> None:
    """Replace `whole` by the sum of the greatest numbers of each rank; put the rest into `left`."""
    own, kept = ranks.index(transport.rank), way.kept_of(len(whole))
    places = greatest(whole.abs(), kept)
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


def greatest(sizes: Tensor, count: int) -> Tensor:
    """Return the places of the greatest numbers.

    On the CPU a threshold is searched first that few more are above, and only these are sorted.
    Source:  arXiv:2010.10458, section 3.1 (MSTopK; there the threshold is enough).
    """
    high = float(sizes.amax()) if of(sizes.device).is_cpu else math.inf
    if not math.isfinite(high) or len(sizes) < _SEARCHED:
        return torch.topk(sizes, count, sorted=False).indices
    low, middle = -1.0, float(sizes.mean())
    for _ in range(_HALVINGS):
        above = int((sizes > middle).sum())
        if above >= count:
            low = middle
            if above <= 2 * count:
                break
        else:
            high = middle
        middle = (max(low, 0.0) + high) / 2
    some = (sizes > low).nonzero().view(-1)
    return some[torch.topk(sizes[some], count, sorted=False).indices]


def sum_products(
    transport: Transport,
    pair: tuple[Tensor, Tensor],
    among: tuple[tuple[int, ...], str],
    matrices: Mapping[int, tuple[int, tuple[int, ...]]],
    powers: dict[int, Tensor],
) -> None:
    """Replace matrices by the products that ranks agree on, and all else by its sum.

    pair:      the gradients of a run, and what is held back of them.
    among:     ranks, and the topology along whose rounds their sums go.
    matrices:  by node, where one begins and its shape.  powers: Q of each; replaced.
    """
    (whole, left), (ranks, topology) = pair, among
    places = {n: slice(start, start + count_of(shape)) for n, (start, shape) in matrices.items()}
    views = {n: whole[places[n]].view(as_matrix(shape)) for n, (_, shape) in matrices.items()}
    ends = [0, *(end for place in places.values() for end in (place.start, place.stop)), len(whole)]
    rest = [whole[a:b] for a, b in zip(ends[::2], ends[1::2], strict=True)]
    firsts = [view @ powers[node] for node, view in views.items()]
    flat = torch.cat([each.view(-1) for each in (*firsts, *rest)])
    sum_along(transport, flat, ranks, topology)
    summed = _cut(flat, [each.numel() for each in (*firsts, *rest)])
    summed, others = summed[: len(firsts)], summed[len(firsts) :]
    bases = [orthonormal(each.view_as(p)) for each, p in zip(summed, firsts, strict=True)]
    seconds = [v.T @ p for v, p in zip(views.values(), bases, strict=True)]
    if seconds:
        flat = torch.cat([second.reshape(-1) for second in seconds])
        sum_along(transport, flat, ranks, topology)
        summed = _cut(flat, [second.numel() for second in seconds])
    left.zero_()
    for (node, view), base, total in zip(views.items(), bases, summed, strict=True):
        powers[node] = total.view_as(powers[node]).clone()
        product = base @ powers[node].T
        left[places[node]] = (view - product / len(ranks)).reshape(-1)
        view.copy_(product)
    for own, total in zip(rest, others, strict=True):
        own.copy_(total)


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
