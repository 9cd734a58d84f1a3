"""Ranks beyond the cores of their host: as if each instant were shared out evenly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.program.instructions import Compute
from penstock.program.lower import lower
from penstock.schedule import find
from penstock.schedule.orders import KINDS
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate
from penstock.timeline import busy_s, step_s
from tests.draws import examples
from tests.program.lowering import lower_schedule

CPU = DeviceKind("cpu", 10**9, (("float32", 1e9),), 1e9)
FREE = Link(0.0, float("inf"))


def machine(ranks: int, cores: int) -> Cluster:
    return Cluster((CPU,), (Host("here", "cpu", ranks, cores=cores),), FREE)


def costs(seconds: list[list[float]]) -> Costs:
    """Return the costs of stages with seconds for F, B, I and W each."""
    table = np.zeros((len(KINDS), len(seconds), 1))
    for stage, row in enumerate(seconds):
        for kind, taken in zip("FBIW", row, strict=True):
            table[KINDS.index(kind), stage, 0] = taken
    return Costs(table)


def waits_for(kind: str, stage: int, micro_batch: int, last: int) -> set[tuple[str, int, int]]:
    """Return what must be over before an action can begin, by the mathematics of a pipeline."""
    if kind == "F":
        return {("F", stage - 1, micro_batch)} if stage else set()
    if kind == "W":
        return {("I", stage, micro_batch)}
    after = set() if stage == last else {(kind, stage + 1, micro_batch)}
    return {("F", stage, micro_batch), *after}


def by_turns(program, seconds: list[list[float]], cores: int) -> float:
    """Return the seconds of a step, computed event by event: who computes goes on equally fast."""
    orders = [
        [(c.action.kind, c.action.stage, c.action.micro_batch) for c in code if type(c) is Compute]
        for code in program.code
    ]
    now, over = 0.0, set()
    left: dict[int, float] = {}
    while any(orders) or left:
        for rank, order in enumerate(orders):
            if rank in left or not order or not waits_for(*order[0], len(seconds) - 1) <= over:
                continue
            kind, stage, _ = order[0]
            left[rank] = seconds[stage]["FBIW".index(kind)]
        speed = min(1.0, cores / len(left))
        passed = min(left.values()) / speed
        now += passed
        for rank in list(left):
            left[rank] -= passed * speed
            if left[rank] < 1e-9:
                over.add(orders[rank].pop(0))
                del left[rank]
    return now


durations = st.lists(st.floats(0.1, 4.0), min_size=4, max_size=4)


@examples(15)
@given(
    st.sampled_from(["gpipe", "one_f_one_b", "zb_h1"]),
    st.lists(durations, min_size=2, max_size=6),
    st.integers(2, 9),
    st.integers(1, 4),
)
def test_step_is_that_of_sharing_every_instant(name, seconds, micro_batches, cores):
    ranks = len(seconds)
    program = lower(find(name)(ranks, micro_batches))
    step = step_s(simulate(program, costs(seconds), machine(ranks, cores), spans=False))
    assert step == pytest.approx(by_turns(program, seconds, cores), rel=0.01)


@given(st.lists(durations, min_size=2, max_size=5), st.integers(2, 6), st.integers(1, 3))
@examples(10)
def test_work_is_kept_and_fewer_cores_are_no_faster(seconds, micro_batches, cores):
    ranks = len(seconds)
    program = lower(find("gpipe")(ranks, micro_batches))
    steps = [
        step_s(simulate(program, costs(seconds), machine(ranks, count), spans=False))
        for count in (cores, cores + 1, 0)
    ]
    work = micro_batches * sum(f + b for f, b, _, _ in seconds)
    assert steps[0] >= work / cores * (1 - 1e-3)
    assert steps[0] >= steps[1] * (1 - 0.01) >= steps[2] * (1 - 0.02)


def test_ranks_that_all_compute_all_the_time_take_ranks_over_cores_times_longer():
    """Four replicas of one stage on two cores."""
    program = lower_schedule(find("gpipe")(1, 3), replicas=4)
    one = costs([[1.0, 2.0, 0.0, 0.0]])
    alone, shared = (simulate(program, one, machine(4, cores)) for cores in (4, 2))
    assert step_s(alone) == 9.0
    assert step_s(shared) == pytest.approx(18.0)
    assert busy_s(shared, 3) == pytest.approx(18.0)


@pytest.mark.parametrize("full_first", [True, False])
def test_a_host_of_its_own_is_not_slower_for_another_that_is_crowded(full_first):
    hosts = Host("full", "cpu", 2, cores=1), Host("free", "cpu", 1, cores=1)
    cluster = Cluster((CPU,), hosts if full_first else hosts[::-1], FREE, FREE)
    program = lower_schedule(find("gpipe")(1, 1), replicas=3)
    timeline = simulate(program, costs([[1.0, 2.0, 0.0, 0.0]]), cluster)
    expected = [6.0, 6.0, 3.0] if full_first else [3.0, 6.0, 6.0]
    assert [busy_s(timeline, rank) for rank in range(3)] == pytest.approx(expected)
