"""bench.convex: each way to agree comes to the one answer by any topology, in the bytes said."""

import pytest

from bench import convex
from bench.agree import AS_THEY_COME, WAYS
from penstock.sums import sums_way

_OWN = "16 bits", "int8", "sign", "top", "gossip"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(3)
def test_it_converges_along_any_topology_or_is_refused(way):
    rows = list(convex.rows([3], 80, [way]))
    assert [row["topology"] for row in rows] == list(convex.TOPOLOGIES)
    own, *routed = rows
    assert own["outcome"] == "works"
    assert own["last"] < own["first"] / 2
    for row in routed:
        if sums_way(way).kind in _OWN:
            assert row["outcome"].startswith(
                f"refused: sums by {row['topology']}, and {way}, which"
            )
        else:
            assert row["formula_bytes"] > 0
            assert row["sent_bytes"] == row["formula_bytes"]
            assert row["last"] == pytest.approx(own["last"], rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("way", AS_THEY_COME)
@pytest.mark.sampled(2)
def test_it_converges_by_a_server_in_the_bytes_said(way):
    own, *routed = convex.rows([3], 80, [way])
    assert own["outcome"] == "works"
    assert own["last"] < own["first"] / 2
    assert 0 < own["sent_bytes"] <= own["formula_bytes"]
    assert own["sent_bytes"] == own["formula_bytes"] or way.startswith("backup")
    for row in routed:
        if row["topology"] == "server":
            assert row["outcome"] == "works"
            continue
        assert row["outcome"].startswith(f"refused: a server that takes gradients as {way} says")
