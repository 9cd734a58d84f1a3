"""Which scripts there are, and by which plans each is run."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ZOO = Path(__file__).parent / "zoo"

PLANS: Mapping[str, tuple[str, ...]] = {
    "default": ("--ranks", "2"),
    "free": (),
    "1f1b": ("--schedule", "one_f_one_b", "--set", "stages=2"),
    "chimera": ("--schedule", "chimera", "--set", "stages=2"),
    "replicas": ("--schedule", "one_f_one_b", "--set", "stages=2", "--ranks", "4"),
    "interleaved": ("--schedule", "interleaved", "--set", "stages=3", "--ranks", "2"),
    "zero bubble": ("--schedule", "zb_h1", "--set", "stages=2"),
    "v": ("--schedule", "dual_pipe_v", "--set", "stages=4", "--ranks", "2"),
    "2bw": ("--schedule", "double_buffered", "--set", "stages=2"),
}
DELAY = {"2bw": 1}  # its gradients are those of the weights one step ago
TURNS = ("chimera", "replicas", "interleaved", "zero bubble", "v")


STEPS = 10


class Script(NamedTuple):
    """One script: its file and name, what is odd, its plans by name, and steps to run it for."""

    path: Path
    name: str
    odd: str
    plans: tuple[str, ...]
    steps: int = STEPS

    @property
    def about(self) -> str:
        return self.path.stem


def scripts(zoo: Path | None = None) -> Iterator[Script]:
    """Yield the scripts of a folder: the public functions of its files that return a Job.

    Files are read, not imported: what one does when imported is part of its script.
    """
    turn = 0
    for path in sorted((zoo or ZOO).glob("*.py")):
        tree = ast.parse(path.read_text())
        thirds, steps = _said_of_all(tree, "THIRD"), _said_of_all(tree, "STEPS")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and _is_script(node):
                odd = " ".join((ast.get_docstring(node) or "").split())
                third = thirds.get(node.name, thirds.get("*", TURNS[turn % len(TURNS)]))
                plans = "default", "1f1b", third
                yield Script(path, node.name, odd, plans, steps.get(node.name, STEPS))
                turn += 1


def _is_script(node: ast.FunctionDef) -> bool:
    returns = ast.unparse(node.returns) if node.returns is not None else ""
    return returns.rpartition(".")[2] == "Job" and not node.name.startswith("_")


def _said_of_all(tree: ast.Module, name: str) -> Mapping[str, Any]:
    """Return what a file says of its scripts: THIRD, plans by name ("*": all), or STEPS."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(target)], value=value) if target == name:
                return ast.literal_eval(value)
            case _:
                pass
    return {}
