"""bench.crossover gives what its docstring says, of jobs that begin together."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench import crossover
from penstock.runtime.shared_cores import await_start, parse_turns
from tests.cli import mlp

TOOK = {"alone a": 2.0, "alone b": 3.0, "by turns": 4.0, "at once": 4.5}


def test_rows_are_those_of_its_docstring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crossover, "a", lambda: replace(mlp.job(), micro_batches=2))
    monkeypatch.setattr(crossover, "played", lambda folder, *_: TOOK[folder.name])
    monkeypatch.setattr(crossover, "equal", lambda one, other: True)
    assert crossover.main(["--json", "--rates", "inf", "--steps", "3"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    for key in row:
        assert key in (crossover.__doc__ or ""), key
    assert (row["after_each_other_s"], row["together_s"], row["free_for_all_s"]) == (5.0, 4.0, 4.5)
    assert 0 < row["predicted_s"] <= row["predicted_after_s"] * 1.01
    assert row["equal_bits"] is True


def test_jobs_begin_together_and_the_last_step_of_either_counts(tmp_path: Path) -> None:
    seen: list[str] = []

    def start(words) -> None:
        turns = parse_turns(words[-1].removeprefix("turns="))
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True)
        if "b" in out.name:
            time.sleep(0.05)  # it is ready later
        seen.append(f"ready {out.name}")
        await_start(turns, 1)
        seen.append(f"begun {out.name}")
        (out / "metrics.jsonl").write_text("{}")

    turns = {"a": f"first:{tmp_path}/cores", "b": f"second:{tmp_path}/cores"}
    assert 0 <= crossover.played(tmp_path / "way", turns, 1, start) < 60
    assert [word.split()[0] for word in seen] == ["ready", "ready", "begun", "begun"]


def test_job_that_fails_is_told(tmp_path: Path) -> None:
    turns = {"a": f"first:{tmp_path}/cores"}
    with pytest.raises(RuntimeError, match="ended before its first step"):
        crossover.played(tmp_path / "way", turns, 1, lambda words: None)
