"""The helper of the grids: every pair is there, in few rows."""

import itertools

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(4, 4, 6), (4, 6, 3), (2, 2), (2, 2, 2, 2)])
def test_every_pair_of_values_meets_in_few_rows(sizes):
    factors = [[f"{at}{value}" for value in range(size)] for at, size in enumerate(sizes)]
    rows = pairwise(*factors)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(factors[a], factors[b]))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert len(rows) <= 1.5 * largest * second
