"""Cut steps against eager autograd, for every model of the zoo."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import GraphError
from penstock.graph.code import function_of
from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.graph.stages import Recompute, Segment, Stages
from penstock.graph.trace import Capture, capture
from tests.draws import examples
from tests.graph.executor import Step, run_cut, run_eager
from tests.graph.zoo import JOBS

captured = functools.cache(lambda name: capture(JOBS[name]))
eager = functools.cache(lambda name: run_eager(JOBS[name]))
zoo = pytest.mark.parametrize("name", JOBS)


def assert_equal(found: Step, expected: Step, summed: set[str]) -> None:
    """Raise unless two steps agree bit for bit; gradients summed over stages to 1e-6."""
    assert [loss.item() for loss in found.losses] == [loss.item() for loss in expected.losses]
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        close = same if name not in summed else nearly
        assert close(found.gradients[name], gradient), name
    for name, buffer in expected.buffers.items():
        assert same(found.buffers[name], buffer), name


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)


def nearly(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-6 * b.abs().max())


def summed(graph: Graph, stages: Stages) -> set[str]:
    """Return the parameters whose gradient is made in several stages."""
    makers = [(p, stage.index) for stage in stages.stages for p, _ in stage.backward.gradients]
    several = [p for p in dict(makers) if len({s for q, s in makers if q == p}) > 1]
    return {graph.nodes[p].name for p in several}


def compare(name: str, cuts: list[int], recompute: Sequence[Recompute], *, split: bool) -> None:
    graph = captured(name).graph
    stages = cut(graph, cuts, recompute)
    found = run_cut(JOBS[name], captured(name), stages, split=split)
    assert_equal(found, eager(name), summed(graph, stages))


@pytest.mark.sampled(4)
@zoo
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_step_cut_everywhere_equals_eager(name: str, split: bool, recompute: bool) -> None:
    cuts = list(range(len(captured(name).graph.cut_points)))
    compare(name, cuts, [recompute] * (len(cuts) + 1), split=split)


@zoo
@examples(4)
@given(data=st.data())
def test_step_cut_anywhere_equals_eager(name: str, data: st.DataObject) -> None:
    points = range(len(captured(name).graph.cut_points))
    cuts = [k for k in points if data.draw(st.booleans())]
    recompute = [data.draw(st.booleans()) for _ in range(len(cuts) + 1)]
    compare(name, cuts, recompute, split=data.draw(st.booleans()))


@examples(8)
@given(st.sampled_from(sorted(JOBS)), st.booleans(), st.data())
def test_any_ops_may_be_repeated(name: str, split: bool, data: st.DataObject) -> None:
    graph = captured(name).graph
    points = range(len(graph.cut_points))
    cuts = [k for k in points if data.draw(st.booleans())]
    ops = [i for i, n in enumerate(graph.nodes) if (n.kind, n.phase) == ("op", "F")]
    share = data.draw(st.integers(1, 9))
    again = tuple(op for op in ops if data.draw(st.integers(0, 9)) < share)
    compare(name, cuts, [again or False] * (len(cuts) + 1), split=split)
    kept = {v for s in cut(graph, cuts, [again] * (len(cuts) + 1)).stages for v in s.forward.keeps}
    assert not any(graph.nodes[graph.nodes[v].storage].kind == "parameter" for v in kept)


def test_what_is_no_op_of_the_forward_pass_is_not_repeated() -> None:
    graph = captured("blocks").graph
    for node in (0, graph.loss + 1, len(graph.nodes)):
        with pytest.raises(GraphError, match=f"stage 0 is to repeat node {node}, which is no op"):
            cut(graph, (), [(node,)])


@zoo
def test_cut_point_bytes_are_those_of_the_edge(name: str) -> None:
    graph = captured(name).graph
    for k, point in enumerate(graph.cut_points):
        edges = [edge for edge in cut(graph, [k]).edges if edge.kind == "F"]
        assert sum(edge.size_bytes for edge in edges) == point.forward_bytes


def everything(stages: Stages) -> list[Segment]:
    kinds = ("F", "B", "I", "W")
    return [stage.segment(kind) for stage in stages.stages for kind in kinds]


def cuttings(name: str) -> list[Stages]:
    """Return some stages of a model: uncut, cut everywhere, every other cut with recompute."""
    graph = captured(name).graph
    every = range(len(graph.cut_points))
    other = [*every][::2]
    return [cut(graph), cut(graph, every), cut(graph, other, [True] * (len(other) + 1))]


@zoo
def test_forward_edges_go_up_and_backward_edges_go_down(name: str) -> None:
    for stages in cuttings(name):
        for edge in stages.edges:
            assert (edge.source < edge.target) == (edge.kind == "F")
            nodes = captured(name).graph.nodes
            assert edge.size_bytes == sum(nodes[v].size_bytes for v in edge.values)


@zoo
def test_segment_takes_arrives_and_inputs_agree(name: str) -> None:
    for stages in cuttings(name):
        for segment in everything(stages):
            assert set(segment.takes) <= set(segment.inputs)
            assert set(segment.arrives) <= set(segment.inputs)
            assert not set(segment.ops) & set(segment.inputs)
            passed = set(segment.keeps) - set(segment.ops)
            assert passed <= set(segment.inputs) - set(segment.takes)


@zoo
def test_b_is_i_and_w(name: str) -> None:
    """Together I and W make the same values; only free ops are repeated."""
    nodes = captured(name).graph.nodes
    for stages in cuttings(name):
        for stage in stages.stages:
            both = set(stage.input_gradient.ops) | set(stage.weight_gradient.ops)
            assert both == set(stage.backward.ops)
            twice = set(stage.input_gradient.ops) & set(stage.weight_gradient.ops)
            assert sum(nodes[op].flop for op in twice) <= 0.01 * stage.backward.flop
            assert stage.weight_gradient.gradients == stage.backward.gradients
            assert stage.input_gradient.sends == stage.backward.sends


@zoo
def test_every_parameter_and_buffer_lives_somewhere(name: str) -> None:
    graph = captured(name).graph
    state = {i for i, node in enumerate(graph.nodes) if node.kind in ("parameter", "buffer")}
    for stages in cuttings(name):
        held = [i for stage in stages.stages for i in (*stage.parameters, *stage.buffers)]
        assert set(held) == state
        several = {i for i in held if held.count(i) > 1 and graph.nodes[i].kind == "parameter"}
        assert {p for p, _ in stages.tied} == several


def test_flop_of_cut_stages_is_that_of_the_graph_but_for_repeated_ops() -> None:
    for name in ("blocks", "unet", "batch_norm"):
        graph = captured(name).graph
        stages = cut(graph, range(len(graph.cut_points)))
        total = sum(stage.forward.flop + stage.backward.flop for stage in stages.stages)
        assert graph.flop * 0.99 <= total <= graph.flop * 1.02


# -- one property of one model each -------------------------------------------------------------


def stage_of_gradient(stages: Stages, node: int) -> list[int]:
    return [s.index for s in stages.stages if node in {p for p, _ in s.backward.gradients}]


def node_of(graph: Graph, name: str) -> int:
    return next(i for i, node in enumerate(graph.nodes) if node.name == name)


def test_gradients_of_tied_weights_stay_as_parts_of_two_stages() -> None:
    graph = captured("tied").graph
    stages = cut(graph, [0, 2])
    embedding = node_of(graph, "embedding.weight")
    assert stages.tied == ((embedding, (0, 2)),)
    assert stage_of_gradient(stages, embedding) == [0, 2]
    assert all(embedding not in dict(s.backward.gradients) for s in stages.stages[1:2])


def test_skip_connection_has_an_edge_over_the_stages_between_and_its_gradient_one_back() -> None:
    graph = captured("unet").graph
    last = len(graph.cut_points)
    stages = cut(graph, range(1, last))
    pairs = {(e.kind, e.source, e.target) for e in stages.edges}
    assert ("F", 0, last - 1) in pairs  # `side` is read by the last op only
    assert ("B", last - 1, 0) in pairs
    assert stage_of_gradient(stages, node_of(graph, "side.weight")) == [0]


def test_gradient_of_a_value_read_by_several_stages_is_summed_on_its_way_back() -> None:
    graph = captured("encoder_decoder").graph
    names = [point.name for point in graph.cut_points]
    cuts = [k for k, name in enumerate(names) if name in ("after encoder", "after decoder.0")]
    pairs = {(e.kind, e.source, e.target) for e in cut(graph, cuts).edges}
    assert {("F", 0, 1), ("F", 0, 2), ("B", 2, 1), ("B", 1, 0)} <= pairs


def test_frozen_parameters_have_no_gradient_and_unused_ones_none() -> None:
    graph = captured("frozen_unused").graph
    assert not any(name.startswith("blocks.0") for name in graph.gradients)
    assert graph.gradients["unused.weight"] is None
    assert graph.gradients["seen.weight"] is None
    stages = cut(graph, range(len(graph.cut_points)))
    assert node_of(graph, "unused.weight") in stages.stages[0].parameters
    assert node_of(graph, "spare") in stages.stages[0].buffers


def test_stages_before_the_first_trained_weight_have_no_backward() -> None:
    graph = captured("frozen_unused").graph
    first, *_ = cut(graph, [0]).stages
    assert (first.backward.ops, first.forward.keeps, first.backward.sends) == ((), (), ())


def test_values_of_every_layout_and_dtype_cross() -> None:
    c = captured("crossing")
    stages = cut(c.graph, range(len(c.graph.cut_points)))
    sent = [c.fx_nodes[v].meta["val"] for edge in stages.edges for v in edge.values]
    assert {torch.float32, torch.int64, torch.bool} <= {value.dtype for value in sent}
    assert any(not value.is_contiguous() for value in sent)
    assert any(0 in value.stride() for value in sent)


def test_checkpointed_ops_are_repeated_in_the_backward_pass() -> None:
    with_checkpoint, plain = captured("checkpoint").graph, captured("blocks").graph
    again = sum(n.flop for n in with_checkpoint.nodes if n.phase == "B")
    once = sum(n.flop for n in plain.nodes if n.phase == "B")
    assert again > 1.2 * once


def test_recompute_keeps_only_what_was_received() -> None:
    graph = captured("blocks").graph
    keeping, again = (cut(graph, [1, 2], [flag] * 3).stages[1] for flag in (False, True))
    assert again.forward.keeps == again.forward.arrives
    assert len(keeping.forward.keeps) > len(again.forward.keeps)
    assert set(again.backward.ops) == set(keeping.backward.ops) | (
        set(again.backward.ops) & set(again.forward.ops)
    )
    assert again.backward.flop > keeping.backward.flop


def test_recompute_keeps_what_read_a_buffer_that_changes() -> None:
    graph = captured("average").graph
    mean = node_of(graph, "1.mean")
    stage = cut(graph, [], [True]).stages[0]
    (reader,) = (i for i in graph.users[mean] if graph.nodes[i].effect == "pure")
    assert reader not in stage.backward.ops
    assert not any(mean in graph.nodes[op].inputs for op in stage.backward.ops)


def test_no_cut_point_stands_between_two_uses_of_a_buffer_that_changes() -> None:
    for name in ("average", "batch_norm"):
        graph = captured(name).graph
        cut(graph, range(len(graph.cut_points)))  # would raise


def test_cut_between_two_uses_of_a_buffer_is_refused() -> None:
    graph = captured("average").graph
    mean = node_of(graph, "0.mean")
    first = min(i for i in graph.users[mean])
    point = replace(graph.cut_points[0], at=first + 1)
    with pytest.raises(GraphError, match=r"buffer 0\.mean is updated, and used by stages \[0, 1\]"):
        cut(replace(graph, cut_points=(point,)), [0])


def test_model_without_a_cut_point_is_one_stage() -> None:
    graph = captured("uncut").graph
    assert graph.cut_points == ()
    (stage,) = cut(graph).stages
    assert stage.forward.arrives == stage.backward.sends == ()


@pytest.mark.parametrize("cuts", [[99], [-1], [1, 0], [1, 1]])
def test_cuts_that_are_not_there_are_refused(cuts: list[int]) -> None:
    graph = captured("blocks").graph
    with pytest.raises(GraphError, match=f"the graph has {len(graph.cut_points)} cut points"):
        cut(graph, cuts)


def test_recompute_of_another_number_of_stages_is_refused() -> None:
    with pytest.raises(GraphError, match="recompute is given for 1 of 2 stages"):
        cut(captured("blocks").graph, [0], [True])


# -- random numbers -----------------------------------------------------------------------------


def test_micro_batches_draw_different_numbers_and_the_same_ones_again() -> None:
    name = "dropout"
    job = replace(JOBS[name], data=lambda start: itertools.repeat(torch.ones(6, 16)))
    stages = cut(captured(name).graph, [1])
    one, two = (run_cut(job, captured(name), stages, split=False) for _ in range(2))
    assert [loss.item() for loss in one.losses] == [loss.item() for loss in two.losses]
    assert one.losses[0] != one.losses[1]


def test_another_seed_draws_other_numbers() -> None:
    name = "noise"
    stages = cut(captured(name).graph, [0])
    losses = [
        run_cut(replace(JOBS[name], seed=seed), captured(name), stages, split=False).losses[0]
        for seed in (0, 1)
    ]
    assert losses[0] != losses[1]


# -- code ---------------------------------------------------------------------------------------


def test_function_frees_each_input_at_its_last_use() -> None:
    c: Capture = captured("blocks")
    (stage,) = cut(c.graph).stages
    function = function_of(stage.backward, c)
    arguments = [torch.zeros(c.graph.nodes[i].shape) for i in function.statics]
    arguments += [torch.zeros(c.graph.nodes[i].shape) for i in function.leaves]
    arguments += [torch.zeros(c.graph.nodes[i].shape) for i in function.values]
    with torch.no_grad():
        function.run(arguments, 0)
    assert arguments == []


def test_function_lists_values_that_die_first() -> None:
    c = captured("unet")
    for stages in cuttings("unet"):
        for segment in everything(stages):
            function = function_of(segment, c)
            assert function.values[: len(segment.takes)] == segment.takes
            assert set(function.values) == set(segment.inputs)
