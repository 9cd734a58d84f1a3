"""penstock predict: one JSON document, a table for people, and what is refused."""

import json
import statistics
from pathlib import Path

import pytest

from tests.cli.conftest import Call

HEAD = (
    "layers,hidden,heads,vocabulary,sequence,device,gpus,data,tensor,pipeline,micro_batch,batch,"
    "recompute,framework,cluster,step_s,peak_bytes"
)
ROW = "18,1536,16,51200,1024,a100-80,8,2,2,2,2,32,full,megatron-lm,mine,300e-3,8e9"
OTHER = ROW.replace("1536", "2048").replace("300e-3", "450e-3")
FAILED = ROW.replace("300e-3", "nan")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEAD, ROW, FAILED, OTHER]))
    return path


def test_json_holds_rows_and_errors_in_percent(call: Call, table: Path) -> None:
    done = call("predict", table, "--json")
    found = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert found.keys() == {
        "rows", "mape", "median", "extrapolates", "memory", "skipped", "taken", "gains",
    }  # fmt: skip
    assert [row["measured"] for row in found["rows"]] == [0.3, 0.45]
    for row in found["rows"]:
        assert row.keys() == {"measured", "predicted", "low", "high", "rests_on"}
        assert row["low"] < row["predicted"] < row["high"]
    errors = [100 * abs(row["predicted"] / row["measured"] - 1) for row in found["rows"]]
    assert found["mape"] == pytest.approx(statistics.mean(errors))
    assert found["median"] == pytest.approx(statistics.median(errors))
    assert found["skipped"] == 1
    assert "interleave: 1" in found["taken"]
    assert found["gains"] == []


def test_memory_has_the_same_keys(call: Call, table: Path) -> None:
    found = json.loads(call("predict", table, "--json").out)
    assert found["memory"].keys() == {"rows", "mape", "median", "extrapolates"}
    first = found["memory"]["rows"][0]
    assert first["measured"] == 8e9
    assert first["low"] < first["predicted"] < first["high"]


def test_a_time_in_other_units_is_told_of_and_never_fitted_on(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEAD, ROW, ROW.replace("300e-3", "300")]))
    told = call("predict", path, "--json")
    assert told.code == 0
    assert told.err.startswith("run 2: 5.00 min measured, ")
    assert told.err.endswith("predicted; is it in seconds?\n")
    assert told.err.count("\n") == 1
    refused = call("predict", path, "--fit", path)
    assert refused.code == 2
    assert "run 2: 5.00 min measured" in refused.err
    assert "not fitted on" in refused.err


def test_runs_that_were_not_made_are_predicted(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plans.csv"
    head, row = (line.rsplit(",", 2)[0] for line in (HEAD, ROW))
    path.write_text(f"{head}\n{row}\n")
    found = json.loads(call("predict", path, "--json").out)
    assert found["rows"][0]["measured"] is None
    assert found["rows"][0]["predicted"] > 0
    assert (found["mape"], found["memory"]["median"]) == (None, None)
    assert "  -  " in call("predict", path).out


def test_own_runs_move_the_constants_of_their_cluster_and_say_what_each_gave(
    call: Call, table: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.csv"
    slow = [ROW.replace("300e-3", str(0.9 + 0.01 * at)) for at in range(3)]
    own.write_text("\n".join([HEAD, *slow]))
    shipped = json.loads(call("predict", table, "--json").out)
    fitted = json.loads(call("predict", table, "--fit", own, "--json").out)
    assert "cluster" in shipped["extrapolates"]["0"]
    assert "cluster" not in fitted["extrapolates"].get("0", [])
    assert fitted["rows"][0]["predicted"] > 1.5 * shipped["rows"][0]["predicted"]
    (gain,) = fitted["gains"]
    assert (gain["cluster"], gain["runs"], len(gain["deviations"])) == ("mine", 3, 4)
    assert gain["deviations"][-1] < gain["deviations"][0]
    assert "mine: 3 runs, a prediction is sure to" in call("predict", table, "--fit", own).out


def test_table_says_errors_intervals_and_extrapolation(call: Call, table: Path) -> None:
    done = call("predict", table)
    assert done.code == 0
    assert "extrapolates in" in done.out.splitlines()[0]
    assert "runs on a100" in done.out.splitlines()[1]
    assert "time: mean error" in done.out
    assert "1 rows of runs that failed were skipped" in done.err
    assert "not said by the table, and taken as: kv_heads: heads" in done.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"\xff\xfe\x00", "is not CSV"),
        (b"", "is empty"),
        (b"a,b\n1,2\n", "columns of no known name"),
        (f"{HEAD}\n".encode(), "has no row to use"),
        (f"{HEAD}\n{ROW.replace('1536', 'x')}\n".encode(), "hidden is 'x'"),
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
