"""Routed sums: the sum of all, to the bit the same on all ranks, over each transport."""

import pytest
import torch

from penstock.routes import PIECE_BYTES
from penstock.transport.routed_sums import sum_along
from tests.transport.transport_ranks import RUNNERS, values

WORDS = (
    *("ring", "tree", "halving", "doubling", "direct", "server", "server:2", "hierarchical:2"),
)


def _of(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def _sums(ranks: tuple[int, ...], counts: tuple[int, ...]):
    def body(end):
        found = []
        for word in WORDS if end.rank in ranks else ():
            for count in counts:
                own = _of(end.rank, count)
                sum_along(end, own, ranks, word)
                wanted = sum(_of(rank, count).double() for rank in ranks)
                error = float((own - wanted).abs().max()) if count else 0.0
                found.append([word, error, own.double().sum().item(), hash(tuple(own.tolist()))])
        end.barrier()
        return found

    return body


@pytest.mark.parametrize("runner", ["threads", "shared_memory", "gloo", "hosts"])
@pytest.mark.parametrize("ranks", [(0, 1), (2, 0, 1), (0, 1, 2, 3)])
@pytest.mark.sampled(2)
def test_all_have_the_sum_to_the_bit(runner, ranks):
    told = values(RUNNERS[runner](max(ranks) + 1, _sums(ranks, (0, 1, 3, 1000))))
    first = told[ranks[0]]
    assert all(told[rank] == first for rank in ranks)
    assert [row[0] for row in first] == [word for word in WORDS for _ in range(4)]
    assert max(row[1] for row in first) < 2e-6


@pytest.mark.parametrize("ranks", [5, 6, 7, 8])
def test_any_number_of_ranks_sums(ranks):
    everyone = tuple(range(ranks))
    told = values(RUNNERS["threads"](ranks, _sums(everyone, (1, 129))))
    assert all(row == told[0] for row in told)
    assert max(row[1] for row in told[0]) < 4e-6


@pytest.mark.parametrize("runner", ["shared_memory", "hosts"])
@pytest.mark.sampled(2)
def test_more_than_a_piece_is_summed(runner):
    """Of three ranks one has more to give than others, and more than a region holds."""
    count = PIECE_BYTES // 4 * 5 // 4
    told = values(RUNNERS[runner](3, _sums((0, 1, 2), (count,))))
    assert all(row == told[0] for row in told)
    assert max(row[1] for row in told[0]) < 4e-6


def test_what_is_not_contiguous_and_has_other_numbers_is_summed():
    def body(end):
        whole = torch.full((4, 6), 2.0**end.rank, dtype=torch.float64)
        sum_along(end, whole[:, 1:3], (0, 1, 2), "ring")
        return whole.sum(0).tolist()

    for rank, told in enumerate(values(RUNNERS["threads"](3, body))):
        own = 4 * 2.0**rank
        assert told == [own, 28.0, 28.0, own, own, own]
