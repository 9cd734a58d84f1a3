"""Steps are made again beside a run on rehearsal GPUs, in memory that its plan leaves."""

import json
from pathlib import Path

import pytest

from tests.rehearsal.command import rehearse

JOBS = Path(__file__).parent / "jobs.py"
ASKED = ["--set", "trial=false", "--steps", "4", "--out", "run"]


@pytest.mark.long
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.sampled(2)
def test_a_clean_run_is_equal_and_waits_for_no_audit(gpus: int, tmp_path: Path) -> None:
    arguments = ["train", f"{JOBS}:job", *ASKED, "--set", "audit=100%"]
    seen = rehearse(arguments, tmp_path, gpus=gpus)
    assert seen.code == 0, seen.text
    assert "the plain loop takes" in seen.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["audited_to"] == 4, summary["audited"]
    assert summary["audits"]["count"] >= 2, summary["audited"]
    assert 0 < summary["audits"]["most_bytes"] < summary["audits"]["room_bytes"]
    assert seen.races == []
    assert len(seen.kept) >= 4 * gpus
    for each in [*seen.last_windows, *seen.kept]:
        assert each["syncs"] <= (each["kind"] == "window")
        assert each["pageable"] == 0


@pytest.mark.parametrize("gpus", [2, 1])
@pytest.mark.sampled(2)
def test_a_weight_that_goes_wrong_is_found(gpus: int, tmp_path: Path) -> None:
    arguments = ["train", f"{JOBS}:job", *ASKED, "--set", "audit=100%,stop"]
    seen = rehearse(arguments, tmp_path, gpus=gpus, wrong=4)
    assert seen.code == 1, seen.text
    assert "step 4 is not what the plain loop makes of it" in seen.text
    assert seen.races == []
