"""Steps that ranks keep are those of the plain loop, or are named; as many as a share pays for."""

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.checkpoints.control import LocalBoard
from penstock.checkpoints.saver import SavePolicy
from penstock.choose.prepare import joined_step
from penstock.choose.run_windows import windows_of
from penstock.errors import JobError, PlanError, RunError
from penstock.graph.merge import merged
from penstock.job import Job
from penstock.listener import SILENT
from penstock.plan import Plan
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.prove import audit_pace
from penstock.prove.audit import (
    HIDDEN,
    Asks,
    Bench,
    why_not,
)
from penstock.prove.audit_checkpoint import audited_in, back_to_audited, keep_audited
from penstock.prove.audit_desk import AuditDesk
from penstock.prove.audit_pace import AuditBasis, Pace, used_with_s
from penstock.prove.audits import SHORT, Audit, Audited, AuditTerms, parse_audit
from penstock.prove.plain_side import Case
from penstock.prove.prove import Planned, case_of, owners_of_replicas
from penstock.runtime import audited, worker
from penstock.runtime.audited import Audits
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.stop import Stopped
from penstock.runtime.windows import repeated
from penstock.runtime.worker import Task, work
from penstock.state.optimizer.updates import Updates
from penstock.state.weights import StageWeights
from tests.parity import models
from tests.parity.models import captured, job_of, plan_of

EXACT = torch.float64
BASIS = AuditBasis(2, 0.01, 10_000, 10**6)


def planned(name: str, plan: Plan, **options: object) -> Planned:
    return Planned(job_of(name, EXACT, "adamw", **options), captured(name, EXACT), plan)


def kept(case: Planned, folder: Path, steps: int = 4, share: Callable[[], bool] = lambda: True):
    """Run some steps of a plan as threads, of which the first and the last are kept."""
    plan, graph = case.plan, case.captured.graph
    task = Task(
        case.captured,
        stages_of(plan, graph),
        merged(case.job, plan.terms.joined, case.captured.batch.division),
        repeated(lower_plan(plan, graph), range(steps)),
        policy=SavePolicy(folder / "checkpoints"),
        joined=plan.terms.joined,
        audits=Audits(folder / HIDDEN, share),
    )
    run_threads(partial(work, task), plan.total_ranks, lambda step: None, groups=task.groups)


def windows_kept(case: Planned, folder: Path, steps: int = 10) -> None:
    """Run a plan's windows as threads, of which the first and the last are kept."""
    plan, graph = case.plan, case.captured.graph
    task = Task(
        case.captured,
        stages_of(plan, graph),
        merged(case.job, plan.terms.joined),
        windows_of(graph, plan, range(steps), [100]),
        policy=SavePolicy(folder / "checkpoints"),
        audits=Audits(folder / HIDDEN, lambda: True),
    )
    run_threads(partial(work, task), plan.total_ranks, lambda step: None, groups=task.groups)


def audited_by(case: Case, folder: Path) -> list[Audit]:
    with closing(AuditDesk()) as desk:
        bench = Bench(case, folder, desk, Pace(1.0, BASIS))
        while (place := bench.next()) is not None:
            bench.audit(place)
    assert bench.failed == ""
    return bench.rows


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "options"),
    [
        ("dropout", "one_f_one_b", 2, {}),
        ("tied", "zb_h1", 2, {"replicas": 2, "clip": True}),
        ("batch_norm", "chimera", 4, {}),
        ("frozen_start", "gpipe", 2, {}),
        ("gpt", "one_f_one_b", 1, {"replicas": 2, "shard": True}),
    ],
)
@pytest.mark.sampled(2)
def test_kept_steps_equal_the_plain_ones(name, schedule, stages, options, tmp_path):
    shard = options.pop("shard", False)
    plan = plan_of(captured(name, EXACT).graph, schedule, stages, 4, **options)
    plan = plan.changed(shard=("shard",)) if shard else plan
    case = planned(name, plan, **({"clip_norm": 0.01} if options.get("clip") else {}))
    kept(case, tmp_path)
    rows = audited_by(case_of(case, (0,)), tmp_path)
    assert [row.step for row in rows] == [0, 3]
    assert [row.problem for row in rows] == ["", ""]
    assert all("gradients" in row.found and "update" in row.found for row in rows)
    assert not list((tmp_path / HIDDEN).iterdir())  # what was audited is gone
    assert audited_in(tmp_path / "checkpoints") == 4


def test_step_whose_micro_batches_are_divided_equals_the_plain_one(tmp_path):
    job = job_of("dropout", EXACT, "adamw", micro_batches=1)
    _, made = joined_step(job, captured("dropout", EXACT), Fraction(1, 3), (), SILENT)
    plan = plan_of(made.graph, "one_f_one_b", 1, 1, replicas=3).changed(joined=Fraction(1, 3))
    case = Planned(job, made, plan)
    kept(case, tmp_path)
    rows = audited_by(case_of(case, (0,)), tmp_path)
    assert [(row.step, row.problem) for row in rows] == [(0, ""), (3, "")]


@pytest.mark.parametrize(
    ("schedule", "name", "options"),
    [
        ("double_buffered", "dropout", {"replicas": 2, "clip": True}),
        ("pipedream", "gpt", {}),
        ("pipemare", "gpt", {}),
        ("spec_train", "gpt", {}),
        ("x_pipe", "frozen_start", {}),
        ("spike_compensation", "gpt", {}),
        ("timeprest", "batch_norm", {}),
    ],
)
@pytest.mark.sampled(2)
def test_windows_of_asynchronous_schedules_equal_their_definition(
    schedule, name, options, tmp_path
):
    """The first window, and the first steps of a longer one, from what was kept between them."""
    plan = plan_of(captured(name, EXACT).graph, schedule, 2, 2, **options)
    case = planned(name, plan, **({"clip_norm": 0.01} if options.get("clip") else {}))
    windows_kept(case, tmp_path)
    rows = audited_by(case_of(case, (0,), begun=True), tmp_path)
    assert [row.problem for row in rows] == ["", ""]
    assert all("gradients" in row.found and "update" in row.found for row in rows)
    last = (8, 2) if schedule == "pipemare" else (4, 4)  # its first four steps are synchronous
    assert (rows[-1].step, rows[-1].steps) == last
    assert Audited(tuple(rows)).steps_proved == sum(last)


@pytest.mark.parametrize(
    ("change", "named"),
    [({}, "the update of"), ({"data": None}, "the gradient of"), ({"seed": 4}, "the gradient of")],
)
def test_a_window_that_differs_from_its_definition_is_named(change, named, tmp_path, monkeypatch):
    if not change:
        half_update(monkeypatch)
    plan = plan_of(captured("dropout", EXACT).graph, "double_buffered", 2, 2)
    case = planned("dropout", plan)
    windows_kept(case, tmp_path)
    monkeypatch.undo()
    change = {**change, **({"data": other_data} if "data" in change else {})}
    wrong = replace(case, job=replace(case.job, **change))
    rows = audited_by(case_of(wrong, (0,), begun=True), tmp_path)
    assert named in rows[-1].problem


def filled_anew(start: int) -> Iterator[object]:
    """Yield the same two tensors again and again, each time with another micro-batch in them."""
    memory = None
    for batch in models.data(start):
        if memory is None:
            memory = {key: value.clone() for key, value in batch.items()}
        for key, value in batch.items():
            memory[key].copy_(value)
        yield memory


def test_memory_that_data_fills_anew_is_audited_as_the_step_read_it(tmp_path):
    plan = plan_of(captured("dropout", EXACT).graph, "one_f_one_b", 2, 4, replicas=2)
    case = planned("dropout", plan)
    case = replace(case, job=replace(case.job, data=filled_anew))
    kept(case, tmp_path)
    assert [row.problem for row in audited_by(case_of(case, (0,)), tmp_path)] == ["", ""]


def test_a_window_of_another_plan_is_not_audited(tmp_path):
    graph = captured("gpt", EXACT).graph
    case = planned("gpt", plan_of(graph, "double_buffered", 2, 2))
    windows_kept(case, tmp_path, 4)
    other = planned("gpt", plan_of(graph, "pipedream", 2, 2))
    with closing(AuditDesk()) as desk:
        bench = Bench(case_of(other, (0,), begun=True), tmp_path, desk, Pace(1.0, BASIS))
        place = bench.next()
        assert place is not None
        bench.audit(place)
    assert "the plan was made again" in bench.failed


def test_eager_replicas_keep_their_steps_too(tmp_path):
    job = job_of("tied", EXACT, "adamw", clip_norm=0.1, micro_batches=4)
    audits = Audits(tmp_path / HIDDEN, lambda: True)
    task = EagerTask(job, 0, 3, policy=SavePolicy(tmp_path / "checkpoints", 100), audits=audits)
    run_processes(partial(work_eagerly, task), 2, lambda step: None)
    rows = audited_by(Case(job, (0,), owners=owners_of_replicas(job, 2)), tmp_path)
    assert [(row.step, row.problem) for row in rows] == [(0, ""), (2, "")]


def test_nothing_is_kept_where_it_is_not_worth_it(tmp_path):
    case = planned("gpt", plan_of(captured("gpt", EXACT).graph, "one_f_one_b", 2, 2))
    kept(case, tmp_path, share=lambda: False)
    assert not (tmp_path / HIDDEN).exists()


def test_a_window_that_the_board_asks_for_is_kept(tmp_path):
    case = planned("gpt", plan_of(captured("gpt", EXACT).graph, "one_f_one_b", 2, 2))
    plan, graph = case.plan, case.captured.graph
    with closing(LocalBoard()) as board:
        task = Task(
            case.captured,
            stages_of(plan, graph),
            case.job,
            repeated(lower_plan(plan, graph), range(6)),
            policy=SavePolicy(tmp_path / "checkpoints"),
            board=board,
            audits=Audits(tmp_path / HIDDEN, lambda: False),
        )
        board.ask_to_audit(1)
        run_threads(partial(work, task), 2, lambda step: None, groups=task.groups)
    assert [path.name for path in (tmp_path / HIDDEN).iterdir()] == ["000001"]
    assert [row.problem for row in audited_by(case_of(case, (0,)), tmp_path)] == [""]


def half_update(monkeypatch) -> None:
    right = Updates.step
    more = lambda self, number, given, factor=1.0: right(self, number, given, 1.01)  # noqa: E731
    monkeypatch.setattr(Updates, "step", more)


def other_data(start: int) -> Iterator[object]:
    return models.data(start + 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, "the update of"),
        ({"data": other_data}, "the loss differs"),
        ({"seed": 4}, "the gradient of"),
        ({"clip_norm": 1e-9}, "the gradient of"),
    ],
)
@pytest.mark.sampled(2)
def test_what_differs_is_named_and_stays(change, named, tmp_path, monkeypatch):
    if not change:
        half_update(monkeypatch)
    plan = plan_of(captured("dropout", EXACT).graph, "one_f_one_b", 2, 2, replicas=2)
    options = {"clip_norm": 1.0} if "clip_norm" in change else {}
    plan = plan.changed(clip=True) if options else plan
    case = planned("dropout", plan, **options)
    kept(case, tmp_path)
    wrong = replace(case, job=replace(case.job, **change))
    rows = audited_by(case_of(wrong, (0,)), tmp_path)
    assert named in rows[-1].problem
    before = checkpoint.load(checkpoint.folder_of(tmp_path / "differs" / "before", rows[-1].step))
    assert before.step == rows[-1].step
    assert audited_in(tmp_path / "checkpoints") is None  # no step was right
    told = [json.loads(line) for line in (tmp_path / "audits.jsonl").read_text().splitlines()]
    assert [(row["step"], row["problem"]) for row in told] == [(r.step, r.problem) for r in rows]


def fading(weights):
    """Scale gradients by a count that no checkpoint holds."""
    made, numbers = torch.optim.SGD(weights, lr=0.1), count(1)

    def fade(own, *_: object) -> None:
        factor = 0.9 ** next(numbers)
        for p in own.param_groups[0]["params"]:
            p.grad.mul_(factor)

    made.register_step_pre_hook(fade)
    return made


@pytest.mark.parametrize("why", ["", "a count is in no state"])
def test_updates_that_follow_from_no_state_are_left_out_once_one_differs(why, tmp_path):
    plan = plan_of(captured("gpt", EXACT).graph, "one_f_one_b", 1, 4, replicas=2)
    case, asked = planned("gpt", plan), list[str]()
    case = replace(case, job=replace(case.job, optimizer=fading))
    kept(case, tmp_path)
    forgets = lambda: asked.append(why) or why  # noqa: E731
    rows = audited_by(replace(case_of(case, (0,)), forgets=forgets), tmp_path)
    assert [bool(row.problem) for row in rows] == [False, not why]
    assert ["update" in row.found for row in rows] == [True, not why]
    assert "gradients" in rows[1].found
    assert asked == [why]  # not of the step that was equal


def test_a_step_that_not_all_have_kept_is_not_audited(tmp_path):
    case = planned("gpt", plan_of(captured("gpt", EXACT).graph, "one_f_one_b", 2, 2))
    kept(case, tmp_path)
    first = min((tmp_path / HIDDEN).iterdir())
    assert audited.is_kept(first)
    (first / "after" / "rank-1.json").unlink()
    assert not audited.is_kept(first)
    shutil.rmtree(first / "after")
    assert not audited.is_kept(first)


# -- how often ------------------------------------------------------------------------------------


@example(0.01, 100.0, [0.3] * 10)
@given(st.floats(0.001, 0.2), st.floats(1.0, 1e4), st.lists(st.floats(1e-3, 1.0), max_size=30))
def test_no_more_than_its_share_is_spent(share, before_s, costs):
    """Whatever audits take: where one is afforded, those before and one like them are paid for."""
    now = [0.0]
    clock = pytest.MonkeyPatch()
    clock.setattr(audit_pace.time, "monotonic", lambda: now[0])
    try:
        pace, own_s, gaps = Pace(share, BASIS._replace(before_s=before_s)), 0.0, list[float]()
        for cost_s in costs:
            for _ in range(200):
                if pace.is_due():
                    break
                now[0] += 1.0
            if not pace.is_due():
                return
            assert pace.spent_s <= share * pace.of_s
            gaps.append(now[0])
            own_s += cost_s
            told = pace.told({"0": (now[0], 0.0), "1": (now[0], 0.0)}, own_s, cost_s)
            assert told == pytest.approx(cost_s)
            assert pace.next_s > now[0]
    finally:
        clock.undo()


def test_what_an_audit_needs_beside_its_steps_is_paid_for():
    """Forking, waiting, and what audits of the phases before took, count: there may be none."""
    pace = Pace(0.01, BASIS._replace(before_s=20.0))
    assert pace.affords()
    pace.used(0.1)
    assert (pace.spent_s, pace.affords()) == (0.1, False)
    assert not Pace(0.01, BASIS._replace(before_s=20.0, spent_s=0.1)).affords()
    assert pace.soon_s() > 1.0  # nobody looks in vain again and again
    assert not BASIS._replace(before_s=0.1, steps=1).affords(0.01)
    assert not BASIS._replace(steps=300).affords(0.01)
    assert not BASIS._replace(steps=300).is_short(0.01)  # it may take longer than was thought
    assert BASIS.affords(0.01)


def test_a_run_has_used_what_its_host_sees_or_what_ranks_tell():
    seen = [0.0]
    pace = Pace(0.01, BASIS._replace(before_s=2.0), lambda: seen[0])
    pace.told({"0": (30.0, 0.0), "1": (30.0, 0.0)}, 0.1, 0.1)
    assert pace.of_s >= 62.0
    seen[0] = 70.0
    pace = Pace(0.01, BASIS._replace(before_s=2.0), lambda: seen[0])
    pace.told({"0": (30.0, 0.0), "1": (30.0, 0.0)}, 0.1, 0.1)
    assert pace.of_s == 70.0
    seen[0] = 3.0  # of the leading process: ranks are on other hosts
    pace = Pace(0.01, BASIS._replace(before_s=2.0), lambda: seen[0])
    pace.told({"0": (30.0, 0.0), "1": (30.0, 0.0)}, 0.1, 0.1)
    assert pace.of_s >= 62.0


def test_a_process_is_seen_with_what_it_has_forked():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def burn() -> None:
        while time.process_time() < 0.1:
            pass
        sender.send("burnt")
        signal.pause()

    child = context.Process(target=burn, daemon=True)
    before_s, own_s = used_with_s(os.getpid()), time.process_time()
    child.start()
    receiver.recv()
    more_s = used_with_s(os.getpid()) - before_s - (time.process_time() - own_s)
    child.kill()
    child.join()
    assert more_s >= 0.05
    assert used_with_s(2**22 + 1) == 0.0


def test_audits_become_rarer():
    now = [0.0]
    clock = pytest.MonkeyPatch()
    clock.setattr(audit_pace.time, "monotonic", lambda: now[0])
    try:
        pace, times = Pace(0.5, BASIS._replace(before_s=10.0)), list[float]()
        for number in range(400):
            while not pace.is_due():
                now[0] += 0.01
            times.append(now[0])
            pace.told({"0": (now[0], 0.0)}, 1e-4 * number, 1e-4)
        first, last = times[50] - times[0], times[-1] - times[-51]
        assert last > 4 * first
    finally:
        clock.undo()


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("1%", AuditTerms()),
        ("0", AuditTerms(0.0)),
        ("2.5%,stop", AuditTerms(0.025, "stop")),
        ("100%, warn", AuditTerms(1.0, "warn")),
    ],
)
def test_what_is_asked_of_audits_is_read(text, terms):
    assert parse_audit(text) == terms


@pytest.mark.parametrize("text", ["", "1", "101%", "-1%", "nan%", "1%,later", "x"])
def test_what_says_nothing_of_audits_is_refused(text):
    with pytest.raises(PlanError, match="audit is") as told:
        parse_audit(text)
    assert "1%,stop" in told.value.hint


def test_why_a_run_is_not_audited_is_said(tmp_path, monkeypatch):
    case = case_of(planned("gpt", plan_of(captured("gpt", EXACT).graph, "one_f_one_b", 2, 2)), (0,))
    late = case_of(
        planned("gpt", plan_of(captured("gpt", EXACT).graph, "double_buffered", 2, 2)), (0,)
    )
    assert why_not(case, AuditTerms(), tmp_path, BASIS) == ""
    assert why_not(case, AuditTerms(0.0), tmp_path, BASIS) == "audit is 0"
    assert why_not(late, AuditTerms(), tmp_path, BASIS) == ""
    assert why_not(case, AuditTerms(), tmp_path, BASIS._replace(steps=9)) == SHORT
    assert why_not(case, AuditTerms(), tmp_path, BASIS._replace(steps=9, step_s=0.0)) == ""
    monkeypatch.setattr(
        "penstock.prove.audit.shutil.disk_usage", lambda _: SimpleNamespace(free=10)
    )
    assert "a step takes" in why_not(case, AuditTerms(), tmp_path, BASIS)


def test_a_step_that_nobody_keeps_is_asked_for_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("penstock.prove.audit.time", SimpleNamespace(monotonic=lambda: now[0]))
    due = SimpleNamespace(is_due=lambda: True, basis=BASIS)
    with closing(LocalBoard()) as board:
        asks = Asks()
        asks.ask(board, due)
        now[0] = 4.0
        asks.ask(board, due)
        assert (board.audits_asked(), asks.is_open) == (1, True)
        now[0] = 6.0  # a rank was lost in it
        asks.ask(board, due)
        assert board.audits_asked() == 2
        asks.heard()
        assert not asks.is_open
        asks.ask(board, due)
        assert board.audits_asked() == 3


# -- what was found -------------------------------------------------------------------------------


def row(step: int, problem: str = "") -> Audit:
    return Audit(step, problem, "", 0.1)


def test_a_run_is_proved_up_to_the_last_audit_before_a_difference():
    equal = Audited((row(0), row(9), row(4)), 0.3, 30.0)
    assert (equal.steps_proved, equal.problem) == (10, None)
    assert str(equal) == (
        "audited at 3 steps, the last of them step 10: equal to the plain loop; "
        "1.0 % of the processor time"
    )
    wrong = Audited((row(0), row(9, "the loss differs"), row(4)), 0.3, 30.0)
    assert (wrong.steps_proved, wrong.problem) == (5, row(9, "the loss differs"))
    assert "step 10 differs: the loss differs" in str(wrong)
    assert str(Audited(left_out="audit is 0")) == "not audited: audit is 0"


def test_the_audited_checkpoint_outlives_those_that_go(tmp_path):
    def saved(step: int) -> Path:
        folder = checkpoint.folder_of(tmp_path, step)
        checkpoint.write_part(tmp_path, step, 0, ({"weights/a": torch.full((2,), step)}, {}))
        return checkpoint.finish(tmp_path, step) and folder

    saved(10)
    saved(20)
    keep_audited(tmp_path, 9)
    assert (audited_in(tmp_path), back_to_audited(tmp_path)) == (None, None)
    keep_audited(tmp_path, 15)
    assert audited_in(tmp_path) == 10
    checkpoint.remove(checkpoint.folder_of(tmp_path, 10))
    back = back_to_audited(tmp_path)
    assert back == (10, checkpoint.folder_of(tmp_path, 10))
    assert checkpoint.load(back[1]).tensors["weights/a"].tolist() == [10, 10]
    keep_audited(tmp_path, 20)
    assert audited_in(tmp_path) == 20
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-000010", "step-000020"]


def test_steps_that_nobody_has_looked_at_count_as_paid_for():
    desk = AuditDesk()
    desk.began(os.getpid(), 0.0)
    desk.may(True)
    assert desk.is_open
    assert desk.affords()
    assert desk.is_open  # whoever asks once it was kept
    assert not desk.affords()
    desk.may(True)  # who audits has not seen it yet
    assert not desk.affords()
    desk.may(2)  # there is time for that one, and one more
    assert desk.affords()
    desk.may(2)
    assert not desk.affords()
    desk.found()
    desk.may(2)
    assert desk.affords()
    desk.close()


def test_who_audits_is_seen_to_be_there():
    with closing(AuditDesk()) as desk:
        desk.may(True)
        desk.began(os.getpid(), 0.5)
        assert (desk.affords(), desk.is_over()) == (True, False)
        assert math.isclose(desk.fork_s, 0.5)
        desk.began(2**22 + 1, 0.0)  # no such process
        assert not desk.affords()
        desk.end()
        assert desk.is_over()


# -- whole runs -----------------------------------------------------------------------------------


def batches(start: int) -> Iterator[torch.Tensor]:
    for number in count(start):
        yield torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


def test_a_run_that_is_equal_says_up_to_which_step(tmp_path):
    job = Job(lambda: nn.Linear(4, 4), lambda m, x: m(x).square().mean(), batches, sgd)
    trained = ps.train(job, ranks=2, num_steps=12, out=tmp_path, audit="50%", trial=False)
    assert trained is not None
    assert trained.summary["audited_to"] == 12
    assert "equal to the plain loop" in str(trained.summary["audited"])
    assert "During the run: audited at" in (tmp_path / "report.html").read_text()
    rows = [json.loads(line) for line in (tmp_path / "audits.jsonl").read_text().splitlines()]
    assert {rows[0]["step"], rows[-1]["step"]} == {0, 11}
    assert not (tmp_path / HIDDEN).exists()


def plain_weights(job: Job, steps: int) -> dict[str, torch.Tensor]:
    """Return what the loop that a job means makes of the model, written from its definition."""
    torch.manual_seed(job.seed)
    model, data = job.model(), job.data(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(job.micro_batches):
            (job.loss(model, next(data)) / job.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"weights/{name}": value.detach() for name, value in model.named_parameters()}


def wrong_from_step_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks of plans, and nobody else, update too far from step 6 on: a fault of ours."""
    right = StageWeights.step

    def step(self: StageWeights, number: int, factor: float = 1.0) -> None:
        right(self, number, factor * (1.5 if number >= 6 else 1.0))

    monkeypatch.setattr(StageWeights, "step", step)


def linear() -> Job:
    return Job(
        lambda: nn.Linear(4, 4), lambda m, x: m(x).square().mean(), batches, sgd, micro_batches=2
    )


def test_a_run_whose_steps_become_others_goes_back_and_on_rightly(tmp_path, monkeypatch):
    wrong_from_step_6(monkeypatch)
    job, options = linear(), {"ranks": 2, "num_steps": 12, "audit": "50%", "trial": False}
    trained = ps.train(job, out=tmp_path, checkpoint_every=4, **options)
    assert trained is not None
    assert trained.plan is None  # eager replicas went on
    for name, value in plain_weights(job, 12).items():
        assert torch.allclose(trained.outcome.weights[name], value, atol=1e-6)
    went_back = r"went back: step \d+ differed: the update of"
    assert re.match(went_back, str(trained.summary["audited"]))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert any(name.startswith("unproved-step-") for name in names)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 13))


LATE = 130  # a step that no examination comes to


def straightened_late() -> Job:
    """A hook of the optimizer sets a number of the model that was built last."""
    built: list[nn.Sequential] = []

    def model() -> nn.Module:
        built.append(nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1)))
        return built[-1]

    def optimizer(weights):
        made, steps = torch.optim.SGD(list(weights), lr=0.1), count(1)

        def straighten(*_: object) -> None:
            if next(steps) == LATE:
                built[-1][1].negative_slope = 0.9

        made.register_step_post_hook(straighten)
        return made

    return Job(model, lambda m, x: (m(x) - 1).square().mean(), batches, optimizer, micro_batches=2)


class Scaled(nn.Module):
    """It reads a number of its own, a buffer and what a module of torch keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.bend, self.alpha = nn.Linear(4, 4), nn.LeakyReLU(0.1), 1.0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bend(self.head(x)) * self.alpha * self.scale


def straighten(model: Scaled) -> None:
    model.bend.negative_slope = 0.9


def halve(model: Scaled) -> None:
    model.alpha = 0.5


def fill(model: Scaled) -> None:
    model.scale.fill_(2.0)


def changed_by_data(change: Callable[[Scaled], None]) -> Job:
    """Data changes the model that was built last, from one of its micro-batches on."""
    built: list[Scaled] = []

    def model() -> nn.Module:
        built.append(Scaled())
        return built[-1]

    def data(start):
        for k, x in enumerate(batches(start), start):
            if k >= 2 * LATE and built:
                change(built[-1])
            yield x

    def loss(net, x):
        return (net(x) - 1).square().mean()

    return Job(model, loss, data, lambda w: torch.optim.SGD(w, lr=0.1), micro_batches=2)


SLOPE, ALPHA = "negative_slope of 1: 0.1, then 0.9", "model.alpha: changed (1, then 0.5)"


@pytest.mark.parametrize(
    ("make", "words", "found_by", "elastic"),
    [
        (straightened_late, SLOPE, "an audit", False),
        (straightened_late, SLOPE, "the end", False),
        (partial(changed_by_data, straighten), "negative_slope of bend", "an audit", True),
        (partial(changed_by_data, halve), ALPHA, "the end", True),
        (partial(changed_by_data, halve), ALPHA, "an audit", False),
        (partial(changed_by_data, fill), "the values of scale: changed", "the end", False),
        (partial(changed_by_data, fill), "the values of scale: changed", "the end", True),
    ],
)
@pytest.mark.sampled(2)
def test_what_is_changed_late_in_the_model_is_found_and_made_as_it_is_in_one_process(
    tmp_path, monkeypatch, make, words, found_by, elastic
):
    job, audit = make(), "50%" if found_by == "an audit" else "0"
    if found_by == "an audit":
        monkeypatch.setattr(worker, "check_model", lambda capture: None)
    options = {"ranks": 2, "num_steps": LATE + 20, "audit": audit, "trial": False}
    trained = ps.train(job, out=tmp_path, elastic=elastic, **options)
    assert trained is not None
    told = json.dumps(trained.summary)
    assert words in told
    assert "since the model was traced" in told
    assert str(trained.summary["checked"]).startswith("one process")
    torch.manual_seed(job.seed)
    model, data = job.model(), job.data(0)
    optimizer = job.optimizer(model.parameters())
    for _ in range(LATE + 20):
        for _ in range(2):
            (job.loss(model, next(data)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        assert torch.allclose(trained.outcome.weights[f"weights/{name}"], value, atol=1e-6)


def test_a_run_that_came_to_such_a_change_does_not_go_on_from_a_checkpoint_unseen(tmp_path):
    asked = {"ranks": 2, "audit": "0", "trial": False, "out": tmp_path}
    ps.train(changed_by_data(halve), num_steps=LATE + 20, **asked)
    with pytest.raises(JobError, match=re.escape(ALPHA)) as told:
        ps.train(changed_by_data(halve), num_steps=LATE + 40, resume=True, **asked)
    assert "forget_state=True" in told.value.hint


@pytest.mark.parametrize("elastic", [False, True])
def test_a_run_that_is_stopped_after_such_a_change_leaves_no_checkpoint_of_it(tmp_path, elastic):
    def stop(row) -> None:
        if row["step"] == LATE + 20:
            os.kill(os.getpid(), signal.SIGTERM)

    asked = {"ranks": 2, "num_steps": 100_000, "audit": "0", "trial": False, "elastic": elastic}
    with pytest.raises(Stopped, match="stopped with no checkpoint"):
        ps.train(changed_by_data(straighten), out=tmp_path, on_step=stop, **asked)
    assert checkpoint.latest(tmp_path / "checkpoints") is None
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_a_run_that_is_to_stop_ends_where_a_step_differs(tmp_path, monkeypatch):
    wrong_from_step_6(monkeypatch)
    options = {"ranks": 2, "num_steps": 12, "audit": "50%,stop", "trial": False}
    with pytest.raises(RunError, match="is not what the plain loop makes of it") as told:
        ps.train(linear(), out=tmp_path, checkpoint_every=4, **options)
    assert "resume=True goes on from where it is proved" in told.value.hint
    assert (tmp_path / "differs" / "before").is_dir()
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is None or checkpoint.load(newest).step <= 6


def test_a_difference_is_said_and_no_more_where_that_is_wanted(tmp_path, monkeypatch):
    wrong_from_step_6(monkeypatch)
    options = {"ranks": 2, "num_steps": 12, "audit": "50%,warn", "trial": False}
    trained = ps.train(linear(), out=tmp_path, **options)
    assert trained is not None
    assert trained.plan is not None
    assert trained.summary["audited_to"] < 12
    assert "differs: the update of" in str(trained.summary["audited"])


def test_what_a_process_asks_that_sees_no_board_is_handed_on(tmp_path):
    board, desk = LocalBoard(), AuditDesk()
    files = tuple(os.dup(file) for file in desk.files)
    desk.hand_on(board)
    with closing(AuditDesk(files)) as other, closing(board):
        other.ask_to_audit(3)
        other.ask_to_stop(-2)
        until = time.monotonic() + 60
        while not board.asked() and time.monotonic() < until:
            time.sleep(0.01)
        desk.close()
        assert (board.audits_asked(), board.asked()) == (3, -2)
