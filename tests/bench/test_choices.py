"""The bench of choices: climbing finds nothing much better, and more memory is never slower."""

import pytest

from bench import choices
from bench.choice_cases import cases


def test_together_is_never_slower_than_apart() -> None:
    rows = list(choices.linear_rows(quick=True))
    assert [row["cap_bytes"] for row in rows] == [None, int(9.66 * 2**20)]
    for row in rows:
        assert row["search_s"] <= row["apart_s"]
    assert rows[0]["search_s"] < 0.95 * rows[0]["apart_s"]  # worth it without a cap


def test_a_tiny_net_is_planned_as_well_as_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases("net 00")
    monkeypatch.setattr(choices, "PARTS", (1.0, 0.8))
    rows = list(choices.case_rows(case, quick=True))
    told = choices.summary(rows)
    assert told["worst"] <= choices.NEAR
    assert told["slower_with_more"] == []
    exact = [row["search_s"] / row["brute_s"] for row in rows if row.get("brute_s")]
    assert exact
    assert max(exact) <= choices.NEAR


@pytest.mark.parametrize(
    ("name", "more", "less"),
    [
        ("net 04", None, 6_248_576),  # all in far memory is where some begin who want the best
        ("net 27", 2_401_075, 2_000_896),  # what was climbed up without a cap comes down
        ("net 31", 2_137_907, 1_870_668),  # stages whose state alone is away become one
    ],
)
@pytest.mark.sampled(2)
def test_more_memory_is_not_slower_where_it_was(name: str, more: int | None, less: int) -> None:
    (case,) = cases(name)
    steps = [choices.planned(case, cap)[1]["search_s"] for cap in (more, less)]
    assert steps[0] <= steps[1]


def test_more_memory_that_is_slower_is_told() -> None:
    row = {"case": "a", "link": 1.0, "refused": "", "seconds": 0.0}
    rows = [
        row | {"cap_bytes": cap, "search_s": step_s, "climbed_s": 2.0}
        for cap, step_s in ((None, 2.0), (9, 3.0), (8, 2.5), (7, None))
    ]
    told = choices.summary(rows)
    assert told["slower_with_more"] == [("a", 8, 1.2)]
    assert (told["behind"], told["worst"], told["median"]) == (2, 1.5, 1.25)
