"""Opened objects: what an object of somebody's own class holds, and one made of other values.

A batch may come in an object that is no container to anybody but its class: graphs with `x` and
`edge_index`, boxes with their picture's size, a SimpleNamespace.  None of the class's code runs.
"""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

_WHOLE = (nn.Module, Optimizer, Dataset, DataLoader)  # have a life beside the batches
_PLAIN = (list, tuple, dict)
_NAMESPACE: Any = SimpleNamespace


def is_opened_object(node: Any) -> bool:
    """Return whether `node`'s class is written in Python and it holds a tensor or an array."""
    return _may_be_opened(node.__class__) and _holds_tensors(node, (), [])


def held_by(node: object) -> dict[str, Any]:
    """Return the values that an object holds, by name: in slots, then in its dict."""
    held = dict[str, Any]()
    for slot in _slots(type(node)):
        with suppress(AttributeError):  # nothing was put there
            held[slot.__name__] = slot.__get__(node)
    with suppress(AttributeError):  # it has slots only
        held |= object.__getattribute__(node, "__dict__")
    return held


def new_object(kind: Any) -> Any:
    """Return an object of a class that holds nothing yet."""
    if issubclass(kind, _NAMESPACE):
        return _NAMESPACE.__new__(kind)
    return object.__new__(kind)


@cache
def _may_be_opened(kind: Any) -> bool:
    if issubclass(kind, _WHOLE) or hasattr(kind, "__del__") or hasattr(kind, "__next__"):
        return False
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:  # put there by ourselves
        return False
    try:
        new_object(kind)
    except TypeError:  # made by C, or abstract
        return False
    return kind is not object


@cache
def _slots(kind: type) -> tuple[Any, ...]:
    each: Iterator[Any] = (value for base in kind.__mro__ for value in vars(base).values())
    slots = (value for value in each if isinstance(value, MemberDescriptorType))
    return tuple(slot for slot in slots if slot.__name__ != "__dict__")


def _holds_tensors(node: Any, above: tuple[int, ...], loops: list[int]) -> bool:
    """Return whether a tensor is below, and no object that is above, by reference or weakly."""
    found = False
    for value in _below(node):
        if _is_a(value, Tensor, np.ndarray):
            found = True
        elif _is_a(value, weakref.ref, *weakref.ProxyTypes) or id(value) in above:
            loops.append(id(value))
        elif _is_a(value, *_PLAIN) or _may_be_opened(value.__class__):
            found |= _holds_tensors(value, (*above, id(value)), loops)
        if loops:
            return False
    return found


def _below(node: Any) -> Iterator[Any]:
    if not _is_a(node, *_PLAIN):
        return iter(held_by(node).values())
    return iter(node.values() if _is_a(node, dict) else node)


def _is_a(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds)
