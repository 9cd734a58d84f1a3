"""Compare: named tensors of two runs of the same step, and how far apart they may be.

The scale of a difference depends on what is compared:

    loss, buffers              max |a - b| / max |b|
    gradients, weights         max |a - b| / max(max |b|, SMALL * greatest |b| of all of them):
                               one that is zero but for rounding has no correct digit, as the bias
                               of an attention's keys
    update                     (max |a - b| - rounding of the weight) / its greatest change

Tensors of 16 bits are told apart from wider ones: rounding takes more of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.typed import Endless

SMALL = 1e-3  # of the greatest gradient: below it only the absolute difference counts
_NARROW = 2  # bytes of an element: bfloat16, float16 and less

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative difference of one group of tensors, and where it is.

    narrow:  whether these have 16 bits, or come of weights that have.
    """

    what: str
    where: str
    value: Endless
    bitwise: bool
    narrow: bool = False

    def __str__(self) -> str:
        what = f"{self.what} in 16 bits" if self.narrow else self.what
        return f"{what} {'equal' if self.bitwise else f'{self.value:.1e}'}"


def is_narrow(tensor: Tensor) -> bool:
    """Return whether a tensor holds floating-point numbers of at most 16 bits."""
    return tensor.is_floating_point() and tensor.element_size() <= _NARROW


def in_widths(
    compare: Callable[[Tensors, Tensors], Difference], found: Tensors, expected: Tensors
) -> Iterator[Difference]:
    """Yield what `compare` finds of the wider tensors and of those of 16 bits, if there are any."""
    narrow = {name for name, value in expected.items() if is_narrow(value)}
    narrow |= {name for name in found if name not in expected and is_narrow(found[name])}
    if not narrow:
        yield compare(found, expected)
        return
    if wide := {*found, *expected} - narrow:
        yield compare(_Some(found, wide), _Some(expected, wide))
    yield replace(compare(_Some(found, narrow), _Some(expected, narrow)), narrow=True)


class _Some(Tensors):
    """The tensors of some names, each read when asked for."""

    def __init__(self, tensors: Tensors, names: Iterable[str]) -> None:
        self.tensors, self.names = tensors, [name for name in names if name in tensors]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def compared(
    what: str,
    found: Tensors,
    expected: Tensors,
    *,
    least_scale: float = 0.0,
) -> Difference:
    """Return how far `found` is from `expected`; infinitely, if one has what the other lacks."""
    worst, where, bitwise = 0.0, "", True
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected:
            return Difference(what, name, math.inf, bitwise=False)
        apart = apart_of(found[name], expected[name])
        if apart is None:
            continue
        bitwise = False
        scale = max(greatest(expected[name]), least_scale)
        value = apart / scale if 0 < scale < math.inf else apart
        if not value <= worst:
            worst, where = value, name
    return Difference(what, where, worst, bitwise)


def compared_gradients(
    found: Tensors, expected: Tensors, *, least: float | None = None
) -> Difference:
    """Return how far two steps' gradients are apart; a missing one is one of zeros.

    least:  the least scale of a difference, where these gradients are not all; see `least_scale`.
    """
    least, rows = least_scale(expected) if least is None else least, list[Difference]()
    for name in sorted({*found, *expected}):
        one, other = found.get(name), expected.get(name)
        one = torch.zeros_like(other) if one is None and other is not None else one
        other = torch.zeros_like(one) if other is None and one is not None else other
        if one is not None and other is not None:
            rows.append(compared("gradients", {name: one}, {name: other}, least_scale=least))
    return worst_of(rows) if rows else Difference("gradients", "", 0.0, bitwise=True)


def compared_weights(found: Tensors, expected: Tensors) -> Difference:
    """Return how far the weights of two runs are apart."""
    return compared("weights", found, expected, least_scale=least_scale(expected))


def least_scale(expected: Tensors) -> float:
    """Return SMALL * the greatest number of all; 0 where that is not finite."""
    scale = max(map(greatest, expected.values()), default=0.0)
    return SMALL * scale if math.isfinite(scale) else 0.0


def compared_updates(found: Tensors, expected: Tensors, before: Tensors) -> Difference:
    """Return how far apart two updates from the same weights are, relative to what they change."""
    worst, where, bitwise = 0.0, "", True
    for name, right in expected.items():
        if name not in found:
            return Difference("update", name, math.inf, bitwise=False)
        apart = apart_of(found[name], right)
        if apart is None:
            continue
        bitwise = False
        if math.isfinite(apart):
            apart = max(0.0, apart - torch.finfo(right.dtype).eps * greatest(right))
        moved = float((_wide(right) - _wide(before[name])).abs().max())
        value = apart / moved if 0 < apart < math.inf and moved > 0 else apart
        if not value <= worst:
            worst, where = value, name
    return Difference("update", where, worst, bitwise)


def apart_of(left: Tensor, right: Tensor) -> float | None:
    """Return the largest difference of two tensors; None if all bits that count are equal.

    Infinity where shapes differ, or where only one of two elements is a number.  What was found may
    have been read from a file to the CPU, and the other be on an accelerator.
    """
    if left.shape != right.shape:
        return math.inf
    right = right.to(left.device)
    if bool(((left == right) | (left.isnan() & right.isnan())).all()):
        return None
    apart = float((_wide(left) - _wide(right)).abs().max())
    return apart if math.isfinite(apart) else math.inf


def greatest(tensor: Tensor) -> float:
    """Return the largest absolute element; 0 if there is none."""
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def worst_of(differences: Iterable[Difference]) -> Difference:
    """Return the largest of several differences."""
    return max(differences, key=lambda difference: difference.value)
