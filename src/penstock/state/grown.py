"""Grown: buffers that forward makes larger, or late, in a checkpoint and back in a module.

    buffers/NAME         as it is
    buffer-built/NAME    how large the model was built with it; [-1]: without it

So a buffer of another size that was built so, as of a longer mask, is still another model's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock._compat import named_modules
from penstock.graph.lasting import is_dense, resized_buffers

BUILT = "buffer-built/"
_NOT_THERE = (-1,)


def built_sizes(model: nn.Module) -> dict[str, Tensor]:
    """Return how large the buffers were built that have another size since, by key."""
    built = resized_buffers(model).items()
    return {
        f"{BUILT}{name}": torch.tensor(_NOT_THERE if size is None else size, dtype=torch.int64)
        for name, size in built
    }


def resizable(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers of a checkpoint, by name, that are of another size than the module's,
    which is as large as that of the run was built.
    """
    modules = {path for path, _ in named_modules(model)}
    buffers = {name: tuple(b.shape) for name, b in model.named_buffers() if is_dense(b)}
    built = {
        key.removeprefix(BUILT): map(int, size)
        for key, size in tensors.items()
        if key.startswith(BUILT)
    }
    return {
        name: tensors[f"buffers/{name}"]
        for name, size in built.items()
        if tuple(size) == buffers.get(name, _NOT_THERE) and name.rpartition(".")[0] in modules
    }


def resize_buffers(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module the buffers that are `resizable`."""
    own = dict(model.named_buffers())
    for name, found in resizable(model, tensors).items():
        like = own.get(name, next(model.parameters(), found))
        path, _, leaf = name.rpartition(".")
        module, value = model.get_submodule(path), found.to(like.device, copy=True)
        if hasattr(module, leaf):
            setattr(module, leaf, value)
        else:
            module.register_buffer(leaf, value)
