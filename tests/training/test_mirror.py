"""Mirror: what is at the URL is whole whenever a copy ends, and a run goes on from it elsewhere."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.checkpoints import checkpoint, folders
from penstock.checkpoints.folders import Keep
from penstock.errors import CheckpointError, PlanError
from penstock.listener import SILENT
from penstock.training import mirror
from penstock.training.mirror import (
    copied,
    fetched,
    mirroring,
    mirroring_next,
    place_of,
    serve,
)
from tests.cli import mlp

KEEP = Keep()


def state_after(step: int, value: float = 0.0):
    return {"weights/a": torch.full((3,), step + value)}, {"done": step}


def write(folder: Path, step: int, value: float = 0.0) -> None:
    """Write a checkpoint as a run of one rank does."""
    checkpoint.write_part(folder / "checkpoints", step, 0, state_after(step, value))
    checkpoint.finish(folder / "checkpoints", step)


def there(tmp_path: Path) -> mirror.MirrorPlace:
    return place_of(f"file://{tmp_path}/there")


@contextmanager
def folders_made() -> Iterator[tuple[Path, Path]]:
    """Give two empty folders: one example needs more of them than a test is given."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        yield Path(first), Path(second)


class Fails:
    """A file system that goes away after so many bytes were put."""

    def __init__(self, files, left: int) -> None:
        self.files, self.left = files, left

    def __getattr__(self, name: str):
        return getattr(self.files, name)

    def put_file(self, source: str, target: str) -> None:
        content = Path(source).read_bytes()
        with self.files.open(target, "wb") as file:
            file.write(content[: self.left])
        if len(content) > self.left:
            self.left = 0
            raise ConnectionResetError("gone")
        self.left -= len(content)


@given(st.integers(0, 3000))
def test_whenever_the_line_ends_what_is_there_is_a_whole_checkpoint(left: int) -> None:
    """And the next try makes it the newest one."""
    fsspec.filesystem("memory").store.clear()
    place = place_of("memory://run")
    with folders_made() as (folder, other):
        write(folder, 1)
        copied(folder, place, KEEP)
        write(folder, 2)
        (folder / "metrics.jsonl").write_text("{}\n" * 200)
        with suppress(ConnectionResetError):
            copied(folder, place._replace(files=Fails(place.files, left)), KEEP)
        assert fetched(place, other, lambda words: None) in (1, 2)
        newest = checkpoint.latest(other / "checkpoints")
        found = checkpoint.load(newest)
        assert torch.equal(found.tensors["weights/a"], state_after(found.step)[0]["weights/a"])
        assert copied(folder, place, KEEP) == 2
        assert list(place.steps()) == [1, 2]
        assert fetched(place, other, lambda words: None) in (2, None)
        assert checkpoint.latest(other / "checkpoints").name == "step-000002"


def test_what_is_not_kept_is_removed_there_too_and_the_best_stays(tmp_path: Path) -> None:
    place, folder = there(tmp_path), tmp_path / "run"
    for step in range(1, 6):
        write(folder, step)
        if step in (2, 4):
            checkpoint.keep_best(folder / "checkpoints", step, 3.0 if step == 2 else 5.0)
        assert copied(folder, place, Keep(1, every=3)) == step
        folders.tidy(folder / "checkpoints", Keep(1, every=3))
    assert list(place.steps()) == [3, 5]
    assert json.loads(place.text("checkpoints", "best", "best.json"))["step"] == 2
    assert place.text("checkpoints", "best", "state.json") is not None
    assert sorted(os.listdir(folder / "checkpoints")) == ["best", "step-000003", "step-000005"]


def test_the_token_of_an_elastic_run_stays_here(tmp_path: Path) -> None:
    place, folder = there(tmp_path), tmp_path / "run"
    write(folder, 1)
    for name in ("plan.json", "elastic.json", ".lock", ".mirror-lock", "mirror.json"):
        (folder / name).write_text("{}")
    copied(folder, place, KEEP)
    assert place.names() == ["checkpoints", "plan.json"]


def test_a_step_made_otherwise_replaces_what_was_there_and_newer_ones_go(tmp_path: Path) -> None:
    place, folder = there(tmp_path), tmp_path / "run"
    for step in (1, 2, 3):
        write(folder, step)
        copied(folder, place, Keep(3))
    for step in (2, 3):
        folders.remove(folders.folder_of(folder / "checkpoints", step))
    write(folder, 2, 0.5)
    copied(folder, place, Keep(3))
    assert list(place.steps()) == [1, 2]
    other = tmp_path / "other"
    assert fetched(place, other, lambda words: None) == 2
    found = checkpoint.load(checkpoint.latest(other / "checkpoints"))
    assert found.tensors["weights/a"][0] == 2.5


def test_one_that_is_damaged_there_is_not_taken(tmp_path: Path) -> None:
    place, folder, other = there(tmp_path), tmp_path / "run", tmp_path / "other"
    for step in (1, 2):
        write(folder, step)
        copied(folder, place, KEEP)
    part = tmp_path / "there/checkpoints/step-000002/rank-0.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    said: list[str] = []
    assert fetched(place, other, said.append) == 1
    assert any("damaged" in words for words in said)
    assert [path.name for path in (other / "checkpoints").iterdir()] == ["step-000001"]


def test_what_is_here_and_as_new_is_not_fetched(tmp_path: Path) -> None:
    place, folder = there(tmp_path), tmp_path / "run"
    write(folder, 1)
    copied(folder, place, KEEP)
    assert fetched(place, folder, lambda words: None) is None


def test_a_place_that_fails_for_a_while_is_tried_again(tmp_path: Path, monkeypatch, capsys) -> None:
    """It is said once, and what is there in the end is the newest."""
    folder, place = tmp_path / "run", there(tmp_path)
    write(folder, 1)
    fails = [OSError("no route"), OSError("no route"), None]
    real = mirror.copied

    def some_fail(*about):
        problem = fails.pop(0) if fails else None
        if problem is not None:
            raise problem
        return real(*about)

    ends, starts = os.pipe()
    os.close(starts)
    monkeypatch.setattr(mirror, "copied", some_fail)
    monkeypatch.setattr(mirror, "_AGAIN_S", (0.0, 0.0, 0.0))
    with os.fdopen(ends) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        told = serve(folder, place, KEEP)
    assert (told.step, told.problem) == (1, "")
    assert capsys.readouterr().err.count("no copy to") == 1
    assert json.loads((folder / "mirror.json").read_text())["step"] == 1


@pytest.mark.parametrize("url", ["nowhere://x/y", "s3", "s3://bucket/run"])
def test_a_url_that_is_none_is_refused_before_anything_is_trained(url: str, tmp_path: Path) -> None:
    """A word without :// is a path; what comes with no package of its own is named."""
    if url == "s3":
        assert place_of(str(tmp_path)).root == str(tmp_path)
        return
    with pytest.raises(PlanError, match="out is"):
        place_of(url)


def test_a_place_with_another_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "run", 1)
    copied(tmp_path / "run", there(tmp_path), KEEP)
    url = f"file://{tmp_path}/there"
    with (
        pytest.raises(PlanError, match="holds a run already"),
        mirroring(url, tmp_path / "new", KEEP, SILENT, resume=False),
    ):
        raise AssertionError("it trains")


def test_a_run_whose_last_checkpoint_cannot_be_copied_says_so(tmp_path: Path) -> None:
    folder, url = tmp_path / "run", f"file://{tmp_path}/there"
    folder.mkdir()
    (tmp_path / "there").write_text("a file, where a folder was to be")
    with (
        pytest.raises(CheckpointError, match=r"cannot read file:.*there"),
        mirroring(url, folder, KEEP, SILENT, resume=False),
    ):
        write(folder, 1)


def test_no_process_is_left_and_what_a_killed_one_did_not_copy_is_copied_at_the_end(
    tmp_path: Path, monkeypatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = mirror._started

    def noted(*about):
        started.append(real(*about))
        return started[-1]

    monkeypatch.setattr(mirror, "_started", noted)
    folder = tmp_path / "run"
    folder.mkdir()
    with mirroring(f"file://{tmp_path}/there", folder, KEEP, SILENT, resume=False):
        write(folder, 1)
    assert started[0].returncode == 0
    assert list(there(tmp_path).steps()) == [1]
    with mirroring(f"file://{tmp_path}/there", folder, KEEP, SILENT, resume=True):
        started[1].kill()
        started[1].wait()
        write(folder, 2)
    assert list(there(tmp_path).steps()) == [1, 2]


@contextmanager
def first_of(url: str, folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Give the process of whoever began a run, which has copied what there was."""
    folder.mkdir()
    write(folder, 1)
    process = mirror._started(url, folder, KEEP)
    while not (folder / "mirror.json").exists():
        assert process.poll() is None
        threading.Event().wait(0.01)
    yield process
    process.communicate()


def test_who_joins_copies_once_whoever_began_the_run_is_gone(tmp_path: Path) -> None:
    folder, url = tmp_path / "run", f"file://{tmp_path}/there"
    with first_of(url, folder) as process, mirroring_next(url, folder, KEEP, SILENT):
        process.kill()
        process.wait()
        write(folder, 2)
    assert list(there(tmp_path).steps()) == [1, 2]


def test_who_joins_copies_nothing_while_another_one_does(tmp_path: Path) -> None:
    folder, url = tmp_path / "run", f"file://{tmp_path}/there"
    with first_of(url, folder) as process:
        os.kill(process.pid, signal.SIGSTOP)
        with mirroring_next(url, folder, KEEP, SILENT):
            write(folder, 2)
        assert list(there(tmp_path).steps()) == [1]
        os.kill(process.pid, signal.SIGCONT)
    assert list(there(tmp_path).steps()) == [1, 2]


def test_who_joined_says_what_it_could_not_copy(tmp_path: Path, monkeypatch) -> None:
    folder, url = tmp_path / "run", f"file://{tmp_path}/there"

    def killed(process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.communicate()

    monkeypatch.setattr(mirror, "_ended", killed)
    folder.mkdir()
    (tmp_path / "there").write_text("a file, where a folder was to be")
    with (
        pytest.raises(CheckpointError, match=r"lacks what is new"),
        mirroring_next(url, folder, KEEP, SILENT),
    ):
        write(folder, 1)


def test_where_all_are_damaged_nothing_is_begun_and_nothing_is_removed(tmp_path: Path) -> None:
    place, folder = there(tmp_path), tmp_path / "run"
    write(folder, 1)
    copied(folder, place, KEEP)
    (tmp_path / "there/checkpoints/step-000001/rank-0.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        fetched(place, tmp_path / "other", lambda words: None)
    assert place.names("checkpoints") == ["damaged-step-000001"]
    assert fetched(place, folder, lambda words: None) is None


def test_the_best_comes_back_too_and_files_of_any_kind(tmp_path: Path) -> None:
    place, folder, other = there(tmp_path), tmp_path / "run", tmp_path / "other"
    write(folder, 1)
    checkpoint.keep_best(folder / "checkpoints", 1, 2.5)
    write(folder, 2)
    (folder / "picture.png").write_bytes(b"\xff\xfe\x00")
    copied(folder, place, KEEP)
    assert fetched(place, other, lambda words: None) == 2
    assert checkpoint.best(other / "checkpoints") == (1, 2.5)
    assert (other / "picture.png").read_bytes() == b"\xff\xfe\x00"


def test_all_that_is_kept_here_is_kept_there_and_what_was_left_half_way_goes(
    tmp_path: Path,
) -> None:
    place, folder = there(tmp_path), tmp_path / "run"
    half = tmp_path / "there/checkpoints/step-000007"
    half.mkdir(parents=True)
    (half / "rank-0.safetensors.part").write_text("half")
    for step in (1, 2, 3, 4, 5):
        write(folder, step)
    copied(folder, place, Keep(1, every=2))
    assert place.names("checkpoints") == ["step-000002", "step-000004", "step-000005"]


@pytest.mark.parametrize("url", ["memory://run", "file://{}/run"])
def test_where_nothing_would_be_kept_is_refused(url: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        pytest.raises(PlanError, match=r"keeps nothing|own folder"),
        mirroring(url.format(tmp_path), tmp_path / "run", KEEP, SILENT, resume=False),
    ):
        raise AssertionError("it trains")


def test_a_run_goes_on_on_another_machine_that_has_only_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is named as the URL ends."""
    url, job = f"file://{tmp_path}/there", mlp.job()
    quick = {"ranks": 1, "trial": False, "check": False, "checkpoint_every": 2}
    whole = replace(job, num_steps=6)
    losses: dict[str, list[float]] = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    ps.train(replace(job, num_steps=4), out=url, **quick)
    assert list(there(tmp_path).steps())[-1] == 4
    assert "report.html" in there(tmp_path).names()
    monkeypatch.chdir(tmp_path / "b")
    ps.train(whole, out=url, resume=True, **quick)
    ps.train(whole, out="plain", **quick)
    for name in ("runs/there", "plain"):
        rows = (tmp_path / "b" / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(row)["loss"] for row in rows]
    assert losses["runs/there"] == losses["plain"]
    assert len(losses["plain"]) == 6
    assert list(there(tmp_path).steps())[-1] == 6
