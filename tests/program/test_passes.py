"""Passes: each sentence after Keeps, Gains and Costs."""

import inspect
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.program.instructions import parse_instruction
from penstock.program.lower import chain, lower
from penstock.program.passes import PASSES, prefetch, receive_early
from penstock.program.program import Compute, Program, Receive, Reduce, Reshard, Send, Unshard
from penstock.schedule import interleaved, one_f_one_b
from tests.program.programs import programs, unsharded, with_shards
from tests.program.toy_run import run_toy

DISTANCES = st.integers(0, 6)


@st.composite
def sharded_programs(draw):
    program = draw(programs())
    if any(isinstance(one, Unshard) for code in program.code for one in code):
        return program
    return with_shards(program, random.Random(draw(st.integers(0, 999))))


def computes_before(code, kinds):
    """Return for each instruction of `kinds`, in order, how many computes stand before it."""
    counts, computes = [], 0
    for one in code:
        computes += isinstance(one, Compute)
        if isinstance(one, kinds):
            counts.append((one, computes))
    return counts


def without(code, kinds):
    return [one for one in code if not isinstance(one, kinds)]


@pytest.mark.parametrize("rewrite", PASSES)
def test_pass_says_what_it_keeps_gains_and_costs_and_where_it_is_from(rewrite):
    words = inspect.getmodule(rewrite).__doc__
    assert all(f"\n{word}:" in words for word in ("Keeps", "Gains", "Costs", "Source"))


@pytest.mark.parametrize("rewrite", PASSES)
@given(program=sharded_programs())
def test_distance_of_zero_changes_nothing(rewrite, program):
    assert rewrite(program, distance=0) == program


@pytest.mark.parametrize("rewrite", PASSES)
def test_negative_distance_is_refused(rewrite):
    with pytest.raises(ValueError, match="distance is -1 computes"):
        rewrite(lower(one_f_one_b(2, 2)), distance=-1)


@pytest.mark.parametrize("rewrite", PASSES)
@settings(max_examples=60)
@given(program=sharded_programs(), distance=DISTANCES)
def test_rewritten_program_still_runs_right_with_any_sends(rewrite, program, distance):
    rewritten = rewrite(program, distance=distance)
    for capacity in (0, 1, None):
        assert run_toy(rewritten, capacity) == ""


@settings(max_examples=60)
@given(sharded_programs(), DISTANCES, DISTANCES)
def test_passes_compose_in_either_order(program, first, second):
    one = prefetch(receive_early(program, distance=first), distance=second)
    other = receive_early(prefetch(program, distance=second), distance=first)
    for a, b in zip(one.code, other.code, strict=True):
        assert without(a, Unshard | Receive) == without(b, Unshard | Receive)
    assert run_toy(one, 0) == run_toy(other, 0) == ""


@given(sharded_programs(), DISTANCES)
def test_prefetch_keeps_instructions_and_the_order_of_collectives(program, distance):
    for before, after in zip(program.code, prefetch(program, distance=distance).code, strict=True):
        assert Counter(before) == Counter(after)
        assert without(before, Unshard) == without(after, Unshard)
        collectives = Unshard | Reduce
        assert [one for one in before if isinstance(one, collectives)] == [
            one for one in after if isinstance(one, collectives)
        ]


@given(sharded_programs(), DISTANCES)
def test_prefetch_moves_a_gather_no_further_than_its_distance(program, distance):
    for before, after in zip(program.code, prefetch(program, distance=distance).code, strict=True):
        pairs = zip(computes_before(before, Unshard), computes_before(after, Unshard), strict=True)
        assert all(0 <= old - new <= distance for (_, old), (_, new) in pairs)


@given(st.integers(1, 5), st.integers(1, 5), DISTANCES)
def test_prefetch_gains_its_distance_where_nothing_is_in_the_way(
    num_stages, num_micro_batches, distance
):
    """All stages on one rank, each gathered once: only another gather can be in the way."""
    program = lower(interleaved(num_stages, num_micro_batches, num_ranks=1))
    program = unsharded(program, lambda rank: _Never(), set(range(num_stages)))
    before = [at for _, at in computes_before(program.code[0], Unshard)]
    after = [at for _, at in computes_before(prefetch(program, distance=distance).code[0], Unshard)]
    assert after == [max(at - distance, 0) for at in before]


class _Never:
    """A chance that never drops the gathered weights of a stage before the end."""

    def random(self):
        return 1.0


@given(sharded_programs(), DISTANCES)
def test_prefetch_costs_at_most_its_distance_of_gathered_stages(program, distance):
    after = prefetch(program, distance=distance)
    for old, new in zip(program.code, after.code, strict=True):
        assert most_gathered(new) <= most_gathered(old) + distance


def most_gathered(code):
    now = most = 0
    for one in code:
        now += isinstance(one, Unshard) - isinstance(one, Reshard)
        most = max(most, now)
    return most


def test_prefetch_gathers_no_weights_that_are_about_to_be_updated():
    line = (
        "unshard0 F0.0 F1.0 I1.0 B0.0 reshard0 W1.0 U0.0 U1.0 "
        "unshard0 F0.1@1 F1.1@1 B1.1@1 B0.1@1 reshard0 U0.1 U1.1"
    )
    code = (tuple(parse_instruction(word, {}) for word in line.split()),)
    program = Program(2, 1, code, edges=chain(2), num_steps=2)
    assert prefetch(program, distance=9) == program


def test_prefetch_does_what_its_docstring_shows():
    program = lower(interleaved(2, 1, num_ranks=1))
    program = unsharded(program, lambda rank: _Never(), {1})
    words = [str(one) for one in program.code[0][:3]]
    assert words == ["F0.0", "unshard1", "F1.0"]
    assert [str(one) for one in prefetch(program).code[0][:3]] == ["unshard1", "F0.0", "F1.0"]


@given(programs(), DISTANCES)
def test_receive_early_keeps_everything_but_places_and_slots_of_receives(program, distance):
    early = receive_early(program, distance=distance)
    for before, after in zip(program.code, early.code, strict=True):
        assert list(map(bare, without(before, Receive))) == list(map(bare, without(after, Receive)))
        receives = [
            [bare(one) for one in code if isinstance(one, Receive)] for code in (before, after)
        ]
        assert receives[0] == receives[1]


def bare(one):
    """Return a message without its slot."""
    return (type(one), one.of, one.edge, one.peer) if isinstance(one, Send | Receive) else one


@given(programs(), DISTANCES)
def test_receive_early_posts_each_receive_its_distance_earlier_or_first(program, distance):
    early = receive_early(program, distance=distance)
    for before, after in zip(program.code, early.code, strict=True):
        pairs = zip(computes_before(before, Receive), computes_before(after, Receive), strict=True)
        assert all(new == max(old - distance, 0) for (_, old), (_, new) in pairs)


@given(programs(), DISTANCES)
def test_receive_early_costs_at_most_the_messages_of_its_distance(program, distance):
    early = receive_early(program, distance=distance)
    for rank, code in enumerate(program.code):
        for edge, slots in early.slots(rank).items():
            posts = [at for one, at in computes_before(code, Receive) if one.edge == edge]
            most = max(sum(at <= other <= at + distance for other in posts) for at in posts)
            assert slots <= program.slots(rank)[edge] + (most if distance else 0)
