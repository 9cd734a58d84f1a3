"""Sums along routes take what their hops take, one by one, by another clock."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.routes import PIECE_BYTES, routes_of
from penstock.units import GB, MiB
from tests.cluster.messages import round_s
from tests.cluster.test_collectives import POD, alike, groups
from tests.draws import examples

WORDS = st.sampled_from(["ring", "tree", "halving", "doubling", "direct"]) | st.builds(
    "{}:{}".format, st.sampled_from(["server", "hierarchical"]), st.integers(1, 6)
)


@examples(60)
@given(groups(), WORDS, st.integers(1, 200))
def test_seconds_are_those_of_the_hops(drawn, word, size_bytes):
    cluster, ranks = drawn
    routes = routes_of(word, len(ranks))
    rows = [
        [(a, b, frozenset(range(first, end))) for a, b, first, end in each.hops]
        for each in routes.rounds
    ]
    together = sum(
        round_s(cluster, ranks, _joined(row), size_bytes / routes.blocks) for row in rows
    )
    assert cluster.sum_s(size_bytes, ranks, word) == pytest.approx(together)


def _joined(row):
    """Return what goes between the same two as one message."""
    found = {}
    for a, b, blocks in row:
        found[a, b] = found.get((a, b), frozenset()) | blocks
    return [(a, b, blocks) for (a, b), blocks in found.items()]


@pytest.mark.parametrize("word", ["ring", "halving", "direct"])
def test_it_is_the_formula_of_a_collective_where_there_is_one(word):
    """Of a piece; more pieces are as many sums."""
    ranks = range(64)
    assert POD.sum_s(MiB, ranks, word) == pytest.approx(POD.all_reduce_s(MiB, ranks, word))
    assert POD.sum_s(3 * PIECE_BYTES, ranks, word) == pytest.approx(
        3 * POD.sum_s(PIECE_BYTES, ranks, word)
    )


def test_who_computes_for_messages_is_counted():
    """Of a server with 3 others: it takes 3 and sends 3; in a ring each takes 6 and sends 6."""
    cluster = alike(4, 1, Link(0.0, GB), Link(0.0, GB, overhead_s=0.5))
    assert cluster.sum_s(0, range(4), "server") == 6 * 0.5
    assert cluster.sum_s(0, range(4), "ring") == 12 * 0.5


def test_over_several_hosts_gloo_is_a_ring():
    """Whoever has an accelerator sums through NCCL, which takes the faster of ring and tree."""
    for accelerated in (False, True):
        device = replace(POD.devices[0], copy_engine=accelerated)
        cluster, ranks = replace(POD, devices=(device,)), range(64)
        ring_s = cluster.all_reduce_s(MiB, ranks, "ring")
        assert (cluster.sum_s(MiB, ranks) == ring_s) == (not accelerated)
        assert cluster.sum_s(MiB, range(8)) == cluster.all_reduce_s(MiB, range(8))


def test_one_rank_takes_no_time():
    assert POD.sum_s(MiB, [3], "ring") == 0.0
