"""The search beside BaPipe's choice: its partition and its schedules, written from the paper.

Layers go to N equal devices in line.  A stage takes what its layers take, but no less than the
messages that it sends.  What is balanced: cuts near k T / N where no message takes longer than a
stage, then moved one layer at a time while the slowest stage gets faster.  On devices that do one
thing at a time, a step is 1F1B without overlap of messages (SNO) or with (SO); whichever is faster
and fits.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, Link
from penstock.graph.graph import Graph
from penstock.plan import plan_by_hand
from penstock.profile import Profile
from penstock.search import Candidate, Fixed, evaluate, search
from tests.draws import examples
from tests.search.chains import chains, cluster_of

SCHEDULES = ("one_f_one_b", "dapple")  # SNO and SO


def layers_of(graph: Graph, profile: Profile) -> list[float]:
    """Return the seconds of each layer, forward and backward."""
    took: dict[str, float] = {}
    for node, seconds in zip(graph.nodes, profile.op_s, strict=True):
        if node.name[1:].isdigit() and node.kind == "op":
            took[node.name[1:]] = took.get(node.name[1:], 0.0) + seconds
    return [took[str(k)] for k in range(len(graph.cut_points) + 1)]


def slowest(layers: list[float], sent: list[float], cuts: list[int]) -> float:
    """Return the seconds of the slowest stage or message; cut k is behind layer k."""
    ends = [0, *(cut + 1 for cut in cuts), len(layers)]
    stages = [sum(layers[a:b]) for a, b in itertools.pairwise(ends)]
    return max([*stages, *(sent[cut] for cut in cuts)])


def balanced(layers: list[float], sent: list[float], devices: int) -> list[int]:
    """Return BaPipe's cuts: near k T / N, layers merged over long messages, then tuned finely."""
    total, own = sum(layers), sum(layers) / devices
    merged = [cut for cut in range(len(sent)) if sent[cut] <= own]
    allowed = merged if len(merged) >= devices - 1 else list(range(len(sent)))
    cuts: list[int] = []
    for k in range(1, devices):
        after = [c for c in allowed if not cuts or c > cuts[-1]]
        left = after[: len(after) - (devices - 1 - k)]
        cuts.append(min(left, key=lambda c: abs(sum(layers[: c + 1]) - k * total / devices)))
    better = True
    while better:
        near = [
            [*cuts[:at], cuts[at] + by, *cuts[at + 1 :]]
            for at in range(len(cuts))
            for by in (-1, 1)
        ]
        near = [
            row for row in near if sorted({*row}) == row and row[0] >= 0 and row[-1] < len(sent)
        ]
        best = min(near, key=lambda row: slowest(layers, sent, row), default=cuts)
        better = slowest(layers, sent, best) < slowest(layers, sent, cuts)
        cuts = best if better else cuts
    return cuts


def chosen(graph: Graph, profile: Profile, cluster: Cluster, count: int) -> Candidate:
    """Return the faster of BaPipe's plans on all devices."""
    layers = layers_of(graph, profile)
    sent = [cluster.message_s(0, 1, point.forward_bytes) for point in graph.cut_points]
    cuts = balanced(layers, sent, cluster.num_ranks)
    rows = (plan_by_hand(graph, cuts, each, num_micro_batches=count) for each in SCHEDULES)
    made = [evaluate(graph, profile, cluster, plan)[0] for plan in rows]
    return min(made, key=lambda each: each.step_s)


@examples(5)
@given(chains(3, 6), st.integers(2, 3), st.integers(1, 6), st.sampled_from([3.0, 10.0, 1e6]))
def test_plan_is_never_slower_than_what_bapipe_chooses(pair, ranks, count, bytes_per_s) -> None:
    graph, profile = pair
    cluster = cluster_of(ranks, link=Link(0.0, bytes_per_s))
    theirs = chosen(graph, profile, cluster, count)
    fixed = Fixed(replicas=1, ranks=ranks)
    plan, *_ = search(graph, profile, cluster, micro_batches=count, fixed=fixed)
    assert plan.predicted.step_s <= theirs.step_s * (1 + 1e-9)


@examples(4)
@given(chains(3, 6), st.integers(2, 6))
def test_nor_where_memory_is_just_enough_for_its_choice(pair, count) -> None:
    """So little that more micro-batches in flight, which hide messages, may not fit."""
    graph, profile = pair
    cluster = cluster_of(2, link=Link(0.0, 10.0))
    cap = max(chosen(graph, profile, cluster, count).peak_bytes)
    tight = cluster_of(2, link=Link(0.0, 10.0), memory_bytes=cap)
    theirs = chosen(graph, profile, tight, count)
    fixed = Fixed(replicas=1, ranks=2)
    plan, *_ = search(graph, profile, tight, micro_batches=count, fixed=fixed)
    assert max(plan.predicted.peak_bytes) <= cap
    assert plan.predicted.step_s <= theirs.step_s * (1 + 1e-9)
