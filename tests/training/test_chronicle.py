"""Chronicle: each step has one row, whoever writes it, and whenever the one before was killed."""

import errno
import json
import os
import shutil
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RunError
from penstock.runtime.calls import StepResult
from penstock.training.chronicle import METRICS, Chronicle, RunAbout
from penstock.training.lock import locked
from tests.cli.conftest import little_room
from tests.parity.models import job_of


def chronicle(folder: Path, steps: int = 9, **options) -> Chronicle:
    import torch

    job = job_of("frozen", torch.float32, **options)
    return Chronicle(folder, job, RunAbout(steps, 8, 0), lambda: None)  # type: ignore


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def step(number: int, **options) -> StepResult:
    return StepResult(number, float(number), 0.5, 1, **options)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 40)), max_size=30),
)
def test_each_step_has_one_row_whoever_writes_it(tmp_path_factory, turns) -> None:
    """Members take turns, some tell the last step again, some are killed in the middle of a row."""
    folder = tmp_path_factory.mktemp("run")
    writers = [chronicle(folder, steps=100) for _ in range(3)]
    done = 0
    for who, again, torn in turns:
        if again and done:
            writers[who].report(step(done - 1))
        writers[who].report(step(done))
        done += 1
        if torn:
            row = json.dumps({"step": done + 1, "loss": 0.1, "seconds": 1.0})[:torn]
            with (folder / METRICS).open("a") as file:
                file.write(row)
    writers[0].report(step(done))
    for each in writers:
        each.close()
    assert [row["step"] for row in rows(folder)] == list(range(1, done + 2))
    assert rows(folder)[0] == {
        "step": 1,
        "loss": 0.0,
        "seconds": 0.5,
        "samples_per_second": 16.0,
        "tokens_per_second": None,
    }


def test_a_validation_is_in_the_row_of_its_step(tmp_path: Path) -> None:
    validation = {"validation": list, "validate_every": 2}
    own = chronicle(tmp_path, **validation)
    own.report(step(0))
    own.report(step(1))
    assert len(rows(tmp_path)) == 1  # the second one waits for its validation
    own.report(StepResult(1, None, 0.0, 0, validated={"val_loss": 3.0}))
    own.report(step(2))
    own.report(step(3))  # whose validation never comes
    other = chronicle(tmp_path, **validation)
    other.report(step(3))
    other.report(step(4))
    own.close()
    other.close()
    found = {row["step"]: row.get("val_loss") for row in rows(tmp_path)}
    assert found == {1: None, 2: 3.0, 3: None, 4: None, 5: None}


@settings(max_examples=30)
@given(room=st.integers(0, 600))
def test_where_the_disk_is_full_there_is_no_half_line_and_the_file_is_named(
    room: int, tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    own = chronicle(folder, steps=100)
    words = f"bytes to {folder / METRICS}: (File too large|No space left)"
    full = pytest.raises(RunError, match=words)
    with little_room(room), full:
        deque(map(own.report, map(step, range(100))))
    own.close()
    told = (folder / METRICS).read_bytes()
    assert told == b"" or told.endswith(b"\n")
    assert [row["step"] for row in rows(folder)] == list(range(1, len(rows(folder)) + 1))
    other = chronicle(folder, steps=100)  # there is room again
    other.report(step(len(rows(folder))))
    other.close()
    assert [row["step"] for row in rows(folder)] == list(range(1, len(rows(folder)) + 1))


@pytest.mark.parametrize("becomes", ["removed", "moved", "another"])
def test_a_folder_that_vanishes_is_named_with_the_next_step(becomes: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    own = chronicle(folder)
    own.report(step(0))
    if becomes == "removed":
        shutil.rmtree(folder)
    else:
        folder.rename(tmp_path / "moved")
    if becomes == "another":
        folder.mkdir()
        (folder / METRICS).touch()
    with pytest.raises(RunError, match=f"{folder / METRICS} is gone, or is another file by now"):
        own.report(step(1))
    own.close()


def test_a_folder_is_where_it_was_though_the_jobs_code_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    own = chronicle(Path("run"))
    own.report(step(0))
    monkeypatch.chdir("/")
    own.report(step(1))
    own.close()
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EROFS, "written there again"), (errno.EPERM, "written there again"),
     (errno.ENOSPC, "free some space")],
)  # fmt: skip
def test_a_folder_that_becomes_read_only_is_named_with_what_can_be_done(
    number: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = chronicle(tmp_path)
    own.report(step(0))

    def refused(file: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refused)
        words = f"bytes to {tmp_path / METRICS}: {os.strerror(number)}"
        with pytest.raises(RunError, match=words) as caught:
            own.report(step(1))
    own.close()
    assert hint in caught.value.hint


def test_a_lock_in_a_folder_that_became_read_only_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(RunError, match="what went wrong"), locked(tmp_path):
        raise RunError("what went wrong")
