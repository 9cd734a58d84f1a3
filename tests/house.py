"""House: how large and how tangled the tree is, measured; printed beside what it should be.

    python -m tests.house

Lines behind a module are those of all modules of the package that it imports, and that these do,
itself included; imports inside functions count, those for types alone do not.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import penstock

SRC = Path(penstock.__file__).parent
BEHIND = {  # lines that may stand behind a module
    "schedule.one_f_one_b": 2_817,  # since a file is read as records of records
    "program.program": 5_685,  # since a file is read as records of records
    "simulate.simulate": 14_233,  # since collects run beside computes
    "runtime.worker": 36_361,  # since figures are told wherever units are cut
    "training.train": 110_702,  # since figures are told wherever units are cut
}
_RUNNING = (
    "runtime",
    "members",
    "choose",
    "pilot",
    "training",
    "cli",
)  # rooms that have ranks and sessions
PARAMETERS, FIELDS = 6, 12  # most of a function, and of a record
WIDE_FUNCTIONS, WIDE_RECORDS, SET_FROZEN = 12, 18, 1  # of today: they only become fewer


class House(NamedTuple):
    """What was measured.

    lines:      of the source.
    behind:     lines behind each module of BEHIND.
    circles:    modules that import each other, each circle once.
    functions:  those with more than PARAMETERS parameters, and how many.
    records:    those with more than FIELDS fields, and how many.
    set_frozen: "file:line" of `object.__setattr__` outside a record's own `__post_init__`.
    set_outside: "file:line name.attribute" of what sets an attribute of a rank or a session, but
                for the class itself.
    twice:      names of files that stand in several rooms; a command is named by its verb.
    """

    lines: int
    behind: dict[str, int]
    circles: list[list[str]]
    functions: list[tuple[str, int]]
    records: list[tuple[str, int]]
    set_frozen: list[str]
    set_outside: list[str]
    twice: list[str]


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module of the package, by its dotted name without the package."""
    return {_dotted(path): path for path in sorted(SRC.rglob("*.py"))}


def _dotted(path: Path) -> str:
    name = path.relative_to(SRC).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


@cache
def lines_of(name: str) -> int:
    return len(modules()[name].read_text().splitlines())


@cache
def imports_of(name: str) -> frozenset[str]:
    """Return the modules of the package that one imports."""
    found: set[str] = set()
    for node in run(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("penstock.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            known = {each.removeprefix("penstock.") for each in whole}
            found |= known & modules().keys()
            if not known <= modules().keys():
                found.add(node.module.removeprefix("penstock."))
    return frozenset(found & modules().keys())


def run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree that are run; what TYPE_CHECKING guards is not."""
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            test = child.test if isinstance(child, ast.If) else None
            is_for_types = isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
            todo += child.orelse if isinstance(child, ast.If) and is_for_types else [child]


def behind(name: str) -> set[str]:
    """Return a module, all that it imports, and what these import."""
    seen, todo = {name}, [name]
    while todo:
        new = imports_of(todo.pop()) - seen
        seen |= new
        todo += new
    return seen


def circles() -> list[list[str]]:
    """Return the sets of modules each of which imports, by some way, each other one."""
    reached = {name: behind(name) for name in modules() if imports_of(name)}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in reached
    }
    return [list(each) for each in sorted(found) if len(each) > 1]


def measured() -> House:
    """Return what the tree is like."""
    functions: list[tuple[str, int]] = []
    records: list[tuple[str, int]] = []
    frozen: list[str] = []
    outside: list[str] = []
    for name in modules():
        outside += _set_outside(name)
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                count -= node.args.args[:1] != [] and node.args.args[0].arg in ("self", "cls")
                functions += [(f"{name}.{node.name}", count)] if count > PARAMETERS else []
                frozen += [] if node.name == "__post_init__" else _set_frozen(name, node)
            elif isinstance(node, ast.ClassDef):
                is_keywords = [*map(ast.unparse, node.bases)] == ["TypedDict"]  # of a function
                count = sum(isinstance(each, ast.AnnAssign) for each in node.body)
                count = 0 if is_keywords else count
                records += [(f"{name}.{node.name}", count)] if count > FIELDS else []
    lines = sum(map(lines_of, modules()))
    by_name = {name: sum(map(lines_of, behind(name))) for name in BEHIND}
    by_count = [sorted(rows, key=lambda row: -row[1]) for rows in (functions, records)]
    return House(lines, by_name, circles(), by_count[0], by_count[1], frozen, outside, twice())


def twice() -> list[str]:
    """Return the names of files that say in several rooms what they hold."""
    files = [path for name, path in modules().items() if not name.startswith("cli.")]
    counts = Counter(path.stem for path in files if path.stem != "__init__")
    return sorted(name for name, count in counts.items() if count > 1)


def _set_frozen(name: str, node: ast.AST) -> list[str]:
    called = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    named = (each for each in called if isinstance(each, ast.Attribute))
    return [
        f"{name}:{each.lineno}"
        for each in named
        if each.attr == "__setattr__" and ast.unparse(each) == "object.__setattr__"
    ]


def _set_outside(name: str) -> Iterator[str]:
    """Yield where an attribute of what is called a rank or a session is set."""
    for node in ast.walk(tree_of(name)) if name.split(".")[0] in _RUNNING else ():
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        inner = (each for target in targets for each in ast.walk(target))
        for each in inner:
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                of = ast.unparse(each.value)
                if of.split(".")[-1].lstrip("_") in ("rank", "session"):
                    yield f"{name}:{each.lineno} {of}.{each.attr}"


def main() -> None:
    house = measured()
    print(f"{house.lines:,} lines in {len(modules())} modules")
    for name, lines in house.behind.items():
        print(f"  behind {name:24} {lines:7,} lines, at most {BEHIND[name]:,}")
    print(f"{len(house.circles)} import circles")
    for circle in house.circles:
        print(f"  {', '.join(circle)}")
    for what, rows in (("functions", house.functions), ("records", house.records)):
        most = PARAMETERS if what == "functions" else FIELDS
        print(f"{len(rows)} {what} with more than {most}")
        for name, count in rows[:10]:
            print(f"  {name} {count}")
    print(f"{len(house.set_frozen)} frozen records changed: {', '.join(house.set_frozen)}")
    print(f"{len(house.set_outside)} attributes set from outside: {', '.join(house.set_outside)}")
    print(f"{len(house.twice)} names of files in several rooms: {', '.join(house.twice)}")


if __name__ == "__main__":
    sys.exit(main())
