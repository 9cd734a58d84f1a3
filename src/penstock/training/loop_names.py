"""Loop names: which names a statement of a loop changes in place, and which a function reads."""

import ast
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

_KINDS = list, dict, set, deque
_FROZEN = tuple, frozenset, MappingProxyType
CHANGES = frozenset(name for kind in _KINDS for name in dir(kind)) - {
    name for kind in _FROZEN for name in dir(kind)
}  # methods of containers; of tensors those that end in _


def changed_in(stmt: ast.stmt, find: Callable[[ast.expr], object]) -> frozenset[str]:
    """Return the names whose objects a statement changes: items, attributes, `append` and its like.

    find:     what an expression is before the loop.
    """
    found = set[str]()
    for node in ast.walk(stmt):
        target: ast.expr | None = None
        match node:
            case ast.Subscript(value=owner, ctx=ast.Store() | ast.Del()):
                target = owner
            case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
                target = owner
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                target = owner if name in CHANGES or name.endswith("_") else None
            case _:
                pass
        root = None if target is None else _root(target)
        if root is not None and not isinstance(find(root), ModuleType):
            found.add(root.id)
    return frozenset(found)


def numbers_of(stmts: Iterable[ast.stmt]) -> frozenset[str]:
    """Return the names that statements set to numbers of Python, by `.item()` or `float(...)`."""
    found = set[str]()
    for stmt in stmts:
        match stmt:
            case ast.Assign(
                targets=[ast.Name(name)],
                value=ast.Call(func=ast.Attribute(attr="item") | ast.Name("float")),
            ):
                found.add(name)
            case ast.Assign(targets=[ast.Name(name)]):
                found.discard(name)
            case _:
                pass
    return frozenset(found)


def is_kept_in(found: object) -> bool:
    """Return whether an object is a container of plain containers, as `history["loss"]` has."""
    if not isinstance(found, dict | list):
        return False
    made: object = found.default_factory if isinstance(found, defaultdict) else None
    inside: list[Any] = [*found.values()] if isinstance(found, dict) else [*found]
    return made in (None, *_KINDS) and all(type(each) in _KINDS for each in inside)


def names_read_in(objects: Iterable[object], known: dict[str, object]) -> frozenset[str]:
    """Return the names of a script that its own functions read, among these and what they name.

    objects:  functions, methods and classes; others are passed over.
    known:    the script's names.
    """
    found, left = set[str](), [*objects]
    while left:
        for name in _names(left.pop(), known):
            if name not in found:
                found.add(name)
                left.append(known[name])
    return frozenset(found)


def _names(one: object, known: dict[str, object]) -> Iterator[str]:
    """Yield the names of `known` that the code of a function, or of a class's methods, has."""
    each: list[Any] = list(vars(one).values()) if isinstance(one, type) else [one]
    for function in each:
        function = function.__func__ if isinstance(function, MethodType) else function
        if isinstance(function, FunctionType) and function.__globals__ is known:
            yield from (name for name in _names_of(function.__code__) if name in known)


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)


def _root(node: ast.expr) -> ast.Name | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node if isinstance(node, ast.Name) else None
