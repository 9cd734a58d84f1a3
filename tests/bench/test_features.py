"""bench.features: each name of the page is there, and what is not there is found."""

from pathlib import Path

import pytest

from bench import features
from bench.features import OURS, Cell, cells, is_ours, is_theirs, missing


def test_each_own_name_in_the_page_is_there_and_each_row_has_a_name_or_a_reason() -> None:
    assert list(missing()) == []
    rows = [cell for cell in cells() if cell.who == OURS]
    assert len(rows) >= 60
    assert {cell.who for cell in cells()} == {OURS, *features.PEERS}


@pytest.mark.parametrize(
    "name", ["Job.weight", "ps.rules.shard", "penstock plan", "until_loss", "on_step"]
)
def test_names_of_all_kinds_are_found(name: str) -> None:
    assert is_ours(name)


@pytest.mark.parametrize("name", ["Job.wait", "ps.rules.share", "penstock play", "until_los"])
def test_names_that_there_are_not_are_missed(name: str) -> None:
    assert not is_ours(name)


def test_names_of_others_stand_in_their_packages(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "one" / "inner").mkdir(parents=True)
    (tmp_path / "one" / "inner" / "part.py").write_text("class Trainer: ...")
    assert is_theirs("Trainer", ("none", "one"), tmp_path)
    assert is_theirs("inner/part", ("one",), tmp_path)
    assert not is_theirs("Planner", ("one",), tmp_path)
    told = [Cell("a", OURS, "yes"), Cell("b", OURS, "no: never"), Cell("c", "X", "`Planner`")]
    monkeypatch.setattr(features, "cells", lambda: iter(told))
    monkeypatch.setattr(features, "PEERS", {"X": ("one",)})
    found = ["a: neither a name nor a reason: yes", "c: X has no Planner"]
    assert list(missing(tmp_path)) == found
