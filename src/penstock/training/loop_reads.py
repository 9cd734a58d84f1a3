"""Loop reads: the objects and attributes that a loss reads, by its functions and what these hold.

A name, its alias and what a function, a `partial` or a criterion keeps of an object are the same
object, so what a step changes is compared with what the loss reads by identity.
"""

import dis
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeAlias, cast, final

_CONTAINERS = list, tuple, set, frozenset, deque, dict
_PLAIN = int, float, complex, str, bytes, type(None), type(...), CodeType
_ROOTS = {
    *("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"),
    *("LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF"),
}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_LIBRARIES = os.path.dirname(os.__file__) + os.sep  # of Python itself
Chain: TypeAlias = tuple[str, tuple[str, ...]]  # a name, and what is asked of it


@final
@dataclass
class LoopReads:
    """What a loss reads.

    known:      the script's names.
    local:      names of the function where the loop stands; `known` itself in a module.
    names:      of the script, or of that function, which functions read.
    whole:      objects any of whose attributes or items may be read, by their ids.
    parts:      ids of owners, and the attribute that is read; modules are their names.
    """

    known: Mapping[str, object]
    local: Mapping[str, object]
    names: set[str] = field(default_factory=set[str])
    whole: dict[int, object] = field(default_factory=dict[int, object])
    parts: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    _left: list[object] = field(default_factory=list[object])

    def add(self, found: object, attributes: Iterable[str] = ()) -> None:
        """Read an object, or the last of plain attributes, one of the other."""
        self._follow(found, attributes)
        while self._left:
            one = self._left.pop()
            if id(one) in self.whole or isinstance(one, _PLAIN):
                continue
            self.whole[id(one)] = one
            if isinstance(one, FunctionType):
                self._add_function(one)
            self._left.extend(_held_by(one))

    def has(self, owner: object, attribute: str | None) -> bool:
        """Return whether an object, or this attribute of it, is read."""
        if isinstance(owner, _PLAIN):
            return False
        key = _owner_id(owner)
        is_part = any(each == key and attribute in (None, name) for each, name in self.parts)
        return is_part or id(owner) in self.whole

    def _add_function(self, function: FunctionType) -> None:
        cells = dict[str, object]()
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                cells[name] = cell.cell_contents
            except ValueError:  # it has no value yet
                continue
        if function.__globals__ is not self.known and _is_of_library(function):
            self._left.extend(cells.values())  # what it wraps
            return
        for name, attributes in _chains_of(function.__code__):
            if name in cells:
                if self.local is not self.known and self.local.get(name) is cells[name]:
                    self.names.add(name)
                self._follow(cells[name], attributes)
            elif name in function.__globals__:
                self.parts.add((id(function.__globals__), name))
                if function.__globals__ is self.known:
                    self.names.add(name)
                self._follow(function.__globals__[name], attributes)

    def _follow(self, found: object, attributes: Iterable[str]) -> None:
        for name in attributes:
            own = _plain_attributes(found)
            if name not in own:
                break
            self.parts.add((_owner_id(found), name))
            found = own[name]
        self._left.append(found)


def kept_inside(one: object) -> Iterator[object]:
    """Yield a container and what stands in it, at any depth."""
    seen, left = dict[int, object](), [one]
    while left:
        found = left.pop()
        if id(found) not in seen and not isinstance(found, _PLAIN):
            seen[id(found)] = found
            yield found
            left.extend(_items_of(found))


def sets_plainly(owner: object, name: str) -> bool:
    """Return whether setting an attribute sets it and nothing else."""
    kind: Any = type(owner)
    if isinstance(owner, type | ModuleType):
        return kind in (type, ModuleType)
    behind: object = getattr(kind, name, None)  # a property may set anything
    return kind.__setattr__ is object.__setattr__ and not hasattr(behind, "__set__")


def _owner_id(one: object) -> int:
    return id(vars(one)) if isinstance(one, ModuleType) else id(one)


def _plain_attributes(one: object) -> Mapping[str, object]:
    """Return the attributes that an object has itself, and that reading gives as they are."""
    own = cast("Mapping[str, object]", getattr(one, "__dict__", {}))
    if isinstance(one, type):
        return {name: each for name, each in own.items() if not hasattr(type(each), "__get__")}
    kind: Any = type(one)
    is_plain = kind.__getattribute__ in (object.__getattribute__, ModuleType.__getattribute__)
    return own if is_plain else {}


def _items_of(one: object) -> Iterable[object]:
    if isinstance(one, dict):
        return [*cast("dict[Any, object]", one).values()]
    return [*cast("list[object]", one)] if isinstance(one, _CONTAINERS) else []


def _held_by(one: Any) -> Iterator[object]:
    """Yield what an object may use when it is called or read: methods, attributes, items."""
    if isinstance(one, ModuleType):
        return
    if isinstance(one, type):
        for base in one.__mro__:
            yield from vars(base).values()
        return
    yield from _called_by(one)
    yield from _items_of(one)
    own: object = getattr(one, "__dict__", None)
    yield from cast("dict[str, object]", own).values() if isinstance(own, dict) else ()
    for base in type(one).__mro__ if _is_made_by_class(one) else ():
        for each in vars(base).values():
            if isinstance(each, MemberDescriptorType):
                yield getattr(one, each.__name__, None)


def _called_by(one: Any) -> tuple[object, ...]:
    if isinstance(one, MethodType):
        return one.__func__, one.__self__
    if isinstance(one, BuiltinFunctionType):
        return (one.__self__,)
    if isinstance(one, FunctionType):
        return *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()
    if isinstance(one, partial):
        return one.func, *one.args, *one.keywords.values()
    if isinstance(one, property):
        return one.fget, one.fset
    if isinstance(one, staticmethod | classmethod):
        return (cast("Any", one).__func__,)
    return (cast("object", type(one)),)


def _is_made_by_class(one: Any) -> bool:
    return type(one).__module__ not in ("builtins", "functools", "collections")


def _is_of_library(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    is_installed = "site-packages" in file or "dist-packages" in file or file.startswith("<")
    return is_installed or file.startswith(_LIBRARIES) or _root_of(function) == "penstock"


def _root_of(function: FunctionType) -> str:
    return (function.__module__ or "").split(".")[0]


def _chains_of(code: CodeType) -> Iterator[Chain]:
    """Yield the names that code reads, with the attributes that it asks of them at once."""
    name, attributes = "", list[str]()
    for each in dis.get_instructions(code):
        if each.opname in _ROOTS:
            if name:
                yield name, tuple(attributes)
            name, attributes = str(each.argval), []
        elif each.opname in _ATTRIBUTES:
            attributes.append(str(each.argval))
        elif each.opname not in ("EXTENDED_ARG", "CACHE") and name:
            yield name, tuple(attributes)
            name = ""
    if name:
        yield name, tuple(attributes)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains_of(inner)
