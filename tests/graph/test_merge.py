"""A job that begins with a later micro-batch: the same data, joined too, and the same dropout."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.batches import ReadNumbers, read
from penstock.errors import GraphError
from penstock.graph.code import micro_batch_seed, seed_ahead
from penstock.graph.merge import ahead, merged, parts_of, unjoined


def _job(**more):
    import torch

    def data(start):
        for number in itertools.count(start):
            yield torch.tensor([[float(number)]])

    return ps.Job(torch.nn.Identity, lambda m, b: b.sum(), data, lambda w: w, **more)


@given(st.integers(0, 2**63 - 1), st.integers(-(10**9), 10**9), st.integers(0, 10**9))
def test_seed_ahead_gives_the_seeds_of_later_micro_batches(seed, count, number):
    made = seed_ahead(seed, count)
    assert made >= 0
    assert micro_batch_seed(made, number) == micro_batch_seed(seed, number + count)


@given(st.integers(0, 50), st.integers(1, 3), st.integers(0, 7))
def test_data_ahead_is_that_of_later_numbers_also_joined(count, joined, start):
    later = merged(ahead(_job(micro_batches=6), count), joined)
    reads = ReadNumbers(start, (0, 2), 3)
    batches = itertools.islice(read(later.data, reads), 4)
    found = [batch.flatten().tolist() for batch in batches]
    places = [start, start + 2, start + 3, start + 5]
    assert found == [[float(p * joined + k + count) for k in range(joined)] for p in places]
    first = next(iter(later.data(start)))
    assert first.flatten().tolist() == found[0]


@given(st.integers(1, 3), st.integers(0, 7))
def test_parts_of_a_joined_batch_are_the_micro_batches(joined, start):
    job = merged(_job(micro_batches=6), joined)
    batch = next(iter(job.data(start)))
    found = [part.flatten().tolist() for part in parts_of(job, batch)]
    assert found == [[float(start * joined + k)] for k in range(joined)]
    later, count = unjoined(ahead(job, 2))
    assert (count, later.micro_batches) == (joined, 6)
    assert next(iter(later.data(start))).item() == start + 2 * joined


def test_micro_batch_of_another_length_is_named():
    import torch

    def data(start):
        for number in itertools.count(start):
            yield torch.zeros(2, 4 + number)

    job = ps.Job(torch.nn.Identity, lambda m, b: b.sum(), data, lambda w: w, micro_batches=2)
    with pytest.raises(GraphError, match=r"float32\[2, 4\] and float32\[2, 5\]") as found:
        next(iter(merged(job, 2).data(0)))
    assert "drop or pad" in found.value.hint
