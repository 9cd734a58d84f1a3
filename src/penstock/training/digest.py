"""Digest: what was read, told in few bytes, so that ranks can be compared with the plain loop."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock import _compat


class Reads:
    """The micro-batches that a process has read: (number in the run, digest), in order."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str]] = []

    def taken(self) -> list[tuple[int, str]]:
        """Return what was read since this was asked last."""
        taken, self.rows = self.rows, []
        return taken


def recorded(data: Callable[[int], Iterator[Any]], reads: Reads) -> Callable[[int], Iterator[Any]]:
    """Return `data` that notes in `reads` what it yields."""

    def read(start: int) -> Iterator[Any]:
        for index, batch in enumerate(data(start), start):
            leaves, _ = _compat.pytree.tree_flatten(batch)
            reads.rows.append((index, digest_of(leaves)))
            yield batch

    return read


def digest_of(leaves: Sequence[object]) -> str:
    """Return a digest of tensors (dtype, shape, bytes) and plain values."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
