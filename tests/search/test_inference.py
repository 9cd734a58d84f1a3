"""Forward pipelines over unlike devices: the recursion equals trying every pipeline there is."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import PlanError
from penstock.search.inference import Layers, best_stream, even_stream, fastest, layers_of
from penstock.search.judge import Judge
from tests.draws import examples
from tests.search.chains import chain, profile_of, with_costs

BETWEEN, ACROSS, INSIDE = Link(9.0, 2.0, 0.5), Link(9.0, 0.5, 1.0), Link(9.0, 50.0, 0.1, 8.0)
CALL_S = 0.25


def cluster_of(hosts: Sequence[tuple[str, int, str]], memory: dict[str, int]) -> Cluster:
    kinds = tuple(DeviceKind(n, m, (("float32", 1.0),), 1.0) for n, m in memory.items())
    made = [
        Host(f"h{at}", device, count, region) for at, (device, count, region) in enumerate(hosts)
    ]
    return Cluster(kinds, tuple(made), INSIDE, BETWEEN, ACROSS)


def every_pipeline(cluster: Cluster, pieces: int, most: int):
    """Yield hosts of each stage and where stages end: whole hosts but for the last, any order."""
    for count in range(1, len(cluster.hosts) + 1):
        for row in itertools.permutations(cluster.hosts, count):
            places = [host for host in row for _ in range(host.num_devices)]
            fewest = len(places) - row[-1].num_devices + 1
            for stages in range(fewest, min(len(places), pieces, most) + 1):
                for cuts in itertools.combinations(range(1, pieces), stages - 1):
                    yield places[:stages], (*cuts, pieces)


def link_of(a: Host, b: Host) -> Link:
    return INSIDE if a is b else BETWEEN if a.region == b.region else ACROSS


def period_s(hosts, ends, seconds, crossing) -> float:
    """Return the busiest of stages and links, by the formula of the module's first lines."""
    starts, busy = [0, *ends[:-1]], []
    for at, (host, first, end) in enumerate(zip(hosts, starts, ends, strict=True)):
        took = sum(seconds[host.device][first:end]) + CALL_S
        for other, size in [
            *([(hosts[at - 1], crossing[first])] if at else []),
            *([(hosts[at + 1], crossing[end])] if at + 1 < len(hosts) else []),
        ]:
            link = link_of(host, other)
            took += link.overhead_s + size / link.copy_bytes_per_s
            busy.append(size / link.bytes_per_s)
        busy.append(took)
    return max(busy)


@st.composite
def cases(draw):
    pieces = draw(st.integers(1, 5))
    numbers = st.lists(st.integers(1, 9), min_size=pieces, max_size=pieces)
    seconds = {device: draw(numbers) for device in "xy"}
    crossing, weights, live = draw(numbers), draw(numbers), draw(numbers)
    host = st.tuples(st.sampled_from("xy"), st.integers(1, 2), st.sampled_from("rs"))
    hosts = draw(st.lists(host, min_size=1, max_size=4))
    memory = {device: draw(st.integers(5, 40)) for device in "xy"}
    return seconds, crossing, weights, live, hosts, memory, draw(st.integers(1, 8))


@examples(50)
@given(cases())
def test_recursion_finds_what_trying_everything_finds(case):
    seconds, crossing, weights, live, hosts, memory, most = case
    cluster, pieces = cluster_of(hosts, memory), len(crossing)
    layers = Layers(
        tuple((0.0, *itertools.accumulate(map(float, seconds[device]))) for device in "xy"),
        (0, *crossing[1:]),
        tuple(((at % 2, weights[at % 2]),) for at in range(pieces)),  # two weights, used by turns
        tuple(live),
        (CALL_S, CALL_S),
    )
    graph = chain([1], [1])
    profiles = [replace(profile_of(graph, [1.0]), kind=kind) for kind in "xy"]

    def fits(places, ends):
        for host, first, end in zip(places, [0, *ends[:-1]], ends, strict=True):
            own = {at % 2 for at in range(first, end)}
            held = sum(weights[each] for each in own) + max(live[first:end])
            if held > memory[host.device]:
                return False
        return True

    tried = [
        period_s(places, ends, seconds, crossing)
        for places, ends in every_pipeline(cluster, pieces, most)
        if fits(places, ends)
    ]
    if not tried:
        with pytest.raises(PlanError, match="no pipeline fits"):
            fastest(layers, profiles, cluster, most)
        return
    found = fastest(layers, profiles, cluster, most)
    assert found.period_s == pytest.approx(min(tried))
    by_name = {host.name: host for host in cluster.hosts}
    row = [by_name[name] for name in found.hosts]
    places = [host for host in row for _ in range(host.num_devices)][: found.num_ranks]
    ends = (*(cut + 1 for cut in found.cuts), pieces)
    assert period_s(places, ends, seconds, crossing) == pytest.approx(min(tried))
    assert fits(places, ends)


def test_simulated_stream_takes_what_the_recursion_says_and_beats_an_even_split():
    """Six layers on one fast and two slow hosts, over links that are not slow."""
    graph = chain([4] * 6, [8, 8, 8, 8, 8, 8])
    rows = [
        replace(profile_of(graph, [took] * 6, call_s=0.01), kind=kind)
        for kind, took in (("x", 1.0), ("y", 3.0))
    ]
    made = cluster_of([("y", 1, "r"), ("x", 1, "r"), ("y", 1, "r")], {"x": 99, "y": 99})
    cluster = replace(made, between=Link(0.1, 100.0, 0.05))
    layers = layers_of(graph, rows)
    assert layers.seconds[0][-1] == 6.0
    assert [layers.held_bytes(at, at + 1) for at in (0, 5)] == [4 + 16, 4 + 16]
    found = best_stream(graph, rows, cluster)
    by_recursion = fastest(layers, rows, cluster, 3)
    assert found.period_s == pytest.approx(by_recursion.period_s)
    assert by_recursion.period_s == pytest.approx(4.0 + 0.01 + 0.05)
    assert found.plan.cuts in ((0, 1), (3, 4))
    assert found.plan.place.hosts in (("h1", "h0", "h2"), ("h0", "h2", "h1"))
    even = even_stream(graph, rows, cluster, 3)
    assert even.period_s == pytest.approx(2 * 3.0 + 0.01 + 0.05, rel=0.02)
    assert "an even split" in str(found.plan)
    assert math.isclose(best_stream(graph, rows, cluster, most=1).period_s, 6.01)


def test_a_model_larger_than_its_devices_is_loaded_and_no_more_of_it_than_has_to_be() -> None:
    graph = chain([400, 300, 500, 200], [60, 40, 20, 30])
    profile = with_costs(profile_of(graph, [0.02, 0.01, 0.03, 0.02]), far_s_per_byte=2e-5)
    judge = Judge(graph, profile, alone(10**6))
    steps: list[float] = []
    with pytest.raises(PlanError, match="no pipeline fits"):
        best_stream(graph, profile, alone(500))
    for cap in (1000, 1400, 10**6):
        found = best_stream(graph, profile, alone(cap))
        plan = found.plan
        assert max(found.peak_bytes) <= cap
        made = judge.candidate(plan.changed(num_micro_batches=8))
        assert found.period_s == pytest.approx(made.step_s / 8)
        steps.append(found.period_s)
        for words in itertools.product(("none", "weights"), repeat=plan.num_stages):
            some = "weights" in words
            other = judge.candidate(plan.changed(offload=words, prefetch=1 if some else 0))
            if max(other.peak_bytes) <= cap and plan.far:
                assert found.period_s <= 1.02 * other.step_s / 8
    assert steps == sorted(steps, reverse=True)
    assert not best_stream(graph, profile, alone(10**6)).plan.far


def alone(memory_bytes: int) -> Cluster:
    return cluster_of([("a", 1, "here")], {"a": memory_bytes})
