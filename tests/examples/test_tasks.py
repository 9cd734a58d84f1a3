"""examples/tasks.py: a graph of tasks whose machines are killed; each effect is there once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import tasks

ROOT = Path(__file__).parents[2]


class KilledError(Exception):
    """This machine."""


@pytest.fixture
def mortal(monkeypatch):
    """Let a machine die by an exception: its attempt ends there, and the test goes on."""

    def kill(group: int, number: int) -> None:
        raise KilledError

    monkeypatch.setattr(os, "killpg", kill)


def test_numbers_of_all_scales_have_one_once_preprocessed(tmp_path) -> None:
    assert tasks.raw(1)["x"].std(0).max() / tasks.raw(1)["x"].std(0).min() > 1e3
    found = tasks.preprocess(tmp_path, 1)["x"].std(0)
    torch.testing.assert_close(found, torch.ones(tasks.D))


def test_an_output_is_that_of_who_publishes_first(tmp_path) -> None:
    for number in (1, 2):
        temporary = tmp_path / str(number)
        temporary.write_text(f"of {number}")
        tasks.link_once(temporary, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "of 1"


@pytest.mark.usefixtures("mortal")
def test_a_task_is_tried_until_it_is_done_and_then_no_more(tmp_path, monkeypatch) -> None:
    calls: list[int] = []

    def work(folder: Path, part: int) -> int:
        calls.append(part)
        return part

    monkeypatch.setitem(tasks.WORK, "preprocess", work)
    names, attempts = [f"preprocess-{part}" for part in range(12)], 0
    for name in names:
        for _ in range(tasks.MOST + 1):
            attempts += not (tmp_path / f"{name}.pt").exists()
            try:
                assert tasks.done(name, tmp_path, 0.9, []) == name
            except KilledError:
                continue
            break
    killed = tasks.lines_of(tmp_path / "deaths.txt")
    assert len(tasks.lines_of(tmp_path / "attempts.txt")) == attempts
    assert {line.split()[1] for line in killed} == {"begun", "written", "published"}
    assert [torch.load(tmp_path / f"{name}.pt") for name in names] == list(range(12))
    before = len(calls)
    assert [tasks.done(name, tmp_path, 0.9, []) for name in names] == names
    assert len(calls) == before > len(names)


@pytest.mark.usefixtures("mortal")
def test_whoever_trains_is_killed_once_there_is_another_checkpoint(tmp_path) -> None:
    dies = next(each for each in deaths(tmp_path) if each.place)
    (tmp_path / "run" / "checkpoints" / "step-000010").mkdir(parents=True)
    with pytest.raises(KilledError):
        dies.once_saved()
    assert tasks.lines_of(tmp_path / "deaths.txt") == ["train saved"]
    assert tasks.saved(tmp_path) == ["step-000010"]


def deaths(folder: Path):
    while True:
        yield tasks.Deaths(folder, "train", 1.0)


@pytest.mark.long
def test_what_machines_that_are_killed_do_is_what_whole_ones_do(tmp_path) -> None:
    pytest.importorskip("distributed", reason='Dask is missing: pip install "penstock[tasks]"')
    found: list[dict[str, object]] = []
    for share in ("0", "0.6"):
        command = [sys.executable, "examples/tasks.py", "--out", str(tmp_path / share)]
        done = subprocess.run(
            [*command, "--deaths", share], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        rows = (tmp_path / share / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [(row["step"], row["loss"]) for row in map(json.loads, rows)]
        said = [torch.load(path).tolist() for path in sorted((tmp_path / share).glob("infer-*"))]
        found.append({"steps": steps, "said": said})
    assert found[0] == found[1]
    assert [step for step, _ in found[1]["steps"]] == list(range(1, tasks.STEPS + 1))
    killed = tasks.lines_of(tmp_path / "0.6" / "deaths.txt")
    assert "train saved" in killed
    assert len(killed) > 5
    outputs = [path.name for path in (tmp_path / "0.6").glob("*.pt")]
    assert len(outputs) == 2 * tasks.PARTS + 1
