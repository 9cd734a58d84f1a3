"""Numbers of a batch that change, as tensors where the loss makes the same of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.batches.reads import ReadNumbers
from penstock.choose.number_tensors import NumberTensors, with_number_tensors


def data(start: int):
    """Yield rows with a number of each kind, and one that stays."""
    for number in range(start, 200):
        torch.manual_seed(number)
        rows = torch.randn(4, 3)
        yield {"x": rows, "t": 0.1 + number / 7, "n": number + 1, "stays": 0.5, "name": "row"}


def job_of(scaled: Callable[[Any, Any], Any], **more: Any) -> ps.Job:
    loss = lambda model, batch: scaled(model(batch["x"]), batch)  # noqa: E731
    return ps.Job(lambda: nn.Linear(3, 2), loss, data, torch.optim.SGD, micro_batches=1, **more)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda y, batch: (y * batch["t"]).square().mean(),
        lambda y, batch: y.square().mean() * batch["t"] / batch["n"],
        lambda y, batch: (
            (y / (1 + batch["n"]) ** 0.5 + batch["t"] * batch["stays"]).square().mean()
        ),
        lambda y, batch: y.square().mean() * (batch["t"] if batch["n"] > 0 else 0),
    ],
)
def test_what_is_only_computed_with_becomes_a_tensor(scaled):
    job = with_number_tensors(job_of(scaled))
    assert job is not None
    for number, batch in zip((0, 7), (next(job.data(0)), next(job.data(7))), strict=True):
        assert torch.equal(batch["x"], next(data(number))["x"])
        assert torch.equal(batch["t"], torch.tensor(0.1 + number / 7))
        assert torch.equal(batch["n"], torch.tensor(number + 1))
        assert batch["stays"] == 0.5
        assert type(batch["stays"]) is float


@pytest.mark.parametrize(
    "scaled",
    [
        lambda y, batch: y.square().mean() * (batch["t"] if isinstance(batch["t"], float) else 0),
        lambda y, batch: y.double().square().mean() * batch["t"],  # a third of which is rounded
        lambda y, batch: y.bfloat16().square().mean() * batch["t"],  # of another type, then
        lambda y, batch: y.square().mean() * {1: 1.0, 2: 2.0, 3: 3.0}[batch["n"]],
    ],
)
def test_a_loss_that_makes_something_else_of_a_tensor_keeps_numbers(scaled):
    assert with_number_tensors(job_of(scaled)) is None


def test_numbers_that_stay_are_left():
    job = job_of(lambda y, batch: y.square().mean())
    same = lambda start: ({**each, "t": 1.0, "n": 2} for each in data(start))  # noqa: E731
    same_job = ps.Job(job.model, job.loss, same, torch.optim.SGD, micro_batches=1)
    assert with_number_tensors(same_job) is None


@given(st.lists(st.tuples(st.integers(-99, 99), st.booleans()), min_size=9, max_size=9))
def test_only_numbers_at_the_places_are_made_tensors(rows):
    told = NumberTensors(lambda start: iter(rows[start:]), (0,))
    for row, (number, flag) in zip(rows, told.picked(ReadNumbers(0, (0,), 1)), strict=True):
        assert torch.equal(number, torch.tensor(row[0]))
        assert flag is row[1]
