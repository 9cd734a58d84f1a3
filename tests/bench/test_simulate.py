"""bench.simulate: every case runs at a small size, and says whether it is what it should be."""

import json
import subprocess
import sys

import pytest

from bench.simulate import LARGE, MEASURED, large, row_of, show, throughput

KEYS = {
    "case", "threads", "actions", "candidates", "seconds", "median_s", "cpu_s", "actions_per_s",
    "candidates_per_s", "peak_bytes", "aim", "reached",
}  # fmt: skip


def test_rows_have_the_keys_documented_and_are_json(capsys):
    rows = [*throughput(quick=True), *(large(name, quick=True) for name in LARGE)]
    assert all(row.keys() == KEYS for row in rows)
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        assert 0.0 < row["seconds"] <= row["median_s"]
        assert row["candidates_per_s"] == pytest.approx(row["candidates"] / row["seconds"])
    show(rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_replicas_as_a_batch_and_as_a_program_have_the_same_number_of_actions():
    batch, program = (MEASURED[name](4, 6, 9) for name in ("replicas_batch", "replicas_program"))
    assert batch[1] * batch[2] == program[1] * program[2] == 2 * 4 * 6 * 9


@pytest.mark.parametrize(
    ("aim", "reached"),
    [
        ("", None),
        ("seconds <= 2", True),
        ("seconds <= 1.9", False),
        ("actions_per_s >= 1e3, candidates_per_s >= 5", True),
        ("actions_per_s >= 1e3, peak_bytes <= 6", False),
    ],
)
def test_row_says_whether_its_aim_is_reached(aim, reached):
    row = row_of("one", 200, (2.0, 3.0, 1.0), candidates=10, aim=aim, peak_bytes=7)
    assert row["reached"] is reached
    assert (row["actions_per_s"], row["candidates_per_s"]) == (1000.0, 5.0)


def test_large_case_in_its_own_process_holds_no_torch():
    command = "import sys, bench.simulate; print(bench.simulate.large('built', quick=True)); "
    command += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
