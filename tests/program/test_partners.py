"""Averages: who averages the weights of a stage with whom, and when."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.program.partners import partners
from penstock.program.program import Program, Update
from penstock.program.reductions import Reduction
from penstock.schedule import chimera, gpipe, one_f_one_b, zb_h1
from tests.program.lowering import lower_schedule

WAYS = "local:4", "diloco:3", "easgd:2", "gossip:2"


@given(st.integers(2, 33))
def test_partners_are_pairs_and_rounds_of_them_mix_all(replicas):
    mixing = np.eye(replicas)
    for pairs in partners(replicas):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks) == 2 * (replicas // 2)
        step = np.eye(replicas)
        for one, other in pairs:
            step[one] = step[other] = (step[one] + step[other]) / 2
        mixing = step @ mixing
    assert np.allclose(mixing.sum(0), 1)  # the mean stays as it is
    often = np.linalg.matrix_power(mixing, 4 * replicas * replicas)
    assert np.allclose(often, 1 / replicas)  # and all come to it
    if replicas & (replicas - 1) == 0:
        assert np.allclose(mixing, 1 / replicas)  # of a hypercube after one turn


def test_one_replica_has_no_partner():
    assert partners(1) == ()


@given(
    st.sampled_from((gpipe, one_f_one_b, zb_h1, chimera)),
    st.sampled_from((2, 4)),
    st.integers(1, 5),
    st.sampled_from(WAYS),
    st.booleans(),
)
def test_averages_come_last_and_gradients_stay_in_their_replica(make, stages, replicas, way, clip):
    program = lower_schedule(make(stages, 2), replicas=replicas, clip=clip, averages=way)
    assert program.end.averages == (way if replicas > 1 else "")
    for rank, code in enumerate(program.code):
        own = set(program.grid.ranks_of(program.grid.replica_of(rank)))
        for at, each in enumerate(code):
            if not isinstance(each, Reduction):
                continue
            assert (each.word == "average") == (not set(each.ranks) <= own)
            rest = code[at + 1 :]
            assert each.word != "average" or not any(isinstance(other, Update) for other in rest)
    text = str(program)
    assert (f"averages {way}" in text) == (replicas > 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_averages_is_saved_and_read(way, tmp_path):
    program = lower_schedule(one_f_one_b(2, 2), replicas=3, averages=way)
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == program


@given(st.integers(2, 6), st.integers(1, 5))
def test_each_round_of_gossip_has_its_turn(replicas, every):
    program = lower_schedule(gpipe(1, 2), replicas=replicas, averages=f"gossip:{every}")
    rounds = partners(replicas)
    for step in range(3 * every * len(rounds)):
        due = {one.ranks for one in program.code.reductions if one.is_due(step)}
        turn, left = divmod(step + 1, every)
        pairs = () if left else rounds[(turn - 1) % len(rounds)]
        assert due == {tuple(sorted(pair)) for pair in pairs}


def test_a_program_without_its_averages_is_refused():
    program = lower_schedule(gpipe(1, 2), replicas=2, averages="local:4")
    codes = [
        tuple(each for each in code if not isinstance(each, Reduction)) for code in program.code
    ]
    with pytest.raises(ProgramError, match="weights of stage 0 that are not averaged"):
        replace(program, code=tuple(codes))


def test_a_program_that_averages_before_its_update_is_refused():
    program = lower_schedule(gpipe(1, 2), replicas=2, averages="local:4")
    codes = [(*code[:-2], code[-1], code[-2]) for code in program.code]
    with pytest.raises(ProgramError, match="its turn is step 0"):
        replace(program, code=tuple(codes))
