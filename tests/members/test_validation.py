"""Validation: one that a death broke off is done again, so that the best checkpoint is the best."""

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.members.member import RunMember
from penstock.runtime import worker
from penstock.runtime.calls import StepResult
from penstock.runtime.rank import Rank
from penstock.runtime.worker import Task
from tests.members import runs
from tests.members.test_kills import check

EVERY = 2
_own = threading.local()  # the number of the member that is this thread


def numbered(number: int, member: RunMember) -> AbstractContextManager[None]:
    _own.number = number
    return nullcontext()


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


@pytest.mark.parametrize(("who", "is_told"), [(0, False), (1, False), (0, True)])
def test_a_validation_that_a_death_broke_off_is_done_again(
    who: int, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it, or when it was done and the first member had not written it down yet.

    The validation itself is left out: members that are threads share the module that it fills.
    """
    task_of, died, told_once = runs.task_of, list[int](), list[int]()

    def validated(task: Task, rank: Rank, checkpoints: Path, step: int) -> None:
        dies = _own.number == who and not died
        if dies and not is_told:
            died.append(who)
            raise runs.Killed
        rank.transport.barrier()
        if dies:
            died.append(who)
            raise runs.Killed
        told_once.append(step)
        rank.report(StepResult(step - 1, None, 0.0, 0, validated={"val_loss": float(step)}))

    def task(*about: Any, **more: Any) -> Task:
        made = task_of(*about, **more)
        return replace(made, policy=replace(made.policy, validate_every=EVERY))

    monkeypatch.setattr(worker, "_validate", validated)
    monkeypatch.setattr(runs, "task_of", task)
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 2, 1), 1: runs.plan_for(ways, 1, 1)}
    told = runs.run(ways, plans, 2, tmp_path, numbered)
    losses = {each.step: each.validated["val_loss"] for each in told.steps if each.validated}
    told.steps = [each for each in told.steps if not each.validated]
    check(told, "gpt", killed=1)
    assert losses == {1: 2.0, 3: 4.0, 4: 5.0}
    assert told_once == [2, 4, 5], "what one has heard is not done again"
