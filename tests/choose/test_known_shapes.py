"""A loader that pads each batch to its longest, whose shapes are looked at before the run."""

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.batches.by_shape import ByShape
from penstock.batches.one_key import is_by_shape, job_of_key, keys_of
from penstock.batches.reads import ReadNumbers
from penstock.choose import known_shapes
from penstock.choose.known_shapes import with_known_shapes
from penstock.keyed import keyed


def data(start: int):
    """Yield numbers as long as they say."""
    while True:
        yield torch.full((2, 3 + start % 3), start)
        start += 1


def job_of(given: Any = data, **more: Any) -> ps.Job:
    loss = lambda model, batch: model(batch[:, :1].float()).mean()  # noqa: E731
    return ps.Job(
        lambda: nn.Linear(1, 1), loss, given, torch.optim.SGD, **({"micro_batches": 1} | more)
    )


@pytest.mark.parametrize("weight", [None, lambda batch: batch.numel()])
def test_data_tells_the_shape_of_each_micro_batch_of_the_run(weight):
    job = with_known_shapes(job_of(weight=weight), 60)
    assert job is not None
    assert is_by_shape(job)
    assert keys_of(job) == {f"int64[2, {n}]": 20 for n in (3, 4, 5)}
    known: Any = keyed(job.data)
    assert [known.key_of(number) for number in (0, 4, 59)] == [
        "int64[2, 3]",
        "int64[2, 4]",
        "int64[2, 5]",
    ]
    own = job_of_key(job, "int64[2, 4]")
    assert is_by_shape(own)
    first = next(own.data(1))
    assert torch.equal(first.batch if weight else first, next(data(4)))


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({}, 59),  # too few of each
        ({"micro_batches": 2}, 60),
        ({"given": lambda start: islice(data(start), 0, 30)}, 60),
        ({"given": lambda start: (torch.ones(1, 1) for _ in range(99))}, 60),  # one shape
        ({"given": lambda start: (torch.ones(1, n + 1) for n in range(999))}, 600),
        ({"given": lambda start: ([torch.ones(1).to_sparse()] for n in range(999))}, 60),
        ({"given": lambda start: iter([1 / 0])}, 60),
    ],
)
def test_what_cannot_be_planned_so_stays_as_it_is(more, steps):
    assert with_known_shapes(job_of(**more), steps) is None


def test_reading_is_given_up_where_it_takes_long(monkeypatch):
    monkeypatch.setattr(known_shapes, "_READ_S", -1.0)
    assert with_known_shapes(job_of(), 60) is None


@given(st.integers(1, 9), st.integers(0, 30), st.integers(1, 20))
def test_micro_batches_are_those_of_the_run_over_and_over(count, start, wanted):
    def counting(first: int):
        while True:
            yield first
            first += 1

    shapes = tuple(str(number % 2) for number in range(count))
    told = ByShape(counting, shapes)
    assert list(islice(told(start), wanted)) == [(start + k) % count for k in range(wanted)]
    assert all(told.key_of(k) == shapes[k % count] for k in range(start))
    assert list(islice(told.picked(ReadNumbers(start, (0, 2), 3)), 3)) == [
        number % count for number in (start, start + 2, start + 3)
    ]
    assert sum(told.keys.values()) == count
