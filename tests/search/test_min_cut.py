"""Cuts of small graphs of values, against all ways to keep some of them."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph.cut import cut
from penstock.graph.keeping import Keeping, keepings_of
from penstock.graph.trace import capture
from penstock.search.min_cut import corners, within
from tests.draws import examples
from tests.graph.zoo import JOBS

MANY = 1000


@st.composite
def keepings(draw: st.DrawFn) -> tuple[Keeping, list[float]]:
    """Return values 0 to n - 1, each made by the op of its number, and seconds of these.

    Some can only be kept; some are views of one that they read; some ops make the value behind
    theirs, too.
    """
    count = draw(st.integers(1, 7))
    made: dict[int, int | None] = {}
    reads: dict[int, tuple[int, ...]] = {}
    memory: dict[int, int] = {}
    for value in range(count):
        earlier = st.lists(st.integers(0, max(0, value - 1)), unique=True, max_size=2)
        read = tuple(draw(earlier)) if value else ()
        kind = draw(st.sampled_from(["op", "op", "op", "view", "second", "kept"]))
        memory[value], made[value] = value, value
        if kind == "second" and value and made[value - 1] == value - 1 == memory[value - 1]:
            made[value] = value - 1
        elif kind == "kept":
            made[value] = None
        else:
            reads[value] = read
            if kind == "view" and read:
                memory[value] = memory[read[0]]
    sizes = {m: draw(st.integers(0, 9)) for m in sorted(set(memory.values()))}
    asked = draw(st.frozensets(st.integers(0, count - 1), min_size=1))
    seconds = [float(draw(st.integers(1, 9))) for _ in range(count)]
    return Keeping(asked, made, reads, memory, sizes), seconds


def ways(keeping: Keeping, seconds: list[float]) -> Iterator[tuple[int, float]]:
    """Yield bytes and seconds of every set of values that can be kept and is enough."""
    for kept in itertools.product((False, True), repeat=len(keeping.made)):
        missing, again = [v for v in keeping.asked if not kept[v]], set()
        while missing:
            op = keeping.made[missing.pop()]
            if op is None:
                break
            if op not in again:
                again.add(op)
                missing += [v for v in keeping.reads[op] if not kept[v]]
        else:
            held = {keeping.memory[v] for v, is_kept in enumerate(kept) if is_kept}
            yield sum(keeping.bytes[m] for m in held), sum(seconds[op] for op in again)


@examples(25)
@given(keepings(), st.integers(0, 30))
def test_no_other_way_within_a_budget_takes_fewer_seconds(pair, budget: int) -> None:
    keeping, seconds = pair
    allowed = [took for held, took in ways(keeping, seconds) if held <= budget]
    found = within(keeping, seconds, budget)
    assert (found is None) == (not allowed)
    if found is not None:
        assert found.held_bytes <= budget
        assert found.again_s == min(allowed) == sum(seconds[op] for op in found.again)
        assert any(h <= found.held_bytes and s <= found.again_s for h, s in ways(*pair))


@examples(20)
@given(keepings())
def test_corners_are_those_of_the_hull_of_all_ways(pair) -> None:
    every = sorted(set(ways(*pair)))
    hull: list[tuple[int, float]] = []
    least_s = float("inf")
    for held, took in every:  # from the fewest bytes on, only what takes less
        if took >= least_s:
            continue
        least_s = took
        while len(hull) > 1:
            (a, b), (c, d) = hull[-2:]
            if (c - a) * (took - b) - (d - b) * (held - a) > 0:
                break
            hull.pop()
        hull.append((held, took))
    found = corners(*pair, most=MANY)
    assert [(cut.held_bytes, cut.again_s) for cut in found] == hull[::-1]


def test_the_smaller_of_two_values_that_give_each_other_is_kept() -> None:
    """16 bits and the same as 32: the wide one is made again for a second, or kept for 4 bytes."""
    keeping = Keeping(frozenset({1}), {0: 0, 1: 1}, {0: (), 1: (0,)}, {0: 0, 1: 1}, {0: 2, 1: 4})
    assert within(keeping, [9.0, 1.0], 3) == ((1,), 1.0, 2)
    assert within(keeping, [9.0, 1.0], 1) == ((0, 1), 10.0, 0)


def test_views_are_kept_with_what_they_look_at() -> None:
    """Three values of one memory: kept once, and none of them made again."""
    memory = {0: 0, 1: 0, 2: 0}
    keeping = Keeping(
        frozenset(memory),
        dict.fromkeys(memory, 0) | {1: 1, 2: 2},
        {0: (), 1: (0,), 2: (1,)},
        memory,
        {0: 8},
    )
    assert within(keeping, [5.0, 1.0, 1.0], 8) == ((), 0.0, 8)
    assert within(keeping, [5.0, 1.0, 1.0], 7) == ((0, 1, 2), 7.0, 0)


@pytest.mark.parametrize("name", ["dropout", "batch_norm", "transformer", "autocast", "normed"])
def test_a_cut_stage_holds_what_the_choice_says(name: str) -> None:
    """With views, ops of several results, dropout, casts of weights, and buffers."""
    graph = capture(JOBS[name]).graph
    (keeping,) = keepings_of(graph, ())
    op_s = [1.0 + node.flop for node in graph.nodes]
    for choice in corners(keeping, op_s):
        (stage,) = cut(graph, (), [choice.again or False]).stages
        assert stage.forward.change_bytes == choice.held_bytes
        again = {*stage.forward.ops} & {*stage.backward.ops} & {*keeping.reads}
        assert again == {*choice.again}
