"""Of a run: the trace and the figures of an elastic run, replayed, are that run."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.cli import main
from penstock.errors import FleetError
from penstock.fleet import policies
from penstock.fleet.job_work import FleetJob, Speed, read_job, with_figures
from penstock.fleet.market import priced
from penstock.fleet.of_run import figures_in, recorded
from penstock.fleet.replay import Ruler, replay
from penstock.fleet.traces import read_market

PACES = {1: 0.5, 2: 0.25, 3: 0.2, 4: 0.125}  # seconds of a step


def write(folder: Path, counts: list[tuple[int, int]], pause_s: float) -> float:
    """Write what a run tells that did so many steps on so many ranks, by turns; its seconds."""
    folder.mkdir(exist_ok=True)
    now, step, events, rows = 1000.0, 7, [], []
    for number, (ranks, steps) in enumerate(counts):
        paused = pause_s if number else 0.0
        now += paused
        about = {"time": now, "step": step, "members": list(range(ranks)), "what": "lost"}
        events.append({**about, "agreed_s": paused / 4, "ready_s": 3 * paused / 4})
        rows += [{"step": step + k + 1, "loss": 1.0, "seconds": PACES[ranks]} for k in range(steps)]
        step, now = step + steps, now + steps * PACES[ranks]
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", rows)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return now - 1000.0


def changing(turns: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return turns of which no two on as many ranks follow each other."""
    return [turns[0], *(turn for before, turn in pairwise(turns) if before[0] != turn[0])]


turns = st.lists(st.tuples(st.integers(1, 4), st.integers(3, 40)), min_size=2, max_size=8)


@given(turns, st.floats(0, 2))
def test_a_replay_of_a_run_takes_as_long_as_the_run(
    tmp_path_factory: pytest.TempPathFactory, counts: list[tuple[int, int]], pause_s: float
) -> None:
    """Whatever the number of ranks does; a pause is one where it changes."""
    while counts != changing(counts):
        counts = changing(counts)
    assume(len(counts) > 1)
    folder = tmp_path_factory.mktemp("run")
    seconds = write(folder, counts, pause_s)
    found = recorded(folder)
    assert found.seconds == pytest.approx(seconds)
    assert found.job.steps == sum(steps for _, steps in counts)
    assert found.job.reform_s == pytest.approx(pause_s)
    (folder / "ranks.csv").write_text(found.csv)
    (folder / "fleet.toml").write_text(found.toml)
    job = read_job(folder / "fleet.toml")
    market = priced(read_market(folder / "ranks.csv"), 1.0, 0.3)
    ruler = Ruler("transient", policies.transient)
    run = replay(market, job, ruler, deadline_s=100 * seconds + 100, tick_s=1.0)
    assert 3600 * run.hours == pytest.approx(seconds, rel=0.01, abs=0.6 * len(counts))
    assert run.steps == pytest.approx(job.steps)


def test_a_run_of_one_generation_is_a_run(tmp_path: Path) -> None:
    seconds = write(tmp_path, [(2, 40)], 1.0)
    found = recorded(tmp_path)
    assert (found.job.steps, found.job.reform_s) == (40, 0)
    assert found.seconds == pytest.approx(seconds)
    assert {one.machines: one.steps_per_s for one in found.job.speeds} == pytest.approx({2: 4.0})


def test_speeds_are_those_of_what_began_early_enough(tmp_path: Path) -> None:
    write(tmp_path, [(4, 80), (1, 10), (4, 30), (2, 9), (1, 9)], 0.0)
    speeds = {speed.machines: speed.steps_per_s for speed in recorded(tmp_path).job.speeds}
    assert speeds == pytest.approx({1: 2, 2: 4, 4: 8})
    early = recorded(tmp_path, first_s=12.0)
    assert {speed.machines for speed in early.job.speeds} == {1, 4}
    assert early.trace == recorded(tmp_path).trace


def test_the_command_writes_what_a_replay_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", [(2, 30), (1, 20), (2, 5)], 0.5)
    folder, own = str(tmp_path / "run"), str(tmp_path)
    assert main(["fleet", "run", folder, "--out", own, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps_per_s"] == pytest.approx({"1": 2.0, "2": 4.0})
    about = ["--job", f"{own}/fleet.toml", "--deadline", "1", "--prices", "1,0.3"]
    assert main(["fleet", "replay", f"{own}/ranks.csv", *about, "--policy", "transient"]) == 0
    assert "transient" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("events.jsonl", None, "events.jsonl"),
        ("events.jsonl", '{"time": 1}\n', "events.jsonl"),
        ("events.jsonl", "", "0 generations"),
        ("events.jsonl", "[1}\n", "damaged"),
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl"),
        ("metrics.jsonl", "", "no generation had two steps"),
    ],
)
def test_what_is_no_run_is_refused(name: str, text: str | None, says: str, tmp_path: Path) -> None:
    write(tmp_path, [(2, 30), (1, 20), (2, 5)], 0.5)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(FleetError, match=says):
        recorded(tmp_path)


def test_what_a_run_has_measured_is_known_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, [(2, 20), (1, 10), (2, 20)], 1.0)
    found = figures_in(tmp_path)
    assert found.rates == pytest.approx({1: 2.0, 2: 4.0})
    assert found.reform_s == pytest.approx(1.0)
    assert (found.start_s, found.restart_s, found.checkpoint_s) == (None, None, None)
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    back = json.dumps({**json.loads(events[1]), "back_to": "checkpoints/step-7"})
    (tmp_path / "events.jsonl").write_text("\n".join([events[0], back, events[2]]) + "\n")
    (tmp_path / "summary.json").write_text('{"checkpointing": {"blocked_s": 0.25}}')
    rows = [
        {"what": "wants", "step": 0, "wanted": {"a": 1}, "held": {"a": 0.0}},  # it begins with it
        {"what": "there", "took_s": 0.1},
        {"what": "wants", "step": 3, "wanted": {"a": 2}, "held": {"a": 1.0}},
        {"what": "there", "took_s": 8.0},
        {"what": "wants", "step": 9, "wanted": {"a": 1}, "held": {"a": 2.0}},  # one leaves
        {"what": "there", "took_s": 0.2},
        {"what": "wants", "step": 12, "wanted": {"a": 3}, "held": {"a": 1.0}},
        {"what": "ended"},
    ]
    (tmp_path / "decisions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = figures_in(tmp_path)
    assert (found.start_s, found.checkpoint_s) == (8.0, 0.25)
    assert found.restart_s == pytest.approx(1.0)
    assert "start_s 8" in str(found)


def test_a_job_keeps_what_was_not_measured(tmp_path: Path) -> None:
    write(tmp_path, [(2, 20), (1, 10), (2, 20)], 1.0)
    assert main(["fleet", "run", str(tmp_path)]) == 0
    planned = FleetJob(10, (Speed(1, 4.0, "one"), Speed(2, 8.0), Speed(4, 16.0)), start_s=99.0)
    for path in (tmp_path, tmp_path / "fleet.toml"):
        found = figures_in(path)
        assert found.start_s is None
        made = with_figures(planned, found.rates, start_s=found.start_s, reform_s=found.reform_s)
        assert (made.start_s, made.reform_s) == (99.0, pytest.approx(1.0))
        speeds = {speed.machines: speed.steps_per_s for speed in made.speeds}
        assert speeds == pytest.approx({1: 2.0, 2: 4.0, 4: 8.0})
        assert made.speeds[0].plan == "one"
