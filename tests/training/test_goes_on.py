"""What a run that goes on, or that cannot be what was asked, is told in words."""

import math
import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from torch import nn

import penstock as ps
from penstock.errors import JobError, PlanError
from penstock.examine.examine import Examined
from penstock.graph.batch import Division, key_of
from penstock.graph.merge import merged
from penstock.graph.trace import capture
from penstock.processes.child import in_a_fork
from penstock.runtime.autopsy import by_the_data
from penstock.runtime.finite import NotFinite, NotFiniteError, check_loss
from penstock.training.begin import Begin
from penstock.training.plan_choice import other_job
from penstock.training.run_asked import JobLearned
from penstock.training.run_folder import check_micro_batches
from penstock.training.saved import keep_job, kept_micro_batches
from penstock.training.session import Session
from tests.cli import mlp


def session(folder, job: ps.Job, **fields) -> Session:
    about = {"num_steps": 9, "fixed": None, "resume": True, **fields}
    return Session(job=job, author=job, folder=folder, there=SimpleNamespace(), **about)


@pytest.mark.parametrize(("before", "done", "next_one"), [(8, 3, "24"), (2, 1000, "2,000")])
def test_other_micro_batches_than_before_are_refused_with_the_place_in_the_data(
    tmp_path, before: int, done: int, next_one: str
) -> None:
    keep_job(tmp_path, "", 9, before)
    own = session(tmp_path, mlp.job())
    with pytest.raises(PlanError, match=f"micro-batch {next_one} of the data is next") as caught:
        check_micro_batches(own, done)
    assert f"micro_batches={before} again" in caught.value.hint


def test_equal_micro_batches_or_those_that_nobody_kept_are_not_refused(tmp_path) -> None:
    own = session(tmp_path, mlp.job())
    check_micro_batches(own, 3)
    keep_job(tmp_path, "", 9)
    assert kept_micro_batches(tmp_path) is None
    check_micro_batches(own, 3)
    keep_job(tmp_path, "", 9, mlp.job().micro_batches)
    check_micro_batches(own, 3)


@pytest.mark.parametrize(
    ("found", "untraced", "why"),
    [
        (Examined(), "file.py:3: control flow on values", "file.py:3: control flow"),
        (Examined(one_process="data ignores its start"), "", "data ignores its start"),
    ],
)
def test_elastic_run_without_a_plan_is_refused_with_the_reason(
    tmp_path, found: Examined, untraced: str, why: str
) -> None:
    own = session(tmp_path, mlp.job(), elastic=True, learned=JobLearned(untraced=untraced))
    with pytest.raises(PlanError, match=why) as caught:
        own.train_eagerly(Begin(), found)
    assert "leave out elastic" in caught.value.hint


def frozen(names: tuple[str, ...]) -> ps.Job:
    def model() -> nn.Module:
        made = mlp.model()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in names)
        return made

    return replace(mlp.job(), model=model)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ((), ("0.0.weight",), "0.0.weight is frozen now"),
        (("4.bias", "4.weight"), (), "4.bias, 4.weight was frozen"),
        (("4.bias",), ("0.0.weight",), "0.0.weight is frozen now; 4.bias was frozen"),
    ],
)
def test_parameters_that_were_frozen_or_thawed_before_a_resume_are_named(
    tmp_path, before: tuple[str, ...], now: tuple[str, ...], words: str
) -> None:
    capture(frozen(before)).graph.save(tmp_path / "graph.json")
    problem = PlanError("another graph")
    assert other_job(tmp_path, capture(frozen(now)), problem) == f"{words} (requires_grad)"
    assert other_job(tmp_path, capture(frozen(before)), problem) == "another graph"


@pytest.mark.parametrize("code", [0, 2, "enough"])
def test_exit_in_data_is_told_with_its_line(code: object) -> None:
    with pytest.raises(JobError, match=r"test_goes_on.py:\d+: sys.exit\(") as caught:
        in_a_fork(lambda beat: sys.exit(code), 300.0)
    assert repr(code) in caught.value.message
    assert "return" in caught.value.hint


@pytest.mark.parametrize(("count", "at", "numbers"), [(2, 7, "14 to 15"), (4, 7, "28 to 31")])
def test_micro_batch_that_is_joined_has_the_numbers_of_the_authors_data(
    count: int, at: int, numbers: str
) -> None:
    found = NotFinite(f"the loss of step 8 (number {at} of the data),", "nan", 7, (at,))
    words = by_the_data(str(found), merged(mlp.job(), count), found)
    assert words == f"the loss of step 8 (numbers {numbers} of the data, as one), is nan"
    assert by_the_data(str(found), mlp.job(), found) == str(found)


def test_part_of_a_micro_batch_is_named_by_the_authors_number() -> None:
    job = mlp.job()
    key = key_of(next(iter(job.data(0))))
    divided = merged(job, Fraction(1, 4), Division(4, (0,), (), key))
    with pytest.raises(NotFiniteError) as caught:
        check_loss(math.nan, 2, 6, 38)
    words = by_the_data(str(caught.value.found), divided, caught.value.found)
    own = "micro-batch 1 (number 9 of the data, part 3 of 4)"
    assert words == f"the loss of step 3, {own}, is nan"


@pytest.mark.parametrize(("count", "at", "own", "place"), [(2, 5, 11, 3), (4, 2, 9, 1)])
def test_loss_of_one_joined_micro_batch_is_named_by_its_own_number(
    count: int, at: int, own: int, place: int
) -> None:
    step, whole = 8 // count, merged(mlp.job(), count)
    with pytest.raises(NotFiniteError) as caught:
        check_loss(math.nan, 2, at - step, at)
    words = by_the_data(str(caught.value.found), whole, caught.value.found, own)
    told = f"the loss of step 3, micro-batch {place} (number {own} of the data), is nan"
    assert words == told
