"""Batch: each candidate takes what the simulation of its program takes, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, Link
from penstock.program.lower import lower
from penstock.schedule import KINDS, SCHEDULES, Schedule, chimera, gpipe, one_f_one_b
from penstock.simulate import Costs, simulate, step_seconds, table_of
from penstock.simulate.wait_table import Table
from penstock.timeline import step_s
from tests.simulate.strategies import clusters, one_host

builders = st.sampled_from(SCHEDULES)
sizes = st.integers(1, 6)
UPDATES = KINDS.index("U")


def random_seconds(seed: int, candidates: int, num_stages: int) -> np.ndarray:
    return np.random.default_rng(seed).random((candidates, len(KINDS), num_stages)) + 0.01


def simulated(schedule: Schedule, seconds: np.ndarray, cluster: Cluster | None) -> float:
    return step_s(simulate(lower(schedule), Costs(seconds[..., None]), cluster, spans=False))


def reduced(schedule: Schedule, cluster: Cluster) -> list[float]:
    """Return the seconds of the sums that the simulation makes, of messages of no bytes."""
    return [cluster.all_reduce_s(0, ranks) for ranks in schedule.stage_ranks]


# -- exact


@given(builders, sizes, sizes, st.integers(0, 99), st.integers(1, 4))
def test_step_is_that_of_the_simulation_with_free_links(
    builder: Callable[..., Schedule], num_stages: int, m: int, seed: int, candidates: int
):
    schedule = builder(num_stages, m)
    seconds = random_seconds(seed, candidates, num_stages)
    expected = [simulated(schedule, each, None) for each in seconds]
    assert step_seconds(table_of(schedule), seconds).tolist() == expected


@given(builders, sizes, sizes, st.integers(0, 99), st.floats(0.0, 3.0))
def test_step_is_that_of_the_simulation_with_latency(
    builder: Callable[..., Schedule], num_stages: int, m: int, seed: int, latency_s: float
):
    schedule = builder(num_stages, m)
    seconds = random_seconds(seed, 3, num_stages)
    cluster = one_host(schedule.num_ranks, Link(latency_s, float("inf")))
    expected = [simulated(schedule, each, cluster) for each in seconds]
    sums = np.tile(reduced(schedule, cluster), (3, 1))
    table = table_of(schedule)
    found = step_seconds(table, seconds, [latency_s] * 3, reduce_s=sums)
    assert found.tolist() == expected


@given(st.data(), builders, sizes, sizes, st.integers(0, 99))
def test_step_is_that_of_the_simulation_with_links_of_all_levels(
    data: st.DataObject, builder: Callable[..., Schedule], num_stages: int, m: int, seed: int
):
    """Where every stage lives on one rank: then the link between two stages is known."""
    schedule = builder(num_stages, m)
    if max(map(len, schedule.stage_ranks)) > 1:
        return
    cluster = data.draw(clusters(schedule.num_ranks))
    latencies = [Link(data.draw(st.floats(0.0, 3.0)), float("inf")) for _ in range(3)]
    cluster = replace(cluster, inside=latencies[0], between=latencies[1], across=latencies[2])
    homes = [rank for (rank,) in schedule.stage_ranks]
    cuts = [cluster.link(a, b).latency_s if a != b else 9.0 for a, b in pairwise(homes)]
    seconds = random_seconds(seed, 1, num_stages)
    found = step_seconds(table_of(schedule), seconds, [[*cuts, 9.0]])
    assert found.tolist() == [simulated(schedule, seconds[0], cluster)]


@given(builders, sizes, sizes, st.integers(0, 99))
def test_step_is_that_of_a_plain_loop_with_messages_by_stage(
    builder: Callable[..., Schedule], num_stages: int, m: int, seed: int
):
    schedule = builder(num_stages, m)
    if schedule.has_updates and max(map(len, schedule.stage_ranks)) > 1:
        return  # an update waits for all ranks of its stage, which the loop below does not
    seconds = random_seconds(seed, 2, num_stages)
    seconds[:, UPDATES] = 0.0
    message_s = np.random.default_rng(seed).random((2, num_stages))
    expected = [plain(schedule, *each) for each in zip(seconds, message_s, strict=True)]
    assert step_seconds(table_of(schedule), seconds, message_s).tolist() == expected


def plain(schedule: Schedule, seconds: np.ndarray, message_s: np.ndarray) -> float:
    """Return the step without updates, rank after rank until all are at their end."""
    clock_s = [0.0] * schedule.num_ranks
    ends_s: dict[tuple[bool, int, int], float] = {}  # forward or not, stage, micro-batch
    orders = [[action for action in order if action.kind != "U"] for order in schedule.orders]
    while any(map(len, orders)):
        for rank, order in enumerate(orders):
            while order:
                kind, stage, m = order[0]
                start_s, before = clock_s[rank], stage - 1 if kind == "F" else stage + 1
                if kind != "W" and 0 <= before < schedule.num_stages:
                    if (kind == "F", before, m) not in ends_s:
                        break
                    sent = schedule.rank_of(before, m) != rank
                    late_s = message_s[min(stage, before)] if sent else 0.0
                    start_s = max(start_s, ends_s[kind == "F", before, m] + late_s)
                clock_s[rank] = start_s + seconds[KINDS.index(kind), stage]
                if kind != "W":
                    ends_s[kind == "F", stage, m] = clock_s[rank]
                order.pop(0)
    return max(clock_s)


@given(builders, sizes, sizes, st.lists(st.floats(0.0, 9.0), min_size=5, max_size=5))
def test_step_is_that_of_the_schedule_played_on_free_links(
    builder: Callable[..., Schedule], num_stages: int, m: int, kinds_s: list[float]
):
    schedule = builder(num_stages, m)
    if not schedule.has_updates:  # then it plays none
        kinds_s[UPDATES] = 0.0
    seconds = np.tile(np.array(kinds_s)[:, None], (1, 1, num_stages))
    played = schedule.play(tuple(kinds_s))[1].max()
    assert step_seconds(table_of(schedule), seconds).tolist() == [played]


def test_step_of_one_action_by_hand():
    """F0 1 s, message 4 s, F1 2 s, B1 3 s, message, B0 5 s, U0 7 s; U1 is over by then."""
    seconds = np.array([[[1.0, 2.0], [5.0, 3.0], [0, 0], [0, 0], [7.0, 6.0]]])
    table = table_of(one_f_one_b(2, 1))
    assert step_seconds(table, seconds, 4.0).tolist() == [26.0]
    assert step_seconds(table, seconds, [[4.0, 99.0]]).tolist() == [26.0]


def test_ranks_of_a_stage_update_it_when_the_last_of_them_has_come():
    """Two pipelines of two ranks; micro-batch 0 goes down, 1 goes up.

    Stage 1 has its gradients after 3 s, stage 0 after 4 s, when the sum of stage 1 is under way.
    """
    schedule = chimera(2, 2)
    assert schedule.stage_ranks == ((0, 1), (0, 1))
    seconds = np.ones((1, 5, 2))
    free = step_seconds(table_of(schedule), seconds)[0]
    assert free == 6.0
    assert step_seconds(table_of(schedule), seconds, reduce_s=5.0)[0] == 3.0 + 5.0 + 5.0 + 2.0
    by_stage = step_seconds(table_of(schedule), seconds, reduce_s=[[5.0, 0.5]])[0]
    assert by_stage == 4.0 + 5.0 + 2.0


# -- many candidates


@given(builders, st.integers(1, 4), st.integers(1, 4), st.integers(0, 200), st.integers(1, 3))
def test_candidates_do_not_depend_on_each_other_or_on_threads(
    builder: Callable[..., Schedule], num_stages: int, m: int, candidates: int, threads: int
):
    table = table_of(builder(num_stages, m))
    seconds = random_seconds(0, candidates, num_stages)
    message_s = np.linspace(0.0, 1.0, candidates)
    together = step_seconds(table, seconds, message_s, threads=threads)
    alone = [
        float(step_seconds(table, seconds[at : at + 1], message_s[at : at + 1])[0])
        for at in range(candidates)
    ]
    assert together.tolist() == alone


def test_more_candidates_than_a_block_holds_are_all_filled():
    table, candidates = table_of(gpipe(2, 3)), 2500
    scale = np.arange(1, candidates + 1.0)
    seconds = np.ones((candidates, 5, 2)) * scale[:, None, None]
    expected = step_seconds(table, seconds[:1])[0] * scale
    for threads in (1, 2):
        assert step_seconds(table, seconds, threads=threads).tolist() == expected.tolist()


@given(builders, sizes, sizes, st.data())
def test_a_slower_action_never_shortens_the_step(
    builder: Callable[..., Schedule], num_stages: int, m: int, data: st.DataObject
):
    seconds = np.repeat(random_seconds(1, 1, num_stages), 2, axis=0)
    kind = data.draw(st.integers(0, len(KINDS) - 1))
    seconds[1, kind, data.draw(st.integers(0, num_stages - 1))] += 1.0
    first, second = step_seconds(table_of(builder(num_stages, m)), seconds)
    assert second >= first


def test_replicas_with_jitter_are_candidates_of_one_table():
    """Three replicas of a pipeline of two: the slowest, and then the sums over them."""
    schedule, jitter = one_f_one_b(2, 4), np.array([1.0, 1.3, 1.1])
    seconds = np.ones((3, 5, 2)) * jitter[:, None, None]
    seconds[:, UPDATES] = 0.0
    steps_s = step_seconds(table_of(schedule), seconds)
    assert steps_s.max() == pytest.approx(2.0 * (4 + 1) * 1.3)


# -- the table


@given(builders, sizes, sizes)
def test_table_has_a_row_for_every_action(
    builder: Callable[..., Schedule], num_stages: int, m: int
):
    schedule = builder(num_stages, m)
    table = table_of(schedule)
    kinds = np.bincount(table.cost // num_stages, minlength=len(KINDS))[: len(KINDS)]
    listed = np.bincount(schedule.orders.kinds, minlength=len(KINDS))
    assert kinds[:UPDATES].tolist() == listed[:UPDATES].tolist()
    assert table.num_actions == schedule.orders.num_actions


def test_listed_updates_wait_for_a_sum_that_begins_when_the_last_of_all_ranks_has_come():
    """Three ranks have one stage; rank 0 does two micro-batches, in 6 s; a sum takes 1 s."""
    text = "rank 0 F0.0 B0.0 F0.1 B0.1 U0.0\nrank 1 F0.2 B0.2 U0.0\nrank 2 F0.3 B0.3 U0.0"
    schedule = Schedule.parse(text)
    seconds = np.zeros((1, len(KINDS), 1))
    seconds[0, :2, 0], seconds[0, UPDATES, 0] = (1.0, 2.0), 0.5
    table = table_of(schedule)
    assert step_seconds(table, seconds, reduce_s=1.0).tolist() == [7.5]
    assert len(table) == table.num_actions + 2


def test_slots_are_used_again():
    """One for each rank, one for the beginning, and for what is under way: not one per action."""
    table = table_of(one_f_one_b(16, 256))
    assert len(table) == 2 * 16 * 256 + 16
    assert table.num_slots < 3 * 16


def test_table_that_reads_what_is_not_there_is_refused():
    table = table_of(gpipe(2, 2))
    with pytest.raises(ValueError, match="row 0 reads a slot that is not written"):
        replace(table, previous=np.full(len(table), table.num_slots - 1))
    with pytest.raises(ValueError, match="slot is not everywhere from 0 to"):
        replace(table, slot=np.full(len(table), table.num_slots))
    with pytest.raises(ValueError, match="cost is not everywhere from 0 to 13"):
        replace(table, cost=np.full(len(table), -1))
    with pytest.raises(ValueError, match="source has shape"):
        replace(table, source=table.source[1:])
    with pytest.raises(ValueError, match="or writes one it reads"):
        Table(1, 1, 2, *(np.array(each) for each in ([0], [0], [6], [0], [0])))
    with pytest.raises(ValueError, match="read-only"):
        table.slot[0] = 1


def test_seconds_that_cannot_be_are_refused():
    table, seconds = table_of(gpipe(2, 2)), np.ones((3, 5, 2))
    for wrong in (seconds[0], seconds[:, :4], seconds[:, :, :1]):
        with pytest.raises(ValueError, match="seconds has shape"):
            step_seconds(table, wrong)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"message_s\[0, 0\] is .*; it must be 0 or more"):
            step_seconds(table, seconds, wrong)
        with pytest.raises(ValueError, match=r"seconds\[0, 0, 0\] is"):
            step_seconds(table, seconds * wrong)
        with pytest.raises(ValueError, match=r"reduce_s\[2, 0\] is"):
            step_seconds(table, seconds, reduce_s=[0.0, 0.0, wrong])
    with pytest.raises(ValueError, match=r"message_s has shape \(2,\)"):
        step_seconds(table, seconds, [0.0, 0.0])
    with pytest.raises(ValueError, match="threads is 0"):
        step_seconds(table, seconds, threads=0)
    assert step_seconds(table, seconds[:0]).tolist() == []
