"""Weights of micro-batches: factors of a step, and what is refused."""

from dataclasses import replace
from itertools import count, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.batches.loader import epoch_of
from penstock.batches.reads import ReadNumbers, read
from penstock.errors import JobError, PlanError
from penstock.examine.unlike_counts import words_of_counts
from penstock.graph.counted import count_of, counts_in
from penstock.runtime.validate import validated
from penstock.weighted import WeightedData, WeightedLoss
from tests.parity import test_weighted as words


def numbers(start):
    yield from (torch.tensor([float(number % 5 + 1)]) for number in count(start))


def job_of(**more):
    def loss(model, x):
        return model(x).mean(), {"mean": x.mean()}

    about = {"micro_batches": 3, "weight": lambda x: x.sum(), **more}
    return ps.Job(lambda: nn.Linear(1, 1), loss, numbers, words.sgd, **about)


@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 12))
def test_factors_have_the_mean_1_in_each_step_wherever_reading_begins(per_step, start, many):
    data = WeightedData(numbers, lambda x: x, per_step)
    found = list(islice(data(start), many))
    for number, (batch, factor) in enumerate(found, start):
        step = number // per_step
        weights = [k % 5 + 1 for k in range(step * per_step, (step + 1) * per_step)]
        assert float(batch) == number % 5 + 1
        assert float(factor) == pytest.approx(float(batch) * per_step / sum(weights))


def test_a_replica_reads_its_own_of_each_step():
    data = WeightedData(numbers, lambda x: x, 4)
    found = list(islice(read(data, ReadNumbers(8, (1, 3), 4)), 4))
    whole = list(islice(data(8), 8))
    assert [float(b.factor) for b in found] == [float(whole[at].factor) for at in (1, 3, 5, 7)]


def test_a_job_changes_its_steps_and_its_weight_and_drops_it():
    own = job_of()
    assert replace(own, micro_batches=2).data.per_step == 2
    other = replace(own, weight=len)
    assert other.data.weight is len
    assert isinstance(other.loss, WeightedLoss)
    assert not isinstance(other.loss.of, WeightedLoss)
    plain = replace(own, weight=None)
    assert plain.data is numbers
    assert not isinstance(plain.loss, WeightedLoss)
    samples = ps.batches(torch.utils.data.TensorDataset(torch.ones(8)), 4)
    assert epoch_of(job_of().data) == (0, 0)
    made = ps.Job(own.model, own.loss, samples, words.sgd, weight=lambda x: 1.0)
    assert epoch_of(made.data) == (4, 2)
    assert made.micro_batches == 1


def test_other_data_afterwards_is_refused():
    own = replace(job_of(), data=numbers)
    with pytest.raises(JobError, match="given other data afterwards"):
        own.loss(own.model(), next(own.data(0)))


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        (lambda x: -x, "gives -1.0 for micro-batch 0"),
        (lambda x: x / 0, "gives inf for micro-batch 0"),
        (lambda x: {"a": 1}, "gives a dict for micro-batch 0"),
        (lambda x: 0, "gives 0 for every micro-batch of step 0"),
    ],
)
def test_weights_that_cannot_be_are_refused(weight, told):
    with pytest.raises(JobError, match=told):
        next(job_of(weight=weight).data(0))


def test_what_does_not_go_with_weights_is_refused(tmp_path):
    with pytest.raises(JobError, match=r"Job\.batch_by_ranks is set"):
        job_of(batch_by_ranks=True)
    with pytest.raises(JobError, match=r"Job\.weight is the int 3, not a function"):
        job_of(weight=3)
    with pytest.raises(PlanError, match=r"Job\.weight is of steps of one size"):
        ps.train(job_of(), out=tmp_path / "run", listener=None, until_loss=1.0)


def test_validations_weigh_as_steps_do():
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    held = [torch.tensor([1.0]), torch.tensor([3.0])]
    found = validated(job_of(validation=lambda: held), model)
    assert found == pytest.approx({"val_loss": 10 / 4, "val_mean": 10 / 4})


def masked(model, batch):
    each = nn.functional.cross_entropy(
        model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none"
    )
    return each.sum() / (batch["y"] != -100).sum()


@pytest.mark.parametrize("loss", [words.loss, masked])
def test_a_loss_that_divides_by_unlike_counts_is_told(loss):
    own = replace(words.job(), weight=None, loss=loss)
    captured = ps.trace(own).capture
    counts = counts_in(captured)
    found = [count_of(captured, counts, batch) for batch in islice(own.data(0), 4)]
    assert found == [[2.0], [4.0], [6.0], [8.0]]
    told = list(words_of_counts(own, captured))
    assert "unlike counts (2, 4, 6, 8, ..." in told[0]
    assert "Job.weight" in told[2]
    assert list(words_of_counts(replace(own, micro_batches=1), captured)) == []
    mended = replace(own, weight=words.tokens)
    assert list(words_of_counts(mended, captured)) == []


def test_a_loss_that_divides_by_like_counts_or_by_none_is_not():
    def plain(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())

    for own in (replace(words.job(), weight=None, loss=plain), job_of(weight=None)):
        assert list(words_of_counts(own, ps.trace(own).capture)) == []
