"""Values that places of a step hand on: who has which, and what is refused."""

from dataclasses import replace
from itertools import count, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.batches.reads import ReadNumbers, read
from penstock.checkpoints import checkpoint
from penstock.errors import JobError
from penstock.runtime.infer import inference_job
from penstock.runtime.validate import validated
from penstock.step_places import PlacedBatch, PlacedData, PlacedLoss, PlacedModel, PlacedValues
from penstock.training.export import trained


def numbers(start):
    yield from (torch.tensor([float(number)]) for number in count(start))


def summed(model, x, carry):
    carry["sum"] = carry["sum"] + x.mean()
    return model(x).mean() + carry["sum"], {"sum": carry["sum"]}


def job_of(**more):
    own = {
        "model": lambda: nn.Linear(1, 1),
        "loss": summed,
        "data": numbers,
        "optimizer": lambda weights: torch.optim.SGD(weights, 0.1),
        "micro_batches": 3,
        "carry": {"sum": torch.tensor(3.0)},
    }
    return ps.Job(**{**own, **more})


@given(st.integers(1, 5), st.integers(0, 20), st.data())
def test_a_micro_batch_has_the_place_of_its_number(per_step, start, drawn):
    data = PlacedData(numbers, per_step)
    for number, found in enumerate(islice(data(start), 7), start):
        assert (float(found.batch), int(found.place)) == (number, number % per_step)
    places = drawn.draw(st.lists(st.integers(0, per_step - 1), min_size=1, unique=True).map(sorted))
    reads = ReadNumbers(start * per_step, places, per_step)
    taken = list(islice(read(data, reads), 2 * len(places)))
    assert [int(each.place) for each in taken] == 2 * places
    assert [int(each.batch) for each in taken] == list(islice(reads.numbers(), 2 * len(places)))


def test_each_place_reads_what_it_has_written_and_no_gradient_goes_through():
    rows = {"h": torch.zeros(3, 2)}
    first, other = (PlacedValues(rows, torch.tensor(at)) for at in (2, 0))
    first["h"] = torch.ones(2, requires_grad=True) * 5
    assert not first["h"].requires_grad
    assert (first["h"].tolist(), other["h"].tolist()) == ([5, 5], [0, 0])
    assert rows["h"].tolist() == [[0, 0], [0, 0], [5, 5]]
    assert (list(first), len(first)) == (["h"], 1)
    anew = PlacedValues({"h": torch.zeros(2)}, None)
    anew["h"] = torch.ones(2, requires_grad=True)
    assert (anew["h"].tolist(), anew["h"].requires_grad) == ([1, 1], False)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda own: own["g"], r'Job\.carry has no "g": it has h'),
        (lambda own: own.__setitem__("h", torch.zeros(3)), r"tensor \[3\] of torch.float32, and"),
        (lambda own: own.__setitem__("h", torch.zeros(2).long()), r"\[2\] of torch.int64, and"),
        (lambda own: own.__setitem__("h", 1.5), r"is set to the float 1.5"),
        (lambda own: own.pop("h"), r'carry\["h"\] is deleted'),
    ],
)
@pytest.mark.parametrize("place", [None, torch.tensor(0)])
def test_what_cannot_be_handed_on_is_refused(act, why, place):
    rows = {"h": torch.zeros(2) if place is None else torch.zeros(1, 2)}
    with pytest.raises(JobError, match=why):
        act(PlacedValues(rows, place))


@pytest.mark.parametrize(
    ("carry", "why"),
    [
        ([torch.zeros(1)], "not tensors by name"),
        ({}, "not tensors by name"),
        ({"a.b": torch.zeros(1)}, "no identifier"),
        ({"h": 0.0}, r'Job\.carry\["h"\] is 0\.0, not a plain tensor'),
        ({"h": torch.zeros(1, requires_grad=True)}, "is a tensor that learns"),
    ],
)
def test_what_is_no_carry_is_refused(carry, why):
    with pytest.raises(JobError, match=why):
        job_of(carry=carry)


@pytest.mark.parametrize(
    "more", [{"batch_by_ranks": True}, {"buffers": "per replica"}, {"batch_range": (1, 9)}]
)
def test_steps_of_other_places_are_refused(more):
    with pytest.raises(JobError, match="needs steps of the same 3 places"):
        job_of(**more)


def test_a_job_changes_its_steps_and_drops_its_carry():
    own = replace(job_of(), micro_batches=2)
    assert own.data.per_step == own.model.per_step == 2
    assert isinstance(own.loss, PlacedLoss)
    assert not isinstance(own.loss.of, PlacedLoss)
    assert own.model().carry.sum.tolist() == [3, 3]
    plain = replace(own, carry=None)
    assert (plain.loss, plain.data) == (summed, numbers)
    assert not isinstance(plain.model, PlacedModel)
    others = replace(own, data=lambda start: own.data(start))
    assert not isinstance(others.data, PlacedData)  # its batches have places


def test_data_or_a_model_that_is_given_afterwards_is_refused():
    other = replace(job_of(), data=numbers)
    with pytest.raises(JobError, match="given other data afterwards"):
        other.loss(other.model(), torch.zeros(1))
    other = replace(job_of(), model=lambda: nn.Linear(1, 1))
    with pytest.raises(JobError, match="given another one afterwards"):
        other.loss(other.model(), next(other.data(0)))


def test_a_model_with_that_attribute_is_refused():
    def model():
        module = nn.Linear(1, 1)
        module.carry = 3
        return module

    with pytest.raises(JobError, match="has an attribute carry"):
        job_of(model=model).model()


def test_what_is_saved_is_read_into_the_authors_model(tmp_path):
    own = job_of(num_steps=2)
    ps.train(own, ranks=1, out=tmp_path, check=False)
    plain = nn.Linear(1, 1)
    assert ps.load_weights(plain, tmp_path) == 2
    kept = checkpoint.load(checkpoint.latest(tmp_path / "checkpoints"))
    assert torch.equal(trained(own, kept).weight, plain.weight)
    assert kept.tensors["buffers/carry.sum"].tolist() == [3 + 0 + 3, 3 + 1 + 4, 3 + 2 + 5]


def test_inference_begins_anew_with_each_micro_batch():
    made = inference_job(job_of())
    model, x = made.model(), torch.tensor([5.0])
    told, _ = made.loss(model, x)
    assert float(told.detach()) == pytest.approx(float(model(x).detach()) + 3 + 5)


def test_weights_are_of_the_authors_batches():
    own = job_of(weight=lambda x: float(x) + 1)
    found = list(islice(own.data(3), 3))
    assert [float(each.batch.factor) for each in found] == pytest.approx([0.8, 1.0, 1.2])
    model = own.model()
    loss, figures = own.loss(model, found[1])
    assert float(figures["sum"]) == 3 + 4
    assert model.carry.sum.tolist() == [3, 7, 3]
    assert float(loss.detach()) == pytest.approx(float(model(found[1].batch.batch).detach()) + 7)


def test_validation_begins_anew_and_keeps_nothing():
    own = job_of(validation=lambda: islice(numbers(5), 2))
    model = own.model()
    found = validated(own, model)
    assert found["val_sum"] == pytest.approx(3 + 5.5)
    assert model.carry.sum.tolist() == [3, 3, 3]


def test_no_place_keeps_nothing():
    own = job_of()
    model = own.model()
    own.loss(model, PlacedBatch(torch.ones(1), None))
    assert model.carry.sum.tolist() == [3, 3, 3]
