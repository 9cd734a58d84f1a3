"""What one process has found of a job's data, told to others."""

import json
from dataclasses import asdict

import pytest
import torch

import penstock as ps
from penstock.batches.by_shape import ByShape
from penstock.batches.one_key import keys_of
from penstock.choose.known_shapes import told_by
from penstock.choose.number_tensors import NumberTensors, with_tensors_at
from penstock.choose.told_data import ToldData, told_by_data
from penstock.typed import typed
from penstock.weighted import WeightedData


def data(start):
    for number in range(start, 99):
        yield {"warmth": 0.5 + number, "x": torch.zeros(2 + number % 2, 3)}


def job_of(*, weight=None) -> ps.Job:
    loss = lambda model, batch: model(batch["x"]).mean()  # noqa: E731
    optimizer = lambda weights: torch.optim.SGD(weights, lr=0.1)  # noqa: E731
    model = lambda: torch.nn.Linear(3, 3)  # noqa: E731
    return ps.Job(model, loss, data, optimizer, micro_batches=1, weight=weight)


def again(told: ToldData) -> ToldData:
    return typed(ToldData, json.loads(json.dumps(asdict(told))))


@pytest.mark.parametrize("weight", [None, lambda batch: batch["x"].sum() + 1])
def test_shapes_of_all_micro_batches_are_told(weight):
    job = job_of(weight=weight)
    told = told_by_data(told_by(job, ["long", "short"], [1, 0, 0, 1]))
    other = again(told).of(job)
    own = other.data.of if isinstance(other.data, WeightedData) else other.data
    assert isinstance(own, ByShape)
    assert own.shapes == ("short", "long", "long", "short")
    assert keys_of(other) == {"short": 2, "long": 2}
    assert told_by_data(other) == told


@pytest.mark.parametrize("weight", [None, lambda batch: batch["x"].sum() + 1])
def test_which_numbers_are_tensors_is_told(weight):
    job = job_of(weight=weight)
    told = told_by_data(with_tensors_at(job, [0]))
    other = again(told).of(job)
    own = other.data.of if isinstance(other.data, WeightedData) else other.data
    assert isinstance(own, NumberTensors)
    assert torch.equal(next(own(3))["warmth"], torch.tensor(3.5))
    assert told_by_data(other) == told


def test_of_data_as_it_was_written_nothing_is_told():
    job = job_of()
    assert told_by_data(job) == ToldData()
    assert ToldData().of(job) is job
