"""Optimizer cover: lines of an optimizer that its trial has not reached, and a later step may.

A class that counts its steps and clips by the norm of all from the hundredth on is divided rightly
for 99 steps.  So the lines of the job's code that run in a trial are noted.  Where a branch that
follows what the optimizer itself writes - a counter, an average - has an arm that was never taken,
nobody knows what it does with several parameters.
"""

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from penstock.job import is_users

_ENDS = ast.Return | ast.Raise | ast.Continue | ast.Break


class Cover:
    """Notes which lines of the job's code run while it is open."""

    def __init__(self) -> None:
        self.lines: dict[CodeType, set[int]] = {}
        self._before: Any = None

    def __enter__(self) -> "Cover":
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        if not is_users(frame.f_code.co_filename):
            return None
        lines = self.lines.setdefault(frame.f_code, set())

        def ran(frame: FrameType, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return ran

        return ran

    def unreached(self) -> str | None:
        """Return the first line of an arm that was not taken, "file.py:12"; None: there is none."""
        functions = {code: _function(code) for code in self.lines}
        trees = [tree for tree in functions.values() if tree is not None]
        kept = {name for tree in trees for name in _kept(tree)}
        for code, tree in functions.items():
            if tree is not None and (line := _unreached(tree, kept, self.lines[code])):
                return f"{code.co_filename}:{line}"
        return None


def _function(code: CodeType) -> ast.AST | None:
    """Return the function that a code object is, by its source; None: there is none."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min(one.lineno for one in (node, *node.decorator_list))
            if first == code.co_firstlineno and node.name == code.co_name:
                return node
    return None


def _kept(function: ast.AST) -> Iterator[str]:
    """Yield the names of what a function writes for longer than its call."""
    for node in ast.walk(function):
        match node:
            case ast.Nonlocal(names=names) | ast.Global(names=names):
                yield from names
            case ast.Attribute(ctx=ast.Store(), attr=name):
                yield name
            case ast.Subscript(ctx=ast.Store(), value=value, slice=key):
                yield from _named(key) if isinstance(key, ast.Constant) else _named(value)
                if isinstance(value, ast.Name):
                    yield value.id
            case _:
                pass


def _unreached(function: ast.AST, kept: set[str], lines: set[int]) -> int | None:
    """Return the line of an arm that follows what is kept, and was not taken."""
    known = _following(function, kept)
    for node in ast.walk(function):
        for block in _blocks(node):
            for at, one in enumerate(block):
                if isinstance(one, ast.If) and one.lineno in lines and _follows(one.test, known):
                    rest = block[at + 1 :] if isinstance(one.body[-1], _ENDS) else ()
                    for arm in (one.body, one.orelse or rest):
                        if arm and not _is_refusal(arm) and arm[0].lineno not in lines:
                            return arm[0].lineno
    return None


def _following(function: ast.AST, kept: set[str]) -> set[str]:
    """Return `kept` with the variables that are made of it."""
    known, before = {*kept}, set[str]()
    while known != before:
        before = {*known}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _follows(node.value, known):
                known |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return known


def _blocks(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _is_refusal(arm: Sequence[ast.stmt]) -> bool:
    return isinstance(arm[0], ast.Raise | ast.Pass)


def _follows(test: ast.AST, known: set[str]) -> bool:
    return any(not known.isdisjoint(_named(node)) for node in ast.walk(test))


def _named(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Constant(value=str(name)):
            yield name
        case _:
            pass
