"""Gradient hooks: what a model's parameters do to their gradients as soon as these are known.

`parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))` is called by autograd with the
gradient of one micro-batch, all uses of the parameter added, before it is accumulated.  In a traced
step it is a part of the trace, behind the gradient, and its micro-batches are neither joined nor
divided: it is called once for each.

Ignores:  hooks behind the accumulation, which see the sum over the micro-batches so far.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock import _compat
from penstock.errors import GraphError
from penstock.job import Job

Hook = Callable[[Tensor], Tensor | None]


def check_hooks(model: nn.Module, job: Job) -> None:
    """Raise for hooks that a trace would lose without a word.

    Raises:   GraphError: a parameter has one that is called behind the accumulation, or one that
              would be given its gradient in the job's precision.
    """
    for name, parameter in model.named_parameters():
        behind = _compat.hooks_behind(parameter)
        if behind or (job.precision and _compat.has_gradient_hook(parameter)):
            raise GraphError(
                f"parameter {name} has a gradient hook, which a traced step would not call",
                hint="move it into the optimizer, or train with plain data parallelism",
            )


def refuse_hooks(model: nn.Module) -> None:
    """Raise for hooks, which are called once for each micro-batch, where these would be others.

    Raises:   GraphError: a parameter has one.
    """
    for name, parameter in model.named_parameters():
        if _compat.has_gradient_hook(parameter):
            raise GraphError(f"parameter {name} has a gradient hook, for each micro-batch alone")


def hooked(
    gradients: Sequence[Tensor | None], names: Sequence[str], hooks: Mapping[str, Sequence[Hook]]
) -> list[Tensor | None]:
    """Return these gradients as the hooks of their parameters, by name, leave them."""
    rows = zip(names, gradients, strict=True)
    return [None if each is None else _hooked(each, hooks[name]) for name, each in rows]


def _hooked(gradient: Tensor, hooks: Sequence[Hook]) -> Tensor:
    with torch.no_grad():
        for hook in hooks:
            new = hook(gradient)
            gradient = gradient if new is None else new
    return gradient
