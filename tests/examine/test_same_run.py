"""Who goes on with a run, or joins it, has what it began with: else the line is named."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from penstock.errors import JobError
from penstock.examine import same_run
from penstock.examine.surroundings import NOTES, Notes
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.state.optimizer.rates import ReplayedRate


def data(start: int):
    for number in itertools.count(start):
        yield torch.full((2, 2), float(number) + float(os.environ.get("SHIFT", "0")))


JOB = Job(
    model=lambda: nn.Linear(2, 1),
    loss=lambda model, x: (model(x) * torch.tensor([2.0])).square().mean(),
    data=data,
    optimizer=lambda weights: SGD(weights, lr=0.1),
    micro_batches=2,
    num_steps=8,
)


def begun(folder: Path, job: Job = JOB) -> Path:
    same_run.keep_facts(folder, facts(job))
    return folder


def facts(job: Job) -> same_run.RunFacts:
    found = same_run.run_facts_of(job, capture(job))
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def fresh_notes(monkeypatch) -> None:
    monkeypatch.setattr(same_run, "NOTES", Notes())
    monkeypatch.setattr("penstock.examine.rank_inputs.NOTES", same_run.NOTES)
    monkeypatch.setattr("penstock.examine.surroundings.NOTES", same_run.NOTES)
    assert NOTES is not same_run.NOTES


def test_the_same_job_joins_and_goes_on(tmp_path) -> None:
    folder = begun(tmp_path)
    same_run.check_joins(folder, facts(JOB))
    assert same_run.check_goes_on(folder, facts(JOB)) == ""
    same_run.check_joins(tmp_path / "older", facts(JOB))  # whose folder says nothing


@pytest.mark.parametrize("traced_first", [True, False])
def test_a_run_goes_on_where_only_one_of_both_is_traced(tmp_path, traced_first) -> None:
    first, then = (None, capture(JOB))[:: -1 if traced_first else 1]
    same_run.keep_facts(tmp_path, same_run.run_facts_of(JOB, first))
    assert same_run.check_goes_on(tmp_path, same_run.run_facts_of(JOB, then)) == ""


def other_data(start: int):
    return (batch + 1.0 for batch in data(start))


OTHERS = {
    "data": (replace(JOB, data=other_data), "micro-batch 0"),
    "a constant": (
        replace(JOB, loss=lambda m, x: (m(x) * torch.tensor([3.0])).square().mean()),
        "constant 0 of the loss",
    ),
    "a number of the job": (replace(JOB, clip_norm=2.0), "Job.clip_norm is 2.0"),
    "an option": (replace(JOB, optimizer=lambda w: SGD(w, lr=0.2)), "lr of group 0"),
    "a rate": (replace(JOB, learning_rate=lambda step: 0.5), "learning rate of step 0 is 0.5"),
}


@pytest.mark.parametrize(("other", "words"), OTHERS.values(), ids=OTHERS)
def test_who_has_something_else_does_not_join(tmp_path, other, words) -> None:
    with pytest.raises(JobError, match=words) as refused:
        same_run.check_joins(begun(tmp_path), facts(other))
    assert str(tmp_path) in refused.value.message


@pytest.mark.parametrize("what", ["data", "a constant"])
def test_a_run_does_not_go_on_with_what_no_checkpoint_holds(tmp_path, what) -> None:
    other, words = OTHERS[what]
    with pytest.raises(JobError, match=words) as refused:
        same_run.check_goes_on(begun(tmp_path), facts(other))
    assert "forget_state=True" in refused.value.hint


@pytest.mark.parametrize("what", ["a number of the job", "an option"])
def test_a_run_goes_on_with_what_its_author_has_set_since(tmp_path, what) -> None:
    assert same_run.check_goes_on(begun(tmp_path), facts(OTHERS[what][0])) == ""


def test_the_line_that_reads_what_has_changed_is_named(tmp_path, monkeypatch) -> None:
    folder = begun(tmp_path)
    monkeypatch.setenv("SHIFT", "3")
    words = r"test_same_run.py:\d+ reads SHIFT, which is another one now"
    with pytest.raises(JobError, match=words):
        same_run.check_joins(folder, facts(JOB))


def test_a_rate_of_the_step_alone_may_be_another_one_and_is_told(tmp_path) -> None:
    folder = begun(tmp_path, replace(JOB, learning_rate=lambda step: 1.0))
    told = same_run.check_goes_on(folder, facts(replace(JOB, learning_rate=lambda step: 0.5)))
    assert "the learning rate of step 0 is 0.5" in told


def test_a_rate_that_keeps_state_has_to_give_what_it_gave(tmp_path) -> None:
    def drawn(seed: int) -> Job:
        source = torch.Generator().manual_seed(seed)
        rate = ReplayedRate(lambda step: float(torch.rand((), generator=source)))
        return replace(JOB, learning_rate=rate)

    folder = begun(tmp_path, drawn(1))
    assert same_run.check_goes_on(folder, facts(drawn(1))) == ""
    with pytest.raises(JobError, match="learning rate of step 0"):
        same_run.check_goes_on(folder, facts(drawn(2)))


def test_nothing_known_leaves_no_file_of_an_older_run(tmp_path) -> None:
    same_run.keep_facts(begun(tmp_path), None)
    assert not (tmp_path / same_run.FACTS).exists()
