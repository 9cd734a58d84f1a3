"""Tables of measurements: their layouts, the physics of a row, and what is refused."""

import math
from pathlib import Path

import pytest

from penstock.errors import EstimateError
from penstock.fleet.measurement import (
    FLEET_LAYOUTS,
    Measurement,
    Peaks,
    StepWork,
    of_placement,
    of_step,
    peaks_of,
    read_table,
    steps_on,
)

STEP = "model,device,flop,parameters,tensors,seconds\n"
PAGE = Path(__file__).parents[2] / "docs" / "fleet_predict.md"


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "table.csv"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "layout", "group", "seconds"),
    [
        (STEP + "net,k80,1e9,1e6,50,0.2\n", "step", "net", 0.2),
        (STEP + "net,k80,1e9,1e6,50,\n", "step", "net", None),
        ("model,size_bytes,tensors,seconds\nnet,1e6,50,3\n", "transfer", "net", 3.0),
        ("model,kind,seconds\nnet,cold,70\n", "start", "net", 70.0),
        ("placement,batch,seconds\n213,8,0.5\n", "placement", "213", 0.5),
        ("placement,local_bsz,step_time,sync_time\n4,8,0.5,0.1\n", "placement", "4", 0.5),
    ],
)
def test_table_is_read_in_the_layout_of_its_columns(write, text, layout, group, seconds):
    table = read_table(write(text))
    (row,) = table.rows
    assert (table.layout, row.group, row.seconds) == (layout, group, seconds)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a,b\n1,2\n", "columns of no known layout: a, b"),
        (STEP + "net,k80,-1,1e6,50,0.2\n", "row 2: flop is '-1'"),
        (STEP + "net,abacus,1,1e6,50,0.2\n", "row 2: nothing is known of a device 'abacus'"),
        (STEP + "net,k80,1e9,1e6,50,-3\n", "row 2: seconds is '-3'"),
        (STEP + "net,k80,1e9,1e6\n", "row 2: 4 cells for 6 columns"),
        ("placement,batch,seconds\n2-1,8,0.5\n", "row 2: placement is '2-1'"),
        ("placement,batch,seconds\n20,8,0.5\n", "row 2: [2, 0] are no numbers of replicas"),
        ("", "is empty"),
    ],
)
def test_table_that_cannot_be_is_refused_with_the_row(write, text, error):
    with pytest.raises(EstimateError) as problem:
        read_table(write(text))
    assert error in problem.value.message
    assert problem.value.hint


def test_peaks_of_a_table_stand_before_those_of_data_sheets(write):
    head = STEP.replace("seconds", "peak_flop_per_s,bytes_per_s,seconds")
    rows = read_table(write(head + "net,own,1e9,1e6,50,1e12,1e11,0.2\n")).rows
    (row,) = steps_on("new", StepWork(2e9, 1e6, 50), rows)
    assert row.device == "own"
    assert row.terms["work"] == pytest.approx(2e9 / 1e12)
    with pytest.raises(EstimateError, match="'other'"):
        steps_on("new", StepWork(2e9, 1e6, 50), rows, ["other"])


def test_step_of_twice_the_work_on_a_device_twice_as_fast_has_the_same_terms_of_work():
    slow = of_step("a", "x", Peaks(1e12, 1e11), StepWork(1e9, 1e6, 50))
    fast = of_step("a", "x", Peaks(2e12, 2e11), StepWork(2e9, 1e6, 50))
    for name in ("work", "bytes"):
        assert fast.terms[name] == pytest.approx(slow.terms[name])
    assert fast.terms["launches"] == slow.terms["launches"]


def test_bytes_that_were_counted_are_believed_and_else_guessed_from_the_width():
    assert StepWork(1e9, 1e6, 50, 7e8).moved == 7e8
    square = StepWork(9e9, 9.0 * 100 * 100 * 10, 10)  # ten convolutions of 3 x 3 x 100 x 100
    assert square.moved == pytest.approx(4 * 9e9 / 100)


def test_bytes_are_left_to_be_guessed_where_the_table_has_none(write):
    rows = read_table(write(STEP + "net,k80,1e9,1e6,50,0.2\n")).rows
    (row,) = steps_on("new", StepWork(2e9, 1e6, 50, 123.0), rows)
    guessed = of_step("new", "k80", peaks_of("k80"), StepWork(2e9, 1e6, 50))
    assert row.terms == pytest.approx(guessed.terms)


def test_messages_cost_only_replicas_that_have_others():
    alone, inside, across = (of_placement("a", hosts, 8).terms for hosts in ([1], [3], [2, 1]))
    costs = alone.keys() - {"step", "samples"}
    assert {alone[name] for name in costs} == {0.0}
    assert (inside["inside"], inside["across"]) == (1.0, 0.0)
    assert (across["inside"], across["across"], across["card"]) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize("terms", [{}, {"a": -1.0}, {"a": math.inf}])
def test_terms_that_are_none_are_refused(terms):
    with pytest.raises(EstimateError, match="are no terms"):
        Measurement("m", "", "", terms, {}, 1.0)


def test_columns_that_the_page_lists_are_those_of_each_layout():
    page = PAGE.read_text()
    for layout in FLEET_LAYOUTS[:4]:
        line = next(line for line in page.splitlines() if line.startswith(f"| `{layout.name}` |"))
        assert all(f"`{column}`" in line for column in layout.columns)
