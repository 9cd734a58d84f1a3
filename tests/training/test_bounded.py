"""Bounded: what a job's optimizer and buffers leave of what was asked for."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.examine.examine import Examined, bounded
from penstock.job import Job
from penstock.search import Fixed
from penstock.state.laws.buffers import BufferLaw

JOB = Job(
    model=lambda: torch.nn.Linear(2, 2),
    loss=lambda model, x: model(x).square().mean(),
    data=lambda start: iter([torch.ones(1, 2)]),
    optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
    micro_batches=4,
)
QUEUE = Examined(laws={"queue": BufferLaw(None, "the loss reads it")})
MEAN = Examined(laws={"mean": BufferLaw(0.9, "")})
WHOLE = "a hook looks at other parameters"


def left(found: Examined, asked: Fixed, whole: str = WHOLE, job: Job = JOB) -> tuple:
    fixed, decisions = bounded(job, found, whole, asked)
    return fixed.ranks, {one.what: (one.value, one.by) for one in decisions}


def test_a_whole_optimizer_beside_a_buffer_in_order_is_trained_on_one_of_the_ranks_asked_for() -> (
    None
):
    ranks, decided = left(QUEUE, Fixed(ranks=2))
    assert ranks == 1
    assert decided["ranks"] == ("1", "only choice")
    _, decisions = bounded(JOB, QUEUE, WHOLE, Fixed(ranks=2))
    assert "one copy: buffers must see every micro-batch in order" in decisions[-1].why


@pytest.mark.parametrize(
    ("found", "whole", "asked"),
    [
        (MEAN, WHOLE, Fixed(ranks=2)),  # replicas
        (QUEUE, "", Fixed(ranks=2)),  # stages
        (QUEUE, WHOLE, Fixed(ranks=1)),
        (QUEUE, WHOLE, Fixed()),  # the search has the choice
        (QUEUE, WHOLE, Fixed(ranks=2, replicas=2)),  # asked for by name: refused as before
        (QUEUE, WHOLE, Fixed(ranks=2, schedule="gpipe")),
    ],
)
def test_ranks_stay_as_asked_where_there_is_something_for_them_or_more_was_asked(
    found: Examined, whole: str, asked: Fixed
) -> None:
    ranks, decided = left(found, asked, whole)
    assert ranks == asked.ranks
    assert "ranks" not in decided


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_whole_optimizer_has_at_most_one_copy_for_each_micro_batch(
    ranks: int, micro_batches: int
) -> None:
    job = replace(JOB, micro_batches=micro_batches)
    left_ranks, _ = left(MEAN, Fixed(ranks=ranks), job=job)
    assert left_ranks == min(ranks, micro_batches)
