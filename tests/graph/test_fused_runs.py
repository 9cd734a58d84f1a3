"""Runs of ops that are compiled as one: which they are, and that the step stays what it was."""

import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.graph import fused_runs
from penstock.graph.cut import cut
from penstock.graph.fused_runs import fused_function_of, runs_of
from tests.graph import executor
from tests.graph.test_cut import assert_equal, captured, eager, summed
from tests.graph.zoo import JOBS

UNLIKE = "attention_dropout", "batch_norm", "average", "layouts", "rotary"


class StandIn:
    """Takes the place of the compiler: runs the ops as they are, and watches what it is given."""

    def __init__(self) -> None:
        self.modules, self.refusal, self.calls = list[fx.GraphModule](), "", 0
        self.used = set[fx.GraphModule]()
        self.error, self.died = 0.0, 0  # of what it computes; arguments that nobody else held

    def __call__(self, module: fx.GraphModule, inputs, strides):
        self.modules.append(module)
        expected = [(each.shape, each.stride, each.dtype) for each in inputs]

        def call(arguments: list[Tensor]) -> tuple[Tensor, ...]:
            self.calls += 1
            self.used.add(module)
            assert [(tuple(t.shape), t.stride(), t.dtype) for t in arguments] == expected
            results = module(*arguments)
            assert [each.stride() for each in results] == list(strides)
            held = [weakref.ref(each) for each in arguments]
            arguments.clear()
            self.died += sum(each() is None for each in held)
            return [each * (1 + self.error) for each in results] if self.error else results

        return self.refusal or call

    @property
    def targets(self) -> set[str]:
        return {str(node.target) for module in self.modules for node in module.graph.nodes}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(_compat, "compiled_by_inductor", made)
    monkeypatch.setattr(fused_runs, "_made", {})
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


@pytest.mark.parametrize(("name", "blocks"), [("blocks", 4), ("transformer", 3)])
def test_of_equal_blocks_one_is_compiled(name: str, blocks: int, compiler: StandIn) -> None:
    """Before or behind the blocks is the loss; the first one gives no gradient to another."""
    (stage,) = cut(captured(name).graph).stages
    for segment, unlike in ((stage.forward, 2), (stage.backward, 3)):
        runs = runs_of(segment, captured(name))
        assert len(runs) == blocks + 1
        assert len({run.text for run in runs}) == unlike
        fused_function_of(segment, captured(name), folder=None)
    assert len(compiler.modules) == 2 + 3


def test_other_strides_than_those_traced_are_computed_op_by_op(compiler: StandIn) -> None:
    made = captured("blocks")
    (stage,) = cut(made.graph).stages
    run = runs_of(stage.forward, made)[0]
    call = fused_runs._call_of(run, made, None)
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


def test_what_dies_in_a_run_is_held_by_its_arguments_alone(compiler: StandIn) -> None:
    """In a backward pass that is all that the forward pass kept, and the gradient that came."""
    made = captured("blocks")
    stages = cut(made.graph)
    executor.run_cut(JOBS["blocks"], made, stages, split=False, micro_batches=1)
    (stage,) = stages.stages
    runs = runs_of(stage.backward, made)
    inside = {value for run in runs for value in run.inputs} - set(stage.backward.inputs)
    kept = set(stage.backward.takes) & {value for run in runs for value in run.inputs}
    assert compiler.died >= len(kept) > len(inside) > 0


def test_functions_that_ask_for_parameters_are_not_fused(compiler: StandIn) -> None:
    (stage,) = cut(captured("blocks").graph).stages
    fused_function_of(stage.forward, captured("blocks"), asks=True, folder=None)
    assert not compiler.modules
