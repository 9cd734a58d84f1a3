"""A job that begins with a later micro-batch: the same data, joined too, and the same dropout."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.batches import ReadNumbers, read
from penstock.errors import GraphError
from penstock.graph.batch import Division, key_of
from penstock.graph.code import micro_batch_seed, seed_ahead
from penstock.graph.merge import ahead, merged, number_of, parts_of, unjoined


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
    assert "drop_last=True, or pad" in found.value.hint


def _rows(**more):
    """Return a job whose micro-batch k is 12 rows of numbers of its own, and its division."""
    import torch

    def data(start):
        for number in itertools.count(start):
            yield {"x": torch.arange(12) + 12 * number, "number": torch.tensor(number)}

    job = ps.Job(torch.nn.Identity, lambda m, b: b.sum(), data, lambda w: w, **more)
    return job, key_of(next(iter(job.data(0))))


@given(
    st.sampled_from([2, 3, 4, 6]),
    st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True).map(sorted),
    st.integers(0, 9),
    st.integers(0, 30),
    st.integers(0, 4),
)
def test_parts_of_any_numbers_are_rows_of_their_micro_batches(parts, places, more, first, at):
    job, key = _rows(micro_batches=2)
    divided = merged(job, Fraction(1, parts), Division(parts, (0,), (1,), key))
    assert divided.micro_batches == 2 * parts
    reads = ReadNumbers(first, tuple(places), places[-1] + 1 + more, min(at, len(places) - 1))
    size = 12 // parts
    for number, (rows, own, part) in zip(reads.numbers(), read(divided.data, reads), strict=False):
        start = number * size  # 12 rows of each micro-batch, one after the other
        assert rows.tolist() == list(range(start, start + size))
        assert (own.item(), part.item()) == divmod(number, parts)
        assert number_of(divided, number) == own.item()
        if number > first + 3 * reads.every:
            break


def test_micro_batch_is_read_once_for_its_parts_and_must_be_of_one_shape():
    import torch

    read_so_far = []

    def data(start):
        for number in itertools.count(start):
            read_so_far.append(number)
            yield torch.zeros(4 if number < 3 else 6, 2)

    job = ps.Job(torch.nn.Identity, lambda m, b: b.sum(), data, lambda w: w)
    divided = merged(job, Fraction(1, 2), Division(2, (0,), (), key_of(torch.zeros(4, 2))))
    batches = iter(divided.data(2))
    assert [tuple(next(batches)[0].shape) for _ in range(4)] == [(2, 2)] * 4
    assert read_so_far == [1, 2]
    with pytest.raises(GraphError, match=r"float32\[6, 2\]") as found:
        next(batches)
    assert "drop_last=True, or pad" in found.value.hint


def test_divided_data_begins_later_by_whole_micro_batches():
    job, key = _rows(micro_batches=2)
    later = ahead(merged(job, Fraction(1, 3), Division(3, (0,), (), key)), 6)
    assert next(iter(later.data(1)))[0].tolist() == [28, 29, 30, 31]
    assert later.seed == seed_ahead(job.seed, 2)
    author, taken = unjoined(later)
    assert (taken, author.micro_batches) == (Fraction(1, 3), 2)
    assert next(iter(author.data(0)))["number"].item() == 2
