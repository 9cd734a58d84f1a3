"""Dynamo: the second way to see a forward pass, for models that make_fx cannot run.

Dynamo reads the bytecode of the model instead of running it on fake tensors, so it drops what
only looks at values (a logged `.item()`).  What it gives is run by make_fx like any model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock import _compat
from penstock.errors import GraphError

Forward = Callable[[Mapping[str, Tensor], Sequence[Any]], Tensor]


def forward_by_dynamo(
    loss: Callable[[], Tensor], model: nn.Module, leaves: Sequence[Any]
) -> Forward:
    """Return the forward pass as a function of (parameters and buffers by name, batch leaves).

    `loss` computes the loss of the batch whose leaves are `leaves`.
    Raises:   GraphError: Dynamo would break the graph, or it reads a tensor from elsewhere.
    """
    module, inputs = _captured(loss)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(value): name for name, value in state.items()}
    places = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    unknown = [i for i in inputs if id(i) not in names and id(i) not in places]
    if unknown:
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else value for value in unknown]
        raise GraphError(f"the model reads values from outside itself and the batch: {shapes}")

    def forward(given: Mapping[str, Tensor], batch: Sequence[Any]) -> Tensor:
        values = [given[names[id(i)]] if id(i) in names else batch[places[id(i)]] for i in inputs]
        (result, *_) = _Annotated(module).run(*values)
        return result

    return forward


class _CapturedError(Exception):
    """Carries the graph out of the compiled call before anything is computed."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__("captured")
        self.module, self.inputs = module, list(inputs)


def _captured(loss: Callable[[], Tensor]) -> tuple[fx.GraphModule, list[Any]]:
    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            raise _CapturedError(module, inputs)

        return run

    torch.compiler.reset()
    try:
        with _compat.dynamo_scalars():
            compiled = torch.compile(  # pyright: ignore[reportUnknownMemberType]
                loss, backend=backend, fullgraph=True, dynamic=False
            )
            compiled()
    except _CapturedError as captured:
        return captured.module, captured.inputs
    except Exception as problem:  # whatever Dynamo or the model raises
        raise GraphError(f"Dynamo: {str(problem).splitlines()[0]}") from problem
    finally:
        torch.compiler.reset()
    raise GraphError("Dynamo found nothing to compute")


class _Annotated(fx.Interpreter):
    """Runs a captured graph and notes for each op the module path that it comes from."""

    def run_node(self, n: fx.Node) -> Any:
        stack = list(n.meta.get("nn_module_stack", {}).values())
        path = _path(stack[-1][0]) if stack else ""
        with _compat.annotate({"module": path}):
            return super().run_node(n)


def _path(source: str) -> str:
    """Return "blocks.0.ln" for Dynamo's "L['model'].blocks[0]._modules['ln']"."""
    inside = re.sub(r"^[A-Za-z_]+\[['\"][^'\"]*['\"]\]", "", source)
    parts = re.findall(r"[A-Za-z_]\w*|\d+", inside.replace("_modules", ""))
    return ".".join(parts)
