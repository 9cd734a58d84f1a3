"""Loops begin as Python, say the same as machine code, and are compiled once that pays."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.program import deadlock, issue, rules, slots
from penstock.program.program import Program
from penstock.program.verify import verify
from penstock.schedule import (
    as_python,
    clock,
    greedy,
    improve,
    justify,
    steady,
    verify_orders,
    weight_rule,
    zero_bubble_rounds,
)
from penstock.schedule.as_python import num_elements, price_s, python_of
from penstock.simulate import kernel, simulate
from penstock.timeline import Span
from tests.simulate.strategies import programs, random_seconds

LOOPS = [
    (deadlock, "_run"),
    (issue, "run_clock"),
    (issue, "write_code"),
    (rules, "follow"),
    (rules, "place"),
    (slots, "_assign"),
    (clock, "run"),
    (greedy, "_run"),
    (improve, "_search"),
    (justify, "_pull"),
    (steady, "period_s"),
    (verify_orders, "_tally"),
    (weight_rule, "_walk"),
    (zero_bubble_rounds, "_rounds"),
    (kernel, "run"),
    (kernel, "find_routes"),
]

MODULE = """
import sys
from typing import NamedTuple
import numpy as np
from penstock.schedule import as_python
from penstock.schedule.compiled import compiled

as_python.BYTE_S = float(sys.argv[1])

class Given(NamedTuple):
    numbers: np.ndarray
    first: int

@compiled
def twice(number):
    return 2 * number

@compiled
def total(given):
    much = given.first
    for number in given.numbers:
        much += twice(number)
    return much

print(total(Given(np.arange(int(sys.argv[2])), 1)), len(total.overloads), len(twice.overloads))
"""


@pytest.fixture
def said(tmp_path: Path) -> Callable[..., str]:
    """Return what another process says: the total, and how often each function is compiled."""
    (tmp_path / "module.py").write_text(MODULE)

    def run(byte_s: float, size: int) -> str:
        begin = f"import sys; sys.path[0] = {str(tmp_path)!r}; import module"
        command = [sys.executable, "-c", begin, str(byte_s), str(size)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        assert done.stderr == ""
        return done.stdout

    return run


def test_a_loop_that_has_not_paid_runs_as_python(said: Callable[..., str]) -> None:
    assert said(1.0, 4) == "13 0 0\n"


def test_a_loop_is_compiled_once_it_has_cost_as_much(said: Callable[..., str]) -> None:
    assert said(0.0, 4) == "13 1 1\n"


def test_much_is_compiled_at_once(said: Callable[..., str]) -> None:
    size = as_python.MUCH + 1
    assert said(1.0, size) == f"{size * (size - 1) + 1} 1 1\n"


def test_code_that_is_kept_is_used_by_the_next_process(said: Callable[..., str]) -> None:
    said(0.0, 4)
    assert said(1.0, 5) == "21 1 0\n"  # what it calls is in its code


@pytest.mark.parametrize(
    ("noted", "is_compiled"), [("1e9", True), ("0.001", False), ("nan", False), ("-1", False)]
)
def test_what_processes_before_have_spent_counts(
    said: Callable[..., str], tmp_path: Path, noted: str, is_compiled: bool
) -> None:
    said(0.0, 4)
    (index,) = tmp_path.rglob("*total*.nbi")
    index.with_suffix(".spent").write_text(noted)
    for kept in tmp_path.rglob("*.nb?"):
        kept.unlink()
    assert said(1.0, 4) == f"13 {int(is_compiled)} {int(is_compiled)}\n"


class FakeFile:
    def __init__(self, folder: Path) -> None:
        self._index_path = str(folder / "loop.nbi")

    def _load_index(self) -> dict[str, str]:
        return {}


def test_seconds_are_noted_for_processes_that_come(tmp_path: Path) -> None:
    spent = as_python.Rent(kernel.run, FakeFile(tmp_path))
    assert not spent.is_enough()
    spent.add(0.01)
    assert not (tmp_path / "loop.spent").exists()  # nothing worth it
    spent.add(price_s(kernel.run) / 2)
    assert not spent.is_enough()
    after = as_python.Rent(kernel.run, FakeFile(tmp_path))
    assert not after.is_enough()
    after.add(price_s(kernel.run) / 2)
    assert after.is_enough()


def test_seconds_that_cannot_be_noted_count_in_this_process(tmp_path: Path) -> None:
    spent = as_python.Rent(kernel.run, FakeFile(tmp_path / "not there"))
    assert not spent.is_enough()
    spent.add(price_s(kernel.run))
    assert spent.is_enough()


def test_a_loop_costs_as_its_bytecode_and_that_of_all_it_calls() -> None:
    bytes_of = [len(f.py_func.__code__.co_code) for f in (kernel.receive_s, kernel._route)]
    assert price_s(kernel.receive_s) == pytest.approx(as_python.BYTE_S * sum(bytes_of))


class _Pair(NamedTuple):
    one: Any
    other: Any


@given(st.recursive(st.integers(0, 50), lambda inner: st.lists(inner, max_size=4), max_leaves=20))
def test_elements_are_those_of_all_arrays_in_tuples(sizes: Any) -> None:
    def arrays(sizes: Any) -> Any:
        if isinstance(sizes, int):
            return np.zeros(sizes)
        return _Pair(1.0, tuple(map(arrays, sizes)))

    def total(sizes: Any) -> int:
        return sizes if isinstance(sizes, int) else sum(map(total, sizes))

    assert num_elements([arrays(sizes), 3]) == total(sizes)


@pytest.mark.parametrize(("module", "name"), LOOPS, ids=lambda one: getattr(one, "__name__", one))
def test_python_of_a_loop_calls_python_alone(module: Any, name: str) -> None:
    todo, seen = [python_of(getattr(module, name))], set[Any]()
    while todo:
        function = todo.pop()
        if function not in seen:
            seen.add(function)
            assert not hasattr(function, "py_func")
            names = function.__code__.co_names
            called = [function.__globals__.get(one) for one in names]
            todo += [one for one in called if hasattr(one, "py_func") or type(one) is type(said)]


@pytest.mark.long  # the machine code of them all is made
@given(programs())
def test_python_and_machine_code_say_the_same_to_the_bit(program: Program) -> None:
    loops = {one: getattr(*one) for one in LOOPS}
    assert _simulated(program, {one: python_of(made) for one, made in loops.items()}) == _simulated(
        program, {one: _machine_code(made) for one, made in loops.items()}
    )


def _simulated(program: Program, loops: dict[tuple[Any, str], Any]) -> list[Span]:
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), function in loops.items():
            patch.setattr(module, name, function)
        verify(program)
        return [*simulate(program, random_seconds(0)).spans]


def _machine_code(made: Any) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        made.compile(tuple(map(numba.typeof, arguments)))
        return made(*arguments)

    return call
