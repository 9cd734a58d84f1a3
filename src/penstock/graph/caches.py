"""Caches: buffers that forward makes once, for itself, and that no state_dict holds.

Tables of angles for the longest batch so far, a causal mask.  A step that finds them made is the
same function of weights and batch as one that makes them, so it is traced as it goes on: with its
caches filled, by a call or two of forward on the first micro-batch.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from penstock import _compat


class RemadeError(Exception):
    """Forward has put another tensor in the place of a buffer that nobody saves."""


def remade(model: nn.Module, before: Mapping[str, Tensor]) -> set[str]:
    """Return the buffers in no state_dict that are other tensors than those of `before`."""
    known = {id(tensor) for tensor in before.values()}
    unsaved = _compat.unsaved_buffers(model).items()
    return {name for name, tensor in unsaved if id(tensor) not in known}


def fill_caches(model: nn.Module, compute: Callable[[], object]) -> set[str]:
    """Let forward fill the caches of a model; return their names.

    compute:  calls the loss on the first micro-batch.
    A buffer that is another tensor after a second call, too, is no cache, and then there is none.
    Weights and all other buffers hold what they held.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: value.detach().clone() for name, value in tensors.items()}
    compute()
    caches, filled = remade(model, tensors), _compat.unsaved_buffers(model)
    compute()
    again = remade(model, filled)
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)
    return set() if again else caches
