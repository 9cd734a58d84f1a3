"""Token attention: attention of the queries of some tokens to the keys of all.

Of the T tokens of a sequence, each of n ranks has two blocks of T / 2n: one of the front and one of
the back (value_placement.Slices, folded).  What ranks gather, and what they sum and scatter, lies
as [n, 2, B, H, T / n, d]: by rank, keys and values.  Causal attention of a block is that to all
keys before it and that inside it, put together by the logarithms of their sums.  So all ranks
compute as many pairs of tokens:

    n = 2   rank 0   block 0: of 1   block 3: of 4     5 of 10 blocks of pairs
            rank 1   block 1: of 2   block 2: of 3     5

Backward, the gradient of a part is torch's own op, given the whole result and logarithm.

Keeps:    every number, to rounding.
Holds:    keys and values of all tokens, and their gradients, while one attention is computed.
Source:   gathered keys and values: Llama 3, arXiv:2407.21783, section 3.3.2; putting parts
          together: ring attention, arXiv:2310.01889.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    register_flop_formula,  # pyright: ignore[reportUnknownVariableType]
)

from penstock.graph import by_rows

aten = torch.ops.aten
_ATTEND: Any = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_LIBRARY: Any = by_rows.LIBRARY
_LIBRARY.define(
    "attend_tokens(Tensor query, Tensor every, Tensor? mask, bool causal, float? scale, int rank)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attend_tokens_backward(Tensor grad, Tensor query, Tensor every, Tensor out, Tensor logs,"
    " Tensor? mask, bool causal, float? scale, int rank) -> (Tensor, Tensor)"
)


class SeenKeys(NamedTuple):
    """Rows of queries, the keys that all of them see, and how: `rows` see those up to their own."""

    rows: slice
    keys: slice
    causal: bool


def parts_of(query: Tensor, keys: Tensor, rank: int, *, causal: bool) -> Iterator[list[SeenKeys]]:
    """Yield the parts of each block of a rank's queries."""
    own, count = query.shape[2], keys.shape[2]
    if not causal:
        yield [SeenKeys(slice(0, own), slice(0, count), False)]
        return
    size = own // 2
    for first, start in ((0, rank * size), (size, count - (rank + 1) * size)):
        rows = slice(first, first + size)
        inside = SeenKeys(rows, slice(start, start + size), True)
        yield [inside, SeenKeys(rows, slice(0, start), False)] if start else [inside]


def in_order(every: Tensor) -> Tensor:
    """Return the values of ranks, [n, B, H, t, d], by the places of their tokens: [B, H, nt, d]."""
    size = every.shape[3] // 2
    front, back = every[..., :size, :], every[..., size:, :]
    return torch.cat([*front, *reversed(back.unbind(0))], 2)


def by_rank(whole: Tensor, ranks: int) -> Tensor:
    """Return for each rank its part of the values that `in_order` returns."""
    blocks = whole.chunk(2 * ranks, 2)
    pairs = zip(blocks[:ranks], reversed(blocks[ranks:]), strict=True)
    return torch.stack([torch.cat(pair, 2) for pair in pairs])


def attend_tokens(
    query: Tensor, every: Tensor, mask: Tensor | None, causal: bool, scale: float | None, rank: int
) -> tuple[Tensor, Tensor]:
    """Return the attention of a rank's queries, [B, H, t, d], and the logarithms of its sums."""
    keys, values = (in_order(each) for each in every.unbind(1))
    outs: list[Tensor] = []
    logs: list[Tensor] = []
    for parts in parts_of(query, keys, rank, causal=causal):
        made = [
            _ATTEND(
                query[:, :, part.rows],
                keys[:, :, part.keys],
                values[:, :, part.keys],
                0.0,
                part.causal,
                attn_mask=mask,
                scale=scale,
            )
            for part in parts
        ]
        out, log = made[0] if len(made) == 1 else _joined(*made)
        outs.append(out.transpose(1, 2))
        logs.append(log)
    return torch.cat(outs, 1).transpose(1, 2), torch.cat(logs, 2)


def _joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the attention to two sets of keys, of that to each."""
    log = torch.logaddexp(one[1], other[1])
    out = one[0] * torch.exp(one[1] - log).unsqueeze(-1)
    out = out.addcmul(other[0], torch.exp(other[1] - log).unsqueeze(-1))
    return out.to(one[0].dtype), log


def attend_tokens_backward(
    grad: Tensor, query: Tensor, every: Tensor, out: Tensor, logs: Tensor, *how: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a rank's queries, and its summand of that of all keys and values.

    how:      mask, causal, scale, rank, as in `attend_tokens`.
    """
    mask, causal, scale, rank = how
    keys, values = (in_order(each) for each in every.unbind(1))
    own = torch.zeros_like(query, memory_format=torch.contiguous_format)
    of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
    for part in (one for row in parts_of(query, keys, rank, causal=causal) for one in row):
        rows, seen = part.rows, part.keys
        made = _BACKWARD(
            grad[:, :, rows],
            query[:, :, rows],
            keys[:, :, seen],
            values[:, :, seen],
            out[:, :, rows],
            logs[:, :, rows],
            0.0,
            part.causal,
            attn_mask=mask,
            scale=scale,
        )
        own[:, :, rows] += made[0]
        of_keys[:, :, seen] += made[1]
        of_values[:, :, seen] += made[2]
    ranks = len(every)
    return own, torch.stack([by_rank(of_keys, ranks), by_rank(of_values, ranks)], 1)


_LIBRARY.impl("attend_tokens", attend_tokens, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_tokens_backward", attend_tokens_backward, "CompositeExplicitAutograd")
ATTEND_TOKENS: Any = torch.ops.penstock.attend_tokens.default
ATTEND_TOKENS_BACKWARD: Any = torch.ops.penstock.attend_tokens_backward.default
RANKED = ATTEND_TOKENS, ATTEND_TOKENS_BACKWARD  # their last argument is the rank's number


def _pairs(query: tuple[int, ...], every: tuple[int, ...], causal: bool) -> int:
    """Return the products of a query with a key, of so many numbers each."""
    (batch, heads, own, size), count = query, every[0] * every[4]
    seen = own * (count + 1) // 2 if causal else own * count
    return batch * heads * seen * size


def _formula(places: tuple[int, int, int], each: int) -> Callable[..., int]:
    """Return the flop of an op by its shapes; its queries, keys and values, causal are there."""

    def flop(*shapes: Any, **_: Any) -> int:
        query, every, causal = (shapes[place] for place in places)
        return each * _pairs(query, every, causal)

    return flop


register_flop_formula(torch.ops.penstock.attend_tokens)(_formula((0, 1, 3), 4))
register_flop_formula(torch.ops.penstock.attend_tokens_backward)(_formula((1, 2, 6), 10))
