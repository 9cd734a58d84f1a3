"""Digest: a short text that tells two micro-batches apart."""

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.graph.contents import as_tensor, attributes_of, flatten

_ADDRESS = re.compile(" at 0x[0-9a-f]+")
_SETS: Any = (set, frozenset)
_DEPTH = 3  # of attributes of attributes


def digest_of(leaves: Iterable[Any]) -> str:
    """Return the BLAKE2 digest of the leaves of a batch: of their bytes, dtypes and shapes.

    Equal for equal values in any layout, on any device and in any process.  What is no tensor
    counts by its text, but for addresses in it, and by the attributes that it holds.
    """
    digest = hashlib.blake2b(digest_size=16)
    for leaf in map(as_tensor, leaves):
        _add(digest.update, leaf, depth=0)
    return digest.hexdigest()


def _add(update: Callable[[Any], None], leaf: Any, *, depth: int) -> None:
    if isinstance(leaf, Tensor) and leaf.is_nested:  # whose shape has names of this process
        update(f"{len(parts := leaf.detach().unbind())} tensors ".encode())
        for each in parts:
            _add(update, each, depth=depth)
        return
    if isinstance(leaf, Tensor):
        update(f"{leaf.dtype} {list(leaf.shape)} ".encode())
        update(_bytes(leaf))
        for name, value in attributes_of(leaf).items():
            update(name.encode())
            _add(update, value, depth=depth)
        return
    text = " ".join(sorted(map(repr, leaf))) if isinstance(leaf, _SETS) else repr(leaf)
    text = _ADDRESS.sub("", text)
    update(f"{type(leaf).__qualname__} {len(text)} {text} ".encode())
    held: Any = None if isinstance(leaf, type) else getattr(leaf, "__dict__", None)
    for each in flatten(held)[0] if held and depth < _DEPTH else ():
        _add(update, each, depth=depth + 1)


def _bytes(tensor: Tensor) -> Any:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    dense = dense.dequantize() if dense.is_quantized else dense
    plain = dense.resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy()
