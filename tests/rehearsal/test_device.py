"""The rehearsal device: what it notices, seen in one process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.rehearsal.command import PATHS
from tests.rehearsal.library import cache_folder


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """Return what `looked_at.py` has found."""
    own = {"REHEARSAL_GPUS": "2", "REHEARSAL_BYTES": str(1 << 20)}
    own["REHEARSAL_CACHE"] = str(cache_folder())
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.looked_at"],
        env={**os.environ, **own, **PATHS},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ops_give_what_those_of_the_cpu_give(seen):
    assert seen["product"] == [[7.0, 10.0], [15.0, 22.0]]
    assert seen["gradient"] == [2.0, 4.0]
    assert seen["kind"] == "cuda:0"


def test_read_that_waits_for_no_event_is_a_race(seen):
    assert [("reads" in race, "writes on" in race) for race in seen["unordered"]] == [(True, True)]


def test_read_behind_an_event_is_no_race(seen):
    assert seen["ordered"] == []


def test_memory_given_back_while_another_stream_uses_it_is_a_race(seen):
    assert any("is freed while" in race for race in seen["freed"])
    assert seen["recorded"] == []


def test_look_at_a_number_makes_the_host_wait(seen):
    assert seen["syncs of item"] == 1
    assert seen["syncs of add"] == 0


def test_copies_from_pageable_memory_are_counted(seen):
    assert seen["pageable"] == {"plain": 1, "pinned": 0}


def test_copy_from_pinned_memory_makes_nobody_wait(seen):
    assert seen["syncs of pinned"] == 0


def test_tensors_of_two_devices_are_refused(seen):
    assert "same device" in seen["two devices"]
    assert "same device" in seen["cpu and device"]


def test_memory_is_counted_by_device_and_ends(seen):
    assert seen["live"] == [4096, 0]
    assert seen["too large"] == "OutOfMemoryError"


def test_each_device_draws_by_its_own_seed(seen):
    assert seen["drawn again"]
    assert not seen["drawn on the other"]
    assert seen["host's draws as before"]


def test_what_empty_gives_is_no_zeros(seen):
    assert seen["empty"] == "nan"


def test_fork_after_a_look_cannot_use_the_device(seen):
    assert "forked subprocess" in seen["fork"]
