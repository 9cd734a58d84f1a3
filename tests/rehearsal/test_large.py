"""Models that are larger than a rehearsal GPU: its memory is set to less than what trains them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal.command import PATHS, rehearse
from tests.rehearsal.large_job import WEIGHT_BYTES
from tests.rehearsal.library import cache_folder

JOB = Path(__file__).parent / "large_job.py"


def test_weights_that_wait_give_what_those_give_that_are_there() -> None:
    own = {"REHEARSAL_GPUS": "1", "REHEARSAL_CACHE": str(cache_folder())}
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.lent_to"],
        env={**os.environ, **own, **PATHS},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["waits"]
    assert seen["names"] == []
    assert seen["apart"] == pytest.approx(0, abs=1e-6)
    assert seen["peak"] < seen["weights"]
    assert seen["update"] >= 1  # AdamW's for all at once holds copies: on the device, not the host
    assert seen["races"] == []


WEIGHTS = """
[[rule]]
offload = "blocks.[0-4]"
what = "weights"
"""
ALL = """
[[rule]]
shard = "blocks.*"

[[rule]]
offload = "blocks.3"
what = "all"
"""


@pytest.mark.parametrize(("stages", "rules"), [(2, WEIGHTS), (1, "")], ids=["stages", "shards"])
@pytest.mark.sampled(2)
def test_model_larger_than_a_gpu_trains(tmp_path: Path, stages: int, rules: str) -> None:
    """No GPU could hold its weights, gradients and momenta.

    Of two stages, the weights of one wait elsewhere for certain.
    """
    room = int(2.2 * WEIGHT_BYTES)
    arguments = [*_train(tmp_path, rules), "--set", f"stages={stages}"]
    seen = rehearse(arguments, tmp_path, gpus=2, bytes_of_each=room)
    assert seen.code == 0, seen.text
    assert "they wait in the host's memory" in seen.text
    assert "equal to the plain loop" in seen.text
    assert "val loss" in seen.text
    assert seen.races == []
    assert seen.devices == {0, 1}
    for last in seen.last_windows:
        assert last["live"] <= 1.02 * last["held"]
        assert last["syncs"] <= 1
        assert last["pageable"] == 0


@pytest.mark.long
def test_gradients_that_have_left_stand_beside_those_on_the_device(tmp_path: Path) -> None:
    """Of blocks in parts, one waits elsewhere: what is told of a step is of both."""
    arguments = [*_train(tmp_path, ALL), "--set", "stages=1"]
    seen = rehearse(arguments, tmp_path, gpus=2, bytes_of_each=4 * WEIGHT_BYTES)
    assert seen.code == 0, seen.text
    assert "equal to the plain loop" in seen.text
    assert seen.races == []


def _train(folder: Path, rules: str) -> list[str]:
    (folder / "rules.toml").write_text(rules)
    more = ["--set", "rules=rules.toml"] if rules else []
    return ["train", f"{JOB}:job", "--steps", "2", "--out", "run", *more]


def test_model_without_a_plan_that_has_no_room_is_refused_with_figures(tmp_path: Path) -> None:
    arguments = ["train", f"{JOB}:untraceable", "--steps", "2", "--out", "run"]
    seen = rehearse(arguments, tmp_path, bytes_of_each=WEIGHT_BYTES)
    assert seen.code != 0
    assert "a replica holds" in seen.text
