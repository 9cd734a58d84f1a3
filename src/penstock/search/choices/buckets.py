"""Buckets: the weights of a traced model, piece by piece, as `best_sharding` takes them.

A piece is what stands between two cut points; one without weights belongs to the piece before it.
A bucket has the weights that its piece is first to read, and of these the gradients and the state
of the optimizer.  What it sends in forward runs beside the forward of the piece before it, and
what it sends in backward beside the backward of that piece, which follows its own.

Ignores:  that in backward weights are gathered before the piece's own backward, not after it;
          more micro-batches than the last one.
"""

import bisect

from penstock.graph.graph import Graph
from penstock.profile import Profile
from penstock.search.choices.sharding import Bucket
from penstock.simulate.price import check_profile


def buckets_of(graph: Graph, profile: Profile) -> tuple[Bucket, ...]:
    """Return the buckets from the input on; none without weights.

    Raises:   ProfileError: a profile of another graph.
    """
    check_profile(graph, profile)
    count = len(graph.cut_points) + 1
    weights, gradients = _bytes(graph, count)
    forward_s, backward_s = _seconds(graph, profile, count)
    found: list[Bucket] = []
    beside = [0.0, 0.0]
    for piece in range(count):
        if weights[piece]:
            state_bytes = round(profile.state_bytes_per_byte * gradients[piece])
            found.append(Bucket(weights[piece], gradients[piece], state_bytes, *beside))
            beside = [0.0, 0.0]
        beside[0] += forward_s[piece]
        beside[1] += backward_s[piece]
    return tuple(found)


def _piece(graph: Graph, node: int) -> int:
    """Return the piece of a forward op, or of the one whose backward it is."""
    origin = graph.nodes[node].origin
    is_backward = graph.nodes[node].phase == "B"
    place = origin if is_backward and origin >= 0 else min(node, graph.loss)
    return bisect.bisect_right([point.at for point in graph.cut_points], place)


def _bytes(graph: Graph, count: int) -> tuple[list[int], list[int]]:
    """Return the bytes of weights and of gradients of each piece."""
    weights, gradients = [0] * count, [0] * count
    for index, node in enumerate(graph.nodes):
        if node.kind != "parameter" or not graph.users[index]:
            continue
        piece = min(_piece(graph, user) for user in graph.users[index])
        weights[piece] += node.size_bytes
        if graph.gradients.get(node.name) is not None:
            gradients[piece] += node.size_bytes
    return weights, gradients


def _seconds(graph: Graph, profile: Profile, count: int) -> tuple[list[float], list[float]]:
    """Return the seconds of forward and of backward ops of each piece."""
    forward_s, backward_s = [0.0] * count, [0.0] * count
    for index, node in enumerate(graph.nodes):
        if node.kind == "op":
            seconds = backward_s if node.phase == "B" else forward_s
            seconds[_piece(graph, index)] += profile.op_s[index]
    return forward_s, backward_s
