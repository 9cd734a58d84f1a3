"""Following: a dataset is told which samples will be asked for, where it can use that.

One that can has a method `following(indices)`, a context in which these are asked for in order; it
gives a function to call where a micro-batch is read.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import Subset

Following = Callable[[Iterator[Any]], AbstractContextManager[Callable[[], None]]]


def following(dataset: Any) -> Following | None:
    """Return the context in which a dataset is told what will be asked for; None: it has none."""
    own: Following | None = getattr(dataset, "following", None)
    if not isinstance(dataset, Subset):
        return own
    subset: Any = dataset  # pyright: ignore[reportUnknownVariableType]
    whole = following(subset.dataset)
    if whole is None:
        return None
    return lambda indices: whole(map(subset.indices.__getitem__, indices))
