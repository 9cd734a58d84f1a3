"""Lasting: which buffers of a model are state, and which forward makes for itself.

A mask or a table of angles that forward registers when it first needs one, and that no state_dict
holds, is made again wherever it is missing: no checkpoint holds it, nothing compares it, and no
replica has to agree with another one about it.  That it follows from the batch before, say, is
what the examination of the job looks for, as of any other attribute.
"""

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

Sizes = Mapping[str, tuple[int, ...]]
_built: "weakref.WeakKeyDictionary[nn.Module, Sizes]" = weakref.WeakKeyDictionary()


def note_built(model: "nn.Module", *, again: bool = False) -> None:
    """Remember which buffers a model has that was just built; what is built twice, as at first.

    again:  those of a model whose caches have been filled last as well.
    """
    sizes = {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    if again:
        _built[model] = sizes
    _built.setdefault(model, sizes)


def is_dense(tensor: "Tensor") -> bool:
    """Return whether a tensor's memory holds each of its elements."""
    return not str(tensor.layout).startswith("torch.sparse")


def lasting_buffers(model: "nn.Module") -> "dict[str, Tensor]":
    """Return the buffers that are state, by name: those that it was built with, or saves.

    Of a model that no job has built all of them.  One that is sparse is none: the model builds it,
    forward may not write it, and no file of ours holds it.
    """
    buffers = {n: b for n, b in model.named_buffers() if is_dense(b)}
    first = _built.get(model)
    if first is None or first.keys() >= buffers.keys():
        return buffers
    saved = model.state_dict(keep_vars=True)
    return {name: value for name, value in buffers.items() if name in first or name in saved}


def resized_buffers(model: "nn.Module") -> "dict[str, tuple[int, ...] | None]":
    """Return the buffers that are state and no longer as large as a job has built them, and how
    large that was; None: it was not there.  Of a model that no job has built there are none.
    """
    first = _built.get(model)
    if first is None:
        return {}
    sizes = {name: tuple(buffer.shape) for name, buffer in lasting_buffers(model).items()}
    return {name: first.get(name) for name, size in sizes.items() if size != first.get(name)}
