"""Referents: what a value holds, by its attributes or else as the collector of garbage sees it.

Nothing of the value's own code runs.  Names matter, too: of a module or a class of others, such as
torch's, only what code of the job sets there is state of the job.
"""

# Any object may come by here.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeArgument=false

import contextvars
import ctypes
import dis
import gc
import threading
import warnings
import weakref
from collections.abc import Collection, Generator, Iterator
from functools import cache, partial
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np

_NOTHING = object()
_STORE_ATTR = dis.opmap["STORE_ATTR"]
_ENDS_NOWHERE = (type, ModuleType, FunctionType, FrameType)  # that a value of C may refer to


def attributes(value: Any) -> list[tuple[str, object]]:
    """Return what a value has by name, in a dict or in slots."""
    if isinstance(value, threading.local):  # of this thread; `object` does not know of it
        return list(threading.local.__getattribute__(value, "__dict__").items())
    slots = (s for kind in type(value).__mro__ for s in _slots(kind))
    rows = [(name, _attribute(value, name)) for name in ("__dict__", *slots)]
    found = [(name, one) for name, one in rows if one is not _NOTHING]
    names: Any = dict(found).pop("__dict__", {})
    return [*dict(names).items(), *(row for row in found if row[0] != "__dict__")]


def _attribute(value: object, name: str) -> object:
    """Return what an object has of this name; its own code is not asked."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _NOTHING


def behind(proxy: Any) -> object:
    """Return what a weak proxy stands for; None: that is gone."""
    try:
        return proxy.__init__.__self__
    except (AttributeError, ReferenceError):
        return None


def is_a(value: object, *kinds: type) -> bool:
    """Return whether a value is of one of some abstract classes; it is not asked itself.

    `isinstance` asks for its `__class__`: one that looks every name up elsewhere, as the `f` of
    what np.load returns does, fails at that.
    """
    return issubclass(type(value), kinds)


def parts(value: Any) -> tuple[object, ...] | None:
    """Return what a value of Python's own holds that has no attributes; None for another."""
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, MethodWrapperType | BuiltinFunctionType):
        return (value.__self__,)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords, *vars(value).values()
    if isinstance(value, ctypes._Pointer):  # pyright: ignore[reportPrivateUsage]
        return (value.contents,) if value else ()
    if isinstance(value, contextvars.ContextVar):
        return (value.get(None),)
    if isinstance(value, ctypes._SimpleCData):  # pyright: ignore[reportPrivateUsage]
        return (value.value,)
    return (value(),) if isinstance(value, weakref.ref) else _parts_of_iterator(value)


def referents(value: object) -> list[object]:
    """Return what a value of C without attributes refers to: a proxy of a dict, an error's words.

    Not the code and the names that it comes from.
    """
    if isinstance(value, np.ndarray):  # of objects
        return list(value.flat)
    return [one for one in gc.get_referents(value) if not isinstance(one, _ENDS_NOWHERE)]


Suspended = GeneratorType | CoroutineType | AsyncGeneratorType


def frame_of(value: Any) -> FrameType | None:
    """Return the frame of a function that waits for its next word; None: it has ended."""
    names = ("gi_frame", "cr_frame", "ag_frame")
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)


def waits_for(value: Any) -> object:
    """Return what a suspended function hands its words on from: `yield from`, `await`."""
    names = ("gi_yieldfrom", "cr_await", "ag_await")
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)


def is_iterator_of_c(value: Any) -> bool:
    """Return whether a value goes over something, and no attribute tells how far: a cursor."""
    is_iterator = is_a(value, Iterator) and not is_a(value, Generator)
    return is_iterator and not isinstance(getattr(type(value), "__next__", None), FunctionType)


def _parts_of_iterator(value: Any) -> tuple[object, ...] | None:
    """Return what an iterator of Python's own goes over, and how far it has come."""
    if not is_a(value, Iterator) or type(value).__module__ not in ("builtins", "itertools"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of itertools is to go
        try:
            return tuple(value.__reduce__()[1:])
        except TypeError:  # it goes over something that cannot be copied
            return None


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the attributes that a class keeps elsewhere than in a dict, also one of C."""
    return tuple(
        name
        for name, value in vars(kind).items()
        if isinstance(value, MemberDescriptorType) and not name.startswith("__")
    )


# -- what of a module or a class a job may have changed ------------------------------------------


def names_set(codes: Collection[CodeType]) -> frozenset[str]:
    """Return the attributes that code sets, of whatever object."""
    return frozenset().union(*map(_names_set, codes))


@cache
def _names_set(code: CodeType) -> frozenset[str]:
    found, more = set[str](), 0
    for op, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if op == dis.EXTENDED_ARG:
            more = (more | argument) << 8
            continue
        if op == _STORE_ATTR:
            found.add(code.co_names[more | argument])
        more = 0
    return frozenset(found)


def names_in(codes: Collection[CodeType]) -> frozenset[str]:
    """Return the globals and attributes that code names."""
    return frozenset().union(*(code.co_names for code in codes))
