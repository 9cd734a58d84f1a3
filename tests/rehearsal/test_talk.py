"""Messages and sums over NCCL as rehearsed: what waits for what, and what they hold."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.rehearsal.command import PATHS
from tests.rehearsal.library import cache_folder


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Return what `talk.py` has found, on two ranks."""
    own = {"REHEARSAL_GPUS": "2", "REHEARSAL_CACHE": str(cache_folder())}
    starts = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *starts, "-m", "tests.rehearsal.talk"],
        env={**os.environ, **own, **PATHS},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_messages_towards_each_other_do_not_wait_for_one_another(told):
    """Both ranks send before they receive, and a send ends with its receive."""
    assert told["crossing"] == [2.0]


def test_receive_does_not_wait_for_what_is_computed_when_it_is_posted(told):
    assert not told["behind computes"]


@pytest.mark.parametrize("parts", ["alike", "unlike"])
def test_parts_are_gathered_and_summed_in_place(told, parts):
    assert told[parts] == {"right": True, "gather": 0, "sum": 0}


def test_what_was_stopped_takes_nothing_more(told):
    """Nobody would ever end it: whoever waits for it would stand still."""
    assert told["stopped"] == ["rehearsal NCCL: the communicator was stopped"] * 2


def test_memory_of_messages_is_not_given_back_too_early(told):
    assert told["races"] == []
