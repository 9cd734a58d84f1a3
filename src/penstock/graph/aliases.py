"""Aliases: memory that tensors of a model share without being one parameter.

A run holds each parameter and buffer by itself.  So what changes in one of two that overlap
would not change in the other.  Tied parameters are one tensor under two names and not among
these, nor are parts of one flat tensor that do not overlap.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from penstock import _compat
from penstock.errors import GraphError


class PastModuleError(GraphError):
    """A tensor that changes in training, and is reached past the module, which may have it."""


_HINT = "register one and compute the other from it in forward, or train without a plan: eager=True"


def refuse_shared(model: nn.Module) -> None:
    """Raise if a parameter shares memory with another, with a buffer, or with itself."""
    named = [(f"parameter {name}", p) for name, p in model.named_parameters()]
    for name, parameter in named:
        if any(n > 1 and step == 0 for n, step in zip(*_view(parameter), strict=True)):
            message = f"{name} repeats its elements: no optimizer can write into it"
            raise GraphError(message, hint="register what is expanded, and expand it in forward")
    buffers = [(f"buffer {name}", b) for name, b in model.named_buffers()]
    kept = {id(parameter) for _, parameter in named}
    for one, other in _pairs([*named, *buffers]):
        if id(one[1]) in kept or id(other[1]) in kept:
            _refuse_if_shared(one, other)


def refuse_written(model: nn.Module, written: Collection[str]) -> None:
    """Raise if one of the buffers that forward has `written` shares memory with another."""
    buffers = [(f"buffer {name}", b) for name, b in model.named_buffers()]
    names = {f"buffer {name}" for name in written}
    for one, other in _pairs(buffers):
        if one[0] in names or other[0] in names:
            _refuse_if_shared(one, other)


def refuse_read(model: nn.Module, constants: Iterable[Tensor], written: Collection[str]) -> None:
    """Raise if the step reads a tensor that changes as a constant: past the module that has it.

    written:  the buffers that forward writes; trainable parameters change as well.
    Raises:   PastModuleError: one that the model has, too.
    """
    held = dict(_changing(model, written))
    for constant in constants:
        if _compat.is_fake(constant):
            message = "the model reads a tensor that it made from others and kept, untraced"
            raise GraphError(
                message, hint="make it in __init__, or train without a plan: eager=True"
            )
        for name, tensor in held.items():
            if not _overlap(constant, tensor):
                continue
            where = _attribute(model, constant)
            through = f"the attribute {where}" if where else "a list, a dict or a global"
            message = f"the model reads {name} through {through}, which would keep its first value"
            hint = f"read {name.split()[1]} itself, or train without a plan: eager=True"
            raise PastModuleError(message, hint=hint)


def refuse_generators(constants: Iterable[object]) -> None:
    """Raise if the step draws from a generator that Python holds: it would go on on each rank."""
    for constant in constants:
        if isinstance(constant, torch.Generator):
            message = "the model draws random numbers from a torch.Generator of its own"
            raise GraphError(message, hint="draw without `generator=`: the job's seed decides")


def _changing(model: nn.Module, written: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or name in written:
            yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        if name in written:
            yield f"buffer {name}", buffer


def _attribute(model: nn.Module, constant: Tensor) -> str:
    """Return the plain attribute that is a tensor in the same memory, if there is one."""
    for path, module in _compat.named_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and _key(value) == _key(constant):
                return f"{path}.{name}".lstrip(".")
    return ""


Named = tuple[str, Tensor]


def _pairs(named: Iterable[Named]) -> Iterator[tuple[Named, Named]]:
    """Yield the pairs whose ranges in one storage overlap."""
    shared: dict[int, list[Named]] = {}
    for name, tensor in named:
        key = _key(tensor)
        if key is not None and tensor.numel():
            shared.setdefault(key, []).append((name, tensor))
    for group in shared.values():
        group.sort(key=lambda row: _extent(row[1])[0])  # stable: the first named stays first
        for at, one in enumerate(group):
            end = _extent(one[1])[1]
            near = itertools.takewhile(lambda row: _extent(row[1])[0] < end, group[at + 1 :])  # noqa: B023
            yield from ((one, other) for other in near)


def _refuse_if_shared(one: Named, other: Named) -> None:
    if _overlap(one[1], other[1]):
        what = "are one tensor" if one[1] is other[1] else "share memory and are not one tensor"
        raise GraphError(f"{one[0]} and {other[0]} {what}", hint=_HINT)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether they have an element in common."""
    if _key(one) is None or _key(one) != _key(other) or not one.numel() or not other.numel():
        return False
    (first, after), (start, end) = _extent(one), _extent(other)
    if after <= start or end <= first:
        return False
    if one.element_size() != other.element_size():
        return True
    size = one.untyped_storage().nbytes() // one.element_size()
    seen = torch.zeros(size, dtype=torch.bool)
    _as_in(seen, one).fill_(True)
    return bool(_as_in(seen, other).any())


def _view(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if tensor.layout is not torch.strided:
        return (), ()
    return tuple(tensor.shape), tensor.stride()


def _as_in(flat: Tensor, tensor: Tensor) -> Tensor:
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after the last."""
    sizes, strides = _view(tensor)
    last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    first, size = int(tensor.storage_offset()), tensor.element_size()
    return first * size, (first + last + 1) * size


def _key(tensor: Tensor) -> int | None:
    return _compat.storage_key(tensor) if tensor.layout is torch.strided else None
