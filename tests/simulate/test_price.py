"""Prices of the stages of a small plan, worked out by hand.

Two layers, cut between them.  w0 40 bytes, w1 10; y0 20 bytes, y1 30, the loss 4; the batch 8.
y0 takes 1 s, y1 2 s, and so does each of their two backward ops: d0; d1, g1.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

from penstock.cluster import Cluster, Host, Link
from penstock.errors import ProfileError
from penstock.graph.alike import AlikeStages
from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.graph.known_stages import KnownStages
from penstock.graph.segment_memory import moved
from penstock.graph.trace import trace
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.program.passes.receive_early import early_on
from penstock.schedule import KINDS
from penstock.simulate.price import ONE_BY_ONE, Ways, costs_of, held_of, memory_on
from penstock.simulate.simulate import simulate
from tests.graph.zoo import floats, job_of
from tests.search.chains import chain, profile_of, with_costs

GRAPH = chain([40, 10], [20, 30])
PROFILE = profile_of(
    GRAPH,
    [1, 2],
    call_s=0.5,
    accumulate_s_per_byte=0.01,
    update_s=0.25,
    update_s_per_byte=0.1,
    copy_s_per_byte=0.05,
    far_s_per_byte=0.25,
    state_bytes_per_byte=2.0,
    update_workspace_per_byte=0.5,
)


def plan_of(schedule: str = "one_f_one_b", *, recompute: bool = False, **more) -> Plan:
    flags = (recompute, recompute)
    return plan_by_hand(GRAPH, [0], schedule, num_micro_batches=2, recompute=flags, **more)


def costs(plan: Plan, versions: tuple[int, ...] = ()) -> dict[str, list[float]]:
    table = costs_of(GRAPH, stages_of(plan, GRAPH), PROFILE, versions).action_s[:, :, 0]
    return {kind: pytest.approx(row.tolist()) for kind, row in zip(KINDS, table, strict=True)}


def memory(plan: Plan, versions: tuple[int, ...] = (), *, workspace: int = 0):
    profile = replace(PROFILE, workspace_bytes=(workspace,) * len(GRAPH.nodes))
    held, program = (
        held_of(GRAPH, stages_of(plan, GRAPH), profile, versions),
        lower_plan(plan, GRAPH),
    )
    return memory_on([held], program, [0] * program.num_ranks)


def test_each_kind_of_device_has_its_own_seconds() -> None:
    stages = stages_of(plan_of(), GRAPH)
    fast = replace(PROFILE, kind="fast")
    slow = replace(PROFILE, kind="slow", op_s=tuple(3 * s for s in PROFILE.op_s))
    both = costs_of(GRAPH, stages, (slow, fast))
    assert both.devices == ("slow", "fast")
    for at, profile in enumerate((slow, fast)):
        alone = costs_of(GRAPH, stages, profile)
        assert alone.devices == ("",)
        assert both.action_s[:, :, at].tolist() == alone.action_s[:, :, 0].tolist()


def test_each_rank_holds_what_its_own_device_makes_it_hold() -> None:
    plan = plan_of(replicas=2)
    stages, program = stages_of(plan, GRAPH), lower_plan(plan, GRAPH)
    zeros = (0,) * len(GRAPH.nodes)
    lean = with_costs(PROFILE, kind="lean", state_bytes_per_byte=0.0, workspace_bytes=zeros)
    rich = replace(PROFILE, kind="rich", workspace_bytes=tuple(7 for _ in zeros))
    held = [held_of(GRAPH, stages, profile) for profile in (lean, rich)]
    found = memory_on(held, program, (1, 0, 0, 1))
    one, other = (memory_on([each], program, (0,) * 4) for each in held)
    places = zip((other, one, one, other), range(4), strict=True)
    assert found.start_bytes.tolist() == [memory.start_bytes[rank] for memory, rank in places]
    assert found.transient_bytes.tolist() == other.transient_bytes.tolist()
    assert (
        memory_on(held, program, (0,) * 4).transient_bytes.tolist() == one.transient_bytes.tolist()
    )


def test_action_takes_its_ops_its_call_and_the_sum_of_its_gradients() -> None:
    assert costs(plan_of()) == {
        "F": [1 + 0.5, 2 + 0.5],
        "B": [1 + 0.5 + 0.4, 4 + 0.5 + 0.1],
        "I": [0, 2 + 0.5],
        "W": [1 + 0.5 + 0.4, 2 + 0.5 + 0.1],
        "U": [0.25 + 4, 0.25 + 1],
    }


def test_recompute_adds_the_forward_ops_that_the_backward_pass_reads() -> None:
    keeping, again = costs(plan_of()), costs(plan_of(recompute=True))
    assert again["F"] == keeping["F"].expected
    assert again["B"] == [1 + 0.5 + 0.4, 2 + 4 + 0.5 + 0.1]  # stage 0 reads nothing of its own
    assert again["I"] == [0, 2 + 2 + 0.5]
    assert again["W"] == keeping["W"].expected


def test_an_update_holds_something_of_its_two_largest_parameters() -> None:
    graph = chain([40, 30, 20], [20, 30, 10])
    known = {"update_workspace_of_largest": 2.0, "update_workspace_of_second": 1.0}
    profile = profile_of(graph, [1, 2, 3], update_workspace_per_byte=0.5, **known)
    for cuts in ([], [0], [0, 1]):
        plan = plan_by_hand(graph, cuts, "gpipe", num_micro_batches=1)
        stages = stages_of(plan, graph)
        held = held_of(graph, stages, profile).transient[KINDS.index("U")]
        for stage, found in zip(stages.stages, held.tolist(), strict=True):
            first, *rest = sorted(map(graph.kept_bytes, stage.parameters), reverse=True)
            assert found == 0.5 * (first + sum(rest)) + 2 * first + sum(rest[:1])


def test_where_the_order_is_known_an_update_holds_something_of_the_one_before() -> None:
    """Of each two neighbours in a stage, whatever lies between them elsewhere."""
    graph = chain([40, 10, 30, 20], [20, 30, 10, 10])
    known = {"update_workspace_of_largest": 2.0, "update_workspace_of_second": 1.0}
    plain = profile_of(graph, [1, 2, 3, 4], **known)
    plan = plan_by_hand(graph, [2], "gpipe", num_micro_batches=1)
    stages = stages_of(plan, graph)
    for order, first in (("0123", 80), ("1032", 100), ("2013", 110), ("3210", 90)):
        profile = with_costs(plain, update_order=tuple(f"w{at}" for at in order))
        held = held_of(graph, stages, profile).transient[KINDS.index("U")]
        assert held.tolist() == [first, 40]
    assert held_of(graph, stages, plain).transient[KINDS.index("U")].tolist() == [110, 40]


def test_numbers_of_the_state_stay_while_the_rest_of_it_is_away() -> None:
    counted = with_costs(PROFILE, state_bytes_per_tensor=4.0)
    plan = plan_of()
    stages, program = (
        stages_of(plan, GRAPH),
        lower_plan(plan.changed(offload=("state",) * 2), GRAPH),
    )
    plain, more = (
        memory_on([held_of(GRAPH, stages, one, copies=True)], program, [0] * 2)
        for one in (PROFILE, counted)
    )
    tensors = [len(stage.parameters) for stage in stages.stages]
    assert (more.start_bytes - plain.start_bytes).tolist() == [4 * count for count in tensors]
    assert (more.net_bytes == plain.net_bytes).all()


def test_a_copy_costs_its_bytes_and_its_tensors() -> None:
    """Adam has two tensors of state for each weight; F of each stage keeps what it reads."""
    plan = plan_of()
    stages = stages_of(plan, GRAPH)
    plain, more = (
        costs_of(GRAPH, stages, with_costs(PROFILE, far_s=far_s), copies=True).action_s[
            len(KINDS) :
        ]
        for far_s in (0.0, 100.0)
    )
    tensors = np.round((more - plain)[:, :, 0] / 100).tolist()
    kept = [len(moved(GRAPH, stages, stage.index)) for stage in stages.stages]
    state = [2 * len(stage.parameters) for stage in stages.stages]
    assert tensors == [kept, state, [1, 1]] * 2
    assert max(kept) > 0


def test_update_that_keeps_an_older_version_copies_the_weights() -> None:
    assert costs(plan_of(), (2, 1))["U"] == [0.25 + 4 + 2, 0.25 + 1]


def test_rank_holds_weights_gradients_state_and_older_versions() -> None:
    assert memory(plan_of()).start_bytes.tolist() == [40 * (1 + 1 + 2), 10 * (1 + 1 + 2)]
    assert memory(plan_of(), (2, 2)).start_bytes.tolist() == [40 * (1 + 2 + 2), 10 * (1 + 2 + 2)]


def test_every_replica_and_a_rank_with_several_stages_hold_all_of_theirs() -> None:
    assert memory(plan_of(replicas=2)).start_bytes.tolist() == [160, 40, 160, 40]
    assert memory(plan_of("interleaved", num_ranks=1)).start_bytes.tolist() == [200]


def test_action_changes_what_is_held_by_its_values_and_the_batch() -> None:
    held = memory(plan_of())
    rows = dict(zip(KINDS, held.net_bytes.tolist(), strict=True))
    assert rows == {
        "F": [8, 20 + 4],  # the batch; y0, which arrived, and the loss
        "B": [-8, -24],
        "I": [20, -4 + 30],  # the message waits for W; gloss is handed on
        "W": [-20 - 8, -20 - 30],
        "U": [0, 0],
    }


def test_action_holds_its_peak_while_it_runs() -> None:
    rows = dict(zip(KINDS, memory(plan_of()).transient_bytes.tolist(), strict=True))
    assert rows == {
        "F": [20 + 8, 20 + 30 + 4],
        "B": [20 + 40, 30 - 4 + 10],
        "I": [20, 30 - 4 + 20],
        "W": [40, 10],
        "U": [20, 5],
    }


def test_workspace_adds_to_the_peak() -> None:
    rows = dict(zip(KINDS, memory(plan_of(), workspace=100).transient_bytes.tolist(), strict=True))
    assert rows["F"] == [128, 154]
    assert rows["U"] == [20, 5]


def test_on_several_hosts_a_message_is_held_from_its_posted_receive_on() -> None:
    hosts = Host("a", "cpu", 1), Host("b", "cpu", 1)
    apart = Cluster(Cluster.here(1).devices, hosts, between=Link(1e-3, 25e6))
    assert (early_on(Cluster.here(2), 2), early_on(apart, 1), early_on(apart, 2)) == (0, 0, 4)
    plan = plan_of("gpipe").changed(early=early_on(apart, 2))
    held, posted = [held_of(GRAPH, stages_of(plan, GRAPH), PROFILE)], lower_plan(plan, GRAPH)
    memory = memory_on(held, posted, (0, 0), posted=True)
    assert [str(one) for one in posted.code[1][:3]] == ["F0.0<r0e0s0", "F0.1<r0e0s1", "F1.0"]
    curve = simulate(posted, lambda action: 1.0, memory=memory).memory
    found = [curve.sizes_bytes[curve.ranks == rank].tolist() for rank in (0, 1)]
    first, second = 160, 40  # from the start
    assert found[1][:5] == [second, second + 20, second + 40, second + 20 + 54, second + 20 + 24]
    assert found[1][5:7] == [second + 24 + 54, second + 24 + 24], "both have been used"
    assert found[0][:3] == [first, first + 20, first + 40], "gradients, before the first forward"
    assert max(found[0]) == first + 40 + 2 * 8 - 20 + 60
    assert found[0][-1] == first


def test_recompute_keeps_what_arrived() -> None:
    held = memory(plan_of(recompute=True))
    rows = dict(zip(KINDS, held.net_bytes.tolist(), strict=True))
    assert rows["F"] == [8, 20]
    assert rows["B"] == [-8, -20]
    assert held.transient_bytes[KINDS.index("B"), 1] == 30 + 4 + 10  # gloss, loss, d1


def test_frozen_and_unreached_parameters_are_held_without_state() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.unused = nn.Linear(4, 4, bias=False)
            self.frozen.weight.requires_grad_(False)
            self.register_buffer("buffer", torch.zeros(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.used(x)) + self.buffer[:4]

    graph: Graph = trace(job_of(Model, floats(2, 4)))
    profile = with_costs(
        profile_of(graph, []), graph=graph.digest, state_bytes_per_byte=2.0, update_s_per_byte=1.0
    )
    stages = cut(graph)
    plan = plan_by_hand(graph, [], "one_f_one_b", num_micro_batches=1)
    held = memory_on([held_of(graph, stages, profile)], lower_plan(plan, graph), [0])
    used, unused, frozen, buffer = 64 * (1 + 1 + 2), 64 * (1 + 1), 64, 20
    assert held.start_bytes.tolist() == [used + unused + frozen + buffer]
    assert costs_of(graph, stages, profile).action_s[KINDS.index("U"), 0, 0] == 64


def test_profile_of_another_graph_is_refused() -> None:
    stages = cut(GRAPH)
    for stale in (
        replace(PROFILE, graph="0" * 16),
        replace(PROFILE, op_s=PROFILE.op_s[1:], workspace_bytes=PROFILE.workspace_bytes[1:]),
    ):
        with pytest.raises(ProfileError, match="the profile is of graph"):
            costs_of(GRAPH, stages, stale)


def test_stages_that_stand_in_several_plans_are_priced_as_by_themselves() -> None:
    graph = chain([40, 10, 40, 10], [20, 30, 20, 30])
    profile = profile_of(graph, [1, 2, 1, 2], state_bytes_per_byte=2.0)
    known = KnownStages(graph, AlikeStages(graph).segments)
    sharded = Ways(sharded=(2, 1), far=frozenset({1}))
    for cuts, ways in (((0,), ONE_BY_ONE), ((1,), sharded), ((0,), sharded), ((1,), ONE_BY_ONE)):
        for alive in ((), (2, 1)):
            plain, fast = cut(graph, cuts), cut(graph, cuts, known=known)
            for price in (costs_of, held_of):
                each = [price(graph, stages, profile, alive, ways=ways) for stages in (plain, fast)]
                assert_same(*each)


def assert_same(one: object, other: object) -> None:
    for field in fields(one):  # type: ignore[arg-type]
        both = getattr(one, field.name), getattr(other, field.name)
        assert np.array_equal(*map(np.asarray, both)) if field.name != "copied" else True
