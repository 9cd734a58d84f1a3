"""Simulate: closed forms, bounds, and each rule of the clock on a small program that shows it."""

import doctest
import textwrap
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ClusterError, ProgramError
from penstock.program.codes import SEND, Codes
from penstock.program.edges import Edge
from penstock.program.lower import chain, lower
from penstock.program.passes import shard
from penstock.program.program import Code, Compute, Program, Reshard, Unshard, Update
from penstock.schedule import (
    KINDS,
    SCHEDULES,
    Action,
    Orders,
    Schedule,
    breadth_first,
    double_buffered,
    gpipe,
    one_f_one_b,
    zb_h1,
    zero_bubble,
)
from penstock.simulate import Costs, Memory, simulate
from penstock.timeline import (
    Span,
    Timeline,
    bubble_fraction,
    busy_s,
    draw,
    peak_bytes,
    step_s,
)
from tests.kinds import kind_s
from tests.program.lowering import lower_schedule
from tests.simulate.strategies import (
    capacities,
    clusters,
    hosts_of,
    links,
    one_host,
    programs,
    random_seconds,
)

seconds = st.integers(1, 9)
small = st.integers(1, 6)


def one(action: Action) -> float:
    return 1.0


def sized(num_stages: int, num_micro_batches: int, size_bytes: int = 1) -> Program:
    schedule = one_f_one_b(num_stages, num_micro_batches)
    return lower_schedule(schedule, edges=chain(num_stages, size_bytes=size_bytes))


def spans_of(timeline: Timeline, lane: str) -> list[Span]:
    return [span for span in timeline.spans if span.lane == lane]


def ends(timeline: Timeline) -> dict[str, float]:
    """Return when each compute and update is over."""
    own = (span for span in timeline.spans if span.lane in ("compute", "update"))
    return {span.name: span.end_s for span in own}


# -- closed forms


@given(small, st.integers(0, 9), seconds, seconds, seconds)
def test_zb_h1_takes_its_closed_form(num_stages: int, more: int, f: int, i: int, w: int):
    m, w = num_stages + more, min(f, i, w)
    timeline = simulate(lower(zb_h1(num_stages, m)), lambda a: {"F": f, "I": i, "W": w}[a.kind])
    assert step_s(timeline) == m * (f + i + w) + (num_stages - 1) * (f + i - w)


@given(st.sampled_from([gpipe, one_f_one_b]), small, st.integers(1, 9), seconds, seconds)
def test_gpipe_and_1f1b_take_their_closed_form(builder, num_stages: int, m: int, f: int, b: int):
    timeline = simulate(lower(builder(num_stages, m)), lambda a: {"F": f, "B": b}[a.kind])
    assert step_s(timeline) == (m + num_stages - 1) * (f + b)
    assert bubble_fraction(timeline) == pytest.approx((num_stages - 1) / (m + num_stages - 1))


@given(small, st.integers(1, 9), seconds, seconds)
def test_a_pass_through_a_slow_link_adds_latency_and_bytes_per_message(
    num_stages: int, m: int, latency_s: int, size_bytes: int
):
    """GPipe with computes longer than messages: the fill and the drain each cross every link."""
    program = lower_schedule(gpipe(num_stages, m), edges=chain(num_stages, size_bytes=size_bytes))
    link = Link(float(latency_s), 1.0)
    timeline = simulate(program, lambda a: 10.0, one_host(num_stages, link))
    crossings = 2 * (num_stages - 1)
    assert step_s(timeline) == 20.0 * (m + num_stages - 1) + crossings * (latency_s + size_bytes)


def test_picture_in_the_docstring_of_zero_bubble_is_what_runs():
    assert zero_bubble.__doc__ is not None
    assert textwrap.indent(draw(simulate(lower(zb_h1(3, 4)), one)), "    ") in zero_bubble.__doc__


# -- bounds


@given(st.data(), programs(), capacities)
def test_no_step_is_shorter_than_its_busiest_rank(
    data: st.DataObject, program: Program, capacity: int | None
):
    cluster = data.draw(st.none() | clusters(program.num_ranks))
    timeline = simulate(program, random_seconds(0), cluster, capacity=capacity)
    busiest_s = max(busy_s(timeline, rank) for rank in range(program.num_ranks))
    assert step_s(timeline) >= busiest_s * (1 - 1e-12)
    assert min(span.start_s for span in timeline.spans) == 0.0


@given(st.data(), programs(), links, capacities)
def test_a_slower_action_never_shortens_the_step(
    data: st.DataObject, program: Program, link: Link, capacity: int | None
):
    cluster, before = one_host(program.num_ranks, link), random_seconds(1)
    works = [i.action for code in program.code for i in code if isinstance(i, Compute)]
    slower = data.draw(st.sampled_from(works))

    def after(action: Action) -> float:
        return before(action) + (action == slower)

    first, second = (
        step_s(simulate(program, each, cluster, capacity=capacity)) for each in (before, after)
    )
    assert second >= first * (1 - 1e-12)


@given(st.data(), programs(), links)
def test_larger_messages_never_shorten_the_step(data: st.DataObject, program: Program, link: Link):
    if not program.edges:
        return
    at = data.draw(st.integers(0, len(program.edges) - 1))
    edges = list(program.edges)
    edges[at] = edges[at]._replace(size_bytes=edges[at].size_bytes + 5)
    cluster = one_host(program.num_ranks, link)
    first, second = (
        step_s(simulate(each, random_seconds(2), cluster))
        for each in (program, replace(program, graph=replace(program.graph, edges=tuple(edges))))
    )
    assert second >= first * (1 - 1e-12)


@given(st.data(), programs(), capacities)
def test_less_room_for_messages_never_shortens_the_step_on_one_host(
    data: st.DataObject, program: Program, capacity: int | None
):
    cluster = one_host(
        program.num_ranks, data.draw(links.map(lambda link: replace(link, slowdown=0.0)))
    )
    free = step_s(simulate(program, random_seconds(3), cluster))
    assert step_s(simulate(program, random_seconds(3), cluster, capacity=capacity)) >= free - 1e-9


# -- what is returned


@given(st.data(), programs())
def test_without_spans_the_totals_are_the_same(data: st.DataObject, program: Program):
    cluster = data.draw(st.none() | clusters(program.num_ranks))
    memory = memory_for(program, 4)
    full = simulate(program, random_seconds(4), cluster, memory=memory)
    bare = simulate(program, random_seconds(4), cluster, memory=memory, spans=False)
    assert (bare.totals, bare.num_ranks) == (full.totals, full.num_ranks)
    assert (len(bare.spans), len(bare.memory)) == (0, 0)
    again = Timeline(full.num_ranks, full.spans, full.memory)
    assert step_s(again) == pytest.approx(step_s(full))
    assert again.totals.busy_s == pytest.approx(full.totals.busy_s)
    assert peak_bytes(again) == peak_bytes(full)


@given(st.data(), programs(), capacities)
def test_simulating_twice_gives_the_same_timeline(
    data: st.DataObject, program: Program, capacity: int | None
):
    cluster = data.draw(clusters(program.num_ranks))
    first, second = (
        simulate(program, one, cluster, memory=memory_for(program, 1), capacity=capacity)
        for _ in range(2)
    )
    assert first == second


@given(programs(), st.integers(0, 99))
def test_spans_of_a_rank_stand_in_the_order_of_its_code(program: Program, seed: int):
    timeline = simulate(program, random_seconds(seed))
    for rank, code in enumerate(program.code):
        names = [str(i.action) for i in code if isinstance(i, Compute)]
        own = [span for span in timeline.spans if span.rank == rank and span.lane == "compute"]
        assert [span.name for span in own] == names
        assert all(a.end_s <= b.start_s for a, b in pairwise(own))


def test_timeline_says_that_it_is_simulated():
    assert dict(simulate(lower(gpipe(1, 1)), one).meta)["clock"] == "simulated"


def test_updates_take_time_by_a_table_and_where_the_schedule_lists_them():
    assert kind_s(simulate(lower(gpipe(2, 2)), one), "U", lane="update") == (0.0, 0.0)
    asynchronous = simulate(lower(double_buffered(2, 3, num_steps=2)), one)
    assert kind_s(asynchronous, "U", lane="update") == (2.0, 2.0)
    table = simulate(lower(gpipe(2, 2)), Costs(np.ones((len(KINDS), 2, 1))))
    assert kind_s(table, "U", lane="update") == (1.0, 1.0)
    assert step_s(table) == 7.0


# -- messages


def test_message_goes_out_when_its_compute_ends_and_is_used_when_it_is_here():
    cluster = one_host(2, Link(0.25, 2.0))
    timeline = simulate(sized(2, 1), one, cluster)
    assert ends(timeline) == {
        **{"F0.0": 1.0, "F1.0": 2.75, "B1.0": 3.75, "B0.0": 5.5},
        **{"U0.0": 5.5, "U1.0": 3.75},
    }
    assert spans_of(timeline, "send")[0] == Span(0, "send", "F", 0, 0, 1.0, 1.5)
    assert spans_of(timeline, "receive")[1] == Span(1, "receive", "F", 0, 0, 1.25, 1.75)


def test_both_ends_lose_computing_time_to_a_message():
    cluster = one_host(2, Link(0.0, float("inf"), overhead_s=0.25, copy_bytes_per_s=4.0))
    timeline = simulate(sized(2, 2), one, cluster)
    end_s = 0.25 + 1 / 4.0
    computes = {span.name: span for span in timeline.spans if span.lane == "compute"}
    assert computes["F0.1"].start_s == 1.0 + end_s  # after it has sent F0.0
    assert computes["F1.0"].start_s == 1.0 + 2 * end_s  # sent and taken in
    assert busy_s(timeline, 0) == 4.0


def test_messages_of_one_pair_of_ranks_go_one_after_another():
    program = lower_schedule(gpipe(2, 2), edges=chain(2, size_bytes=3))
    sends = spans_of(simulate(program, one, one_host(2, Link(0.0, 1.0))), "send")
    assert [(span.start_s, span.end_s) for span in sends[:2]] == [(1.0, 4.0), (4.0, 7.0)]


def test_opposite_directions_do_not_wait_for_each_other():
    timeline = simulate(sized(2, 2, 3), one, one_host(2, Link(0.0, 1.0)))
    by_name = {(span.kind, span.micro_batch): span for span in spans_of(timeline, "send")}
    there, back = by_name["F", 1], by_name["B", 0]
    assert there.start_s < back.end_s
    assert back.start_s < there.end_s


def side_by_side() -> Program:
    """Return a program in which stage 0 sends to stage 2, and 1 to 3; a stage per rank."""
    actions = (tuple(Action(kind, stage, 0) for kind in ("F", "B")) for stage in range(4))
    edges = [Edge("F", 0, 2, 2), Edge("F", 1, 3, 2), Edge("B", 2, 0, 0), Edge("B", 3, 1, 0)]
    return lower_schedule(Schedule(4, 1, Orders.of(actions)), edges=edges)


def test_ranks_of_one_host_share_its_card():
    """Stages 0 and 1 on one host send to stages 2 and 3 on another, at one time."""
    program = side_by_side()
    together = spans_of(simulate(program, one, hosts_of(4, 2, Link(0.0, 1.0))), "send")
    assert [span[0:1] + span[5:] for span in together[:2]] == [(0, 1.0, 3.0), (1, 3.0, 5.0)]
    alone = spans_of(simulate(program, one, one_host(4, Link(0.0, 1.0))), "send")
    assert [span[0:1] + span[5:] for span in alone[:2]] == [(0, 1.0, 3.0), (1, 1.0, 3.0)]


def test_messages_to_one_host_share_its_card():
    """Stages 0 and 1 on hosts of their own send to stages 2 and 3 on one, at one time."""
    program = side_by_side()
    link = Link(0.5, 1.0)
    hosts = (Host("a", "d", 1), Host("b", "d", 1), Host("c", "d", 2))
    cluster = Cluster(hosts_of(4, 2, link).devices, hosts, link, link)
    timeline = simulate(program, one, cluster)
    sends, receives = spans_of(timeline, "send"), spans_of(timeline, "receive")
    assert [(s.start_s, s.end_s) for s in sends[:2]] == [(1.0, 3.0)] * 2
    assert [(s.start_s, s.end_s) for s in receives if s.kind == "F"] == [(1.5, 3.5), (3.5, 5.5)]


def test_compute_beside_a_busy_link_is_slowed():
    """While rank 0 sends, for a second, it does 0.8 s of its work; then the rest."""
    link = Link(0.0, 1.0, slowdown=0.25)
    timeline = simulate(
        lower_schedule(gpipe(2, 2), edges=chain(2, size_bytes=1)), one, one_host(2, link)
    )
    second = next(span for span in timeline.spans if span.name == "F0.1" and span.lane == "compute")
    assert (second.start_s, second.end_s) == (1.0, pytest.approx(2.2))
    assert busy_s(timeline, 0) == pytest.approx(4.2)


def gathered(cores: int, link: Link, kept_s: float = 0.0) -> dict[str, tuple[float, float]]:
    """Two replicas: while stage 0 computes for a second, 8 bytes of stage 1 are gathered."""
    program = lower_schedule(breadth_first(2, 1, num_ranks=1), replicas=2)
    program = shard(program, ["replicate", "shard"], prefetch=1)
    seconds = np.ones((5, 2, 1))
    costs = Costs(seconds, unshard_s=[0.0, kept_s], unshard_bytes=[0, 8])
    kind = DeviceKind("d", 1, (), 1.0)
    cluster = Cluster((kind,), (Host("h", "d", 2, cores=cores),), link)
    timeline = simulate(program, costs, cluster)
    return {span.name: (span.start_s, span.end_s) for span in timeline.spans if span.rank == 0}


def test_compute_beside_a_gather_has_what_that_leaves_of_its_core():
    """4 bytes go each way at 8 bytes/s: for half a second it gets on at 0.8 of its speed."""
    found = gathered(0, Link(0.0, 8.0, slowdown=0.25))
    assert found["F0.0"] == (0.0, pytest.approx(1.1))
    assert found["F1.0"] == (pytest.approx(1.1), pytest.approx(2.1))


@pytest.mark.parametrize(("cores", "longer_s"), [(0, 0.0), (4, 0.0), (3, 0.1), (2, 0.2), (1, 0.2)])
def test_copies_take_of_the_core_where_there_is_none_to_spare(cores: int, longer_s: float):
    """It copies 4 bytes in and 4 out at 80 bytes/s, and what is its own for 0.1 s."""
    found = gathered(cores, Link(0.0, 8.0, copy_bytes_per_s=80.0), kept_s=0.1)
    start_s, end_s = found["F0.0"]
    times = 2 if cores == 1 else 1  # two ranks share it
    assert end_s - start_s == pytest.approx(times + longer_s, rel=2e-3)


@pytest.mark.parametrize(("cores", "longer_s"), [(0, 0.3), (4, 0.0), (3, 0.15), (2, 0.3)])
def test_what_a_sum_was_measured_to_take_is_what_computes_beside_it_lose(
    cores: int, longer_s: float
):
    """0.1 s and 4 bytes at 40 bytes/s, and 0.1 s of its own; a gather lasts for 0.6 s."""
    link = Link(0.0, 8.0, copy_bytes_per_s=80.0, slowdown=0.25, core_s=0.1, core_bytes_per_s=40.0)
    start_s, end_s = gathered(cores, link, kept_s=0.1)["F0.0"]
    assert end_s - start_s == pytest.approx(1 + longer_s, rel=2e-3)


def test_collective_that_takes_all_of_a_core_leaves_nothing_beside_it():
    found = gathered(2, Link(0.0, 8.0, copy_bytes_per_s=1.0))
    assert found["F0.0"] == (0.0, pytest.approx(1.5))


def test_send_waits_for_its_receive_where_nothing_can_be_under_way():
    """Rank 1 posts the receive of F0.2 when it is done with F1.0, at 6 s."""
    program = lower(gpipe(2, 4))
    free, waits = (ends(simulate(program, slow_end, capacity=room)) for room in (None, 0))
    assert (free["F0.2"], free["F0.3"]) == (3.0, 4.0)
    assert (waits["F0.2"], waits["F0.3"]) == (3.0, 7.0)


def test_more_room_lets_a_sender_run_further_ahead():
    program = lower(gpipe(2, 6))
    times = [
        ends(simulate(program, slow_end, capacity=room))["F0.5"] for room in (0, 1, 2, 3, None)
    ]
    assert times == [17.0, 12.0, 7.0, 6.0, 6.0]


def slow_end(action: Action) -> float:
    return 5.0 if action.stage else 1.0


# -- collectives


def test_update_waits_for_the_reduction_of_all_replicas():
    program = lower_schedule(gpipe(1, 1), replicas=2, stage_bytes=())
    program = with_reduced_bytes(program, 4)
    link = Link(0.5, 2.0)
    timeline = simulate(program, one, one_host(2, link))
    (a, b) = spans_of(timeline, "collective")
    assert (a.start_s, a.end_s) == (b.start_s, b.end_s) == (2.0, 2.0 + 2 * (0.5 + 4 / 2 / 2.0))
    assert {span.start_s for span in spans_of(timeline, "update")} == {a.end_s}
    assert a.name == "reduce 0"


def with_reduced_bytes(program: Program, size_bytes: int) -> Program:
    reductions = tuple(replace(each, size_bytes=size_bytes) for each in program.code.reductions)
    return changed(program, replace(program.code, reductions=reductions))


def changed(program: Program, code: Codes) -> Program:
    """Return `program` with other code, unchecked."""
    other = replace(program)
    object.__setattr__(other, "code", code)
    return other


def test_weights_are_gathered_beside_an_earlier_compute():
    program = lower(gpipe(1, 2))
    gathered = program.map_ranks(lambda code: (Unshard(0), *code[:-1], Reshard(0), code[-1]))
    later = program.map_ranks(
        lambda code: (
            Unshard(0),
            code[0],
            Reshard(0),
            Unshard(0),
            *code[1:-1],
            Reshard(0),
            code[-1],
        )
    )
    costs = Costs(np.ones((len(KINDS), 1, 1)), unshard_s=np.array([0.5]))
    assert step_s(simulate(gathered, costs)) == 5.5
    assert step_s(simulate(later, costs)) == 6.0
    spans = spans_of(simulate(later, costs), "collective")
    assert [(span.name, span.start_s, span.end_s) for span in spans] == [
        ("unshard 0", 0.0, 0.5),
        ("unshard 0", 1.5, 2.0),
    ]


def test_gathering_over_replicas_takes_what_the_links_of_the_cluster_say():
    program = lower_schedule(gpipe(1, 2), replicas=4)
    gathered = program.map_ranks(lambda code: (Unshard(0), *code[:-1], Reshard(0), code[-1]))
    costs = Costs(np.zeros((len(KINDS), 1, 1)), unshard_bytes=np.array([8]))
    cluster = hosts_of(4, 1, Link(0.25, 4.0))
    alone = step_s(simulate(program, costs, cluster))
    assert alone == cluster.all_reduce_s(0, range(4), "ring")
    gather_s = 3 * (0.25 + 8 / 4 / 4.0)  # a ring: three rounds of a fourth
    assert step_s(simulate(gathered, costs, cluster)) == alone + gather_s
    assert step_s(simulate(gathered, costs)) == 0.0


# -- memory


def memory_for(program: Program, unit: int) -> Memory:
    shape = len(KINDS), program.num_stages
    net = np.zeros(shape, np.int64)
    for kind, change in (("F", 2), ("B", -2), ("I", -1), ("W", -1)):
        net[KINDS.index(kind)] = change * unit
    transient = np.arange(np.prod(shape)).reshape(shape)
    start = 10 * np.arange(program.num_ranks)
    return Memory(start, transient, net, np.full(program.num_stages, 7))


@given(programs(), st.integers(0, 99))
def test_memory_curve_follows_the_actions_of_a_rank(program: Program, seed: int):
    memory = memory_for(program, 3)
    timeline = simulate(program, random_seconds(seed), memory=memory)
    for rank, code in enumerate(program.code):
        curve = [entry for entry in timeline.memory if entry.rank == rank]
        expected = sizes_held(code, memory, int(memory.start_bytes[rank]))
        assert [entry.size_bytes for entry in curve] == expected
        assert peak_bytes(timeline)[rank] == max(expected)
        times = [entry.time_s for entry in curve]
        assert times[0] == 0.0
        assert times == sorted(times)
        works = [s for s in timeline.spans if s.rank == rank and s.lane in ("compute", "update")]
        assert {time for span in works for time in span[5:]} <= set(times)


def sizes_held(code: Code, memory: Memory, held: int) -> list[int]:
    sizes = [held]
    for instruction in code:
        match instruction:
            case Compute() | Update():
                kind = "U" if isinstance(instruction, Update) else instruction.action.kind
                stage = (
                    instruction.stage
                    if isinstance(instruction, Update)
                    else instruction.action.stage
                )
                at = KINDS.index(kind), stage
                sizes.append(held + int(memory.transient_bytes[at]))
                held += int(memory.net_bytes[at])
                sizes.append(held)
            case Unshard() | Reshard():
                held += 7 if isinstance(instruction, Unshard) else -7
                sizes.append(held)
            case _:
                pass
    return sizes


@given(small, st.integers(1, 9))
def test_1f1b_holds_at_most_one_micro_batch_per_stage_after_it(num_stages: int, m: int):
    program = lower(one_f_one_b(num_stages, m))
    net = np.zeros((len(KINDS), num_stages), np.int64)
    net[KINDS.index("F")], net[KINDS.index("B")] = 1, -1
    memory = Memory(np.zeros(num_stages), np.zeros_like(net), net)
    timeline = simulate(program, one, memory=memory)
    assert peak_bytes(timeline) == tuple(min(num_stages - rank, m) for rank in range(num_stages))
    last = {entry.rank: entry.size_bytes for entry in timeline.memory}
    assert set(last.values()) == {0}


def test_message_is_held_from_its_receive_to_its_first_use():
    """Rank 1 posts its receive before it has done anything, rank 0 after its forward."""
    zeros, action_s = np.zeros((len(KINDS), 2)), np.zeros((len(KINDS), 2, 1))
    action_s[KINDS.index("F")], action_s[KINDS.index("B")] = 1.0, 2.0
    memory = Memory(np.zeros(2), zeros, zeros, message_bytes=[5, 7])
    timeline = simulate(lower(gpipe(2, 1)), Costs(action_s), memory=memory)
    curves = [[entry[1:] for entry in timeline.memory if entry.rank == rank] for rank in range(2)]
    assert curves[0][:6] == [(0, 0), (0, 0), (1, 0), (1, 7), (4, 0), (6, 0)]
    assert curves[1][:6] == [(0, 0), (0, 5), (1, 0), (2, 0), (2, 0), (4, 0)]
    assert peak_bytes(timeline) == (7, 5)


def test_replicas_hold_the_messages_that_they_receive_themselves():
    """In the first each rank runs both stages and sends nothing."""
    alone = Schedule.parse("rank 0 F0.0 F1.0 B1.0 B0.0\nrank 1 F0.1 F1.1 B1.1 B0.1")
    zeros, action_s = np.zeros((len(KINDS), 2)), np.ones((len(KINDS), 2, 1))
    memory = Memory(np.zeros(4), zeros, zeros, message_bytes=[5, 7])
    program = lower_schedule([alone, one_f_one_b(2, 2)])
    timeline = simulate(program, Costs(action_s), memory=memory)
    assert peak_bytes(timeline)[:2] == (0, 0)
    assert min(peak_bytes(timeline)[2:]) > 0
    assert [rank for rank, _, held in timeline.memory if held < 0] == []


# -- what is refused


def test_costs_that_do_not_fit_the_program_are_refused():
    program = lower(gpipe(2, 1))
    with pytest.raises(ValueError, match="costs of 3 stages for a program of 2"):
        simulate(program, Costs(np.ones((5, 3, 1))))
    with pytest.raises(ValueError, match="costs on devices d, but no cluster"):
        simulate(program, Costs(np.ones((5, 2, 1)), ("d",)))
    with pytest.raises(ValueError, match='rank 0 is on a "d", and the costs are on devices e'):
        simulate(program, Costs(np.ones((5, 2, 1)), ("e",)), one_host(2, Link(0.0, 1.0)))
    with pytest.raises(ValueError, match=r"B1\.0 takes -1\.0 s; it must be 0 or more"):
        simulate(program, lambda a: -1.0 if a == ("B", 1, 0) else 1.0)
    with pytest.raises(ValueError, match=r"F0\.0 takes nan s"):
        simulate(program, lambda a: float("nan"))
    with pytest.raises(ValueError, match="memory of 3 ranks and 2 stages for a program of 2 and 2"):
        simulate(program, one, memory=Memory(np.zeros(3), np.zeros((5, 2)), np.zeros((5, 2))))
    with pytest.raises(ValueError, match="capacity is -1 messages"):
        simulate(program, one, capacity=-1)


def test_cluster_that_does_not_fit_the_program_is_refused():
    with pytest.raises(ClusterError, match="a program of 3 ranks on a cluster of 2"):
        simulate(lower(gpipe(3, 1)), one, one_host(2, Link(0.0, 1.0)))
    alone = hosts_of(2, 1, Link(0.0, 1.0))
    with pytest.raises(ClusterError, match=r"ranks 0 and 1 .* have no link"):
        simulate(lower(gpipe(2, 1)), one, Cluster(alone.devices, alone.hosts))


def test_program_whose_message_is_never_sent_stops_with_the_place_and_the_evidence():
    program = lower(gpipe(2, 1))
    columns = ("op", "kind", "stage", "micro_batch", "edge", "peer", "version", "slot")
    code = program.code
    kept = np.flatnonzero(code.op != SEND)
    broken = Codes(
        *(getattr(code, name)[kept] for name in columns), np.searchsorted(kept, code.offsets)
    )
    with pytest.raises(ProgramError) as caught:
        simulate(changed(program, broken), one)
    assert str(caught.value).startswith("rank 0 waits forever at B0.0\n  rank 0  F0.0")
    assert "rank 1  F0.0<r0e0s0 F1.0" in str(caught.value)


@given(st.sampled_from(SCHEDULES), small, st.integers(1, 9))
def test_every_schedule_runs_at_every_size_with_any_room(builder, num_stages: int, m: int):
    program = lower(builder(num_stages, m))
    times = [step_s(simulate(program, one, capacity=room, spans=False)) for room in (None, 0, 1, 3)]
    assert times[0] <= min(times)


def test_norm_after_the_updates_is_part_of_the_step(tmp_path: Path):
    program = lower_schedule(zero_bubble.zb_h2(3, 4), clip=True, post_validation=True)
    costs = Costs(np.ones((len(KINDS), 3, 1)))
    timeline = simulate(program, costs, one_host(3, Link(0.5, 1e9)))
    ends = [span.end_s for span in timeline.spans]
    assert step_s(timeline) == max(ends)
    timeline.save(tmp_path / "timeline.json")
    assert step_s(Timeline.load(tmp_path / "timeline.json")) == pytest.approx(max(ends))


def test_examples_of_the_page_are_what_runs():
    page = Path(__file__).parents[2] / "docs" / "simulate.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0
