"""bench.overlap gives what its docstring says, of what `penstock doctor --overlap` prints."""

import json

import pytest

from bench import overlap

WAY = {"median_s": 2.0, "low_s": 1.9, "high_s": 2.3}
SIZE = {
    **dict.fromkeys(("compute", "sum", "one_by_one", "at_once"), WAY),
    **{"size_bytes": 2**20, "predicted_s": 2.1, "slowdown": 0.1, "gain": 0.2},
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "can_throttle", lambda: (False, "a reason"))
    document = {"sizes": [SIZE, SIZE | {"predicted_s": None}], "disturbed": True}
    monkeypatch.setattr(overlap, "measured", lambda rate: document)


def test_rows_are_those_of_its_docstring(told: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["link"] for row in rows] == ["free", "free"]
    for key in rows[0]:
        assert key in (overlap.__doc__ or ""), key
    assert rows[0]["spread"] == pytest.approx(0.1)


def test_people_read_how_far_it_is_off_and_why_no_line_is_slow(
    told: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert overlap.main([]) == 0
    shown = capsys.readouterr().out
    for words in "+5 %", "disturbed", "no slow links: a reason":
        assert words in shown
