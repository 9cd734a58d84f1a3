"""A member that becomes slow gives micro-batches away in another generation, and gets them back."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.members.member import RunMember
from penstock.members.words import View
from penstock.pilot.slow_ranks import slowed
from penstock.plan import Plan
from penstock.training import elastic_run
from penstock.training.begin import Begin
from tests.members import runs
from tests.members.test_kills import check


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


def slow(monkeypatch: pytest.MonkeyPatch, who: int, steps: range, ready_s: float = 0.0) -> None:
    """Let a member be three times slower in some steps, as its samples tell.

    ready_s:  what a generation is thought to take.
    """
    hears = elastic_run.RunPilot.hears

    def heard(pilot: elastic_run.RunPilot, *about) -> None:
        pilot._ready_s = ready_s
        hears(pilot, *about)

    monkeypatch.setattr(elastic_run.RunPilot, "hears", heard)

    def slowness(member: RunMember, own) -> float:
        now = max(own.first, own.vote.passed + 1)
        return 3.0 if member.mesh.own == who and now in steps else 1.0

    monkeypatch.setattr(RunMember, "_slowness", slowness)


def shares_of(told) -> list[tuple[int, ...]]:
    return [Plan.from_text(event.view.plan).grid.shares for event in told.events]


def test_micro_batches_go_to_the_others_and_come_back(tmp_path: Path, monkeypatch) -> None:
    slow(monkeypatch, 1, range(2))
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 1, 2), 1: runs.plan_for(ways, 1, 1)}
    told = runs.run(ways, plans, 2, tmp_path)
    check(told, "gpt", killed=0)
    assert shares_of(told) == [(2, 2), (3, 1), (2, 2)]
    assert [event.what for event in told.events] == ["begins", "moved", "moved"]
    assert all(event.moved_bytes == 0 for event in told.events)
    assert told.events[1].view.why.startswith("asked for: share")


def test_little_that_is_left_is_no_reason(tmp_path: Path, monkeypatch) -> None:
    slow(monkeypatch, 1, range(2), ready_s=1e6)
    ways = runs.ways_of("gpt", "adamw", 2)
    told = runs.run(ways, {2: runs.plan_for(ways, 1, 2)}, 2, tmp_path)
    check(told, "gpt", killed=0)
    assert shares_of(told) == [(2, 2)]


def test_slow_member_and_a_loss_are_priced_together(tmp_path: Path, monkeypatch) -> None:
    """Three replicas, one slow and one killed: the slow one has less to do with what is left."""
    slow(monkeypatch, 1, range(1, 9))
    ways = runs.ways_of("gpt", "adamw", 3)
    plans = {count: runs.plan_for(ways, 1, count) for count in (3, 2, 1)}
    told = runs.run(ways, plans, 3, tmp_path, runs.doomed(2, 3, 4))
    check(told, "gpt", killed=1)
    last = told.events[-1].view
    assert sorted(last.members) == [0, 1]
    shares = dict(zip(last.members, shares_of(told)[-1], strict=True))
    assert shares[1] < shares[0]


def test_a_profile_of_any_device_is_slower_for_who_is_slow() -> None:
    ways = runs.ways_of("gpt", "adamw", 2)
    (profile,) = ways.ways[0].profiles
    found = slowed(ways.cluster, [1.0, 2.0]).profiles((replace(profile, kind=""),))
    assert [sum(each.op_s) / sum(profile.op_s) for each in found] == pytest.approx([1.0, 2.0])


def test_a_plan_is_read_once_and_not_at_every_step(monkeypatch) -> None:
    ways = runs.ways_of("gpt", "adamw", 2)
    plan = runs.plan_for(ways, 1, 2)
    task = partial(runs.task_of, folder=Path("nowhere"))
    pilot = elastic_run.RunPilot(elastic_run.ElasticRun(ways, task, {2: plan}, Begin(), runs.STEPS))
    view, read, real = (
        View(1, 0, elastic_run.text_of(plan), (0, 1)),
        list[Plan](),
        elastic_run.text_of,
    )
    monkeypatch.setattr(elastic_run, "text_of", lambda plan: read.append(plan) or real(plan))
    for step in range(3):
        pilot.hears(view, (1.0, 1.0))
        assert not pilot.shares(view, step)
    assert len(read) == 1
