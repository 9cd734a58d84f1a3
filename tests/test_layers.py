"""The layout of STYLE.md section 2: who may import whom, where torch is, how long a function is."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import penstock
from tests.house import BEHIND, SET_FROZEN, WIDE_FUNCTIONS, WIDE_RECORDS, measured, run

SRC = Path(penstock.__file__).parent

# Reading order = import order: a room imports only rooms to its left.
ROOMS = (
    "units",
    "bits",
    "sums",
    "routes",
    "errors",
    "extras",
    "minima",
    "referee",
    "device",
    "files",
    "typed",
    "taken",
    "terminal",
    "heap",
    "garbage",
    "_compat",
    "far",
    "script",
    "stores",
    "averages",
    "large_batch",
    "best",
    "weighted",
    "in_turn",
    "each_epoch",
    "step_places",
    "keyed",
    "job",
    "batches",
    "ported",
    "writers",
    "cluster",
    "graph",
    "lightning_job",
    "profile",
    "estimate",
    "schedule",
    "program",
    "plan",
    "rules",
    "manifest",
    "timeline",
    "simulate",
    "search",
    "listener",
    "processes",
    "transport",
    "state",
    "checkpoints",
    "runtime",
    "gauge",
    "members",
    "examine",
    "prove",
    "report",
    "fleet",
    "choose",
    "pilot",
    "training",
    "cli",
    "__main__",
)

# Where torch may be imported; everything else plans and simulates without it.
TORCH_ROOMS = {
    "device",
    "_compat",
    "far",
    "in_turn",
    "batches",
    "lightning_job",
    "ported",
    "processes",
    "transport",
    "state",
    "checkpoints",
    "runtime",
    "gauge",
    "members",
    "examine",
    "prove",
    "choose",
    "pilot",
    "training",
    "report",
    "cli",
}
TORCH_FILES = {
    "graph/tensor/drawn_slices.py",
    "graph/gradient_hooks.py",
    "graph/held.py",
    "graph/module_facts.py",
    "graph/trace.py",
    "graph/unread.py",
    "graph/aliases.py",
    "graph/answers.py",
    "graph/batch.py",
    "graph/by_place.py",
    "graph/by_rows.py",
    "graph/caches.py",
    "graph/cast_once.py",
    "graph/traced_constants.py",
    "graph/contents.py",
    "graph/ctc.py",
    "graph/functional.py",
    "graph/rows.py",
    "graph/in_place.py",
    "graph/reserved.py",
    "graph/dynamo.py",
    "graph/layerwise.py",
    "graph/linear.py",
    "graph/merge.py",
    "graph/flop.py",
    "graph/code.py",
    "graph/composed.py",
    "graph/counted.py",
    "graph/codec.py",
    "graph/direct.py",
    "graph/fused_runs.py",
    "graph/hollow.py",
    "graph/whole_optimizer.py",
    "graph/precision.py",
    "graph/narrow_lstm.py",
    "graph/without_gradients.py",
    "graph/slicing.py",
    "graph/sliced_embedding.py",
    "graph/sliced_loss.py",
    "graph/sliced_ops.py",
    "graph/summed_loss.py",
    "graph/split.py",
    "graph/tensor/by_tokens.py",
    "graph/tensor/choose_slices.py",
    "graph/tensor/class_slices.py",
    "graph/tensor/expert_rows.py",
    "graph/tensor/expert_slices.py",
    "graph/tensor/op_choice.py",
    "graph/tensor/collect_op.py",
    "graph/tensor/divided.py",
    "graph/tensor/of_rank.py",
    "graph/tensor/placed.py",
    "graph/tensor/slicing_rules.py",
    "graph/tensor/sorted_rows.py",
    "graph/tensor/token_attention.py",
    "graph/tensor/token_slices.py",
    "graph/shared_memory_views.py",
    "graph/dims.py",
    "graph/joined/along.py",
    "graph/joined/batched.py",
    "graph/joined/divided_batch.py",
    "graph/joined/divider.py",
    "graph/joined/over_samples.py",
    "graph/joined/joined.py",
    "graph/joined/joiner.py",
    "graph/joined/linear_values.py",
    "graph/joined/loss_ops.py",
    "graph/joined/joining_rules.py",
    "graph/waiting.py",
    "profile/by_kind.py",
    "profile/fused.py",
    "profile/marks.py",
    "profile/measure.py",
    "profile/routing.py",
}

FILES = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))
ROOM_MODULES = [file for file in FILES if file != "__init__.py"]


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax of every file."""
    return {file: ast.parse((SRC / file).read_text()) for file in FILES}


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def dotted(file: str) -> str:
    return ("penstock/" + file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.AST) -> set[str]:
    """Return the dotted names that running a module imports, also inside its functions."""
    names: set[str] = set()
    for node in run(tree):
        match node:
            case ast.Import(aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(str(module), aliases):
                names |= {f"{module}.{alias.name}" for alias in aliases}
            case _:
                pass
    return names


def rooms_imported(tree: ast.AST) -> set[str]:
    parts = (name.split(".") for name in imports(tree))
    return {part[1] for part in parts if part[0] == "penstock" and len(part) > 1}


def test_every_module_is_in_a_room() -> None:
    assert [file for file in ROOM_MODULES if room_of(file) not in ROOMS] == []


def test_modules_import_only_rooms_above_their_own() -> None:
    """A file is listed with the rooms that it must not know."""
    wrong: dict[str, set[str]] = {}
    for file in ROOM_MODULES:
        place = ROOMS.index(room_of(file))
        if below := rooms_imported(modules()[file]) - set(ROOMS[: place + 1]):
            wrong[file] = below
    assert wrong == {}


def test_no_module_imports_relatively() -> None:
    froms = (
        (file, node)
        for file in ROOM_MODULES
        for node in ast.walk(modules()[file])
        if isinstance(node, ast.ImportFrom)
    )
    assert [f"{file}:{node.lineno}" for file, node in froms if node.level] == []


def test_importing_what_plans_and_simulates_loads_no_torch() -> None:
    names = ["penstock"] + [
        dotted(file)
        for file in ROOM_MODULES
        if room_of(file) not in TORCH_ROOMS and file not in TORCH_FILES
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'importing {name} loads torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_penstock_configures_no_logging() -> None:
    program = "import penstock, logging, sys; sys.exit(len(logging.getLogger().handlers))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function from `def` to its end, without its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_functions_have_at_most_40_lines() -> None:
    """A longer one says why, in a comment `# long: ...` on its first line."""
    long: list[str] = []
    for file in ROOM_MODULES:
        source = (SRC / file).read_text().splitlines()
        long += [
            f"{file}:{function.lineno} {function.name}: {lines_of_code(function)} lines"
            for function in functions(modules()[file])
            if lines_of_code(function) > 40 and "# long:" not in source[function.lineno - 1]
        ]
    assert long == []


def test_source_is_ascii() -> None:
    files = ["__init__.py", *ROOM_MODULES]
    assert [file for file in files if not (SRC / file).read_text().isascii()] == []


def test_no_two_classes_share_a_name() -> None:
    """A leading underscore makes no other name of it."""
    homes: dict[str, list[str]] = {}
    for file, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(f"{file}:{node.lineno}")
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_module_has_more_behind_it_than_its_room_allows() -> None:
    """See tests/house.py; the numbers there only become smaller."""
    house = measured()
    assert {name: lines for name, lines in house.behind.items() if lines > BEHIND[name]} == {}
    assert house.circles == []
    assert len(house.functions) <= WIDE_FUNCTIONS
    assert len(house.records) <= WIDE_RECORDS
    assert len(house.set_frozen) <= SET_FROZEN
    assert house.set_outside == []
    assert house.twice == []
