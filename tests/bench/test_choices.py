"""The bench of choices: together never slower than each kind by itself, and the cap is kept."""

from bench import choices


def test_together_is_never_slower_than_apart() -> None:
    rows = list(choices.rows_of(quick=True))
    assert [row["cap_bytes"] for row in rows] == [None, int(9.66 * 2**20)]
    for row in rows:
        assert row["search_s"] <= row["apart_s"]
    assert rows[0]["search_s"] < 0.95 * rows[0]["apart_s"]  # worth it without a cap
