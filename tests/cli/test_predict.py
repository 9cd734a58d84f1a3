"""penstock predict: one JSON document, a table for people, and what is refused."""

import json
import statistics
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.estimate.test_table import ROW, SAILOR, VTRAIN

OTHER = ROW[VTRAIN].replace("1536", "2048").replace(",300", ",450")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([VTRAIN, ROW[VTRAIN], ROW[VTRAIN].replace("300", "nan"), OTHER]))
    return path


@pytest.fixture
def sized(tmp_path: Path) -> Path:
    path = tmp_path / "sized.csv"
    path.write_text("\n".join([SAILOR, ROW[SAILOR]]))
    return path


def test_json_holds_rows_and_errors_in_percent(call: Call, table: Path) -> None:
    done = call("predict", table, "--json")
    found = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert found.keys() == {"rows", "mape", "median", "extrapolates", "layout", "skipped"}
    assert [row["measured"] for row in found["rows"]] == [0.3, 0.45]
    for row in found["rows"]:
        assert row.keys() == {"measured", "predicted", "low", "high"}
        assert row["low"] < row["predicted"] < row["high"]
    errors = [100 * abs(row["predicted"] / row["measured"] - 1) for row in found["rows"]]
    assert found["mape"] == pytest.approx(statistics.mean(errors))
    assert found["median"] == pytest.approx(statistics.median(errors))
    assert (found["layout"], found["skipped"]) == ("vtrain", 1)


def test_memory_has_the_same_keys_where_the_file_has_it(call: Call, sized: Path) -> None:
    found = json.loads(call("predict", sized, "--json").out)
    assert found["memory"].keys() == {"rows", "mape", "median", "extrapolates"}
    (row,) = found["memory"]["rows"]
    assert row["measured"] == 8e9
    assert row["low"] < row["predicted"] < row["high"]


def test_fit_uses_that_file_alone(call: Call, table: Path, sized: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice.csv"
    slow = [f"{row.rpartition(',')[0]},{9 * 300 * at}" for at, row in enumerate([ROW[VTRAIN]] * 9)]
    twice.write_text("\n".join([VTRAIN, *slow[1:]]))
    shipped = json.loads(call("predict", table, "--json").out)
    fitted = json.loads(call("predict", table, "--fit", twice, "--json").out)
    for own, other in zip(shipped["rows"], fitted["rows"], strict=True):
        assert other["predicted"] > 3 * own["predicted"]
    without = json.loads(call("predict", sized, "--fit", twice, "--json").out)
    assert "memory" not in without  # none was measured in the file fitted on
    assert "cluster" in without["extrapolates"]["0"]


def test_table_says_errors_intervals_and_extrapolation(call: Call, table: Path) -> None:
    done = call("predict", table)
    assert done.code == 0
    assert "extrapolates in" in done.out.splitlines()[0]
    assert "hidden size" not in done.out.splitlines()[1]
    assert "time: mean error" in done.out
    assert "1 rows without a measured time were skipped" in done.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"\xff\xfe\x00", "is not CSV"),
        (b"", "is empty"),
        (b"a,b\n1,2\n", "columns of no known layout"),
        (f"{VTRAIN}\n".encode(), "has no row to use"),
        (f"{VTRAIN}\n{ROW[VTRAIN].replace('1536', 'x')}\n".encode(), "hidden size is 'x'"),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_bad_files_are_refused(
    call: Call, table: Path, content: bytes | None, message: str, as_json: list[str]
) -> None:
    bad = table.with_name("bad.csv")
    if content is not None:
        bad.write_bytes(content)
    for arguments in ([bad], [table, "--fit", bad]):
        error, _ = call("predict", *arguments, *as_json).refusal(2)
        assert message in error
        assert "bad.csv" in error
