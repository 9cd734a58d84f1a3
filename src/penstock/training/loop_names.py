"""Loop names: which names a statement of a loop changes in place, and which it reads."""

import ast
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from penstock.training.loop_reads import kept_inside, sets_plainly

_KINDS = list, dict, set, deque
_FROZEN = tuple, frozenset, MappingProxyType
CHANGES = frozenset(name for kind in _KINDS for name in dir(kind)) - {
    name for kind in _FROZEN for name in dir(kind)
}  # methods of containers; of tensors those that end in _


class LoopChange(NamedTuple):
    """What a statement changes in place.

    name:       that it stands under.
    owners:     objects that it may be, if they are known before the loop.
    attribute:  that is set; None: anything of the object.
    """

    name: str
    owners: tuple[object, ...] | None
    attribute: str | None


def changed_in(stmt: ast.stmt, find: Callable[[ast.expr], object]) -> frozenset[str]:
    """Return the names whose objects a statement changes: items, attributes, `append` and its like.

    find:     what an expression is before the loop.
    """
    roots = [_root(owner) for owner, _ in _targets(stmt)]
    return frozenset(
        root.id for root in roots if root is not None and not isinstance(find(root), ModuleType)
    )


def changes_in(
    stmt: ast.stmt, find: Callable[[ast.expr], object], missing: object
) -> Iterator[LoopChange]:
    """Yield what a statement changes in place, by what it is.

    find:     what an expression is before the loop; `missing`: nobody knows.
    """
    for owner, attribute in _targets(stmt):
        root = _root(owner)
        if root is None:
            continue
        found, at = known_part(owner, find, missing)
        if found is missing:
            yield LoopChange(root.id, None, attribute)
        elif at is owner:
            is_call = attribute is None and isinstance(found, ModuleType)
            is_plain = attribute is not None and sets_plainly(found, attribute)
            if not is_call:  # `module.append(...)` is a function of it
                yield LoopChange(root.id, (found,), attribute if is_plain else None)
        else:
            yield LoopChange(root.id, (*kept_inside(found),), None)


def known_part(
    node: ast.expr, find: Callable[[ast.expr], object], missing: object
) -> tuple[object, ast.expr]:
    """Return what an expression is, or else that of which it is an item; and which part that is."""
    found = find(node)
    while found is missing and isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        found = find(node)
    return found, node


def _targets(stmt: ast.stmt) -> Iterator[tuple[ast.expr, str | None]]:
    """Yield what a statement changes, and the attribute that it sets; None: another change."""
    for node in ast.walk(stmt):
        match node:
            case ast.Subscript(value=owner, ctx=ast.Store() | ast.Del()):
                yield owner, None
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
                yield owner, name
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                if name in CHANGES or name.endswith("_"):
                    yield owner, None
            case ast.Call(func=ast.Name("setattr" | "delattr"), args=[owner, *_]):
                yield owner, None
            case _:
                pass


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


def chains_in(node: ast.AST) -> Iterator[tuple[ast.Name, tuple[str, ...]]]:
    """Yield the names that are read, with the attributes that are asked of them at once."""
    asked, inner = list[str](), node
    while isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
        asked.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        if isinstance(inner.ctx, ast.Load):
            yield inner, tuple(reversed(asked))
        return
    for child in ast.iter_child_nodes(inner):
        yield from chains_in(child)


def _root(node: ast.expr) -> ast.Name | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node if isinstance(node, ast.Name) else None
