"""What is said of a job, or refused, before its first step."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import penstock as ps
from penstock.errors import JobError
from penstock.runtime.validate import EndlessError, most_of, validated
from penstock.training.listener import SILENT
from penstock.training.outset import check_validation

HELD = TensorDataset(torch.arange(24.0).reshape(12, 2))


def data(start: int) -> Iterator[list[Tensor]]:
    return ([torch.full((4, 2), float(k))] for k in itertools.count(start))


def job(validation) -> ps.Job:
    return ps.Job(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        data=data,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        micro_batches=2,
        num_steps=3,
        validation=validation,
    )


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


ENDLESS = {
    "by number": lambda: ps.batches(HELD, 4)(0),
    "by workers": lambda: ps.batches(HELD, 4, workers=1)(0),
    "of a loader": lambda: ps.from_loader(DataLoader(HELD, 4, shuffle=True))(3),
    "of a stream": lambda: ps.batches(Stream(), 4, shuffle=False)(0),
    "the job's own data": lambda: data(1000),
    "a cycle": lambda: itertools.cycle(DataLoader(HELD, 4)),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_validation_without_end_is_refused_before_a_step(name: str) -> None:
    with pytest.raises(JobError, match=r"without end|does not end") as caught:
        check_validation(job(ENDLESS[name]), "", SILENT)
    assert "itertools.islice(" in caught.value.hint


def test_length_of_an_epoch_is_in_the_hint() -> None:
    with pytest.raises(JobError) as caught:
        check_validation(job(ENDLESS["by number"]), "", SILENT)
    assert caught.value.hint == "end it: validation=lambda: itertools.islice(..., 3)"


ENDS = {
    "a list": lambda: [next(data(k)) for k in range(3)],
    "a loader": lambda: DataLoader(HELD, 4),
    "an epoch": lambda: itertools.islice(ps.batches(HELD, 4)(0), 3),
    "a long one with a length": lambda: [next(data(0))] * 20_000,
    "one that fails": lambda: iter([1 / 0]),
    "none": None,
}


@pytest.mark.parametrize("name", ENDS)
def test_validation_that_ends_or_fails_by_itself_is_not_refused(name: str) -> None:
    check_validation(job(ENDS[name]), "", SILENT)


def test_validation_is_read_one_by_one_and_told_how_far() -> None:
    held, told = list[int](), list[tuple[int, int]]()

    def one_by_one() -> Iterator[list[Tensor]]:
        for number in range(3):
            held.append(number)
            assert len(told) == number, "the one before is done"
            yield [torch.ones(4, 2)]

    found = validated(job(one_by_one), nn.Linear(2, 1), lambda *done: told.append(done))
    assert told == [(1, 0), (2, 0), (3, 0)]
    assert set(found) == {"val_loss"}
    told.clear()
    validated(job(ENDS["a list"]), nn.Linear(2, 1), lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_validation_that_does_not_end_ends_with_an_error_that_counts(monkeypatch) -> None:
    monkeypatch.setattr("penstock.runtime.validate._FEW", 10)
    own = job(lambda: data(0))
    assert most_of(own) == 120
    with pytest.raises(EndlessError, match="120 micro-batches"):
        validated(own, nn.Linear(2, 1))


def test_short_last_micro_batch_counts_by_its_samples() -> None:
    model = nn.Linear(2, 1)
    whole = job(lambda: DataLoader(HELD, 12))
    for size in (5, 7, 11):
        found = validated(job(lambda size=size: DataLoader(HELD, size)), model)
        assert found["val_loss"] == pytest.approx(validated(whole, model)["val_loss"], rel=1e-6)
