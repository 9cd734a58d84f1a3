"""Nothing unreachable: each file of src, and each public name in it, serves a command or `ps.`."""

import ast
import re
from collections.abc import Iterator

import penstock
from tests.test_layers import FILES, dotted, modules

PLACES = {dotted(file): file for file in FILES}
WORDS = re.compile(r"[\w.:]+")  # a text that may name something: "penstock.x.y", "module:name"


def test_each_file_is_imported_by_a_command_or_by_what_penstock_offers() -> None:
    """Also by what is loaded when it is first used, and by what is named in a text."""
    offered = {f"penstock.{penstock._PLACES[name]}" for name in penstock.__all__}
    starts = {PLACES[name] for name in {"penstock", "penstock.__main__", *offered}}
    reached, todo = set[str](), [*starts, *(file for file in FILES if file.startswith("cli/"))]
    while todo:
        file = todo.pop()
        if file not in reached:
            reached.add(file)
            todo += [PLACES[name] for name in _named(modules()[file]) if name in PLACES]
    assert sorted(set(FILES) - reached) == []


def test_each_module_that_is_imported_is_there() -> None:
    """Also where it is imported inside a function, which a test may never call."""
    wanted = {
        (file, node.module)
        for file, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock.")
    }
    assert sorted(pair for pair in wanted if pair[1] not in PLACES) == []


def _named(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports, or names in a text; with those that these stand in."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(str(module), aliases):
                names = [f"{module}.{alias.name}" for alias in aliases]
            case ast.Constant(str(text)) if text.startswith("penstock."):
                names = [text]
            case _:
                continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def test_each_public_function_and_class_is_used() -> None:
    """By its own file, by another one that does more than hand it on, or by who imports penstock.

    A test, a page or a bench is not enough.
    """
    used = set(penstock.__all__) | {"__getattr__", "__dir__"}
    for file, tree in modules().items():
        used |= set(_mentioned(tree, hands_on=file.endswith("__init__.py")))
    unused = [
        f"{file}: {node.name}"
        for file, tree in modules().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        if node.name not in used and not _is_called_by_its_decorator(node)
    ]
    assert unused == []


def _mentioned(tree: ast.Module, *, hands_on: bool) -> Iterator[str]:
    """Yield what a file names: not what it defines, nor what it only imports under its own name."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.alias(name) if not hands_on:
                yield name.rpartition(".")[2]
            case ast.Constant(str(text)) if WORDS.fullmatch(text) and not hands_on:
                yield from re.split("[.:]", text)
            case _:
                pass


def _is_called_by_its_decorator(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether it is a command's: `app.callback()` calls it."""
    calls = (each.func for each in node.decorator_list if isinstance(each, ast.Call))
    return any(isinstance(call, ast.Attribute) and call.attr == "callback" for call in calls)
