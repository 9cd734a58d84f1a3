"""Reach: whether what an optimizer calls after a step can lay hands on a module.

It is given its parameters, and may do with them what it likes.

Such a hook may do to the module in a later step what no trial of the first ones shows: put averages
into it, thaw or reset a layer.  A part of the optimizer would do that to its own stage alone.

Attributes are followed where that is asked, and of the author's own objects only: a trainer that
has the model.
"""

import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from penstock import _compat
from penstock.job import is_users
from penstock.state.optimizer_state import nested

_MOST = 64  # of what a container holds
_DEPTH = 6


def hook_with_module(optimizer: Optimizer, *, objects: bool = False) -> str:
    """Return the line of a hook after steps from which a module is reached; empty: of none.

    objects:  whether attributes of the author's objects are followed, too.
    """
    for _, one in nested(optimizer):
        for hook in _compat.post_hooks(one):
            held = _reached(hook, _DEPTH, set(), objects)
            if any(isinstance(each, nn.Module) for each in held):
                return _line(hook)
    return ""


def reached_by_hooks(optimizer: Optimizer) -> dict[int, str]:
    """Return which modules and parameters the hooks of an optimizer reach, before steps or after
    them, beyond its groups: by the `id`, the line of the hook.
    """
    found: dict[int, str] = {}
    for _, one in nested(optimizer):
        for hook in [*_compat.pre_hooks(one), *_compat.post_hooks(one)]:
            for held in _reached(hook, _DEPTH, set(), True):
                found.setdefault(id(held), _line(hook))
    return found


def lines_of(optimizer: Optimizer) -> list[str]:
    """Return the lines at which what an optimizer does at its steps is written, if the author's:
    its hooks, and `step` of its class.
    """
    found = list[str]()
    for _, one in nested(optimizer):
        for called in (type(one).step, *_compat.pre_hooks(one), *_compat.post_hooks(one)):
            code = getattr(_function(called), "__code__", None)
            if code is not None and is_users(code.co_filename):
                found.append(_line(called))
    return found


def _reached(
    held: object, depth: int, seen: set[int], objects: bool
) -> Iterator[nn.Module | nn.Parameter]:
    """Yield the modules and parameters that are reached, without what these hold."""
    if isinstance(held, nn.Module | nn.Parameter):
        yield held
    elif depth and id(held) not in seen and not isinstance(held, Optimizer):
        seen.add(id(held))
        for each in (*_parts(held), *(_attributes(held) if objects else ())):
            yield from _reached(each, depth - 1, seen, objects)


def _parts(held: object) -> Iterator[object]:
    """Yield what a function closes over or names, what a method is of, what a container holds."""
    if isinstance(held, FunctionType):
        for cell in held.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is empty yet
                continue
        yield from held.__defaults__ or ()
        if is_users(held.__code__.co_filename):
            yield from (held.__globals__.get(name) for name in held.__code__.co_names)
    elif isinstance(held, MethodType):
        yield held.__func__
        yield held.__self__
    elif isinstance(held, partial):
        bound = cast("partial[Any]", held)
        yield from (bound.func, *bound.args, *bound.keywords.values())
    elif isinstance(held, dict):
        yield from list(cast(dict[Any, Any], held).values())[:_MOST]
    elif isinstance(held, list | tuple | set):
        yield from list(cast("list[Any]", held))[:_MOST]


def _attributes(held: object) -> list[object]:
    """Return what an object of a class of the author's keeps, but in slots."""
    file = getattr(sys.modules.get(type(held).__module__), "__file__", None)
    if file is None or not is_users(file):
        return []
    return list(getattr(held, "__dict__", {}).values())[:_MOST]


def _function(hook: object) -> object:
    """Return the function that the author has written, below decorators."""
    while True:
        match hook:
            case partial():
                hook = cast("partial[Any]", hook).func
            case MethodType():
                hook = hook.__func__
            case FunctionType() if hasattr(hook, "__wrapped__"):
                hook = cast(object, hook.__wrapped__)  # pyright: ignore[reportFunctionMemberAccess]
            case _:
                return hook


def _line(hook: object) -> str:
    code = getattr(_function(hook), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(hook)
