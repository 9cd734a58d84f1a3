"""Rows of places are put together as they are, and a place that moves is noticed."""

import random
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule.orders import F
from penstock.state.placed_rows import PlacedRows, misplaced_row
from penstock.transport.threads import thread_transports
from tests.program.lowering import lower_schedule
from tests.program.programs import random_schedule

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)


def rows_of(seed: int, places: int) -> list[torch.Tensor]:
    """Return buffers of all kinds; some numbers are not finite."""
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randn(places, 3, 2, generator=source)
    drawn[0, 0] = torch.tensor([float("inf"), float("nan")])
    whole = torch.randint(-(2**62), 2**62, (places,), generator=source)
    flags = torch.rand(places, 5, generator=source) < 0.5
    pairs = torch.view_as_complex(torch.randn(places, 2, generator=source))
    return [drawn, drawn.bfloat16(), drawn.double() / 3, whole, flags, pairs]


@given(st.integers(1, 4), st.data())
def test_each_row_comes_from_the_rank_that_wrote_it_and_others_stay(ranks, drawn):
    places = drawn.draw(st.integers(1, 6))
    holders = drawn.draw(st.lists(st.integers(-1, ranks - 1), min_size=places, max_size=places))
    held = [[each.clone() for each in rows_of(99, places)] for _ in range(ranks)]
    expected = rows_of(99, places)
    ends, own = thread_transports(ranks), list[PlacedRows]()
    for rank in range(ranks):
        own.append(PlacedRows(lambda rank=rank: held[rank], places, tuple(range(ranks))))
        for place, holder in enumerate(holders):
            if holder == rank:
                own[rank].note(place + places * drawn.draw(st.integers(0, 9)))
                for kept, whole, new in zip(
                    held[rank], expected, rows_of(place, places), strict=True
                ):
                    kept[place] = whole[place] = new[place]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(lambda rank: own[rank].join(ends[rank]), range(ranks)))
    for rank in range(ranks):
        for found, whole, dtype in zip(held[rank], expected, DTYPES, strict=True):
            assert found.dtype == dtype
            torch.testing.assert_close(found, whole, rtol=0, atol=0, equal_nan=True)
        assert not own[rank].written


@given(st.integers(0, 500), st.integers(1, 5), st.integers(1, 3))
def test_a_place_that_moves_or_goes_back_is_told(seed, places, ranks):
    chance = random.Random(seed)
    programs = [
        lower_schedule(random_schedule(chance, 1, 4, ranks, fixed=False, backward=True))
        for _ in range(2)
    ]
    holders: dict[int, set[int]] = {}
    goes_back = False
    for program in programs:
        for rank in range(ranks):
            taken = [
                int(m)
                for kind, m in zip(
                    program.code.kind[program.code.slice_of(rank)],
                    program.code.micro_batch[program.code.slice_of(rank)],
                    strict=True,
                )
                if kind == F
            ]
            for place in range(places):
                mine = [m for m in taken if m % places == place]
                goes_back |= mine != sorted(mine)
                if mine:
                    holders.setdefault(place, set()).add(rank)
    moves = any(len(each) > 1 for each in holders.values())
    assert bool(misplaced_row(programs, 0, range(ranks), places)) == (moves or goes_back)
