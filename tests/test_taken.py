"""What a plan takes of a job's micro-batches, as files and people read it."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import taken
from penstock.typed import MisfitError

TAKEN = st.integers(1, 99) | st.integers(2, 99).map(lambda parts: Fraction(1, parts))


@given(TAKEN)
def test_what_is_written_is_read_back(value):
    assert taken.read(taken.written(value)) == value


@pytest.mark.parametrize("value", ["2/4", "1/1", "1/", "1/-2", "1/²", "0.5", 0.5, None, True, []])
def test_what_is_no_part_of_one_is_refused(value):
    with pytest.raises(MisfitError, match='as "1/4"'):
        taken.read(value)


@given(TAKEN, st.integers(0, 50))
def test_counts_are_whole_where_they_can_be(value, count):
    found = taken.counted(value, count)
    assert found == pytest.approx(float(value * count))
    assert isinstance(found, int) == ((value * count).denominator == 1)


def test_words():
    assert [*map(taken.words, (1, 4, Fraction(1, 4)))] == ["", "4 joined", "each in 4 parts"]
