"""Rows: the nodes of a Graph, from the ops that torch recorded."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.flop import flop_of
from penstock.graph.functional import backward_ops, custom, is_static, mutates
from penstock.graph.graph import Effect, Node, NodeKind
from penstock.graph.reserved import reserved_bytes

aten = torch.ops.aten


class RedrawnError(GraphError):
    """A backward pass that draws random numbers: those of the forward, in a checkpointed block."""


class Placeholder(NamedTuple):
    """What an input of the recorded step stands for."""

    name: str
    kind: NodeKind


def rows_of(graph: fx.Graph, placeholders: Sequence[Placeholder]) -> tuple[Node, ...]:
    """Return one row for each node of `graph` but its output.

    Raises:   RedrawnError: the backward pass draws random numbers.
              GraphError: it changes a buffer, or a value is sparse.
    """
    rows = _Rows(graph, placeholders).rows()
    for node in rows:
        if node.phase == "B" and node.effect != "pure":
            is_drawn = node.effect == "random"
            does = "draws random numbers" if is_drawn else "changes a buffer"
            where = f"module {node.module}" if node.module else "the model"
            error = RedrawnError if is_drawn else GraphError
            raise error(
                f"the backward pass of {where} {does} ({node.target})",
                hint="remove torch.utils.checkpoint from the model: a plan can recompute stages",
            )
    return rows


def _held(node: fx.Node) -> object:
    """Return the value of a node; of a constant that no op has looked at, the constant itself."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target), None)
    return value


class _Rows:
    """Finds phase, origin, storage and effect of one node after the other."""

    def __init__(self, graph: fx.Graph, placeholders: Sequence[Placeholder]) -> None:
        self.fx_nodes = [node for node in graph.nodes if node.op != "output"]
        self.index = {node: i for i, node in enumerate(self.fx_nodes)}
        self.placeholders = placeholders
        self.backward = backward_ops(graph)
        self.reserved = reserved_bytes(graph)
        self.owners: dict[int, int] = {}
        self.first_of: dict[int, int] = {}  # sequence number -> first forward op with it

    def rows(self) -> tuple[Node, ...]:
        rows: list[Node] = []
        for i, node in enumerate(self.fx_nodes):
            sequence = custom(node).get("sequence")
            if node.op == "call_function" and node not in self.backward and sequence is not None:
                self.first_of.setdefault(sequence, i)
            rows.append(self._row(i, node))
        return tuple(rows)

    def _row(self, i: int, node: fx.Node) -> Node:
        value = _held(node)
        tensor = value if isinstance(value, Tensor) else None
        static = tensor is not None and is_static(tensor)
        name, kind = node.name, _kind(node)
        if node.op == "placeholder":
            name, kind = self.placeholders[i]
        backward = node in self.backward
        return Node(
            name=name,
            kind=kind,
            target=_target_name(node) if kind == "op" else "",
            inputs=tuple(self.index[source] for source in node.all_input_nodes),
            shape=tuple(tensor.shape) if tensor is not None and static else (),
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            size_bytes=self._size_bytes(node, tensor if static else None),
            storage=i if tensor is None else self._owner(i, tensor),
            phase="B" if backward else "F",
            origin=self._origin(node) if backward else -1,
            flop=flop_of(node) if kind == "op" else 0,
            module=str(custom(node).get("module", "")),
            effect=_effect(node),
        )

    def _size_bytes(self, node: fx.Node, tensor: Tensor | None) -> int:
        held = 0 if tensor is None else tensor.numel() * tensor.element_size()
        return held or self.reserved.get(node, 0)

    def _owner(self, i: int, tensor: Tensor) -> int:
        if tensor.layout != torch.strided:
            where = custom(self.fx_nodes[i]).get("module") or "the model"
            raise GraphError(
                f"a value of {where} is {tensor.layout} ({self.fx_nodes[i].target})",
                hint="a plan needs dense tensors, as of nn.Embedding(..., sparse=False)",
            )
        return self.owners.setdefault(_compat.storage_key(tensor), i)

    def _origin(self, node: fx.Node) -> int:
        """Return the first forward op with the node's sequence number, or the nearest before."""
        sequence = custom(node).get("sequence")
        if sequence is None:
            return -1
        if sequence in self.first_of:
            return self.first_of[sequence]
        before = [known for known in self.first_of if known < sequence]
        return self.first_of[max(before)] if before else -1


def _kind(node: fx.Node) -> NodeKind:
    return "constant" if node.op == "get_attr" else "op"


def _target_name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    scaled = node.target == aten.add.Tensor and node.kwargs.get("alpha", 1) != 1
    return f"{node.target} with alpha" if scaled else str(node.target)


def _effect(node: fx.Node) -> Effect:
    if node.op != "call_function":
        return "pure"
    if node.target == aten.copy_.default:
        return "writes"
    if mutates(node):
        return "mutates"
    target: Any = node.target
    return "random" if _compat.draws_random(target, node.args, node.kwargs) else "pure"
