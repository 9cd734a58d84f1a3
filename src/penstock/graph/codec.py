"""Codec: the numbers of a tensor in a few bits each, and back (wire.py says what they mean).

A packed tensor is several: the scales of its rows, and its codes in parts of 16, 8, 4, 2 or 1
bits.  A part of w bits has 8 / w numbers in each byte: the flat tensor is cut into so many pieces
of equal length, and byte k has the k-th number of every piece.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.graph.wire import TINY, row_length, widths


class TensorForm(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def packed_kinds(kind: TensorForm, bits: int) -> list[TensorForm]:
    """Return the forms of a packed tensor: its scales, then its codes."""
    count = math.prod(kind.shape)
    return [TensorForm((_rows(kind)[0], 1), _wide(kind)), *(_part(count, w) for w in widths(bits))]


def _part(count: int, width: int) -> TensorForm:
    if width == 16:
        return TensorForm((count,), torch.int16)
    return TensorForm((-(-count * width // 8),), torch.uint8)


def _rows(kind: TensorForm) -> tuple[int, int]:
    """Return the rows of a tensor, and the numbers in each."""
    length = row_length(kind.shape)
    return math.prod(kind.shape) // max(1, length), length


def _wide(kind: TensorForm) -> torch.dtype:
    """Return the dtype in which scales are kept and codes are computed."""
    return torch.float64 if kind.dtype == torch.float64 else torch.float32


def packer(kind: TensorForm, bits: int) -> Callable[[Tensor], list[Tensor]]:
    """Return the function that packs tensors of a kind."""
    most, shape, wide = 2 ** (bits - 1) - 1, _rows(kind), _wide(kind)
    kept = torch.int16 if bits > 8 else torch.int8

    def pack(tensor: Tensor) -> list[Tensor]:
        rows = tensor.detach().reshape(shape).to(wide)
        scales = rows.abs().amax(1, keepdim=True).clamp_(min=TINY).div_(most)
        codes = (rows / scales).round_().to(kept).view(-1)
        return [scales, *_split(codes, bits)]

    return pack


def unpacker(kind: TensorForm, bits: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return the inverse of `packer`: a function from scales and codes to a tensor."""
    shape, wide = _rows(kind), _wide(kind)

    def unpack(parts: Sequence[Tensor]) -> Tensor:
        scales, *rest = parts
        codes = _joined(rest, bits, shape[0] * shape[1])
        return codes.view(shape).to(wide).mul_(scales).to(kind.dtype).view(kind.shape)

    return unpack


def _split(codes: Tensor, bits: int) -> list[Tensor]:
    """Return the parts of the codes; one of 8 or 16 bits is the codes themselves."""
    if bits == 16:
        return [codes]
    if bits == 8:
        return [codes.view(torch.uint8)]
    left, parts, narrow = bits, list[Tensor](), codes.dtype == torch.int8
    for width in widths(bits):  # the highest bits first
        left -= width
        part = codes if left == 0 else codes >> left
        part = part.view(torch.uint8) if narrow else part.to(torch.uint8)
        parts.append(part if width == 8 else _folded(part, width))
    return parts


def _folded(codes: Tensor, width: int) -> Tensor:
    """Return the lowest bits of each code, several in a byte."""
    pieces = 8 // width
    length = -(-len(codes) // pieces)
    if len(codes) < pieces * length:
        codes = pad(codes, (0, pieces * length - len(codes)))
    rows = (codes & (2**width - 1)).view(pieces, length)
    folded = rows[0]
    for piece in range(1, pieces):
        folded = folded | (rows[piece] << (width * piece))
    return folded[: -(-len(codes) * width // 8)]


def _joined(parts: Sequence[Tensor], bits: int, count: int) -> Tensor:
    """Return the codes of which `_split` made the parts, with their signs."""
    if bits == 16:
        return parts[0]
    if bits == 8:
        return parts[0].view(torch.int8)
    left, kept = bits, torch.int16 if bits > 8 else torch.uint8
    codes = torch.zeros((), dtype=kept)
    for part, width in zip(parts, widths(bits), strict=True):
        left -= width
        own = (part if width == 8 else _unfolded(part, width, count)).to(kept)
        codes = codes | (own << left)
    if bits > 8:
        return (codes << (16 - bits)) >> (16 - bits)  # the sign is the highest bit
    return (codes << (8 - bits)).view(torch.int8) >> (8 - bits)


def _unfolded(folded: Tensor, width: int, count: int) -> Tensor:
    mask = 2**width - 1
    return torch.cat([(folded >> (width * piece)) & mask for piece in range(8 // width)])[:count]
