"""Contents: the leaves of a micro-batch in any container, as tensors that nothing else writes into.

A batch is a tree: lists, tuples, dicts and all else that torch opens; dataclasses; subclasses of
dict, UserDict (as BatchEncoding of transformers) and named tuples.  Its numpy arrays and numbers
become tensors of the same dtype where it is read: the loss sees tensors, traced or not.
"""

import copy
import dataclasses
import threading
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import is_ as _is
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock import _compat
from penstock.device import of
from penstock.graph.shared_memory_views import copied_together, overlaps_of

_TUPLE: Any = tuple
_DICT: Any = dict
_ORDERED: Any = OrderedDict  # keeps its keys beside those of the dict that it is
_NUMBERS = {np.dtype(code) for code in "?bBhHiIlLqQefdFD"}  # for which torch has a dtype
_ALIGNMENT = 64  # bytes; of memory that torch allocates
_taught: set[type] = set()  # classes that torch opens because we have taught it
_teaching = threading.Lock()  # ranks may be threads


def flatten(batch: object) -> tuple[list[Any], Any]:
    """Return the leaves of a batch, numpy's as tensors that share their memory, and its tree."""
    leaves, spec = _compat.pytree.tree_flatten(batch)
    while any(list(map(_teach, leaves))):  # all of them before it is opened again
        leaves, spec = _compat.pytree.tree_flatten(batch)
    return [as_tensor(leaf) for leaf in leaves], spec


def rebuilt(leaves: Sequence[Any], spec: Any) -> Any:
    """Return a batch of these leaves.

    A class made from dict or UserDict then has its items and no other attribute: those are of
    one batch only, so that a trace must not see them.
    """
    return _compat.pytree.tree_unflatten(list(leaves), spec)


def mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the batch with `change(leaf)` for each leaf, and all else as it is."""

    if batch.__class__ is dict:  # as most are; pytree is slower by an order of magnitude
        return {key: mapped(item, change) for key, item in batch.items()}
    if batch.__class__ is list:
        return [mapped(item, change) for item in batch]
    if batch.__class__ is Tensor:
        return change(batch)

    def at(node: Any) -> Any:
        if not _is_opened(node):
            return change(as_tensor(node))
        children, names = _parts(node)
        return _with(node, names, [mapped(child, change) for child in children])

    return _compat.pytree.tree_map(at, batch, is_leaf=_is_opened)


def own(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`, with memory of its own; see `owned`.

    Its tensors have elements in common where the originals have.
    """
    leaves: dict[int, Tensor] = {}  # all kept, so that no other has the id of one

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaves.setdefault(id(leaf), leaf)
        return leaf

    batch = mapped(batch, keep)
    each = list(leaves.values())
    made = dict[int, Tensor]()
    for overlap in overlaps_of(each):
        made |= copied_together(each, overlap, device)
    for place, (key, leaf) in enumerate(tuple(leaves.items())):
        leaves[key] = _named(made[place], leaf) if place in made else owned(leaf, device)
    return mapped(batch, lambda leaf: leaves.get(id(leaf), leaf))


def own_apart(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`, each tensor copied by itself; see `owned`.

    It is as `own` where nobody writes into a tensor of the batch, and faster.
    """
    made: dict[int, Any] = {}

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) not in made:
            made[id(leaf)] = owned(leaf, device), leaf  # kept, so that no other has its id
        return made[id(leaf)][0] if isinstance(leaf, Tensor) else leaf

    return mapped(batch, change)


def seen(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`: itself where it is there, else a copy as `own` makes it.

    A container with numpy's arrays or numbers is another one, with tensors in their place, and so
    is what holds it; all others are the data's own, into which the loss may write.
    """
    leaves = flatten(batch)[0]
    away = any(isinstance(leaf, Tensor) and leaf.device != device for leaf in leaves)
    return own(batch, device) if away else _as_tensors(batch)


def _as_tensors(node: Any) -> Any:
    if type(node) is Tensor:
        return node
    if _is_opened(node):
        children, names = _parts(node)
        changed = [_as_tensors(child) for child in children]
        return node if _are_same(children, changed) else _with(node, names, changed)
    children, spec = _one_level(node)
    if _are_same(children, [node]):
        return as_tensor(node)
    changed = [_as_tensors(child) for child in children]
    return node if _are_same(children, changed) else rebuilt(changed, spec)


def containers(batch: Any) -> list[Any]:
    """Return the containers of a batch into which somebody may write, each before what it holds."""
    children = _parts(batch)[0] if _is_opened(batch) else _one_level(batch)[0]
    if _are_same(children, [batch]):
        return []
    below = [node for child in children for node in containers(child)]
    return below if _is_a(batch, tuple) else [batch, *below]


def _one_level(node: Any) -> tuple[list[Any], Any]:
    """Return the children of a container that torch opens, and its tree; of a leaf itself."""
    return _compat.pytree.tree_flatten(node, is_leaf=lambda one: one is not node)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(_is, some, others))


def owned(leaf: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `leaf` on `device` that nothing else writes into.

    Data may fill one buffer again and again; what is kept beyond the next read is copied.  The
    copy is laid out as the original is, and floats are aligned as there: products of matrices
    depend on it to the bit.  It has the attributes that somebody gave to the original.
    """
    if leaf.device != device:
        return _named(of(device).taken(leaf.detach()).requires_grad_(leaf.requires_grad), leaf)
    if leaf.layout != torch.strided or type(leaf) not in (Tensor, torch.nn.Parameter):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    found = _named(_aligned(leaf.detach()), leaf)
    return found.requires_grad_() if leaf.requires_grad else found


def _named(copy: Tensor, leaf: Tensor) -> Tensor:
    """Give the copy the attributes of a plain tensor; other classes copy their own."""
    if type(leaf) is Tensor and (own := attributes_of(leaf)):
        vars(copy).update(own)
    return copy


def attributes_of(leaf: Tensor) -> dict[str, Any]:
    """Return the attributes that user code has set on a plain tensor; torch's own are left out."""
    if type(leaf) is not Tensor or not (own := vars(leaf)):
        return {}
    return {name: value for name, value in own.items() if not name.startswith("_dynamo")}


def _aligned(leaf: Tensor) -> Tensor:
    exact = not (leaf.is_floating_point() or leaf.is_complex())
    if not of(leaf.device).is_cpu or (exact and leaf.is_contiguous()):
        return leaf.clone()
    shift, rest = divmod(leaf.data_ptr() % _ALIGNMENT, leaf.element_size())
    is_dense = leaf.is_contiguous()
    if (is_dense and not shift) or rest or not leaf.numel():
        return leaf.clone()
    sizes, strides = leaf.shape, leaf.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if not leaf.numel() <= span <= 2 * leaf.numel():  # expanded, or a thin slice of much
        return leaf.clone()
    found = torch.empty(shift + span, dtype=leaf.dtype).as_strided(sizes, strides, shift)
    return found.copy_(leaf)


def as_tensor(leaf: Any) -> Any:
    """Return a numpy array or number as a tensor of its dtype; all else, and what torch has no
    dtype for, as it is.

    The tensor shares the array's memory, where that may be written and is laid out as torch's.
    """
    if type(leaf) not in (np.ndarray, np.memmap) and not _is_a(leaf, np.generic):
        return leaf
    array: Any = np.asarray(leaf)
    if array.dtype.newbyteorder("=") not in _NUMBERS:
        return leaf
    size: int = array.dtype.itemsize
    fits = all(stride >= 0 and stride % size == 0 for stride in array.strides)
    if not (fits and array.dtype.isnative and array.flags.writeable):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


# -- what torch does not open by itself -----------------------------------------------------------


def _is_opened(node: object) -> bool:
    """Return whether `node` is a container that torch, left alone, takes for a leaf."""
    if type(node) in _taught:
        return True
    if _is_dict(node) or (_is_a(node, tuple) and hasattr(node, "_fields")):
        return not _compat.opens(node)
    is_record = dataclasses.is_dataclass(node) and not _is_a(node, type, Tensor)
    return is_record and not _compat.opens(node)


def _is_dict(node: object) -> bool:
    return _is_a(node, UserDict, dict)


def _is_a(node: object, *kinds: type) -> bool:
    return isinstance(node, kinds)


def _teach(leaf: object) -> bool:
    """Let torch open `leaf`, if it is a container; return whether it is."""
    if not _is_opened(leaf):
        return False
    kind = type(leaf)
    with _teaching:
        if kind not in _taught:
            _compat.open_as(kind, _parts, partial(_closed, kind))
            _taught.add(kind)
    return True


def _parts(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the values that a container holds, and their names."""
    if _is_dict(node):
        items: dict[Any, Any] = dict(_ORDERED.items(node) if _is_a(node, OrderedDict) else node)
        return list(items.values()), tuple(items)
    if _is_a(node, tuple):
        return list(node), tuple(range(len(node)))
    names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
    names += [name for name in getattr(node, "__dict__", ()) if name not in names]
    return [getattr(node, name) for name in names], tuple(names)


def _closed(kind: Any, children: Iterable[Any], names: tuple[Any, ...]) -> Any:
    """Return a container of a class without running any of the class's code."""
    values = list(children)
    if issubclass(kind, tuple):
        return _TUPLE.__new__(kind, values)
    new: Callable[..., Any] = kind.__new__ if issubclass(kind, dict) else object.__new__
    return _filled(new(kind), names, values)


def _with(node: Any, names: tuple[Any, ...], values: list[Any]) -> Any:
    """Return a copy of a container with `values` in place of its own; attributes stay."""
    if _is_dict(node):
        return _filled(copy.copy(node), names, values)
    return _closed(type(node), values, names)


def _filled(node: Any, names: tuple[Any, ...], values: list[Any]) -> Any:
    pairs = zip(names, values, strict=True)
    if _is_a(node, UserDict):
        node.data = dict(pairs)
    elif _is_a(node, dict):
        setter = _ORDERED.__setitem__ if _is_a(node, OrderedDict) else _DICT.__setitem__
        for name, value in pairs:
            setter(node, name, value)
    else:
        for name, value in pairs:
            object.__setattr__(node, name, value)
    return node
