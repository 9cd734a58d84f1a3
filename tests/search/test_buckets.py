"""search.buckets: all weights once, and all computing but the last piece's to run beside."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from penstock.errors import ProfileError
from penstock.search.choices.buckets import buckets_of
from tests.search.chains import chain, chains, profile_of


@settings(deadline=None)
@given(chains())
def test_buckets_have_every_weight_once(case):
    graph, profile = case
    profile = replace(profile, state_bytes_per_byte=2.0)
    found = buckets_of(graph, profile)
    assert sum(bucket.weight_bytes for bucket in found) == graph.parameter_bytes
    for bucket in found:
        assert bucket.gradient_bytes == bucket.weight_bytes
        assert bucket.optimizer_bytes == 2 * bucket.weight_bytes


def test_buckets_run_beside_the_piece_before():
    """Forward takes 3, 5, 7 s; backward of a layer twice that, of the first only its weights."""
    graph = chain((10, 20, 30), (1, 1, 1))
    first, second, third = buckets_of(graph, profile_of(graph, (3, 5, 7)))
    assert [each.weight_bytes for each in (first, second, third)] == [10, 20, 30]
    assert (first.forward_s, first.backward_s) == (0, 0)
    assert (second.forward_s, second.backward_s) == (3, 3)
    assert (third.forward_s, third.backward_s) == (5, 10)


def test_piece_without_weights_belongs_to_the_one_before():
    graph = chain((10, 0, 30), (1, 1, 1))
    first, second = buckets_of(graph, profile_of(graph, (3, 5, 7)))
    assert (first.weight_bytes, second.weight_bytes) == (10, 30)
    assert (second.forward_s, second.backward_s) == (8, 13)


def test_weights_without_gradient_have_none():
    graph = chain((10, 20), (1, 1))
    frozen = replace(graph, gradients={**graph.gradients, "w0": None})
    first, second = buckets_of(frozen, profile_of(frozen, (1, 1), state_bytes_per_byte=1.0))
    assert (first.gradient_bytes, first.optimizer_bytes) == (0, 0)
    assert (second.gradient_bytes, second.optimizer_bytes) == (20, 20)


def test_profile_of_another_graph_is_refused():
    graph, other = chain((10,), (1,)), chain((20,), (1,))
    with pytest.raises(ProfileError, match="the profile is of graph"):
        buckets_of(graph, profile_of(other, (1,)))


def test_weights_that_two_pieces_read_are_in_the_first_one():
    graph = chain((10, 20), (1, 1))
    nodes = [
        replace(node, inputs=(*node.inputs, 0)) if node.name == "y1" else node
        for node in graph.nodes
    ]
    tied = replace(graph, nodes=tuple(nodes))
    assert [each.weight_bytes for each in buckets_of(tied, profile_of(tied, (1, 1)))] == [10, 20]
