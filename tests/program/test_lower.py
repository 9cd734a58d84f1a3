"""Lowering: what comes out is sound, right when run, and no bigger than it need be."""

import graphlib
import itertools
import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.program.lower import chain, lower
from penstock.program.program import (
    Compute,
    Edge,
    Receive,
    Send,
    StageBytes,
    TiedGroup,
    Update,
)
from penstock.program.reductions import Norm, Reduction, Sum
from penstock.schedule import (
    Action,
    Schedule,
    bitpipe,
    breadth_first,
    chimera,
    double_buffered,
    gpipe,
    interleaved,
    one_f_one_b,
    versions,
    zb_h1,
)
from tests.draws import examples
from tests.program.lowering import lower_schedule
from tests.program.programs import forward_only, programs, random_window, schedule_of, skips
from tests.program.toy_run import run_toy

SIZES = st.integers(1, 6), st.integers(1, 8)


@examples(50)
@given(programs())
def test_lowered_program_runs_right_with_rendezvous_bounded_and_unbounded_sends(program):
    for capacity in (0, 1, None):
        assert run_toy(program, capacity) == ""


@given(programs(max_stages=6, max_micro_batches=6))
def test_computes_are_the_schedule_and_messages_are_the_edges(program):
    for rank, code in enumerate(program.code):
        replica = rank // program.grid.num_ranks
        sent = Counter((one.edge, one.of.micro_batch) for one in code if isinstance(one, Send))
        assert all(count == 1 for count in sent.values())
        for one in code:
            if isinstance(one, Send | Receive):
                edge = program.edges[one.edge]
                assert edge.source == one.of.stage
                assert one.peer // program.grid.num_ranks == replica


@given(st.sampled_from([gpipe, one_f_one_b, zb_h1]), *SIZES)
def test_rank_of_a_chain_computes_in_the_order_of_the_schedule(build, num_stages, micro_batches):
    schedule = build(num_stages, micro_batches)
    program = lower(schedule)
    computed = [[one.action for one in code if isinstance(one, Compute)] for code in program.code]
    assert [tuple(order) for order in computed] == list(schedule.orders)


@given(*SIZES)
def test_one_f_one_b_needs_one_slot_for_gradients_and_the_depth_for_activations(
    num_stages, micro_batches
):
    program = lower(one_f_one_b(num_stages, micro_batches))
    for rank in range(num_stages):
        expected = {}
        if rank > 0:
            expected[rank - 1] = min(num_stages - rank + 1, micro_batches)
        if rank < num_stages - 1:
            expected[num_stages - 1 + rank] = 1
        slots = program.slots(rank)
        assert slots.keys() == expected.keys()
        assert all(slots[edge] <= most for edge, most in expected.items())


@given(*SIZES)
def test_gpipe_needs_a_slot_per_micro_batch(num_stages, micro_batches):
    program = lower(gpipe(num_stages, micro_batches))
    for rank in range(1, num_stages):
        assert program.slots(rank)[rank - 1] == micro_batches


@given(programs(max_stages=5, max_micro_batches=6))
def test_slots_are_as_few_as_are_live_at_once(program):
    """The smallest free slot never passes the greatest number of messages held at once."""
    for rank, code in enumerate(program.code):
        live, most, last_use = Counter(), Counter(), _last_uses(program, code)
        holding = {}
        for at, one in enumerate(code):
            if isinstance(one, Receive):
                live[one.edge] += 1
                most[one.edge] = max(most[one.edge], live[one.edge])
                holding[one.edge, one.of.micro_batch] = one.slot
            for edge, micro_batch in last_use.get(at, ()):
                if (edge, micro_batch) in holding:
                    live[edge] -= 1
        assert program.slots(rank) == dict(most)


def _last_uses(program, code):
    last = {}
    for at, one in enumerate(code):
        if isinstance(one, Compute):
            for edge, (_, _, target, *_) in enumerate(program.edges):
                if target == one.action.stage:
                    last[edge, one.action.micro_batch] = at
    uses = {}
    for message, at in last.items():
        uses.setdefault(at, []).append(message)
    return uses


def test_received_gradient_is_kept_until_w():
    """The last Linear's output gradient is the received one: W still reads the slot after I."""
    orders = (
        _actions("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1"),
        _actions("F1.0 B1.0 F1.1 B1.1"),
    )
    program = lower(Schedule(2, 2, orders))
    slots = [one.slot for one in program.code[0] if isinstance(one, Receive)]
    assert slots == [0, 1]


def test_sums_come_as_soon_as_their_gradients_are_made_and_norm_and_updates_at_the_end():
    program = lower_schedule(
        interleaved(4, 2, num_ranks=2),
        tied=[TiedGroup("wte", (0, 3), 64)],
        replicas=2,
        clip=True,
        stage_bytes=[StageBytes(weights=100 + stage) for stage in range(4)],
    )
    words = " ".join(str(one) for one in program.code[0])
    assert "B2.1 B2.1>r1e4s1 B1.0<r1e3s0 replicas:stage2.0 B0.0 " in words
    assert words.endswith(" B0.1 tied:wte.0 replicas:stage0.0 norm:all.0 U0.0 U2.0")
    sums = [one for one in program.code[3] if isinstance(one, Reduction)]
    assert sums == [
        Sum("tied", "wte", (2, 3), 0, 64),
        Sum("replicas", "stage1", (1, 3), 0, 101),
        Sum("replicas", "stage3", (1, 3), 0, 103),
        Norm((2, 3)),
    ]


SUMMED = (gpipe, one_f_one_b, zb_h1, interleaved, chimera, bitpipe, breadth_first)


@given(
    st.sampled_from(SUMMED), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans()
)
def test_every_rank_sums_what_its_gradients_allow_and_all_in_one_order(
    build, pairs, micro_batches, replicas, is_tied
):
    """Behind the last gradient for it there and the sums before it, and before any other action."""
    ranks = 2 * pairs
    stages = ranks * (2 if build in (interleaved, bitpipe, breadth_first) else 1)
    sizes = {"num_ranks": ranks} if stages > ranks else {}
    schedule = build(stages, 2 * ranks * micro_batches, **sizes)
    tied = [TiedGroup("wte", (0, stages - 1))] if is_tied else []
    program = lower_schedule(schedule, tied=tied, replicas=replicas)
    places = {}  # by sum: its place among the sums of each rank
    for rank, code in enumerate(program.code):
        gradients = {}  # by stage: where the last one is made
        for at, one in enumerate(code):
            if isinstance(one, Compute) and one.action.kind in "BW":
                gradients[one.action.stage] = at
        sums = [at for at, one in enumerate(code) if isinstance(one, Reduction)]
        before = 0
        for number, at in enumerate(sums):
            one = code[at]
            held = (0, stages - 1) if one.word == "tied" else [int(one.bucket[len("stage") :])]
            made = max(gradients[stage] for stage in held if stage in gradients)
            between = code[max(made + 1, before) : at]
            assert made < at
            assert not any(isinstance(each, Compute | Update) for each in between)
            places.setdefault(one, {})[rank] = number
            before = at
        updated = [at for at, one in enumerate(code) if isinstance(one, Update)]
        assert max(sums, default=-1) < min(updated)
    order = graphlib.TopologicalSorter()
    for rank in range(program.num_ranks):
        own = sorted((each[rank], str(one), one) for one, each in places.items() if rank in each)
        for (_, _, one), (_, _, after) in itertools.pairwise(own):
            order.add(after, one)
    order.prepare()  # raises where ranks would wait for each other in a circle


def test_asynchronous_sums_stand_right_before_their_update():
    program = lower_schedule(
        double_buffered(2, 2, num_steps=2), tied=[TiedGroup("wte", (0, 1), 64)], replicas=2
    )
    for code in program.code:
        for at, one in enumerate(code):
            if isinstance(one, Update):
                tied, replicas = code[at - 2 : at]
                assert (str(tied), replicas.word) == (f"tied:wte.{one.step}", "replicas")
                assert replicas.step == one.step


@given(*SIZES, st.integers(1, 4))
def test_computes_read_the_versions_of_the_weight_rule(num_stages, micro_batches, num_steps):
    schedule = double_buffered(num_stages, micro_batches, num_steps=num_steps)
    table = versions(schedule)
    for code in lower(schedule).code:
        for one in code:
            if isinstance(one, Compute):
                (kind, stage, m), version = one.action, one.version
                read = table.forward if kind == "F" else table.backward
                assert version == read[stage, m]


def test_replicas_are_copies_that_talk_only_inside_themselves():
    one = lower(one_f_one_b(3, 4))
    three = lower_schedule(one_f_one_b(3, 4), replicas=3)
    assert (three.num_ranks, three.grid.num_ranks) == (9, 3)
    for rank in range(9):
        messages = [each for each in three.code[rank] if isinstance(each, Send | Receive)]
        originals = [each for each in one.code[rank % 3] if isinstance(each, Send | Receive)]
        assert [each.peer - rank // 3 * 3 for each in messages] == [e.peer for e in originals]
        assert [each.slot for each in messages] == [each.slot for each in originals]


def test_forward_only_schedule_has_neither_sums_nor_updates():
    program = lower_schedule(
        forward_only(3, 2), tied=[TiedGroup("w", (0, 2))], replicas=2, clip=True
    )
    assert not any(isinstance(one, Reduction | Update) for code in program.code for one in code)
    assert run_toy(program, 0) == ""


def test_value_for_a_later_backward_crosses_once_and_is_held_until_it():
    edges = (*chain(3), Edge("F", 0, 2, 8))
    program = lower_schedule(one_f_one_b(3, 4), edges=edges)
    received = [one for one in program.code[2] if isinstance(one, Receive) and one.edge == 4]
    words = ["F0.0<r0e4s0", "F0.1<r0e4s1", "F0.2<r0e4s2", "F0.3<r0e4s0"]
    assert [str(one) for one in received] == words
    assert not any(isinstance(one, Receive) and one.edge == 4 for one in program.code[1])


def test_edges_between_stages_of_one_rank_need_no_message():
    program = lower(interleaved(3, 3, num_ranks=1))
    assert not any(isinstance(one, Send | Receive) for one in program.code[0])


@given(st.integers(0, 999))
def test_receive_stands_where_its_value_is_made_on_a_unit_clock(seed):
    """No compute that ends later on that clock stands before the Receive, none earlier after it."""
    chance = random.Random(seed)
    schedule = schedule_of("random", 4, 4, chance)
    program = lower_schedule(schedule, edges=skips(4, chance))
    if not any(
        one.action.kind != "F" for code in program.code for one in code if isinstance(one, Compute)
    ):
        return
    ends = _unit_clock(program)
    for rank, code in enumerate(program.code):
        for at, one in enumerate(code):
            if isinstance(one, Receive):
                made = ends[one.of], one.peer
                before = [c.action for c in code[:at] if isinstance(c, Compute)]
                after = [c.action for c in code[at:] if isinstance(c, Compute)]
                assert all((ends[action], rank) < made for action in before)
                assert all((ends[action], rank) > made for action in after)


def _unit_clock(program):
    """Return when every action ends if each takes one tick and messages take none."""
    ends, orders = {}, []
    for code in program.code:
        orders.append([one.action for one in code if isinstance(one, Compute)])
    while len(ends) < sum(map(len, orders)):
        for order in orders:
            last = 0
            for action in order:
                needs = _needs(program, action, {a for o in orders for a in o})
                if action not in ends:
                    if not all(need in ends for need in needs):
                        break
                    ends[action] = max([last, *(ends[need] for need in needs)]) + 1
                last = ends[action]
    return ends


def _needs(program, action, there):
    kinds = {"F": "F", "B": "BI", "I": "BI", "W": ""}[action.kind]
    forward = action.kind == "F"
    sources = [
        e.source for e in program.edges if e.target == action.stage and (e.kind == "F") == forward
    ]
    candidates = (Action(kind, source, action.micro_batch) for source in sources for kind in kinds)
    return [one for one in candidates if one in there]


@examples(50)
@given(programs(max_stages=6, max_micro_batches=6) | programs(kinds=("window",), max_stages=6))
def test_all_lists_agree_with_one_order_in_which_a_send_and_its_receive_are_one_event(program):
    """So a lowered program cannot stop even where a Receive blocks until its message is there."""
    assert _one_order(program)


def test_sums_inside_a_window_fit_into_that_order_and_give_the_right_weights():
    """Of many random windows, because only where a rank comes early and waits is a tick wrong."""
    refused = []
    for seed in range(300):
        chance = random.Random(seed)
        num_stages = chance.randrange(2, 7)
        schedule = random_window(chance, num_stages, chance.randrange(1, 4), chance.randrange(2, 6))
        tied = [TiedGroup("wte", tuple(chance.sample(range(num_stages), 2)))]
        try:
            program = lower_schedule(schedule, tied=tied, clip=chance.random() < 0.3)
        except ProgramError as problem:  # some rank of it updates before all is whole
            refused.append(problem.message)
            continue
        assert _one_order(program)
        assert run_toy(program, 0) == ""
    assert len(refused) < 100
    assert all(re.search("in a sum|its turn is|comes before it", why) for why in refused)


def _one_order(program):
    """Return whether the lists, with one node per message and per sum, have a common order.

    A rank begins a sum and goes on; it is over after its begin on all ranks, and the sum before it
    on each of their lanes; a norm and an update come after all sums begun on their rank.
    """
    sorter, rows = graphlib.TopologicalSorter(), 0
    for rank, code in enumerate(program.code):
        before, summed = (), ()
        for one in code:
            rows += 1
            node = (rank, rows)
            if isinstance(one, Send | Receive):
                node = (rank // program.grid.num_ranks, one.edge, one.of)
            if isinstance(one, Update):
                before = (*before, *summed)
            sorter.add(node, *before)
            before = (node,)
            if isinstance(one, Reduction):
                sorter.add(one, node, *summed)
                summed = (one,)
                before = (node, one) if one.word == "norm" else before
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return False
    return True


@pytest.mark.parametrize("edges", [[Edge("F", 0, 3)], [Edge("F", 1, 0)], [Edge("B", 0, 1)]])
def test_edge_that_joins_no_two_stages_in_its_direction_is_refused(edges):
    with pytest.raises(ProgramError, match=r"edge [FB] \d->\d"):
        lower_schedule(one_f_one_b(3, 2), edges=edges)


def test_two_edges_between_the_same_stages_are_refused():
    with pytest.raises(ProgramError, match="edge F 0->1 appears twice"):
        lower_schedule(one_f_one_b(2, 2), edges=[*chain(2), Edge("F", 0, 1)])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([TiedGroup("w", (0,))], "joins stages"),
        ([TiedGroup("w", (0, 2))], "joins stages"),
        ([TiedGroup("w", (1, 1))], "joins stages"),
        ([TiedGroup("a b", (0, 1))], "no name of one word"),
        ([TiedGroup("w", (0, 1)), TiedGroup("w", (1, 0))], "two tied groups of one name"),
    ],
)
def test_tied_group_that_cannot_be_is_refused(groups, message):
    with pytest.raises(ProgramError, match=message):
        lower_schedule(one_f_one_b(2, 2), tied=groups)


def test_tied_group_of_stages_on_two_ranks_is_summed_over_both_before_the_stages_are():
    orders = (_actions("F0.0 F1.1 B1.1 B0.0"), _actions("F0.1 F1.0 B1.0 B0.1"))
    program = lower_schedule(Schedule(2, 2, orders), tied=[TiedGroup("w", (0, 1))])
    for rank in (0, 1):
        sums = [i for i in program.code[rank] if isinstance(i, Reduction)]
        assert [i.word for i in sums] == ["tied", "replicas", "replicas"]
        assert all(i.ranks == (0, 1) for i in sums)


def test_clipping_where_a_rank_updates_one_stage_before_the_other_is_whole_is_refused():
    orders = (_actions("F0.0 F1.0 B1.0 U1.0 B0.0 U0.0"),)
    with pytest.raises(ProgramError, match="reduction or Update of that step comes before it"):
        lower_schedule(Schedule(2, 1, orders), clip=True)


def test_sums_that_wait_for_each_other_are_refused():
    orders = (_actions("F0.0 F2.0 B2.0 B0.0 U0.0 U2.0"), _actions("F1.0 F3.0 B3.0 B1.0 U3.0 U1.0"))
    with pytest.raises(ProgramError, match="rank 0 waits forever in a sum"):
        lower_schedule(
            Schedule(4, 1, orders), tied=[TiedGroup("w", (0, 1)), TiedGroup("v", (2, 3))]
        )


def test_replicas_below_one_are_refused():
    with pytest.raises(ProgramError, match="replicas is 0"):
        lower_schedule(one_f_one_b(2, 2), replicas=0)


def _actions(text):
    return tuple(Action.parse(word) for word in text.split())
