"""Dynamo: the second way to see a forward pass, for models that make_fx cannot run.

Dynamo reads the bytecode of the model instead of running it on fake tensors, so it drops what
only looks at values (a logged `.item()`).  What it gives is run by make_fx like any model.

It knows the values of whole numbers that the model holds, and goes on as those of the first
micro-batch say: `if int(self.calls) >= 48`.  A capture for which it did so is none.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.lasting import lasting_buffers

Forward = Callable[[Mapping[str, Tensor], Sequence[Any]], tuple[Tensor, Sequence[Tensor]]]


def forward_by_dynamo(
    loss: Callable[[], Any], model: nn.Module, leaves: Sequence[Any], *, num_figures: int = 0
) -> Forward:
    """Return the forward pass as a function of (parameters and buffers by name, batch leaves).

    `loss` computes the loss of the batch whose leaves are `leaves`; with so many figures, a pair of
    it and of a tensor that holds them.
    Raises:   GraphError: Dynamo would break the graph, or has gone on as a tensor's value says,
              or it reads a tensor from elsewhere, or may put a new one in a buffer's place.
    """
    module, inputs = _captured(loss)
    state = {**dict(model.named_parameters()), **lasting_buffers(model)}
    names = {id(value): name for name, value in state.items()}
    places = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    unknown = [i for i in inputs if id(i) not in names and id(i) not in places]
    if unknown:
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else value for value in unknown]
        raise GraphError(f"the model reads values from outside itself and the batch: {shapes}")
    _refuse_replaced_buffers(module, model)
    paths = {path for path, _ in _compat.named_modules(model)}

    def forward(
        given: Mapping[str, Tensor], batch: Sequence[Any]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        values = [given[names[id(i)]] if id(i) in names else batch[places[id(i)]] for i in inputs]
        (result, *others) = _Annotated(module, paths).run(*values)
        return result, others[0].unbind() if num_figures else ()

    return forward


class _CapturedError(Exception):
    """Carries the graph out of the compiled call before anything is computed."""

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[Any], assumed: Sequence[str]
    ) -> None:
        super().__init__("captured")
        self.module, self.inputs, self.assumed = module, list(inputs), assumed


def _captured(loss: Callable[[], Tensor]) -> tuple[fx.GraphModule, list[Any]]:
    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        assumed = _compat.dynamo_assumes()

        def run(*inputs: Any) -> Any:
            raise _CapturedError(module, inputs, assumed)

        return run

    torch.compiler.reset()
    try:
        with _compat.dynamo_scalars():
            compiled = torch.compile(  # pyright: ignore[reportUnknownMemberType]
                loss, backend=backend, fullgraph=True, dynamic=False
            )
            compiled()
    except _CapturedError as captured:
        if captured.assumed:
            message = f"the model asks for the values of tensors: {', '.join(captured.assumed)}"
            raise GraphError(message) from None
        return captured.module, captured.inputs
    except Exception as problem:  # whatever Dynamo or the model raises
        raise GraphError(f"Dynamo: {str(problem).splitlines()[0]}") from problem
    finally:
        torch.compiler.reset()
    raise GraphError("Dynamo found nothing to compute")


def _refuse_replaced_buffers(module: fx.GraphModule, model: nn.Module) -> None:
    """Raise if a result beside the loss may be meant to replace a buffer: it would be lost."""
    result: Any = module.graph.output_node().args[0]
    given = {_memory_of(node) for node in module.graph.find_nodes(op="placeholder")}
    kept = [node.meta["example_value"] for node in result[1:] if _memory_of(node) not in given]
    found = {(value.shape, value.dtype) for value in kept if isinstance(value, Tensor)}
    for name, buffer in model.named_buffers():
        if (buffer.shape, buffer.dtype) in found:
            raise GraphError(f"the model may replace buffer {name}: let it use copy_ instead")


def _memory_of(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return _compat.storage_key(value) if isinstance(value, Tensor) else None


class _Annotated(fx.Interpreter):
    """Runs a captured graph and notes for each op the module path that it comes from."""

    def __init__(self, module: fx.GraphModule, paths: Set[str]) -> None:
        super().__init__(module)
        self.paths = paths

    def run_node(self, n: fx.Node) -> Any:
        stack = list(n.meta.get("nn_module_stack", {}).values())
        path = _path(stack[-1][0], self.paths) if stack else ""
        n.meta["custom"] = {
            **n.meta.get("custom", {}),
            "module": path,
        }  # the interpreter's own note
        return super().run_node(n)


def _path(source: str, paths: Set[str]) -> str:
    """Return "blocks.0.ln" for Dynamo's "L['self'].model.blocks[0]._modules['ln']".

    That is the longest end of it that is the path of a module.
    """
    parts = re.findall(r"[A-Za-z_]\w*|\d+", source.replace("_modules", ""))
    ends = (".".join(parts[first:]) for first in range(len(parts)))
    return next((end for end in ends if end in paths), "")
