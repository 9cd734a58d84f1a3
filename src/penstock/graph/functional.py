"""Functional: a step recorded twice by make_fx, so that no op writes into its input.

The first pass sees autograd: each of its nodes has a sequence number, which its backward ops
repeat.  The second pass makes the ops functional; what they wrote into a buffer stands as a
copy at the end.  Numbers and module paths are carried through it in `meta["custom"]`.
"""

import linecache
import operator
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.device import here
from penstock.errors import GraphError, JobError
from penstock.garbage import collector_waits
from penstock.graph.aliases import PastModuleError
from penstock.graph.by_rows import join_losses
from penstock.graph.caches import RemadeError
from penstock.graph.ctc import widen_kept
from penstock.graph.graph import NodeKind
from penstock.graph.in_place import made_anew

aten = torch.ops.aten

# Ops that change an argument although their schema does not say so.
HIDDEN_MUTATIONS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)
# Their backward takes the running statistics, and reads them only outside training.
BACKWARD_OF_HIDDEN = (
    aten.native_batch_norm_backward.default,
    aten.cudnn_batch_norm_backward.default,
)


class UntraceableError(GraphError):
    """A model that cannot run on fake tensors, such as one whose control flow depends on data."""


def functional_trace(
    step: Callable[..., Any],
    tensors: Sequence[Tensor],
    kinds: Sequence[NodeKind],
    recorded: Callable[[], None] = lambda: None,
) -> fx.GraphModule:
    """Return the ops that `step` runs on `tensors`; its result is [loss, *gradients, *figures].

    kinds:    of each tensor.
    recorded: called when the ops are recorded, and what `step` gave is gone.
    Raises:   UntraceableError: the model cannot run on fake tensors.
              GraphError: it writes into a parameter.
              PastModuleError: it writes into a tensor that is neither a buffer nor its own.
              RemadeError: as `step` does.
    """
    mode = _compat.fake_mode()
    place = here().place  # a model that waits is traced as if it were there
    fakes = [_compat.as_fake(mode, tensor, place) for tensor in tensors]
    try:
        with _compat.tracing_session(mode), collector_waits():
            traced = _compat.make_fx(step, record_stack_traces=False)(*fakes)
            recorded()
            _refuse_writes(traced.graph, kinds)
            _note_sequences(traced.graph)
            if _writes_statistics(traced.graph) or not made_anew(traced.graph):
                traced = _without_writes(traced, fakes)
    except (GraphError, JobError, RemadeError):
        raise
    except Exception as problem:  # whatever the user's model raises under tracing
        raise UntraceableError(where(problem)) from problem
    traced.meta["written"] = _drop_writes_into_the_batch(traced.graph, kinds)
    traced.graph.eliminate_dead_code()
    _drop_identities(traced.graph)
    join_losses(traced.graph)
    widen_kept(traced.graph)
    _guard_buffers(traced.graph, mode)
    return traced


def _writes_statistics(graph: fx.Graph) -> bool:
    return any(map(mutates, graph.nodes))


def _without_writes(recorded: fx.GraphModule, fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Return a recorded step whose ops write into no tensor but buffers, at its end.

    It takes as long as the first recording, and gives the same again where no op writes.
    """
    run = torch.func.functionalize(
        lambda *inputs: fx.Interpreter(recorded).run(*inputs), remove="mutations"
    )
    with torch.no_grad():  # what it recorded has its backward pass in it
        return _compat.make_fx(run)(*fakes)


def backward_ops(graph: fx.Graph) -> set[fx.Node]:
    """Return the ops of the backward pass.

    They come after the loss; autograd's engine ran them, or they read what it made, or they
    lead to nothing but such (what a checkpointed block computes again).  What leads to a figure
    beside the loss does not.
    """
    loss = results_of(graph)[0]
    nodes: list[fx.Node] = list(graph.nodes)
    after_loss = nodes[nodes.index(loss) + 1 :] if loss.op == "call_function" else nodes
    found = {[node for node in nodes if node.op == "placeholder"][-1]}  # the gradients' scale
    to_buffers = _needed_beside(after_loss)
    for node in after_loss:
        if node.op == "call_function" and (_is_backward(node, found) or node not in to_buffers):
            found.add(node)
    return {node for node in found if node.op == "call_function"}


def _is_backward(node: fx.Node, known: set[fx.Node]) -> bool:
    if node.target in (aten.copy_.default, operator.getitem):  # belongs to its source
        return node.args[1 if node.target == aten.copy_.default else 0] in known
    return bool(custom(node).get("backward")) or not known.isdisjoint(node.all_input_nodes)


def _needed_beside(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that write into buffers or are figures, and those that they need."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.target == aten.copy_.default or custom(node).get("figure") or node in found:
            found |= {node, *node.all_input_nodes}
    return found


def results_of(graph: fx.Graph) -> list[Any]:
    """Return the results of the step: the loss, each parameter's gradient or None, the figures."""
    result: Any = graph.output_node().args[0]
    return list(result)


def custom(node: fx.Node) -> dict[str, Any]:
    """Return the notes that this file and the module hooks made about an op."""
    return node.meta.get("custom", {})


def mutates(node: fx.Node) -> bool:
    """Return whether an op changes its running statistics."""
    return node.target in HIDDEN_MUTATIONS and bool(node.args[5])  # args[5]: in training mode


# -- before the second pass ---------------------------------------------------------------------


def _note_sequences(graph: fx.Graph) -> None:
    for node in graph.nodes:
        sequence, backward = node.meta.get("seq_nr"), node.meta.get("autograd_backward")
        node.meta["custom"] = {**custom(node), "sequence": sequence, "backward": bool(backward)}


def _refuse_writes(graph: fx.Graph, kinds: Sequence[NodeKind]) -> None:
    """Raise where the model writes into a parameter or a tensor that nobody saves."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    kind_of = dict(zip(placeholders, kinds, strict=True))
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        root[node] = node
        for argument, value in arguments_of(node):
            if not isinstance(value, fx.Node) or argument.alias_info is None:
                continue
            root[node] = root[value]
            owner = root[value]
            if argument.alias_info.is_write and kind_of.get(owner) == "parameter":
                kind, what = GraphError, "a parameter, which only the optimizer may change"
            elif argument.alias_info.is_write and owner.op == "get_attr":
                kind = PastModuleError
                what = "a tensor that is neither a parameter nor a buffer: register it as a buffer"
            else:
                continue
            where = custom(node).get("module") or "the model"
            raise kind(f"{where} writes with {node.target} into {what}")


def arguments_of(node: fx.Node) -> list[tuple[Any, Any]]:
    """Return (schema, value) of the positional arguments and of `out` of an op."""
    schema = _compat.schema_of(node.target)
    if schema is None:
        return []
    named = [(one, node.kwargs[one.name]) for one in schema.arguments if one.name in node.kwargs]
    return [*zip(schema.arguments, node.args, strict=False), *named]


def where(problem: Exception, head: str = "the model cannot be traced") -> str:
    """Return a message that names the line of the user's code at which `problem` arose."""
    frames = traceback.extract_tb(problem.__traceback__)
    outside = [frame for frame in frames if _is_of_the_job(frame.filename)]
    reason = (str(problem).strip().splitlines() or [""])[0][:200]
    what = f"{type(problem).__name__}: {reason}"
    if not outside:
        return f"{head}: {what}"
    place = outside[-1]
    code = linecache.getline(place.filename, place.lineno or 0).strip()
    return f"{head} at {place.filename}:{place.lineno}: {code}\n  {what}"


def line_here() -> str:
    """Return the line of the user's code that runs now: "file.py:12: code"."""
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and not _is_of_the_job(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "the loss"
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


_NOT_OF_THE_JOB = str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<"


def _is_of_the_job(file: str) -> bool:
    return not file.startswith(_NOT_OF_THE_JOB)


# -- after the second pass ----------------------------------------------------------------------


def _drop_writes_into_the_batch(graph: fx.Graph, kinds: Sequence[NodeKind]) -> tuple[int, ...]:
    """Remove copies into leaves of the batch, which nobody reads after the step.

    Return which there were, as numbers among the inputs.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    batch = [n for n, kind in zip(placeholders, kinds, strict=True) if kind == "input"]
    nodes: list[fx.Node] = list(graph.nodes)
    copies = [n for n in nodes if n.target == aten.copy_.default and n.args[0] in batch]
    written = {batch.index(node.args[0]) for node in copies}  # pyright: ignore[reportArgumentType]
    for node in copies:
        graph.erase_node(node)
    return tuple(sorted(written))


def _drop_identities(graph: fx.Graph) -> None:
    """Remove calls that compute nothing: detach, alias, and a transpose undone."""
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if node.target in (aten.detach.default, aten.alias.default):
            if source.op != "call_function" and graph.output_node() in node.users:
                continue  # the loss is to be an op
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target == aten.t.default == source.target:
            node.replace_all_uses_with(source.args[0])  # pyright: ignore[reportArgumentType]
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _guard_buffers(graph: fx.Graph, mode: Any) -> None:
    """Let the backward pass, and views, read a copy of each buffer that the step changes.

    The next micro-batch's forward pass may change it before this one's backward pass runs.
    """
    backward = backward_ops(graph)
    for buffer in [node for node in graph.nodes if node.op == "placeholder"]:
        written = any(_writes(user, buffer) for user in buffer.users)
        readers = [user for user in buffer.users if not _writes(user, buffer)]
        readers = [user for user in readers if user.target not in BACKWARD_OF_HIDDEN]
        if not written or not any(user in backward or is_view(user) for user in readers):
            continue
        in_order = [node for node in graph.nodes if node in set(readers)]
        with graph.inserting_before(in_order[0]), mode:
            copy = graph.call_function(aten.clone.default, (buffer,))
            copy.meta["val"] = buffer.meta["val"].clone()
            module = custom(in_order[0]).get("module", "")
            copy.meta["custom"] = {"module": module, "sequence": None, "backward": False}
        for reader in readers:
            reader.replace_input_with(buffer, copy)


def _writes(user: fx.Node, buffer: fx.Node) -> bool:
    if user.target == aten.copy_.default:
        return user.args[0] is buffer
    return mutates(user) and buffer in user.args[3:5]


def is_view(node: fx.Node) -> bool:
    """Return whether an op's result shares the memory of an argument.

    That of `_unsafe_view` does, though its schema does not say so.
    """
    if node.target == aten._unsafe_view.default:
        return True
    schema = _compat.schema_of(node.target)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def is_static(tensor: Tensor) -> bool:
    """Return whether every size is a number; those that depend on data are symbols."""
    return all(type(size) is int for size in tensor.shape)
