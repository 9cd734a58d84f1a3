"""Placing: as little is moved as by any order of members."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.members.placing import OnHosts, placed, sizes_of
from penstock.members.words import HeldTensor
from penstock.state.tensor_parts import part_key

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


def stages_lost(names: Sequence[str]) -> int:
    """Return with how many hosts a stage is lost; ranks 0, 2, ... have one, the others another."""
    alone = (len({*names[stage::2]}) == 1 for stage in range(2))
    return len({names[stage] for stage, is_alone in enumerate(alone) if is_alone})


@pytest.mark.parametrize("count", [4, 8])
def test_newcomers_of_one_host_do_not_get_all_replicas_of_the_smaller_stage(count: int) -> None:
    """Those that were there hold both stages, one as a guard: either moves nothing for them."""
    keys = {"small": 1000, "large": 2000}
    wanted = [{f"weights/{name}": keys[name]} for name in ("small", "large")] * (count // 2)
    whole = [HeldTensor(f"weights/{name}", "float32", (1,)) for name in keys]
    members, half = [*range(count)], count // 2
    homes = {member: "ab"[member >= half] for member in members}
    holds = dict.fromkeys(range(half), whole)
    order, moved = placed(members, wanted, holds)
    assert (stages_lost([homes[m] for m in order]), moved) == (2, half * 1000)
    order, moved = placed(members, wanted, holds, OnHosts(homes, stages_lost))
    assert (stages_lost([homes[m] for m in order]), moved) == (0, half * 1500)
    assert sorted(order) == members
    assert homes == {member: "ab"[member >= half] for member in order}


def test_where_a_host_is_lost_in_any_order_the_one_that_moves_least_is_taken() -> None:
    wanted = [{"weights/a": 5}, {"weights/b": 7}]
    holds = {1: [HeldTensor("weights/a", "float32", (1,))]}
    on = OnHosts({0: "a", 1: "b"}, lambda names: 2)
    assert placed((0, 1), wanted, holds, on) == ((1, 0), 7)
