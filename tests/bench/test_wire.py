"""bench.wire gives what its docstring says."""

from contextlib import nullcontext

import pytest

from bench import wire, zoo
from bench.play import Block, Played, Rounds
from penstock.cluster import Cluster


@pytest.mark.long
def test_rows_set_bits_measured_and_predicted_beside_none(monkeypatch):
    monkeypatch.setattr(wire, "line", lambda *_: nullcontext(()))
    monkeypatch.setattr(wire, "cluster_over", lambda *_: Cluster.here(2))
    taken = [[Block(8.0 / (1 + at), 0.0)] * 3 for at in range(4)]
    monkeypatch.setattr(wire, "played_over", lambda *_: [Played(each, 1) for each in taken])
    rows = list(wire.rows(list(zoo.JOBS)[-1], 1e6, Rounds()))
    assert [row["bits"] for row in rows] == [32, 16, 8, 4]
    assert [row["speedup"] for row in rows] == pytest.approx([1, 2, 3, 4])
    sizes = [row["message_bytes"] for row in rows]
    whole = 2 * 4 * 64 * 64 * 4  # there and back, 4 samples of 64 tokens, 64 numbers of 4 bytes
    assert sizes == [whole, *(whole * bits // 32 + 2 * 4 * 64 * 4 for bits in (16, 8, 4))]
