"""Chains: graphs of layers written down without torch, their profiles, and small clusters.

Layer k reads y(k-1) and its weight w(k) and gives y(k); the loss is a mean of the last.  Its
backward gives the weight's gradient and, but for layer 0, that of y(k-1).
"""

from collections.abc import Sequence
from dataclasses import fields, replace

from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.graph.graph import CutPoint, Graph, Node
from penstock.profile import Profile
from penstock.profile.profile import CopyCost, ProfileBasis, UpdateCost
from penstock.search import Candidate

FLOP = 10**6


def chain(weights: Sequence[int], values: Sequence[int]) -> Graph:
    """Return a chain of layers with the bytes of their weights and of their results."""
    count = len(weights)
    nodes = [
        Node(f"w{k}", "parameter", "", (), (size,), "int8", size, k)
        for k, size in enumerate(weights)
    ]
    nodes.append(Node("batch", "input", "", (), (8,), "int8", 8, count))
    nodes.append(Node("scale", "scale", "", (), (), "float32", 4, count + 1))

    def op(name: str, inputs: tuple[int, ...], size: int, origin: int = -1) -> int:
        at, phase = len(nodes), "F" if origin < 0 else "B"
        module = f"layers.{name[1:]}"
        nodes.append(
            Node(
                name,
                "op",
                "aten.mm.default",
                inputs,
                (size,),
                "int8",
                size,
                at,
                phase,
                origin,
                FLOP,
                module,
            )
        )
        return at

    results = [count]
    for k, size in enumerate(values):
        results.append(op(f"y{k}", (results[k], k), size))
    loss = op("loss", (results[-1],), 4)
    gradient, of_weights = op("gloss", (loss, count + 1), values[-1], loss), {}
    for k in reversed(range(count)):
        of_weights[f"w{k}"] = op(f"d{k}", (results[k], gradient), weights[k], results[k + 1])
        if k:
            gradient = op(f"g{k}", (gradient, k), values[k - 1], results[k + 1])
    cuts = (CutPoint(f"after layers.{k}", results[k + 2], values[k]) for k in range(count - 1))
    return Graph(("chain",), tuple(nodes), loss, of_weights, tuple(cuts), 1, 0)


def profile_of(graph: Graph, forward_s: Sequence[float], **more: float) -> Profile:
    """Return a profile: y(k) takes forward_s[k], its two backward ops as long each."""
    op_s = [0.0] * len(graph.nodes)
    for i, node in enumerate(graph.nodes):
        if node.kind == "op" and node.name[1:].isdigit():
            op_s[i] = forward_s[int(node.name[1:])]
    return with_costs(costless(graph.digest, tuple(op_s), device="d", versions="v"), **more)


def costless(graph: str, op_s: Sequence[float], **basis: object) -> Profile:
    """Return an estimate in which nothing but ops takes time."""
    rests = ProfileBasis(
        **{"device": "cpu", "versions": "", "how": "estimated", "beside": 0} | basis
    )
    update, copying = UpdateCost(*(0.0,) * 4), CopyCost(0.0, 0.0)
    return Profile(graph, rests, tuple(op_s), (0,) * len(op_s), 0.0, 0.0, update, copying)


def with_costs(profile: Profile, **costs: object) -> Profile:
    """Return `profile` with other values of its fields, and of those of its records."""
    for name in ("update", "copying", "basis"):
        part = getattr(profile, name)
        own = {each.name: costs.pop(each.name) for each in fields(part) if each.name in costs}
        profile = replace(profile, **{name: replace(part, **own)})
    return replace(profile, **costs)


def cluster_of(
    ranks: int, *, memory_bytes: int = 10**9, link: Link | None = None, usd_per_hour: float = 0.0
) -> Cluster:
    device = DeviceKind("d", memory_bytes, (("float32", 1.0),), 1.0, usd_per_hour=usd_per_hour)
    fast = Link(0.0, 1e12) if link is None else link
    return Cluster((device,), (Host("h", "d", ranks),), inside=fast)


sizes, seconds = st.integers(1, 50), st.integers(1, 9)


@st.composite
def chains(draw: st.DrawFn, least: int = 1, most: int = 6) -> tuple[Graph, Profile]:
    count = draw(st.integers(least, most))
    rows = [st.lists(kind, min_size=count, max_size=count) for kind in (sizes, sizes, seconds)]
    weights, values, forward_s = (draw(row) for row in rows)
    graph = chain(weights, values)
    return graph, profile_of(graph, forward_s)


def figures(candidate: Candidate) -> tuple[float, int, float]:
    return candidate.step_s, max(candidate.peak_bytes), candidate.usd


SLOW = Link(0.01, 20.0, overhead_s=0.01)
SIX = chain([40, 10, 10, 10, 10, 40], [10, 20, 10, 20, 10, 10])
SIX_PROFILE = profile_of(SIX, [1, 1, 2, 1, 1, 3])
