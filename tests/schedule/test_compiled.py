import subprocess
import sys

import numba

import penstock.schedule.compiled as room
from penstock.schedule.compiled import compiled


def test_function_is_compiled_also_where_no_cache_can_be_written(monkeypatch):
    def njit(function=None, *, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(function)

    monkeypatch.setattr(room, "njit", njit)
    assert compiled(lambda number: number + 1)(2) == 3


PROGRAM = """
from typing import NamedTuple
from penstock.schedule.compiled import kept

class {name}(NamedTuple):
    number: int

@kept
def more(given):
    return given.number + {more}

print(more({name}(2)))
"""


def test_code_that_was_kept_for_a_record_that_is_gone_is_made_anew(tmp_path):
    """The caches of a package that is updated in its place."""
    path = tmp_path / "module.py"
    for name, more in (("First", 1), ("First", 1), ("Second", 20)):
        path.write_text(PROGRAM.format(name=name, more=more))
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path[0] = {str(tmp_path)!r}; import module",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stderr, done.stdout) == ("", f"{2 + more}\n")
    assert list(tmp_path.rglob("*.nbi"))


def test_whether_code_is_kept_is_known_before_it_is_called(tmp_path):
    (tmp_path / "module.py").write_text(
        "from penstock.schedule.compiled import is_kept, kept\n"
        "@kept\ndef more(number):\n    return number + 1\n"
        "print(is_kept(more), more(1), is_kept(more), is_kept(len))\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[0] = {str(tmp_path)!r}; import module"]
    for before in ("False", "True"):
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stderr, done.stdout) == ("", f"{before} 2 True True\n")


INNER = """
from penstock.schedule.compiled import kept

@kept
def add(number):
    return number + {more}
"""
OUTER = """
from inner import add
from penstock.schedule.compiled import kept

@kept
def more(number):
    return add(number)

print(more(2))
"""


def test_code_that_was_kept_is_made_anew_when_what_it_calls_in_another_file_changes(tmp_path):
    (tmp_path / "outer.py").write_text(OUTER)
    for more in (1, 1, 20):
        (tmp_path / "inner.py").write_text(INNER.format(more=more))
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path[0] = {str(tmp_path)!r}; import outer",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stderr, done.stdout) == ("", f"{2 + more}\n")


def test_code_is_compiled_also_where_there_is_no_room_to_keep_it(tmp_path):
    (tmp_path / "module.py").write_text(
        "import resource, sys\n"
        "from penstock.schedule.compiled import kept\n"
        "@kept\ndef more(number):\n    return number + 1\n"
        "if sys.argv[1:]: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "print(more(1))\n"
    )
    begin = f"import sys; sys.path[0] = {str(tmp_path)!r}; import module"
    for little in (["little"], []):
        command = [sys.executable, "-c", begin, *little]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stderr, done.stdout) == ("", "2\n")
