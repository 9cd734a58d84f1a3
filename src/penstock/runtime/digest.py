"""Digest: a few letters that tell two micro-batches apart."""

import hashlib
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.graph.contents import as_tensor


def digest_of(leaves: Iterable[Any]) -> str:
    """Return the BLAKE2 digest of the leaves of a batch: of their bytes, dtypes and shapes.

    Equal for equal values in any layout, on any device and in any process.  What is no tensor
    counts by its text or, where that is not its value, by its pickle.
    """
    digest = hashlib.blake2b(digest_size=16)
    for leaf in map(as_tensor, leaves):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {list(leaf.shape)} ".encode())
            digest.update(_bytes(leaf))
        else:
            digest.update(f"{type(leaf).__qualname__} ".encode())
            digest.update(_of_object(leaf))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    plain = dense.resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())


def _of_object(leaf: object) -> bytes:
    text = repr(leaf)
    if type(leaf).__repr__ is not object.__repr__:
        return text.encode()
    try:
        return pickle.dumps(leaf)
    except (pickle.PicklingError, TypeError, AttributeError):
        return b""  # an address tells nothing
