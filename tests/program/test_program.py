"""Program: its columns, its file, its text."""

import json
import re
import tempfile
from collections import Counter, defaultdict, deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.program import codes
from penstock.program.codes import Codes
from penstock.program.instructions import parse_instruction
from penstock.program.lower import chain, drafted, lower
from penstock.program.program import (
    Compute,
    Edge,
    Program,
    Receive,
    Send,
    StageBytes,
    TiedGroup,
    Update,
    sound,
)
from penstock.program.reductions import Reduction, Sum
from penstock.program.step_end import StepEnd
from penstock.schedule import (
    DOUBLE_BUFFERED,
    Action,
    WeightRule,
    double_buffered,
    gpipe,
    interleaved,
    one_f_one_b,
)
from penstock.schedule.grid import InnerAxis
from tests.program.lowering import lower_schedule
from tests.program.programs import programs


@given(programs())
def test_codes_of_the_instructions_of_codes_are_equal(program):
    assert Codes.of(tuple(program.code)) == program.code
    assert hash(Codes.of(tuple(program.code))) == hash(program.code)


@given(programs())
def test_instruction_prints_as_what_it_parses_from(program):
    for code in program.code:
        for one in code:
            table = {(one.word, one.bucket): one} if isinstance(one, Reduction) else {}
            assert parse_instruction(str(one), table) == one


@pytest.mark.parametrize(
    "text",
    [
        *("", "F0", "X0.0", "F0.0>r1e0", "F0.0>r1e0s0x", "F0.0>r9999999999e0s0", "W0.0>r1e0s0"),
        *(
            "F0.0@",
            "F0.0@1.5",
            "U0.0@1",
            "tied:w",
            "norm:all.0",
            "unshard",
            "reshardx",
            "reshard-1x",
        ),
    ],
)
def test_text_that_is_no_instruction_is_refused_with_a_hint(text):
    with pytest.raises(ProgramError, match=re.escape(repr(text))) as caught:
        parse_instruction(text, {("tied", "w"): Sum("tied", "w", (0,))})
    assert "F0.3>r1e0s2" in caught.value.hint


@given(programs())
def test_program_loads_as_it_was_saved(program):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.json"
        program.save(path)
        assert Program.load(path) == program


def test_saved_program_is_readable_json(tmp_path):
    path = tmp_path / "program.json"
    lower_schedule(
        one_f_one_b(2, 1),
        edges=chain(2, size_bytes=64),
        tied=[TiedGroup("wte", (0, 1), 8)],
        stage_bytes=[StageBytes(weights=100, optimizer=200), StageBytes(weights=50)],
    ).save(path)
    assert path.read_text() == EXPECTED


EXPECTED = """\
{
 "penstock": "program",
 "num_stages": 2,
 "num_micro_batches": 1,
 "num_steps": 1,
 "replicas": 1,
 "clip": false,
 "weight_rule": "synchronous",
 "edges": [
  ["F", 0, 1, 64],
  ["B", 1, 0, 64]
 ],
 "tied": [
  ["wte", [0, 1], 8]
 ],
 "stage_bytes": [
  [100, 200, 0, 0, 0],
  [50, 0, 0, 0, 0]
 ],
 "shares": [],
 "reductions": [
  ["tied", "wte", [0, 1], 8]
 ],
 "code": [
  "F0.0 F0.0>r1e0s0 B1.0<r1e1s0 B0.0 tied:wte.0 U0.0",
  "F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 tied:wte.0 U1.0"
 ]
}
"""


def test_program_with_a_weight_rule_of_ones_own_loads_when_it_is_given(tmp_path):
    mine = WeightRule("mine", DOUBLE_BUFFERED.law)
    program = replace(lower(double_buffered(2, 2)), weight_rule=mine)
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json", weight_rules=[mine]) == program
    with pytest.raises(ProgramError, match="weight_rule is 'mine'; known are synchronous double"):
        Program.load(tmp_path / "program.json")


def _break(field, value):
    return lambda content: content | {field: value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_break("penstock", "plan"), "no program: it is a plan"),
        (lambda content: {k: v for k, v in content.items() if k != "edges"}, "edges is missing"),
        (lambda content: {}, "is JSON, but no program"),
        (_break("colour", 1), "colour is 1, not a field that is known"),
        (_break("num_stages", "2"), "num_stages is '2', not a whole number"),
        (_break("num_stages", True), "num_stages is True, not a whole number"),
        (_break("num_stages", 0), "num_stages is 0"),
        (_break("num_stages", 10**30), "not a whole number below 2 ** 63"),
        (
            _break("stage_bytes", [[2**63, 0, 0, 0, 0]]),
            "stage_bytes[0][0] is 9223372036854775808, not",
        ),
        (_break("num_stages", 10**9), "18 instructions for 2000000000 forwards"),
        (_break("clip", 1), "clip is 1, not true or false"),
        (_break("edges", {}), "edges is {}, not a list"),
        (_break("edges", [["F", 0, 1]]), "edges[0] is ['F', 0, 1], not a list of 4"),
        (_break("edges", [["X", 0, 1, 0]]), "edges[0][0] is 'X', not one of F, B"),
        (_break("code", [1, 2]), "code[0] is 1, not a text"),
        (_break("code", ["F0.0", "F1.x"]), "'F1.x' is not an instruction"),
        (_break("code", ["F0.0 tied:w.0", "F1.0"]), "'tied:w.0' is not an instruction"),
        (_break("code", ["F0.0 F0.1", "F1.0 F1.1"]), "F1.0: it uses the value of edge F 0->1"),
        (_break("stage_bytes", [[1]]), "stage_bytes[0] is [1], not a list of 5"),
        (_break("stage_bytes", [[1, 0, 0, 0, 0]]), "1 stage_bytes for 2 stages"),
        (_break("tied", [["w", [0, "1"], 0]]), "tied[0][1][1] is '1', not a whole number"),
    ],
)
def test_file_that_is_no_sound_program_is_refused_with_its_name(tmp_path, change, message):
    path = tmp_path / "program.json"
    lower(one_f_one_b(2, 2)).save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ProgramError) as caught:
        Program.load(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"penstock": "program"'])
def test_damaged_file_is_refused(tmp_path, text):
    path = tmp_path / "program.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ProgramError, match=re.escape(str(path))):
        Program.load(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ProgramError, match=r"cannot read program .*none\.json"):
        Program.load(tmp_path / "none.json")


def test_program_prints_its_edges_and_ranks():
    assert str(lower(one_f_one_b(2, 1))) == (
        "program: 2 ranks, 2 stages, 1 micro-batches, 10 instructions\n"
        "edge 0  F 0->1\n"
        "edge 1  B 1->0\n"
        "rank 0  F0.0 F0.0>r1e0s0 B1.0<r1e1s0 B0.0 U0.0\n"
        "rank 1  F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 U1.0"
    )


def test_long_program_prints_short_and_says_what_is_left_out():
    lines = str(lower(double_buffered(40, 30))).splitlines()
    assert lines[0].startswith("program: 40 ranks, 40 stages, 30 micro-batches, 4 steps, double_b")
    assert "... 46 more edges" in lines
    assert lines[-1] == "... 24 more ranks"
    assert re.fullmatch(r"rank 15  .* \.\.\. \d+ more", lines[-2])
    assert max(map(len, lines)) < 1200


@given(programs())
def test_mapping_ranks_to_themselves_changes_nothing(program):
    assert program.map_ranks(lambda code: code) == program


def test_mapping_ranks_to_a_broken_program_is_refused():
    with pytest.raises(ProgramError, match="no rank sends it"):
        lower(one_f_one_b(2, 2)).map_ranks(
            lambda code: (one for one in code if not isinstance(one, Send))
        )


def test_program_knows_stages_and_slots_of_a_rank():
    program = lower(interleaved(4, 3, num_ranks=2))
    assert [program.stages_of(rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert program.slots(0) == {1: 3, 3: 1, 5: 1}


@given(programs())
def test_unread_messages_are_as_many_as_a_queue_of_each_sender_holds(program):
    for rank, code in enumerate(program.code):
        queues, most = defaultdict(deque), Counter()
        for one in code:
            if isinstance(one, Receive):
                queues[one.edge, one.peer].append(one.of.micro_batch)
                most[one.edge, one.peer] = max(
                    most[one.edge, one.peer], len(queues[one.edge, one.peer])
                )
            if not isinstance(one, Compute):
                continue
            for (edge, _), queue in queues.items():
                kind, _, target, *_ = program.edges[edge]
                if target == one.action.stage and (kind == "F") == (one.action.kind == "F"):
                    while one.action.micro_batch in queue:
                        queue.popleft()
        assert program.unread(rank) == dict(most)
        assert not any(queues.values())


def test_a_rank_reads_at_once_what_it_keeps_for_long():
    """GPipe keeps every activation until its backward, and no message lies about."""
    program = lower(gpipe(3, 40))
    assert program.slots(1) == {0: 40, 3: 1}
    assert program.unread(1) == {(0, 0): 2, (3, 2): 1}


def test_wide_numbers_make_wide_columns():
    narrow = lower(one_f_one_b(2, 2)).code
    assert {getattr(narrow, name).dtype.itemsize for name in codes.SMALL} == {2}
    wide = Codes.of([[Compute(Action("F", 40_000, 0)), Update(40_000)]])
    assert wide.stage.dtype == np.int32
    assert wide[0] == (Compute(Action("F", 40_000, 0)), Update(40_000))


def test_wide_columns_are_verified_and_lowered_like_narrow_ones():
    narrow = lower(one_f_one_b(3, 3))
    wide = {name: getattr(narrow.code, name).astype(np.int32) for name in codes.SMALL}
    assert replace(narrow, code=replace(narrow.code, **wide)) == narrow


def test_number_beyond_32_bits_is_refused():
    with pytest.raises(ProgramError, match="a number in an instruction is 2147483648"):
        Codes.of([[Compute(Action("F", 0, 2**31))]])


def test_columns_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        lower(one_f_one_b(2, 2)).code.stage[0] = 1


def test_columns_that_disagree_are_refused():
    code = lower(one_f_one_b(2, 2)).code
    with pytest.raises(ValueError, match="all must be of one length"):
        replace(code, op=code.op[1:])
    with pytest.raises(ValueError, match="beyond the last one"):
        replace(code, op=code.op + 7)
    with pytest.raises(ValueError, match="beyond the last one"):
        replace(code, op=np.full_like(code.op, codes.REDUCE))


@given(programs(), st.integers(-40, 40))
def test_rank_of_codes_is_that_of_a_sequence(program, rank):
    ranks = list(program.code)
    if -len(ranks) <= rank < len(ranks):
        assert program.code[rank] == ranks[rank]
    else:
        with pytest.raises(IndexError):
            program.code[rank]


def test_stages_of_a_runtime_travel_along_but_do_not_count_in_a_comparison(tmp_path):
    program = lower_schedule(one_f_one_b(2, 2), stages=("anything", 3))
    assert program.graph.stages == ("anything", 3)
    assert program == lower(one_f_one_b(2, 2))
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json").graph.stages == ()


def test_edge_and_group_print_short():
    assert str(Edge("F", 0, 2, 8)) == "F 0->2"


def test_a_draft_has_to_be_sound_once_it_is_done() -> None:
    program = lower(one_f_one_b(2, 4))
    draft = drafted([one_f_one_b(2, 4)], None, StepEnd(), InnerAxis(), frozenset())
    changed = replace(draft, num_steps=1)
    assert sound(changed) == program
    broken = draft.map_ranks(lambda code: code[::-1])  # backwards before their forwards
    with pytest.raises(ProgramError):
        sound(broken)
    with pytest.raises(ProgramError):
        program.map_ranks(lambda code: code[::-1])
