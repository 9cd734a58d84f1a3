"""Watched: what is told of a run while its files grow, and the page that shows it."""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoints.folders import folder_of
from penstock.errors import ReportError
from penstock.plan import Prediction
from penstock.report.live import LivePage, page, state_words
from penstock.report.wanted import wanted_rows
from penstock.report.watched import Watch, Watched, WatchedRank
from tests.report.samples import HOSTILE, Tree, a_plan
from tests.report.test_browser import browse

NOW = 2e9
LOST = {"1": "died"}


def row(step: int, seconds: float = 0.2) -> dict:
    rates = {"samples_per_second": 10 / seconds, "tokens_per_second": 2560 / seconds}
    return {"step": step, "loss": 5 - step / 10, "seconds": seconds, **rates}


def event(generation: int, step: int, members: list[int], **more) -> dict:
    own = {"time": NOW - 100 + step, "step": step, "generation": generation, "members": members}
    told = {"what": "lost", "plan": "2 x 1 stages", "why": "rank 1 died", "predicted_step_s": 0.3}
    costs = {"agreed_s": 0.05, "ready_s": 0.1, "stepped_s": 0.25, "moved_bytes": 2**20}
    return {**own, **told, **costs, **more}


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).write_text("".join(f"{json.dumps(each)}\n" for each in rows))


def age(folder: Path, seconds: float) -> None:
    for path in folder.iterdir():
        os.utime(path, (NOW - seconds, NOW - seconds))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of an elastic run that lost rank 1 of 3 after 4 steps; 7 joined."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    replace(a_plan(), predicted=Prediction(0.1, (1,) * 2)).save(folder / "plan.json")
    (folder / "job.json").write_text(json.dumps({"penstock": "job", "steps": 40}))
    write(folder, "metrics.jsonl", [row(step) for step in range(1, 12)])
    begins = event(1, 0, [0, 1, 2], what="begins", predicted_step_s=0.1)
    joined = event(3, 6, [0, 2, 7], what="joined", predicted_step_s=0.16)
    write(folder, "events.jsonl", [begins, event(2, 4, [0, 2], gone=LOST), joined])
    kept = folder_of(folder / "checkpoints", 10)
    kept.mkdir()
    (kept / "rank-0.safetensors").write_bytes(b"x" * 1000)
    (folder_of(folder / "checkpoints", 11)).mkdir()  # not complete
    (kept / "state.json").write_text("{}")
    age(folder, 1.0)
    return folder


def look(folder: Path, *, is_held: bool = True, now_s: float = NOW) -> Watched:
    return Watch(folder).look(now_s, is_held=is_held)


def test_a_run_under_way_is_told_with_ranks_speed_changes_and_checkpoints(run: Path) -> None:
    told = look(run)
    assert (told.state, told.step, told.num_steps, told.loss) == ("running", 11, 40, 5 - 1.1)
    assert told.step_s == (0.16, 0.2)  # of the plan that is run now, not that of the file
    assert told.tokens_per_s.predicted == pytest.approx(2560 / 0.16)
    assert told.tokens_per_s.measured == pytest.approx(2560 / 0.2)
    assert told.left_s == pytest.approx(29 * 0.2)
    assert told.ranks == (
        WatchedRank(0, True, 11),
        WatchedRank(1, False, 4, "died"),
        WatchedRank(2, True, 11),
        WatchedRank(7, True, 11),
    )
    assert [each.cost_s for each in told.changes] == [pytest.approx(0.4)] * 2
    assert [(each.step, each.size_bytes) for each in told.checkpoints] == [(10, 1002)]
    assert "3 ranks at work, 1 gone" in state_words(told)


def test_what_is_measured_is_of_the_generation_that_works_now(run: Path) -> None:
    rows = [row(step, 9.0 if step <= 7 else 0.5) for step in range(1, 12)]
    write(run, "metrics.jsonl", rows)  # the first step of the generation is the seventh
    assert look(run).step_s.measured == 0.5


def test_a_run_that_is_not_elastic_is_told_by_its_plan(run: Path) -> None:
    (run / "events.jsonl").unlink()
    told = look(run)
    assert told.step_s == (0.1, 0.2)
    assert told.ranks == (WatchedRank(0, True, 11), WatchedRank(1, True, 11))
    assert (told.changes, told.to_json()["generation"]) == ((), None)


@pytest.mark.parametrize(
    ("held", "silent_s", "summary", "state"),
    [
        (True, 900.0, False, "running"),  # a long search, or a long step
        (False, 5.0, False, "running"),  # who started it has died, the ranks go on
        (False, 900.0, False, "stopped"),
        (False, 900.0, True, "ended"),
        (True, 900.0, True, "running"),  # it is resumed
    ],
)
def test_state_is_told_by_who_is_there_and_what_was_written(
    run: Path, held: bool, silent_s: float, summary: bool, state: str
) -> None:
    if summary:
        (run / "summary.json").write_text(json.dumps({"steps": 11}))
    age(run, silent_s)
    told = look(run, is_held=held)
    assert told.state == state
    assert told.num_steps == (11 if state == "ended" else 40)
    assert (told.left_s is not None) == (state == "running")


def test_an_ended_run_is_also_read_where_nothing_was_planned(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", [{"step": 1, "loss": None, "seconds": 1.0}])
    summary = {"steps": 1, "peak_bytes_measured": [5, 6], "val_loss": 2.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    told = look(tmp_path, is_held=False)
    assert (told.state, len(told.ranks), told.tokens_per_s) == ("ended", 2, (None, None))
    json.dumps(told.to_json())
    assert "Ended after step 1 of 1." in page(told)


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 6))
def test_lines_that_grow_byte_by_byte_are_each_read_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], count: int
) -> None:
    folder = tmp_path_factory.mktemp("grows")
    content = "".join(f"{json.dumps(row(step))}\n" for step in range(1, count + 1)).encode()
    path = folder / "metrics.jsonl"
    path.write_bytes(b"")
    watch = Watch(folder)
    for cut in sorted({*(min(len(content), 13 * each) for each in cuts), len(content)}):
        with path.open("ab") as file:
            file.write(content[file.tell() : cut])
        told = watch.look(NOW, is_held=True)
        assert [s.step for s in told.inputs.steps] == list(range(1, content[:cut].count(b"\n") + 1))


def test_metrics_that_a_resume_shortens_are_read_anew(run: Path) -> None:
    watch = Watch(run)
    assert watch.look(NOW, is_held=True).step == 11
    other = run / "new"
    write(run, "new", [row(step, 0.7) for step in range(1, 6)])
    other.rename(run / "metrics.jsonl")
    assert watch.look(NOW, is_held=True).step == 5
    (run / "metrics.jsonl").unlink()
    assert watch.look(NOW, is_held=True).step == 0


def test_a_folder_without_a_run_and_damaged_files_are_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is no folder"):
        Watch(tmp_path / "nowhere")
    with pytest.raises(ReportError, match="holds no run"):
        Watch(tmp_path)
    (run / "events.jsonl").write_text("{\n")
    with pytest.raises(ReportError, match=r"line 1 of .*events\.jsonl"):
        look(run)


# -- the page ------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path) -> Iterator[LivePage]:
    watch = Watch(folder)
    with LivePage(0, lambda: watch.look(NOW, is_held=True)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: LivePage, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(server.address.rstrip("/") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read().decode()


def test_page_shows_the_run_and_its_parts_follow_it(run: Path) -> None:
    with served(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, text = ask(server, "/")
        assert status == 200
        policy = Tree(text).all("meta")[1].attributes["content"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src 'self';" in policy
        assert "Ranks that came and went" in text
        write(run, "metrics.jsonl", [row(step) for step in range(1, 24)])
        status, text = ask(server, "/live")
        assert (status, "step 23 of 40" in text, "<html" in text) == (200, True, False)
        (run / "events.jsonl").write_text("[]\n")
        assert ask(server, "/live")[0] == 500
        assert ask(server, "/../plan.json")[0] == 404
        assert ask(server, "/live", Host="evil.example")[0] == 403


def test_what_a_run_says_of_itself_is_no_markup(run: Path) -> None:
    write(run, "events.jsonl", [event(1, 0, [0], why=HOSTILE[:-1], plan=HOSTILE[:-1])])
    assert "<b>" not in page(look(run))


def test_a_port_in_use_is_told(run: Path) -> None:
    with served(run) as server, pytest.raises(ReportError, match=f"port {server.server_port}"):
        LivePage(server.server_port, lambda: look(run))


def test_browser_redraws_the_page_by_itself(chromium: str, run: Path, tmp_path: Path) -> None:
    steps = iter([11, 17])

    def grows() -> Watched:
        write(run, "metrics.jsonl", [row(step) for step in range(1, next(steps, 17) + 1)])
        return look(run)

    with LivePage(0, grows) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        dom = browse(chromium, server.address, tmp_path)
        server.shutdown()
        thread.join()
    assert "Running: step 17 of 40" in dom
    assert "<dd>17</dd>" in dom


def decided(what: str, now_s: float, **more) -> dict:
    own = {"time": NOW - 100 + now_s, "now_s": now_s, "step": 3, "what": what}
    counts = {"wanted": {"zone-a": 2, "zone-a:on-demand": 0}, "usd": 0.5, "usd_h": 2.0}
    return {**own, **counts, "deadline_h": 1.0, **more}


def test_what_a_policy_wanted_is_told_with_what_it_foresaw_and_what_followed(run: Path) -> None:
    about = {"left_h": 0.5, "left_usd": 1.25, "why": "zone-a offers 2 in place of 1"}
    rows = [decided("wants", 1.0, **about), decided("there", 7.0, took_s=6.0)]
    none = {"wanted": {"zone-a": 0}, "why": "<b>none</b>", "left_h": None, "left_usd": 0.0}
    write(run, "decisions.jsonl", [*rows, decided("wants", 9.0, **none), decided("ended", 20.0)])
    told = Watch(run).look(NOW, is_held=False)
    first, second, last = wanted_rows(told.inputs.changes.machines)
    assert first[2:7] == ("2 zone-a", "zone-a offers 2 in place of 1", "6.00 s", "0.5", "1.25")
    assert (second[2], second[4], last[2]) == ("none", "not all of it", "the end")
    assert told.to_json()["machines"][1]["took_s"] == 6.0
    text = page(told)
    assert "Machines that were wanted" in text
    assert "<b>none</b>" not in text
