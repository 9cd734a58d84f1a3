"""Passes: each sentence after Keeps, Gains and Costs."""

import inspect
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.program.lower import lower
from penstock.program.passes import receive_early
from penstock.program.program import Compute, Receive, Send, Unshard
from penstock.schedule import one_f_one_b
from tests.draws import examples
from tests.program.programs import programs, with_shards
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


def test_pass_says_what_it_keeps_gains_and_costs_and_where_it_is_from():
    words = inspect.getmodule(receive_early).__doc__
    assert all(f"\n{word}:" in words for word in ("Keeps", "Gains", "Costs", "Source"))


@given(program=sharded_programs())
def test_distance_of_zero_changes_nothing(program):
    assert receive_early(program, distance=0) == program


def test_negative_distance_is_refused():
    with pytest.raises(ValueError, match="distance is -1 computes"):
        receive_early(lower(one_f_one_b(2, 2)), distance=-1)


@examples(20)
@given(program=sharded_programs(), distance=DISTANCES)
def test_rewritten_program_still_runs_right_with_any_sends(program, distance):
    rewritten = receive_early(program, distance=distance)
    for capacity in (0, 1, None):
        assert run_toy(rewritten, capacity) == ""


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
