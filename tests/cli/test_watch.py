"""penstock watch: what is printed of a run, and what is refused."""

import json
from pathlib import Path

import pytest

from penstock.plan import plan_by_hand
from tests.cli.conftest import Call
from tests.report.test_watched import NOW, event, row, write
from tests.search.chains import chain


def a_run(folder: Path) -> Path:
    """Return the folder of a run whose process has gone long ago, without a summary."""
    write(folder, "metrics.jsonl", [row(step) for step in range(1, 10)])
    began = event(1, 0, [0, 1], what="begins")
    write(folder, "events.jsonl", [began, event(2, 4, [0], gone={"1": "died"})])
    (folder / ".lock").write_text(json.dumps({"pid": 2**22 + 1, "host": "elsewhere"}))
    return folder


def test_it_is_printed_once_where_nobody_looks_on(call: Call, tmp_path: Path) -> None:
    done = call("watch", a_run(tmp_path))
    assert (done.code, done.err) == (0, "")
    assert "step 9" in done.out
    assert "lost: 1 died" in done.out
    assert "12,800" in done.out  # tokens per second
    assert done.out.isascii()


def test_page_of_a_run_that_has_not_begun_waits_for_it(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def begins(seconds: float) -> None:
        (tmp_path / "run").mkdir()
        a_run(tmp_path / "run")

    monkeypatch.setattr("time.sleep", begins)
    monkeypatch.setattr("penstock.cli.watch._serve", lambda told, port: seen.append(told.folder))
    done = call("watch", tmp_path / "run", "--page")
    assert (done.code, seen) == (0, [tmp_path / "run"])
    assert "waiting for a run" in done.err


def test_ranks_of_any_run_have_their_steps(call: Call, tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", [row(step) for step in range(1, 10)])
    graph = chain([1, 1], [1, 1])
    plan_by_hand(graph, [0], "gpipe", num_micro_batches=2).save(tmp_path / "plan.json")
    lines = call("watch", tmp_path).out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("rank"))
    assert [line.split()[0] for line in lines[at + 1 : at + 3]] == ["0", "1"]
    assert all(line.endswith(" 9") for line in lines[at + 1 : at + 3])


def test_json_is_one_object(call: Call, tmp_path: Path) -> None:
    told = json.loads(call("watch", a_run(tmp_path), "--json").out)
    assert (told["step"], told["generation"], told["loss"]) == (9, 2, 4.1)
    assert told["tokens_per_second"]["measured"] == 12800
    assert [rank["how"] for rank in told["ranks"]] == ["", "died"]
    assert NOW > told["silent_s"] >= 0


def test_what_is_no_run_or_damaged_is_refused(call: Call, tmp_path: Path) -> None:
    error, hint = call("watch", tmp_path).refusal(2)
    assert str(tmp_path) in error
    assert "penstock train" in hint
    a_run(tmp_path)
    (tmp_path / "plan.json").write_text("[]")
    assert "plan.json" in call("watch", tmp_path, "--page").refusal(2)[0]
