"""What ranks have kept of a step: whatever of it is missing, unreadable or misshapen differs."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock as ps
from penstock.errors import CheckpointError
from penstock.prove.audit import HIDDEN, Bench
from penstock.prove.audit_desk import AuditDesk
from penstock.prove.audit_pace import Pace
from penstock.prove.audit_parts import lacks_room
from penstock.prove.plain_side import Case
from penstock.prove.prove import case_of
from penstock.runtime import audited as runtime_audited
from penstock.runtime.audited import StepKeeper
from penstock.state.weights import StageWeights
from tests.parity.models import captured, plan_of
from tests.prove.test_audit import BASIS, EXACT, kept, linear, plain_weights, planned

RANKS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    """Return a case, and a folder in which two ranks have kept the first and the last step."""
    folder = tmp_path_factory.mktemp("run")
    case = planned("dropout", plan_of(captured("dropout", EXACT).graph, "one_f_one_b", RANKS, 2))
    kept(case, folder)
    return case_of(case, (0,)), folder


def audited(case: Case, folder: Path, *, is_over: bool = False) -> Bench:
    """Return what has audited all that is in a folder, until something differs."""
    with closing(AuditDesk()) as desk:
        bench = Bench(case, folder, desk, Pace(1.0, BASIS))
        while (place := bench.next(is_over=is_over)) is not None:
            bench.audit(place)
            if bench.failed or (bench.rows and bench.rows[-1].problem):
                break
    return bench


def removed(name: str) -> Callable[[Path], None]:
    return lambda place: (place / name).unlink()


def cut_short(name: str) -> Callable[[Path], None]:
    return lambda place: (place / name).write_bytes((place / name).read_bytes()[:-9])


def noted(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        path = place / "after" / "rank-1.json"
        content = json.loads(path.read_text())
        change(content["plain"])
        path.write_text(json.dumps(content))

    return damage


def tensors(
    when: str, prefix: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[Path], None]:
    """Change the first tensor of a rank whose name begins so; None: it is lost."""

    def damage(place: Path) -> None:
        path = place / when / "rank-1.safetensors"
        held = load_file(path)
        name = next(key for key in sorted(held) if key.startswith(prefix))
        other = change(held.pop(name))
        save_file(held if other is None else {**held, name: other}, path)

    return damage


DAMAGES = {
    "a part is missing": (removed("after/rank-1.safetensors"), "rank 1 has not written its part"),
    "a note is missing": (removed("after/rank-1.json"), "rank 1 has not written its part"),
    "no rank has written": (lambda p: shutil.rmtree(p / "after"), "no rank has written its part"),
    "a part is cut short": (cut_short("after/rank-0.safetensors"), "damaged"),
    "a state is cut short": (cut_short("before/rank-0.safetensors"), "damaged"),
    "a note is cut short": (cut_short("before/rank-0.json"), "damaged"),
    "a note is of another kind": (lambda p: (p / "after/rank-0.json").write_text("[]"), "damaged"),
    "a loss is of another kind": (noted(lambda p: p.update({"losses/1": 3})), "damaged"),
    "a loss is not noted": (noted(lambda p: p.pop("losses/1")), 'rank 1 has noted no "losses"'),
    "copies are not noted": (noted(lambda p: p.pop("held/1")), 'rank 1 has noted no "held"'),
    "a weight is lost": (tensors("before", "weights/", lambda t: None), "does not fit"),
    "a weight has another shape": (tensors("before", "weights/", lambda t: t[:1]), "does not fit"),
    "a gradient has another shape": (tensors("after", "gradients/", lambda t: t[:1]), ""),
    "a new weight has another shape": (
        tensors("after", "weights/", lambda t: t[:1]),
        "does not fit",
    ),
    "a new weight is lost": (tensors("after", "weights/", lambda t: None), "does not fit"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_a_rank_has_not_kept_as_it_should_differs(name, run, tmp_path):
    case, folder = run
    shutil.copytree(folder, tmp_path / "run")
    damage, words = DAMAGES[name]
    damage(min((tmp_path / "run" / HIDDEN).iterdir()))
    bench = audited(case, tmp_path / "run")
    assert bench.failed == ""
    assert bench.rows[0].step == 0
    assert bench.rows[0].problem
    assert words in bench.rows[0].problem
    assert (tmp_path / "run" / "differs").is_dir()
    told = (tmp_path / "run" / "audits.jsonl").read_text().splitlines()
    assert json.loads(told[0])["problem"] == bench.rows[0].problem


def test_a_rank_that_has_not_told_of_the_last_step_differs_once_the_run_is_over(run, tmp_path):
    case, folder = run
    shutil.copytree(folder, tmp_path / "run")
    (max((tmp_path / "run" / HIDDEN).iterdir()) / "after" / "rank-0.json").unlink()
    first, last = audited(case, tmp_path / "run", is_over=True).rows
    assert first.problem == ""
    assert last.problem == "rank 0 has not written its part of the state after it"


def test_parts_that_nobody_sees_are_said(run, tmp_path):
    """Where a folder is not shared, a rank of another host writes what is not seen here."""
    case, folder = run
    shutil.copytree(folder, tmp_path / "run")
    for place in (tmp_path / "run" / HIDDEN).iterdir():
        for when in ("before", "after"):
            (place / when / "rank-1.json").unlink()
    bench = audited(case, tmp_path / "run", is_over=True)
    assert bench.rows == []
    assert "rank 1 has not written its part" in bench.failed


def test_a_rank_that_may_be_lost_need_not_tell(run, tmp_path):
    case, folder = run
    first = min((folder / HIDDEN).iterdir())
    shutil.copytree(first, tmp_path / HIDDEN / f"{first.name}-1")
    (tmp_path / HIDDEN / f"{first.name}-1" / "after" / "rank-1.json").unlink()
    bench = audited(case, tmp_path, is_over=True)
    assert (bench.rows, bench.failed) == ([], "")


def test_what_the_author_s_code_raises_differs(run, tmp_path):
    case, folder = run
    shutil.copytree(folder, tmp_path / "run")

    def ended(start: int) -> Iterator[object]:
        yield from ()

    bench = audited(replace(case, job=replace(case.job, data=ended)), tmp_path / "run")
    assert bench.rows[0].problem.startswith("the plain loop ends there: the job's data ended")


def test_what_the_machine_lacks_says_nothing_of_a_step(run, tmp_path):
    case, folder = run
    shutil.copytree(folder, tmp_path / "run")

    def full(start: int) -> Iterator[object]:
        raise OSError(errno.ENOSPC, "no space")
        yield

    bench = audited(replace(case, job=replace(case.job, data=full)), tmp_path / "run")
    assert (bench.rows, "no space" in bench.failed) == ([], True)
    damaged = CheckpointError("a file is damaged")
    damaged.__cause__ = MemoryError()
    assert lacks_room(damaged)
    assert lacks_room(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not lacks_room(FileNotFoundError(errno.ENOENT, "no such file"))
    assert not lacks_room(RuntimeError("shapes differ"))


def test_a_host_that_is_not_reached_just_now_says_nothing_of_a_step(run, tmp_path):
    case, folder = run
    shutil.copytree(folder, tmp_path / "run")
    asked, right = list[int](), case.job.data

    def far(start: int) -> Iterator[object]:
        asked.append(start)
        if len(asked) == 1:
            raise ConnectionResetError("a host is away")
        yield from right(start)

    bench = audited(replace(case, job=replace(case.job, data=far)), tmp_path / "run")
    assert [(row.step, row.problem) for row in bench.rows] == [(3, "")]
    assert bench.failed == ""
    assert bench.missed.startswith("step 1 could not be audited: the plain loop ends there: Conn")


def twice_from_step_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks of plans, and nobody else, update twice from step 6 on."""
    right = StageWeights.step

    def step(self: StageWeights, number: int, factor: float = 1.0) -> None:
        for _ in range(1 + (number >= 6)):
            right(self, number, factor)

    monkeypatch.setattr(StageWeights, "step", step)


def test_a_run_that_updates_twice_goes_back_and_on_rightly(tmp_path, monkeypatch):
    twice_from_step_6(monkeypatch)
    options = {"ranks": 2, "num_steps": 12, "audit": "50%", "trial": False}
    trained = ps.train(linear(), out=tmp_path, checkpoint_every=4, **options)
    assert trained is not None
    for name, value in plain_weights(linear(), 12).items():
        assert torch.allclose(trained.outcome.weights[name], value, atol=1e-6)
    assert "differed: an optimizer was called 2 times in 1" in str(trained.summary["audited"])


def test_looking_at_the_model_is_a_part_of_what_a_kept_step_takes(tmp_path, monkeypatch):
    clock = SimpleNamespace(process_time=lambda: seconds[0])
    seconds = [0.0]

    def changes() -> Sequence[str]:
        seconds[0] += 5.0
        return ["model.drop.p"]

    monkeypatch.setattr(runtime_audited, "time", clock)
    alone: Any = SimpleNamespace(rank=0, num_ranks=1)
    audits = runtime_audited.Audits(tmp_path, lambda: True)
    keeper = StepKeeper(audits, alone, lambda step: None, tuple, dict)
    keeper.before(3)
    keeper.after(4, changes)
    (note,) = tmp_path.rglob("after/**/rank-0.json")
    plain = json.loads(note.read_text())["plain"]
    assert plain["cpu/0"] == [5.0, 5.0]
    assert plain["changes/0"] == ["model.drop.p"]


def test_a_state_that_cannot_be_read_is_made_from_where_the_run_goes_back_to(tmp_path, monkeypatch):
    right = StepKeeper.after

    def lost(self: StepKeeper, step: int, changes: Callable[[], Sequence[str]] = tuple) -> None:
        right(self, step, changes)
        is_first = not (tmp_path / "differs").exists()
        if is_first and step > 6 and self.transport.rank == 1:
            (self._folder / "before" / "rank-1.safetensors").write_bytes(b"")

    monkeypatch.setattr(StepKeeper, "after", lost)
    options = {"ranks": 2, "num_steps": 12, "audit": "50%", "trial": False}
    trained = ps.train(linear(), out=tmp_path, checkpoint_every=4, **options)
    assert trained is not None
    for name, value in plain_weights(linear(), 12).items():
        assert torch.allclose(trained.outcome.weights[name], value, atol=1e-6)
    assert "damaged" in str(trained.summary["audited"])
    assert "; audited at" in str(trained.summary["audited"])  # by replicas, not the plain loop


def test_a_run_whose_auditing_process_is_killed_ends_and_says_so(tmp_path, monkeypatch):
    right = Bench.audit

    def killed(self: Bench, place: Path) -> None:
        if self.rows:
            os.kill(os.getpid(), signal.SIGKILL)
        right(self, place)

    monkeypatch.setattr(Bench, "audit", killed)
    options = {"ranks": 2, "num_steps": 12, "audit": "50%", "trial": False}
    trained = ps.train(linear(), out=tmp_path, **options)
    assert trained is not None
    words = "audited at 1 step, the last of them step 1: equal to the plain loop; the process that"
    assert str(trained.summary["audited"]).startswith(words)
