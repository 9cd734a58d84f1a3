"""A checkpoint is whole or not there, whoever is killed when, and says what is wrong with it."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoints import checkpoint, folders
from penstock.checkpoints.folders import Keep
from penstock.errors import CheckpointError, RunError
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.worker import RankResult, save

TENSORS = {"weights/a": torch.arange(6.0).view(2, 3).t(), "optimizer/a/step": torch.tensor(3.0)}
PLAIN = {"optimizer/a/rate": 0.5, "optimizer/a/name": None}


class PowerCutError(BaseException):
    """Nothing that the code could catch."""


def write(folder: Path, step: int = 4, ranks: int = 2) -> Path:
    for rank in range(ranks):
        tensors = {f"{key}{rank}": value + step for key, value in TENSORS.items()}
        checkpoint.write_part(folder, step, rank, (tensors, PLAIN))
    return checkpoint.finish(folder, step)


def result(rank: int) -> RankResult:
    return RankResult(rank, (), (), 0, (0.0,), 0.0, {})


def test_what_was_written_is_read(tmp_path):
    state = checkpoint.load(write(tmp_path))
    assert state.step == 4
    assert state.plain == PLAIN
    assert sorted(state.tensors) == sorted(f"{key}{rank}" for key in TENSORS for rank in (0, 1))
    for key, value in TENSORS.items():
        assert torch.equal(state.tensors[f"{key}1"], value + 4)


def test_a_folder_holds_state_and_one_file_for_each_rank(tmp_path):
    names = sorted(path.name for path in write(tmp_path).iterdir())
    assert names == ["rank-0.safetensors", "rank-1.safetensors", "state.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


# -- files that are not what they were -----------------------------------------------------------


@pytest.mark.parametrize("name", ["state.json", "rank-0.safetensors", "rank-1.safetensors"])
def test_a_missing_file_is_refused(name, tmp_path):
    (write(tmp_path) / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(tmp_path / "step-000004")


@pytest.mark.parametrize("name", ["state.json", "rank-1.safetensors"])
def test_a_file_truncated_anywhere_is_refused(name, tmp_path):
    path = write(tmp_path) / name
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=name) as caught:
            checkpoint.load(path.parent)
        assert caught.value.hint
    path.write_bytes(whole)
    checkpoint.load(path.parent)


@given(content=st.binary(max_size=200))
def test_a_file_of_anything_else_is_refused(content, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("checkpoint"))
    for name in ("state.json", "rank-0.safetensors"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError):
            checkpoint.load(folder)
        (folder / name).write_bytes(kept)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"step": 4, "parts": ["rank-0.safetensors"]},
        {"step": "4", "parts": ["rank-0.safetensors"], "plain": {}},
        {"step": 4, "parts": "rank-0.safetensors", "plain": {}},
        {"step": 4, "parts": [7], "plain": {}},
        {"step": 4, "parts": [], "plain": []},
    ],
)
def test_a_state_that_says_something_else_is_refused(content, tmp_path):
    folder = write(tmp_path)
    (folder / "state.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        checkpoint.load(folder)


# -- which one is the newest ---------------------------------------------------------------------


def test_latest_is_the_greatest_step(tmp_path):
    assert checkpoint.latest(tmp_path / "not there") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (999_999, 4, 1_000_000):
        write(tmp_path, step)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000000"


def test_latest_looks_at_complete_checkpoints_only(tmp_path):
    write(tmp_path, 4)
    checkpoint.write_part(tmp_path, 8, 0, (TENSORS, PLAIN))
    (tmp_path / "step-000012").mkdir()
    (tmp_path / "step-of-mine").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000004"


def test_tidy_removes_the_oldest(tmp_path):
    for step in (999_999, 4, 1_000_000):
        write(tmp_path, step)
    checkpoint.tidy(tmp_path, Keep(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1000000", "step-999999"]


def test_discard_removes_only_what_is_half_written(tmp_path):
    write(tmp_path, 4)
    checkpoint.write_part(tmp_path, 8, 0, (TENSORS, PLAIN))
    checkpoint.discard(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_writing_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 4, ranks=3)
    state = checkpoint.load(write(tmp_path, 4, ranks=1))
    assert sorted(state.tensors) == sorted(f"{key}0" for key in TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


# -- the power goes, the disk is full ------------------------------------------------------------

STEPS_OF_WRITING = (
    (folders, "write_file"),
    (folders, "write_text"),
    (folders, "_flush"),
    (os, "write"),
    (Path, "rename"),
    (Path, "unlink"),
    (shutil, "rmtree"),
    (os, "fsync"),
    (os, "replace"),
)


def cut_power_at(monkeypatch, number: int) -> list[int]:
    """Raise before the call `number` of all that changes files; count the calls."""
    calls = [0]

    def counted(original):
        def call(*args, **options):
            calls[0] += 1
            if calls[0] == number:
                raise PowerCutError
            return original(*args, **options)

        return call

    for place, name in STEPS_OF_WRITING:
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    return calls


@pytest.mark.parametrize("again", [False, True])
def test_power_cut_anywhere_leaves_the_checkpoint_before_or_the_new_one(
    again, tmp_path, monkeypatch
):
    step, number, seen = 4 if again else 8, 0, set()
    while True:
        number += 1
        folder = tmp_path / f"{number}"
        write(folder, 2)
        write(folder, 4)
        with monkeypatch.context() as patched:
            calls = cut_power_at(patched, number)
            try:
                write(folder, step)
                checkpoint.tidy(folder, Keep())
            except PowerCutError:
                pass
        if calls[0] < number:
            break
        found = checkpoint.load(checkpoint.latest(folder)).step
        seen.add(found)
        assert found in ((2, 4) if again else (4, 8))
        checkpoint.discard(folder)
        assert not list(folder.glob(".*"))
    assert number > 10
    assert len(seen) == 2


def test_sigkill_while_writing_leaves_a_whole_checkpoint(tmp_path):
    large = {"weights/a": torch.zeros(300_000)}
    for kill_after in (1, 2, 3, 5, 8):
        folder = tmp_path / f"{kill_after}"
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            for step in range(1, 1000):
                checkpoint.write_part(folder, step, 0, (large, {"step": step}))
                os.write(writer, b".")
                checkpoint.finish(folder, step)
                checkpoint.tidy(folder, Keep())
            os._exit(0)
        for _ in range(kill_after + 1):
            assert os.read(reader, 1) == b"."
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
        state = checkpoint.load(checkpoint.latest(folder))
        assert state.plain == {"step": state.step}
        assert state.step >= kill_after


def test_full_disk_leaves_nothing_half_written(tmp_path):
    """RLIMIT_FSIZE makes a real write fail, in a process of its own."""

    def work(transport, report):
        transport.barrier()  # after which its shared memory has been made
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        size = (10, 100_000)[transport.rank]
        save(tmp_path, 4, transport, ({f"weights/{transport.rank}": torch.zeros(size)}, {}))
        return result(transport.rank)

    write(tmp_path, 2)
    with pytest.raises(RunError, match=r"rank 1 failed: cannot write .*File too large") as caught:
        run_processes(work, 2, lambda step: None)
    assert "free some space" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.parametrize(("place", "name"), [(checkpoint, "write_part"), (checkpoint, "finish")])
def test_a_rank_that_cannot_write_ends_all_and_leaves_nothing(
    place, name, launcher, tmp_path, monkeypatch
):
    original, guilty = getattr(place, name), 2 if name == "write_part" else 0

    def fails(folder, step, about, *state):
        if name == "write_part" and about != guilty:
            return original(folder, step, about, *state)
        raise CheckpointError("no room", hint="make some")

    def work(transport, report):
        save(tmp_path, 4, transport, (TENSORS, PLAIN))
        return result(transport.rank)

    monkeypatch.setattr(place, name, fails)
    with pytest.raises(RunError, match=f"rank {guilty} failed: no room"):
        launcher(work, 3, lambda step: None)
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_only_ranks_with_a_part_write_one(launcher, tmp_path):
    def work(transport, report):
        save(tmp_path, 4, transport, (TENSORS, PLAIN) if transport.rank < 2 else None)
        return result(transport.rank)

    launcher(work, 4, lambda step: None)
    assert len(list((tmp_path / "step-000004").glob("rank-*"))) == 2


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="file"):
        checkpoint.write_part(tmp_path / "file", 4, 0, (TENSORS, PLAIN))
