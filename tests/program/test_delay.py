"""Delayed sums: those of the step before, from the beginning of a step on."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.program.passes.delay import delay
from penstock.program.program import Compute, Program, Update
from penstock.program.reductions import Reduction
from penstock.schedule import gpipe, one_f_one_b, zb_h1
from tests.program.lowering import lower_schedule


@given(
    st.sampled_from((gpipe, one_f_one_b, zb_h1)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_sums_come_first_and_all_else_stays(make, stages, micro_batches, replicas, clip):
    program = lower_schedule(make(stages, micro_batches), replicas=replicas, clip=clip)
    made = delay(program)
    assert (made == program) == (replicas == 1)
    for code, before in zip(made.code, program.code, strict=True):
        late = [each for each in code if isinstance(each, Reduction) and each.word == "delayed"]
        own = [each for each in before if isinstance(each, Reduction) and each.word == "replicas"]
        assert list(code[: len(late)]) == late
        assert [(each.bucket, each.ranks) for each in late] == [(o.bucket, o.ranks) for o in own]
        rest = [each for each in before if each not in own]
        assert list(code[len(late) :]) == rest
        kinds = [type(each) for each in rest if isinstance(each, Compute | Update)]
        assert all((a, b) != (Update, Compute) for a, b in pairwise(kinds))


def test_a_delayed_program_is_saved_and_printed(tmp_path):
    made = delay(lower_schedule(gpipe(1, 2), replicas=2))
    assert "rank 0  delayed:stage0.0 F0.0 F0.1" in str(made)
    made.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == made
