"""Placing: as little is moved as by any order of members."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from penstock.members.placing import placed, sizes_of
from penstock.members.words import HeldTensor
from penstock.state.parts import part_key

KEYS = [f"weights/{letter}" for letter in "abcde"]


@given(st.integers(1, 5), st.data())
def test_no_order_of_members_moves_less(count: int, data) -> None:
    members = data.draw(st.permutations(range(10, 10 + count)))
    sizes = {key: data.draw(st.integers(1, 1000)) for key in KEYS}
    some = st.sets(st.sampled_from(KEYS))
    wanted = [{key: sizes[key] for key in data.draw(some)} for _ in range(count)]
    has = {member: data.draw(some) for member in members}
    holds = {m: [HeldTensor(key, "float32", (1,)) for key in keys] for m, keys in has.items()}

    def moved(order: tuple[int, ...]) -> int:
        rows = zip(order, wanted, strict=True)
        return sum(size for m, need in rows for key, size in need.items() if key not in has[m])

    order, bytes_moved = placed(members, wanted, holds)
    assert sorted(order) == sorted(members)
    assert bytes_moved == moved(order) == min(map(moved, permutations(members)))


def test_members_stay_as_they_stand_where_nothing_is_gained() -> None:
    assert placed((7, 3, 5), [{}, {}, {}], {}) == ((7, 3, 5), 0)


def test_parts_count_as_the_whole_that_they_are_of() -> None:
    rows = [
        HeldTensor("weights/a", "bfloat16", (2, 3)),
        HeldTensor(part_key("b", 2, (4, 2)), "float32", (3,)),
    ]
    assert sizes_of({0: rows}, {"bfloat16": 2}) == {"weights/a": 12, "b": 32}
