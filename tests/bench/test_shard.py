"""bench.shard gives what its docstring says."""

import math

import pytest

from bench import shard
from tests.bench.sides import play_tiny

NAMES = (
    "model, ranks, link, way, plan, cap_bytes, peer, ours_s, peer_s, ratio, ours_peak_bytes, "
    "peer_peak_bytes, ours_sent_bytes, peer_sent_bytes, ours_cpu_s, peer_cpu_s, predicted_s, "
    "predicted_bytes"
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    play_tiny(monkeypatch, shard)


@pytest.mark.long
def test_rows_are_of_all_sides_which_come_to_the_same_weights_in_the_bytes_predicted(tiny):
    found = list(shard.rows(("gpt",), (2,), (math.inf,), 1))
    assert all(", ".join(row) == NAMES for row in found)
    sides = [(row["way"], row["peer"]) for row in found]
    assert sides == [
        (way, peer) for way in (*shard.WAYS, shard.PLANNED, shard.SPLIT) for peer in shard.PEERS
    ]
    for row in found:
        assert row["ratio"] == row["ours_s"] / row["peer_s"] > 0
        assert row["ours_peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.01)
        assert row["ours_sent_bytes"] == 0
    (cap,) = {row["cap_bytes"] for row in found if row["way"] == shard.PLANNED}
    held = {row["way"]: row["predicted_bytes"] for row in found}
    assert held[shard.PLANNED] <= cap == held["shard"] < held["shard_keep"]
