"""Unseen sums: norms and a factor stand for gradients until these are back."""

import math

import pytest
import torch

from penstock.state.unseen_sums import UnseenSums

PLACES = [{3: slice(0, 2), 5: slice(2, 6)}, {4: slice(1, 4)}, {}]


def flats() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=drawn) for size in (6, 4, 2)]


def left(own: list[torch.Tensor]) -> UnseenSums:
    unseen = UnseenSums(own, PLACES)
    for number, flat in enumerate(own):
        unseen.leave(number, flat)
    return unseen


@pytest.mark.parametrize("step", [1, 2])
def test_what_comes_back_has_the_norms_that_were_told(step: int) -> None:
    own = flats()
    unseen = left(own)
    if step == 2:  # the factors of the step before are gone
        unseen.scale(7.0)
        unseen = left(own)
    unseen.scale(0.5)
    unseen.scale(torch.tensor(0.25))
    told = unseen.norms([5, 3, 4])
    unseen.came(own)
    torch.testing.assert_close(own, [flat / 8 for flat in flats()], rtol=0, atol=0)
    parts = own[0][2:6], own[0][0:2], own[1][1:4]
    torch.testing.assert_close(told, [part.norm() for part in parts])


def test_number_that_is_not_finite_is_told_though_it_is_away() -> None:
    own = flats()
    assert bool(left(own).are_finite())
    own[2][1] = math.inf  # of no parameter of this rank: of those that others tell
    assert not bool(left(own).are_finite())
