"""In place: ops that write into a tensor of their own become ops that make a new one.

    gates = unsafe_split(x)[0]                gates = unsafe_split(x)[0]
    out   = sigmoid_(gates)         becomes   out   = sigmoid(gates)

Torch can do so for any step, by recording it again; here it is a change of names, for steps in
which nobody else looks at what is written: recurrent cells, `relu_`, `x += y`, dropout.

Keeps:    every bit; a second recording gives the same ops.
Gains:    about two fifths of the time of a trace.
Ignores:  writes into views, inputs and constants, and what is read after it was written under its
          old name: a step with one of these is left as it was.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from penstock import _compat

aten = torch.ops.aten

_NAMED_OTHERWISE = {aten.bernoulli_.float: aten.bernoulli.p}
_MOVES = ("copy_", "fill_", "zero_")  # torch makes something else of these


def made_anew(graph: fx.Graph) -> bool:
    """Make every op of a recorded graph one that writes into nothing; return whether it is so.

    The graph stays as it was where one op cannot be.
    """
    others: dict[fx.Node, Any] = {}
    at = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        written = _written(node)
        if not written:
            continue
        other = _making_anew(node)
        if other is None or written != [node.args[0]] or not _is_own(node, at, others):
            return False
        others[node] = other
    try:
        values = _values(graph, others)
    except RuntimeError:  # a view that only the old layout allows
        return False
    for node, value in values.items():
        node.meta["val"] = value
    for node, other in others.items():
        node.target = other
    if others:
        _compat.name_by_ops(graph)
    return True


def _making_anew(node: fx.Node) -> Any:
    """Return the op that makes a new tensor of the value that an op writes; None: there is none."""
    op: Any = node.target
    name = op.overloadpacket.__name__
    if not name.endswith("_") or name in _MOVES or op.namespace != "aten":
        return None
    packet = getattr(aten, name[:-1], None)
    other = _NAMED_OTHERWISE.get(op) or getattr(packet, op._overloadname, None)  # pyright: ignore
    if other is None or any(result.alias_info for result in _compat.schema_of(other).returns):
        return None
    return other


def _values(graph: fx.Graph, others: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Return the new value of each node whose value has changed.

    Raises:   RuntimeError: an op does not take another layout.
    """
    found: dict[fx.Node, Any] = {}
    moved = set[fx.Node]()  # whose layout is another one, or that look at such
    for node in graph.nodes:
        if node not in others and moved.isdisjoint(node.all_input_nodes):
            continue
        value: Any = _computed(node, others.get(node, node.target), found)
        if node.op == "output" or (value is None and node not in others):
            continue
        is_same = _layouts(value) == _layouts(node.meta["val"])
        if node in others and is_same:
            found[node.args[0]] = value  # what was there before has its own memory
            continue
        if node in others and getattr(value, "dtype", None) != node.meta["val"].dtype:
            raise RuntimeError("written as another dtype")
        if not is_same or _is_view(node) or node.target is operator.getitem:
            found[node] = value
            moved.add(node)
    return found


def _computed(node: fx.Node, target: Any, found: Mapping[fx.Node, Any]) -> Any:
    if node.op != "call_function":
        return None
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs), lambda one: found.get(one, one.meta.get("val"))
    )
    with _compat.mode_of(_compat.pytree.tree_leaves((args, kwargs))):
        return target(*args, **kwargs)


def _is_own(node: fx.Node, at: Mapping[fx.Node, int], found: Mapping[fx.Node, Any]) -> bool:
    """Return whether an op writes into the result of another op that nobody else looks at."""
    target = node.args[0]
    if not isinstance(target, fx.Node) or target.op != "call_function":
        return False
    source = target.args[0] if target.target is operator.getitem else target
    if not isinstance(source, fx.Node) or (source not in found and _is_view(source)):
        return False
    others = [user for user in target.users if user is not node]
    return all(at[user] < at[node] and not _is_view(user) for user in others)


def _written(node: fx.Node) -> list[Any]:
    schema = _compat.schema_of(node.target)
    if schema is None:
        return []
    named = [(one, node.kwargs[one.name]) for one in schema.arguments if one.name in node.kwargs]
    given = [*zip(schema.arguments, node.args, strict=False), *named]
    return [value for one, value in given if one.alias_info is not None and one.alias_info.is_write]


def _is_view(node: fx.Node) -> bool:
    schema = _compat.schema_of(node.target)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _layouts(value: Any) -> list[object]:
    tensors = [one for one in _compat.pytree.tree_leaves(value) if isinstance(one, Tensor)]
    return [(one.shape, one.stride(), one.dtype, one.device, one.layout) for one in tensors]
