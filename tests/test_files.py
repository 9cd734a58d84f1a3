"""Files: written whole or not at all, and named in what goes wrong."""

import errno
import math
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import PlanError
from penstock.files import finite, read_json, write_bytes, write_text


def test_written_file_holds_the_text_and_its_folder_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b.json", "h\u00e4")
    assert (tmp_path / "a" / "b.json").read_bytes() == "h\u00e4".encode()
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["b.json"]


def test_written_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "new", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_who_reads_a_file_goes_on_in_the_old_one_while_a_new_one_is_written(tmp_path: Path) -> None:
    write_bytes(tmp_path / "plan.json", b"old")
    with open(tmp_path / "plan.json", "rb") as reader:
        write_bytes(tmp_path / "plan.json", b"new")
        assert reader.read() == b"old"
    assert (tmp_path / "plan.json").read_bytes() == b"new"


def test_file_that_finds_no_room_leaves_the_old_one_and_is_named(tmp_path: Path) -> None:
    write_bytes(tmp_path / "big", b"old")
    program = (
        "import sys\nfrom penstock.files import write_bytes\n"
        "try:\n    write_bytes(sys.argv[1], b'x' * 100_000)\n"
        "except OSError as problem:\n    print(problem.errno, problem.filename)\n"
    )

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    command = [sys.executable, "-c", program, str(tmp_path / "big")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=little_room)
    assert done.stdout == f"{errno.EFBIG} {tmp_path / 'big'}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["big"]
    assert (tmp_path / "big").read_bytes() == b"old"


def test_file_under_a_file_is_refused_by_its_own_name(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"")
    with pytest.raises(OSError, match="file/new") as caught:
        write_bytes(tmp_path / "file" / "new", b"")
    assert caught.value.filename == str(tmp_path / "file" / "new")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is not readable JSON"),
        (b"{", "is not readable JSON"),
        (b"\xff", "is not readable JSON"),
        (b"[" * 100_000, "is not readable JSON"),
        (b"[]", "holds a list, not an object"),
    ],
)
def test_what_is_no_object_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=found) as caught:
        read_json(tmp_path / "plan.json", PlanError, "plan")
    assert caught.value.hint


def test_what_json_cannot_say_becomes_null() -> None:
    value = {"a": [1.5, math.inf, -math.inf, {"b": math.nan}], "c": "inf", "d": 2**64}
    assert finite(value) == {"a": [1.5, None, None, {"b": None}], "c": "inf", "d": 2**64}
