"""Runs of ops that are compiled as one: which they are, and that the step stays what it was."""

from functools import partial

import pytest
import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.graph import fuse
from penstock.graph.cut import cut
from penstock.graph.fuse import fused_function_of, runs_of
from tests.graph import executor
from tests.graph.test_cut import assert_equal, captured, eager, summed
from tests.graph.zoo import JOBS

UNLIKE = "attention_dropout", "batch_norm", "average", "layouts", "rotary"


class StandIn:
    """Takes the place of the compiler: runs the ops as they are, and watches what it is given."""

    def __init__(self) -> None:
        self.modules, self.refusal, self.calls = list[fx.GraphModule](), "", 0

    def __call__(self, module: fx.GraphModule, inputs, strides):
        self.modules.append(module)
        expected = [(each.shape, each.stride, each.dtype) for each in inputs]

        def call(arguments: list[Tensor]) -> tuple[Tensor, ...]:
            self.calls += 1
            assert [(tuple(t.shape), t.stride(), t.dtype) for t in arguments] == expected
            given = arguments.copy()
            arguments.clear()
            results = module(*given)
            assert [each.stride() for each in results] == list(strides)
            return results

        return self.refusal or call

    @property
    def targets(self) -> set[str]:
        return {str(node.target) for module in self.modules for node in module.graph.nodes}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(_compat, "compiled_by_inductor", made)
    monkeypatch.setattr(fuse, "_made", {})
    monkeypatch.setattr(executor, "function_of", partial(fused_function_of, folder=None))
    return made


@pytest.mark.parametrize("name", UNLIKE)
def test_a_step_in_runs_equals_eager_and_what_is_random_or_writes_is_in_none(
    name: str, compiler: StandIn
) -> None:
    graph = captured(name).graph
    stages = cut(graph, [len(graph.cut_points) // 2], [True, False])
    found = executor.run_cut(JOBS[name], captured(name), stages, split=True)
    assert_equal(found, eager(name), summed(graph, stages))
    assert compiler.calls
    outside = {node.target for node in graph.nodes if node.effect != "pure"}
    outside |= {"aten.view_as_complex.default"}  # Inductor makes nothing of complex numbers
    assert compiler.targets.isdisjoint(outside)
    assert len(outside) > 1 or name not in ("attention_dropout", "batch_norm", "average")


def test_of_equal_blocks_one_is_compiled(compiler: StandIn) -> None:
    """Four blocks of norm, linear, gelu, linear, sum; then the square and mean of the loss."""
    (stage,) = cut(captured("blocks").graph).stages
    for segment, unlike in ((stage.forward, 2), (stage.backward, 3)):  # backward, the first block
        runs = runs_of(segment, captured("blocks"))
        assert len(runs) == 5
        assert len({run.text for run in runs}) == unlike
        fused_function_of(segment, captured("blocks"), folder=None)
    assert len(compiler.modules) == 2 + 3


def test_other_strides_than_those_traced_are_computed_op_by_op(compiler: StandIn) -> None:
    made = captured("blocks")
    (stage,) = cut(made.graph).stages
    run = runs_of(stage.forward, made)[0]
    call = fuse._call_of(run, made, None)
    like = [made.fx_nodes[node].meta["val"] for node in run.inputs]
    plain = [torch.rand(each.shape) for each in like]
    turned = [t.mT.contiguous().mT if t.dim() == 2 else t for t in plain]
    assert any(a.stride() != b.stride() for a, b in zip(plain, turned, strict=True))
    expected = call(list(plain))
    found = call(turned)
    assert compiler.calls == 1
    assert turned == []
    torch.testing.assert_close(found, expected)


def test_what_the_compiler_refuses_is_run_op_by_op_and_said(compiler: StandIn, caplog) -> None:
    compiler.refusal = "no such instruction"
    name = "transformer"
    graph = captured(name).graph
    found = executor.run_cut(JOBS[name], captured(name), cut(graph), split=False)
    assert_equal(found, eager(name), set())
    assert compiler.modules
    assert "ops are run one by one: no such instruction" in caplog.text


def test_functions_that_ask_for_parameters_are_not_fused(compiler: StandIn) -> None:
    (stage,) = cut(captured("blocks").graph).stages
    fused_function_of(stage.forward, captured("blocks"), asks=True, folder=None)
    assert not compiler.modules
