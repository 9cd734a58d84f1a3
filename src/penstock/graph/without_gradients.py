"""Without gradients: what a loss gives where nobody learns from it.

    loss, figures = without_gradients(lambda: loss_and_figures(job, model, batch))

Nothing is recorded for a backward pass.  A loss may take a gradient itself, as a penalty or an
inner step does; torch.autograd.grad fails where nothing is recorded.  Such a loss is computed once
more, with all recorded.

Costs:   what such a loss does until it takes its gradient, twice.
"""

import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from penstock._compat import pytree
from penstock.errors import PenstockError

T = TypeVar("T")


def without_gradients(compute: Callable[[], T]) -> T:
    """Return the result of `compute`, of which no tensor has a gradient."""
    with torch.no_grad():
        try:
            return compute()
        except (RuntimeError, PenstockError) as problem:
            if not _takes_a_gradient(problem):
                raise
    with torch.enable_grad():
        told = compute()
    return pytree.tree_map_only(Tensor, Tensor.detach, told)


def _takes_a_gradient(problem: BaseException) -> bool:
    """Return whether it was torch.autograd that failed, called by the job's own code."""
    return any(
        isinstance(each, RuntimeError) and frame.filename == torch.autograd.__file__
        for each in _causes(problem)
        for frame in traceback.extract_tb(each.__traceback__)
    )


def _causes(problem: BaseException | None) -> Iterator[BaseException]:
    while problem is not None:
        yield problem
        problem = problem.__cause__
