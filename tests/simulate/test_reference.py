"""The compiled simulation equals the plain one of reference.py, span by span."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.program.lower import chain
from penstock.program.passes import shard
from penstock.program.program import Program, StageBytes
from penstock.schedule import KINDS, Action, breadth_first, gpipe
from penstock.simulate import Costs, simulate
from penstock.timeline import Span, Timeline, step_s
from tests.program.lowering import lower_schedule
from tests.simulate.reference import Reference
from tests.simulate.strategies import (
    capacities,
    clusters,
    hosts_of,
    one_host,
    programs,
    random_seconds,
)


def in_order(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (*span[:5], round(span.start_s, 7)))


def check(timeline: Timeline, reference: Reference) -> None:
    expected = in_order(reference.run())
    mine = in_order(timeline.spans)
    assert [span[:5] for span in mine] == [span[:5] for span in expected]
    for a, b in zip(mine, expected, strict=True):
        assert (a.start_s, a.end_s) == pytest.approx((b.start_s, b.end_s), abs=1e-6), (a, b)
    assert step_s(timeline) == pytest.approx(max(span.end_s for span in expected))


@given(programs(), st.integers(0, 999), capacities)
def test_simulation_over_free_links_equals_the_reference(
    program: Program, seed: int, capacity: int | None
):
    seconds = random_seconds(seed)
    timeline = simulate(program, seconds, capacity=capacity)
    check(timeline, Reference(program, seconds, None, capacity))


@given(st.data(), programs(), st.integers(0, 999), capacities)
def test_simulation_on_any_cluster_equals_the_reference(
    data: st.DataObject, program: Program, seed: int, capacity: int | None
):
    cluster, seconds = data.draw(clusters(program.num_ranks)), random_seconds(seed)
    timeline = simulate(program, seconds, cluster, capacity=capacity)
    check(timeline, Reference(program, seconds, cluster, capacity))


def tables(num_stages: int, devices: tuple[str, ...], seed: int) -> Costs:
    random = np.random.default_rng(seed)
    shape = len(KINDS), num_stages, len(devices)
    unshard_s, unshard_bytes = random.random(num_stages) + 0.01, random.integers(9, size=num_stages)
    return Costs(random.random(shape) + 0.01, devices, unshard_s, unshard_bytes)


@given(st.data(), programs(), st.integers(0, 999))
def test_simulation_by_a_table_equals_the_reference(
    data: st.DataObject, program: Program, seed: int
):
    """Updates take time now, gathers too; every device has its own seconds."""
    cluster = data.draw(clusters(program.num_ranks, devices=("c", "d")))
    costs = tables(program.num_stages, ("e", "d", "c"), seed)
    place = [costs.devices.index(cluster.device_of(r).name) for r in range(program.num_ranks)]

    def seconds(action: Action, rank: int) -> float:
        return float(costs.action_s[KINDS.index(action.kind), action.stage, place[rank]])

    timeline = simulate(program, costs, cluster)
    unshard = list(zip(costs.unshard_s.tolist(), costs.unshard_bytes.tolist(), strict=True))
    check(timeline, Reference(program, seconds, cluster, None, unshard))


@pytest.mark.parametrize(("prefetch", "parts"), [(0, ()), (1, ()), (1, (3, 1))])
def test_shards_one_after_the_other_equal_the_reference(prefetch: int, parts: tuple[int, ...]):
    sizes = [StageBytes(weights=8 * k) for k in range(4)]
    schedules = [breadth_first(4, 2, num_ranks=1), breadth_first(4, 1, num_ranks=1)]
    program = lower_schedule(schedules, stage_bytes=sizes)
    what = ["shard", "shard_keep", "shard", "shard"]
    program = shard(program, what, prefetch=prefetch, parts=parts)
    cluster, costs = one_host(2, Link(3.0, 1.0)), tables(4, ("",), prefetch)
    unshard = list(zip(costs.unshard_s.tolist(), costs.unshard_bytes.tolist(), strict=True))

    def seconds(action: Action, rank: int) -> float:
        return float(costs.action_s[KINDS.index(action.kind), action.stage, 0])

    timeline = simulate(program, costs, cluster)
    check(timeline, Reference(program, seconds, cluster, None, unshard))


def test_messages_that_wait_for_a_shared_lane_may_be_more_than_the_heap_had_room_for():
    program = lower_schedule(gpipe(3, 1500), edges=chain(3, size_bytes=1))
    seconds, cluster = random_seconds(1), hosts_of(3, 1, Link(5e4, 0.1))
    check(simulate(program, seconds, cluster), Reference(program, seconds, cluster, None))


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_senders_to_one_card_that_wait_for_room_equal_the_reference(capacity: int):
    """Messages take longer than computes, so a sender comes back before its last one is there."""
    program = lower_schedule(gpipe(3, 6), edges=chain(3, size_bytes=1))
    seconds, cluster = random_seconds(2), hosts_of(3, 1, Link(0.5, 0.5))
    timeline = simulate(program, seconds, cluster, capacity=capacity)
    check(timeline, Reference(program, seconds, cluster, capacity))
