"""bench.buckets gives what its docstring says."""

import pytest

from bench import beside, buckets
from bench.beside import Told
from bench.models import TINY


@pytest.mark.long
def test_rows_are_of_all_settings_and_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "GPT", TINY)

    def played(name, plans, where, rounds, peers):
        assert (name, where, rounds, peers) == ("gpt", (2, 1e8), 2, ["ddp"])
        assert {plan.total_ranks for plan in plans.values()} == {2}
        sides = (*plans, *peers)
        return {way: Told([2.0 + at, 3.0 + at], 1, 0.0, []) for at, way in enumerate(sides)}

    monkeypatch.setattr(buckets, "played", played)
    found = list(buckets.rows(["gpt"], [1e8], 2))
    assert [row["way"] for row in found] == ["whole", "block", "25 MB", "each", "searched", "ddp"]
    assert list(found[0]) == [
        "model", "ranks", "link", "way", "units", "seconds", "low", "high", "ratio", "predicted_s",
    ]  # fmt: skip
    assert (found[0]["seconds"], found[0]["low"], found[0]["high"]) == (2.5, 2.0, 3.0)
    assert found[0]["ratio"] == pytest.approx((6 / 2 + 7 / 3) / 2)
    assert {row["link"] for row in found} == {"100 MB/s"}
    said = {row["way"]: row["predicted_s"] for row in found}
    assert said.pop("ddp") is None
    assert said["searched"] == min(said.values()) > 0
