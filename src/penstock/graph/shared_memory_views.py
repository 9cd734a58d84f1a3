"""Views: tensors of one micro-batch that have elements of memory in common.

Inputs and labels are often views of one row of tokens.  Where a loss writes into one of them, the
other holds what was written; so a copy of the batch has them in one memory as well, and a step is
traced with them in one.  Where nothing writes, it does not matter, and each is copied by itself.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.errors import GraphError

_ALIGNMENT = 64  # bytes; of memory that torch allocates
_WORK = 100_000  # candidates to go through before two tensors are taken to overlap
_KINDS = (Tensor, torch.nn.Parameter)


class SharedMemory(NamedTuple):
    """Leaves of a batch that have elements in common, by their places in it; or one that repeats
    its own, as what is expanded does.

    offsets:  of the first element of each, in bytes from that of the lowest.
    """

    leaves: tuple[int, ...]
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        rows = zip(self.leaves, self.offsets, strict=True)
        return " and ".join(f"leaf {leaf} at byte {offset}" for leaf, offset in rows)


def overlaps_of(leaves: Sequence[Any]) -> tuple[SharedMemory, ...]:
    """Return the groups of leaves that have elements in common, directly or through others.

    Addresses decide: numpy arrays that are views of one become tensors with a storage each.
    """
    spans = sorted(_spans(leaves))
    if all(one.end <= other.start for one, other in itertools.pairwise(spans)) and not any(
        _repeats(leaves[span.place]) for span in spans
    ):
        return ()
    groups: list[list[_LeafBytes]] = []
    for span in spans:
        near = [group for group in groups if any(_meet(leaves, span, one) for one in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*itertools.chain.from_iterable(near), span])
    several = [group for group in groups if len(group) > 1 or _repeats(leaves[group[0].place])]
    return tuple(sorted(map(_overlap, several)))


def overlaps_with(written: Collection[int], leaves: Sequence[Any]) -> tuple[SharedMemory, ...]:
    """Return the overlaps in which a leaf is at one of the places that are `written`."""
    return tuple(one for one in overlaps_of(leaves) if not set(written).isdisjoint(one.leaves))


def describe_overlaps(overlaps: Sequence[SharedMemory]) -> str:
    """Return in words which leaves share memory."""
    return f"{', '.join(map(str, overlaps)) or 'no leaves'} share memory"


def copied_together(
    leaves: Sequence[Any], overlap: SharedMemory, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Yield (place, copy) of the leaves of an overlap; the copies overlap as the leaves do.

    They are laid out and aligned as the originals are.  What lies between them is not copied.
    """
    own: list[Tensor] = [leaves[place].detach() for place in overlap.leaves]
    shift = min(leaf.data_ptr() for leaf in own) % _ALIGNMENT
    offsets = [shift + offset for offset in overlap.offsets]
    size = max(offset + _bytes_of(leaf) for offset, leaf in zip(offsets, own, strict=True))
    memory = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    for place, leaf, offset in zip(overlap.leaves, own, offsets, strict=True):
        start, rest = divmod(offset, leaf.element_size())
        assert not rest, "a leaf that is not aligned has no overlap"
        copy = torch.empty(0, dtype=leaf.dtype, device=device)
        _fill(copy.set_(memory, start, leaf.shape, leaf.stride()), leaf)  # pyright: ignore
        yield place, copy.requires_grad_(leaves[place].requires_grad)


def laid_together(leaves: Sequence[Any], overlap: SharedMemory) -> Iterator[tuple[int, Tensor]]:
    """Yield (place, tensor) of the leaves of an overlap, as views of one tensor made of them.

    For a trace, which follows what is written into a view by the ops that made it.

    Raises:   GraphError: they are of several dtypes.
    """
    own: list[Tensor] = [leaves[place].detach() for place in overlap.leaves]
    if len({leaf.dtype for leaf in own}) > 1 or any(map(_repeats, own)):
        what = "the same as numbers of another dtype, or an element twice"
        message = f"the loss writes into a tensor of the batch, which holds {what}"
        raise GraphError(message, hint="let the loss write into a clone()")
    size = own[0].element_size()
    offsets = [offset // size for offset in overlap.offsets]
    count = max(at + _bytes_of(leaf) // size for at, leaf in zip(offsets, own, strict=True))
    whole = own[0].new_zeros(count)
    views = [whole.as_strided(v.shape, v.stride(), at) for v, at in zip(own, offsets, strict=True)]
    for view, leaf in zip(views, own, strict=True):
        _fill(view, leaf)
    yield from zip(overlap.leaves, views, strict=True)


# -- where tensors lie ----------------------------------------------------------------------------


class _LeafBytes(NamedTuple):
    """The bytes between the first element of a leaf and its last one."""

    device: str
    start: int
    end: int
    place: int


def _spans(leaves: Sequence[Any]) -> Iterator[_LeafBytes]:
    for place, leaf in enumerate(leaves):
        if type(leaf) not in _KINDS or leaf.layout is not torch.strided or not leaf.numel():
            continue
        start: int = leaf.data_ptr()
        if start % leaf.element_size() == 0:
            yield _LeafBytes(str(leaf.device), start, start + _bytes_of(leaf), place)


def _bytes_of(leaf: Tensor) -> int:
    """Return the bytes from the first element to the last, gaps included."""
    pairs = zip(leaf.shape, leaf.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in pairs)) * leaf.element_size()


def _repeats(leaf: Tensor) -> bool:
    """Return whether two elements of a leaf are one in memory."""
    if leaf.is_contiguous():
        return False
    dims = [(stride, size) for size, stride in zip(leaf.shape, leaf.stride(), strict=True)]
    span = 0
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride <= span:  # as of no tensor that was not expanded or made by as_strided
            return stride == 0 or _counted(dims) < leaf.numel()
        span += stride * (size - 1)
    return False


def _counted(dims: Sequence[tuple[int, int]]) -> int:
    """Return the number of places in memory that such dims reach."""
    places = np.zeros(1, np.int64)
    for stride, size in dims:
        places = np.unique(places[:, None] + stride * np.arange(size))
    return len(places)


def _meet(leaves: Sequence[Any], one: _LeafBytes, other: _LeafBytes) -> bool:
    """Return whether two leaves have an element in common."""
    if one.device != other.device or one.end <= other.start or other.end <= one.start:
        return False
    first = min(one.start, other.start)
    memory = np.empty(max(one.end, other.end) - first, np.uint8)  # never touched
    arrays = [_array(leaves[span.place], memory, span.start - first) for span in (one, other)]
    try:
        return bool(np.shares_memory(*arrays, max_work=_WORK))  # pyright: ignore
    except np.exceptions.TooHardError:
        return True


def _array(leaf: Tensor, memory: Any, offset: int) -> Any:
    """Return an array in `memory` that lies there as a leaf does."""
    size = leaf.element_size()
    strides = [stride * size for stride in leaf.stride()]
    return np.ndarray(tuple(leaf.shape), f"V{size}", memory, offset, strides)


def _overlap(group: Sequence[_LeafBytes]) -> SharedMemory:
    spans = sorted(group, key=lambda span: span.place)
    first = min(span.start for span in spans)
    return SharedMemory(
        tuple(span.place for span in spans), tuple(span.start - first for span in spans)
    )


def _fill(copy: Tensor, leaf: Tensor) -> None:
    """Copy the elements of `leaf`, those that are expanded once."""
    for dim, (size, stride) in enumerate(zip(leaf.shape, leaf.stride(), strict=True)):
        if size > 1 and stride == 0:
            copy, leaf = copy.narrow(dim, 0, 1), leaf.narrow(dim, 0, 1)
    copy.copy_(leaf)
