"""bench.proof counts what examining and proving took, and a later run finds both."""

import pytest

from bench.proof import pairs
from tests.cli import training


@pytest.mark.long
def test_the_first_run_proves_and_a_later_one_finds_it(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # put back at the end: the bench sets its own
    first, later = pairs(f"{training.__file__}:small", runs=1)
    assert (first["run"], later["run"]) == ("first", "later")
    assert min(first["examine_s"], first["proof_s"], first["cpu_s"]) > 0
    assert (later["examine_s"], later["proof_s"], later["cpu_s"]) == (0, 0, 0)
    assert first["kept_bytes"] == later["kept_bytes"] > 0
    assert later["checked"] == f"{first['checked']}, as was found before"
