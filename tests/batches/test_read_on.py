"""Data that several readers of one rank read in turn."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batches.read_on import ReadOn
from penstock.batches.reads import ReadNumbers


class Counted:
    """Numbers themselves, and how often they are begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.fails_at: set[int] = set()

    def picked(self, reads: ReadNumbers) -> Iterator[int]:
        self.begun += 1
        for number in reads.numbers():
            if number in self.fails_at:
                self.fails_at.remove(number)
                raise OSError("a reader is gone")
            yield number

    def __call__(self, start: int) -> Iterator[int]:
        return self.picked(ReadNumbers.all_from(start))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4)), max_size=6),
    st.sampled_from([(0,), (0, 1), (1,), (2, 0)]),
)
def test_readers_go_on_where_another_one_ended_without_beginning_anew(turns, places):
    data, every, taken = Counted(), 3, 0
    shared = ReadOn(data)
    expected = ReadNumbers(0, places, every).numbers()
    for _, count in turns:
        turn, at = divmod(taken, len(places))
        source = shared.picked(ReadNumbers(turn * every, places, every, at))
        assert [next(source) for _ in range(count)] == [next(expected) for _ in range(count)]
        taken += count
    assert data.begun == bool(turns)


def test_who_reads_elsewhere_begins_there():
    data = Counted()
    shared = ReadOn(data)
    assert next(shared(4)) == 4
    assert next(shared(9)) == 9
    assert next(shared(10)) == 10
    assert data.begun == 2


def test_what_failed_is_read_again():
    data = Counted()
    data.fails_at = {2}
    shared = ReadOn(data)
    source = shared(0)
    assert [next(source), next(source)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(source)
    assert next(shared(2)) == 2
    assert data.begun == 2


def test_an_end_is_an_end():
    shared = ReadOn(lambda start: iter(range(start, 3)))
    assert list(shared(1)) == [1, 2]
