"""The verifier: its verdict against a run on threads, and what it says rule by rule."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.program import faults, rules, verify
from penstock.program.deadlock import stops
from penstock.program.edges import StageGraph
from penstock.program.instructions import parse_instruction
from penstock.program.lower import chain
from penstock.program.program import Edge, Program, StageBytes, TiedGroup
from penstock.program.reductions import Norm, Sum, Validate
from penstock.program.step_end import StepEnd
from penstock.schedule import Reads, WeightRule
from tests.draws import examples
from tests.program.lowering import parted
from tests.program.mutants import MUTATIONS, later, mutate
from tests.program.programs import programs, rebuilt, unchecked
from tests.program.toy_run import run_toy

CAPACITIES = (0, 1, 3, None)  # rendezvous, bounded, unbounded


@examples(133)
@given(programs(), st.sampled_from(MUTATIONS), st.integers(0, 10**6))
def test_mutant_is_refused_exactly_when_some_run_of_it_goes_wrong(program, how, seed):
    codes = mutate(program, how, random.Random(seed))
    if codes is None:
        return
    try:
        mutant, accepted = rebuilt(program, codes), True
    except ProgramError:
        mutant, accepted = unchecked(program, codes), False
    assert accepted == all(run_toy(mutant, capacity) == "" for capacity in CAPACITIES)


@examples(50)
@given(programs(max_micro_batches=6), st.integers(0, 10**6))
def test_ranks_stop_exactly_when_threads_hang_with_the_same_sends(program, seed):
    mutant = unchecked(program, later(program, random.Random(seed)))
    facts, code = verify.facts_of(mutant), verify.columns(mutant.code)
    for capacity in CAPACITIES:
        stop = bool((stops(code, facts, capacity) < code.offsets[1:]).any())
        assert run_toy(mutant, capacity) == ("hang" if stop else "")


@examples(50)
@given(programs(max_micro_batches=6), st.integers(0, 10**6))
def test_program_that_stops_with_some_sends_stops_with_rendezvous_and_is_refused(program, seed):
    codes = later(program, random.Random(seed))
    mutant = unchecked(program, codes)
    facts, code = verify.facts_of(mutant), verify.columns(mutant.code)
    end = code.offsets[1:]
    stop = [bool((stops(code, facts, capacity) < end).any()) for capacity in CAPACITIES]
    assert stop == sorted(stop, reverse=True)
    if stop[0]:
        with pytest.raises(ProgramError, match="deadlock: rank"):
            rebuilt(program, codes)
    else:
        rebuilt(program, codes)


def program_of(*lines, reductions=(), **fields):
    """Return the program with these lines of instructions, one per rank."""
    table = {(one.word, one.bucket): one for one in reductions}
    code = tuple(tuple(parse_instruction(word, table) for word in line.split()) for line in lines)
    fields = {"num_stages": 2, "num_micro_batches": 1, "edges": chain(2)} | fields
    graph, end = parted(fields)
    if VALIDATE in reductions:
        end["post_validation"] = True
    return Program(code=code, graph=StageGraph(**graph), end=StepEnd(**end), **fields)


TWO = (
    "F0.0 F0.0>r1e0s0 B1.0<r1e1s0 B0.0 U0.0",
    "F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 U1.0",
)
MORE = (
    "F0.0 F0.0>r1e0s0 F0.1 F0.1>r1e0s1 B1.0<r1e1s0 B0.0 B1.1<r1e1s0 B0.1 U0.0",
    "F0.0<r0e0s0 F1.0 F0.1<r0e0s1 B1.0 B1.0>r0e1s0 F1.1 B1.1 B1.1>r0e1s0 U1.0",
)
SPLIT = (
    "F0.0 F0.0>r1e0s0 F0.1 F0.1>r1e0s1 I1.0<r1e1s0 I0.0 I1.1<r1e1s1 I0.1 W0.0 W0.1 U0.0",
    "F0.0<r0e0s0 F0.1<r0e0s1 F1.0 I1.0 I1.0>r0e1s0 F1.1 I1.1 I1.1>r0e1s1 W1.0 W1.1 U1.0",
)
SHARDED = (
    "unshard0 F0.0 F0.0>r1e0s0 B1.0<r1e1s0 B0.0 reshard0 U0.0",
    "F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 U1.0",
)


def edited(lines, rank, old, new):
    assert re.search(rf"(?<!\S){re.escape(old)}(?!\S)", lines[rank]), old
    parts = list(lines)
    parts[rank] = " ".join(re.sub(rf"(?<!\S){re.escape(old)}(?!\S)", new, lines[rank]).split())
    return parts


@pytest.mark.parametrize("lines", [TWO, MORE, SPLIT, SHARDED])
def test_sound_lines_are_accepted(lines):
    program_of(*lines, num_micro_batches=2 if "F0.1" in lines[0] else 1)


@pytest.mark.parametrize(
    ("lines", "rank", "old", "new", "message"),
    [
        (TWO, 0, "F0.0", "F2.0", "cannot do F2.0: an operand is out of range"),
        (TWO, 0, "F0.0", "F0.1", "cannot do F0.1: an operand is out of range"),
        (TWO, 0, "F0.0>r1e0s0", "F0.0>r1e0s1", "slots stay below the number of micro-batches"),
        (TWO, 0, "F0.0>r1e0s0", "F0.0>r2e0s0", "an operand is out of range"),
        (TWO, 0, "F0.0>r1e0s0", "F0.0>r1e2s0", "an operand is out of range"),
        (TWO, 0, "U0.0", "U0.1", "an operand is out of range"),
        (TWO, 0, "F0.0", "F0.0 F0.0", "cannot do F0.0: it was done already, on rank 0"),
        (TWO, 1, "F1.0", "F0.0 F1.0", "cannot do F0.0: it was done already, on rank 0"),
        (TWO, 0, "B0.0", "I0.0 B0.0", "cannot do B0.0: before it come F I"),
        (TWO, 0, "B0.0", "W0.0", "cannot do W0.0: before it come F"),
        (TWO, 1, "B1.0", "I1.0", "the program has F1.0 I1.0"),
        (TWO, 1, "F1.0", "", "before it come none"),
        (TWO, 0, "B0.0", "", "stage 0, micro-batch 0 is not complete: the program has F0.0"),
        (TWO, 0, "F0.0>r1e0s0", "F0.0>r1e0s0 F0.0>r1e0s0", "sends the same message"),
        (TWO, 0, "F0.0>r1e0s0", "", "cannot do F0.0<r0e0s0: no rank sends it"),
        (TWO, 1, "F0.0<r0e0s0", "", "uses the value of edge F 0->1, and no Receive posted before"),
        (TWO, 1, "F0.0<r0e0s0", "F0.0<r0e0s0 F0.0<r0e0s0", "it was received before"),
        (TWO, 1, "F0.0<r0e0s0", "F0.0<r1e0s0", "the other end is on rank 0"),
        (TWO, 0, "F0.0>r1e0s0", "F0.0>r0e0s0", "the other end is on rank 1"),
        (TWO, 1, "B1.0>r0e1s0", "F1.0>r0e1s0", "its edge does not carry this value"),
        (TWO, 1, "F0.0<r0e0s0", "F0.0<r0e1s0", "its edge does not carry this value"),
        (TWO, 0, "B1.0<r1e1s0", "I1.0<r1e1s0", "its edge does not carry this value"),
        (TWO, 1, "B1.0>r0e1s0", "I1.0>r0e1s0", "this rank has not made that value yet"),
        (TWO, 0, "F0.0", "F0.0@1", "the rule synchronous says version 0"),
        (TWO, 0, "B0.0", "B0.0@-1", "the rule synchronous says version 0"),
        (TWO, 0, "U0.0", "", "rank 0 does not end every step of stage 0 with an update"),
        (TWO, 0, "U0.0", "U0.0 U0.0", "the next update of the stage is that of step 1"),
        (TWO, 0, "U0.0", "U1.0 U0.0", "this rank has no gradients of that stage"),
        (TWO, 1, "B1.0", "U1.0 B1.0", "its gradient enters step 0, and a reduction or Update"),
        (MORE, 0, "F0.1>r1e0s1", "F0.1>r1e0s0", "the sender fills another slot: F0.1>r1e0s0"),
        (SHARDED, 0, "unshard0", "", "cannot do F0.0: the weights of the stage are sharded"),
        (SHARDED, 0, "reshard0", "", "the stage is still gathered"),
        (SHARDED, 0, "reshard0", "reshard0 reshard0", "the stage is not gathered"),
        (SHARDED, 0, "unshard0", "unshard0 unshard0", "the stage is gathered already"),
        (SHARDED, 0, "U0.0", "U0.0 unshard0", "rank 0 ends with stage 0 gathered"),
        (SHARDED, 0, "unshard0", "unshard0 unshard1", "this rank has no gradients of that stage"),
    ],
)
def test_broken_rule_is_named_with_the_instruction(lines, rank, old, new, message):
    with pytest.raises(ProgramError) as caught:
        program_of(*edited(lines, rank, old, new), num_micro_batches=2 if lines is MORE else 1)
    assert message in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.hint


def refusal(*lines, **fields):
    with pytest.raises(ProgramError) as caught:
        program_of(*lines, **fields)
    return caught.value.message


def test_error_shows_the_instructions_around():
    lines = edited(MORE, 0, "B1.1<r1e1s0", "")
    assert refusal(*lines, num_micro_batches=2) == (
        "rank 0 cannot do B0.1: it uses the value of edge B 1->0, "
        "and no Receive posted before brings it\n"
        "  rank 0  ... F0.1 F0.1>r1e0s1 B1.0<r1e1s0 B0.0 B0.1 U0.0"
    )


def test_receive_after_the_use_of_its_value_is_refused():
    edges = (*chain(2),)
    lines = (TWO[0], "F1.0 F0.0<r0e0s0 B1.0 B1.0>r0e1s0 U1.0")
    assert "F1.0: it uses the value of edge F 0->1" in refusal(*lines, edges=edges)


def test_action_whose_other_half_is_on_another_rank_is_refused():
    message = refusal("F0.0 U0.0", "B0.0", num_stages=1, edges=())
    assert (
        "cannot do B0.0: other actions of the same stage and micro-batch are on rank 0" in message
    )


def test_value_used_before_it_is_made_on_the_same_rank_is_refused():
    message = refusal("F1.0 F0.0 B1.0 B0.0 U0.0 U1.0")
    assert "F1.0: it uses the value of edge F 0->1, which this rank makes only later" in message


def test_messages_received_in_another_order_than_sent_are_refused():
    """torch 2.13's defer_pp_recv: untagged messages then land in each other's buffers."""
    lines = edited(MORE, 1, "F0.0<r0e0s0", "F0.1<r0e0s1 F0.0<r0e0s0")
    lines[1] = lines[1].replace("F1.0 F0.1<r0e0s1", "F1.0")
    message = refusal(*lines, num_micro_batches=2)
    assert "F0.0<r0e0s0: the sender sends it before F0.1>r1e0s1, which was received" in message


def test_two_edges_of_one_channel_are_received_in_the_order_in_which_they_are_sent():
    edges = (Edge("F", 0, 1), Edge("F", 0, 2))
    sends = "F0.0 F0.0>r1e0s0 F0.0>r1e1s0"
    right = (sends, "F0.0<r0e0s0 F0.0<r0e1s0 F1.0 F2.0")
    wrong = (sends, "F0.0<r0e1s0 F0.0<r0e0s0 F1.0 F2.0")
    program_of(*right, num_stages=3, edges=edges)
    assert "sender sends it before" in refusal(*wrong, num_stages=3, edges=edges)


def test_slot_filled_again_before_the_last_use_is_refused():
    lines = [line.replace("s1", "s0") for line in MORE]
    lines[1] = "F0.0<r0e0s0 F1.0 F0.1<r0e0s0 B1.0 B1.0>r0e1s0 F1.1 B1.1 B1.1>r0e1s0 U1.0"
    message = refusal(*lines, num_micro_batches=2)
    assert "F0.1<r0e0s0: the slot still holds a value that a later action uses" in message


def test_gradient_slot_filled_again_between_i_and_w_is_refused():
    lines = [line.replace("e1s1", "e1s0") for line in SPLIT]
    message = refusal(*lines, num_micro_batches=2)
    assert "I1.1<r1e1s0: the slot still holds a value" in message


def test_version_that_does_not_exist_yet_is_refused():
    ahead = WeightRule(
        "ahead", lambda stage, m, stages, per_step: Reads(m * 0 + 1, m * 0 + 1, m // per_step)
    )
    message = refusal("F0.0@1 B0.0@1 U0.0", num_stages=1, edges=(), weight_rule=ahead)
    assert "F0.0@1: that version is not there: versions 0 to 0 are" in message


def test_version_older_than_the_history_is_refused():
    back = WeightRule("back", lambda stage, m, stages, per_step: Reads(-m, -m, m // per_step))
    code = "F0.0 B0.0 U0.0 F0.1@-1 B0.1@-1 U0.1"
    message = refusal(code, num_stages=1, edges=(), num_steps=2, weight_rule=back)
    assert "F0.1@-1: that version is not there: versions 0 to 1 are" in message


def test_law_that_moves_a_gradient_to_another_step_is_refused():
    late = WeightRule("late", lambda stage, m, stages, n: Reads(m * 0, m * 0, m // n + 1))
    message = refusal("F0.0 B0.0 U0.0", num_stages=1, edges=(), weight_rule=late)
    assert message == "rule late puts a gradient into another step than its micro-batch's own"


TIED = Sum("tied", "w", (0, 1))
NORM = Norm((0, 1))
SUMMED = ("F0.0 F0.0>r1e0s0 B1.0<r1e1s0 B0.0 tied:w.0 norm:all.0 U0.0",
          "F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 tied:w.0 norm:all.0 U1.0")  # fmt: skip
SUMS = {"tied": (TiedGroup("w", (0, 1)),), "clip": True, "reductions": (TIED, NORM)}


def test_sums_in_order_are_accepted():
    program_of(*SUMMED, **SUMS)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "tied:w.0", "", "norm:all.0: an earlier sum of stage 0 is missing"),
        (0, "norm:all.0", "", "U0.0: its gradient is not whole: a norm sum is missing"),
        (1, "tied:w.0", "tied:w.0 tied:w.0", "tied:w.0: its turn is step 1"),
        (1, "B1.0", "tied:w.0 B1.0", "B1.0: its gradient enters step 0, and a reduction or Update"),
        (1, "U1.0", "U1.0 norm:all.0", "norm:all.0: its turn is step 1"),
    ],
)
def test_sum_that_is_missing_doubled_or_misplaced_is_refused(rank, old, new, message):
    assert message in refusal(*edited(SUMMED, rank, old, new), **SUMS)


def test_sum_that_the_program_does_not_need_is_refused():
    fields = SUMS | {"clip": False}
    assert "norm:all.0: this program needs no such sum on this rank" in refusal(*SUMMED, **fields)


def test_sum_over_other_ranks_or_bytes_is_refused():
    for other in (replace(TIED, ranks=(0,)), replace(TIED, size_bytes=9)):
        fields = SUMS | {"reductions": (other, NORM)}
        assert "tied:w.0: this program needs no such sum" in refusal(*SUMMED, **fields)


def test_update_on_replicas_without_their_sum_is_refused():
    message = refusal("F0.0 B0.0 U0.0", "F0.0 B0.0 U0.0", num_stages=1, edges=(), replicas=2)
    assert "rank 0 cannot do U0.0: its gradient is not whole: a replicas sum is missing" in message


def test_collectives_in_another_order_on_another_rank_are_refused():
    groups = (TiedGroup("w", (0, 1)), TiedGroup("v", (0, 1)))
    sums = (TIED, replace(TIED, bucket="v"))
    lines = edited(SUMMED, 0, "norm:all.0", "tied:v.0")
    lines = edited(lines, 1, "norm:all.0", "")
    lines = edited(lines, 1, "tied:w.0", "tied:v.0 tied:w.0")
    assert refusal(*lines, tied=groups, reductions=sums) == (
        "ranks 0 1 do not reach their collectives in one order; the first difference:\n"
        "  rank 0  tied:w.0 tied:v.0\n"
        "  rank 1  tied:v.0 tied:w.0"
    )


def test_replica_that_gathers_in_another_order_is_refused():
    one = "unshard0 unshard1 F0.0 F1.0 B1.0 B0.0 reshard0 reshard1"
    other = one.replace("unshard0 unshard1", "unshard1 unshard0")
    sums = tuple(Sum("replicas", f"stage{stage}", (0, 1)) for stage in (0, 1))
    end = " replicas:stage0.0 replicas:stage1.0 U0.0 U1.0"
    fields = {"replicas": 2, "reductions": sums}
    program_of(one + end, one + end, **fields)
    assert "ranks 0 1 do not reach their collectives" in refusal(one + end, other + end, **fields)


def test_deadlock_names_the_ranks_that_wait_and_shows_what_they_do():
    """Head to head, pytorch #172668: both ranks send before either has posted its receive."""
    message = refusal(
        "F0.0 F0.0>r1e0s0 F0.1 F0.1>r1e0s1 B1.0<r1e1s0 B0.0 B1.1<r1e1s0 B0.1 U0.0",
        "F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 F0.1<r0e0s1 F1.1 B1.1 B1.1>r0e1s0 U1.0",
        num_micro_batches=2,
    )
    assert message == (
        "deadlock: rank 0 at F0.1>r1e0s1 waits for rank 1 at B1.0>r0e1s0, which waits for rank 0\n"
        "  rank 0  F0.0 F0.0>r1e0s0 F0.1 F0.1>r1e0s1 B1.0<r1e1s0 B0.0 B1.1<r1e1s0 B0.1 ...\n"
        "  rank 1  F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 F0.1<r0e0s1 F1.1 B1.1 B1.1>r0e1s0 ..."
    )


def test_deadlock_of_a_compute_and_a_sum_is_told_apart():
    lines = edited(SUMMED, 1, "B1.0>r0e1s0", "")
    lines = edited(lines, 1, "norm:all.0", "norm:all.0 B1.0>r0e1s0")
    message = refusal(*lines, **SUMS)
    head = "deadlock: rank 0 at B0.0 waits for rank 1 at norm:all.0, which waits for rank 0"
    assert message.splitlines()[0] == head


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_stages": 0}, "num_stages is 0"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": 3}, "2 ranks cannot be divided into 3 replicas"),
        ({"stage_bytes": (StageBytes(),)}, "1 stage_bytes for 2 stages"),
        ({"stage_bytes": (StageBytes(), StageBytes(deferred=-1))}, "stage_bytes is below 0"),
        ({"edges": (Edge("F", 0, 1, -1),)}, "edge F 0->1 of -1 bytes cannot be"),
    ],
)
def test_number_that_cannot_be_is_refused(fields, message):
    assert message in refusal(*TWO, **fields)


def test_program_without_ranks_is_refused():
    with pytest.raises(ProgramError, match="num_ranks is 0"):
        Program(1, 1, ())


def test_every_rule_has_words():
    alone = {rules.NOT_UPDATED, rules.NOT_VALIDATED, rules.NOT_DROPPED, rules.NOT_BACK}
    told = {*faults.WORDS, rules.FINE, rules.MISSING, *alone}
    assert told == set(range(rules.NOT_THIS_GROUP + 1))


VALIDATE = Validate((0, 1))
LATE = ("F0.0 F0.0>r1e0s0 B1.0<r1e1s0 B0.0 U0.0 validate:all.0",
        "F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 U1.0 validate:all.0")  # fmt: skip


def test_validation_after_the_update_is_accepted():
    program_of(*LATE, clip=True, reductions=(VALIDATE,))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("U0.0 validate:all.0", "U0.0", "rank 0 ends with an update of stage 0 that is not valid"),
        ("U0.0 validate:all.0", "validate:all.0 U0.0", "validate:all.0: its turn is step 0"),
        ("validate:all.0", "validate:all.0 validate:all.0", "validate:all.0: its turn is step 1"),
    ],
)
def test_validation_elsewhere_is_refused(old, new, message):
    lines = (LATE[0].replace(old, new), LATE[1])
    assert message in refusal(*lines, clip=True, reductions=(VALIDATE,))
