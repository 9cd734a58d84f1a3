"""Fuse: runs of ops of a segment, each compiled by Inductor as one; all else stays as it is.

A run holds ops that only compute: no random numbers, no write into a buffer, no size that depends
on data.  It ends at each op that is none of these, and where a block of the model ends: blocks
that are built alike give equal runs, and of those one is compiled.  The order of the segment, and
so of the Program, is never changed.

    segment    embed  norm mm gelu mm   dropout    norm mm gelu mm   loss
    becomes    embed  [run a]           dropout    [run a]           loss

A compiled run is kept for the process, and on disk; ranks that are forked later inherit it.
Equal to the ops one by one to rounding: fused sums are made in another order.

Source:  DeepCompile compiles what its passes have ordered; whole-graph Inductor would undo the
         order (research on torch 2.13), so only runs without communication are given to it.
"""

import fcntl
import itertools
import logging
import operator
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.graph.by_rows import LOSS_BACKWARD, taken_apart
from penstock.graph.code import IN_GRAD_MODE, Function, Fused, function_of, outputs_of
from penstock.graph.cut_points import block_of
from penstock.graph.functional import is_static
from penstock.graph.graph import Graph, Node
from penstock.graph.stages import Segment
from penstock.graph.trace import Capture

log = logging.getLogger(__name__)

_PRODUCTS = "mm", "convolution", "scaled_dot_product"  # in the name of an op
_ADD = "aten.add.Tensor"
_LEAST = 2  # ops of a run that are neither views nor products: fewer leave nothing to fuse

_made: dict[str, Callable[[list[Any]], Sequence[Any]]] = {}  # by structure, in this process
_making = threading.RLock()


class FusedRun(NamedTuple):
    """Consecutive ops of a segment that are compiled as one.

    text:  what they compute, without names: equal runs have the same.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    text: str


def runs_of(segment: Segment, capture: Capture) -> list[FusedRun]:
    """Return the runs of a segment that are worth compiling, in order."""
    if segment.times > 1:  # its tensors are larger than those that were traced
        return []
    outputs = outputs_of(segment, capture)
    plain = {op for op in segment.ops if not _is_fusible(op, capture)}
    while True:
        rows = _between(segment, capture.graph, plain)
        runs = [_run(ops, segment, capture.graph, outputs) for ops in rows]
        more = {op for run in runs for op in _astride(run, capture)}
        if not more:
            break
        plain |= more
    texts = ((*run, _text(capture, *run)) for run in runs if _is_worth_it(run[0], capture.graph))
    return [FusedRun(*each) for each in texts]


def is_light(node: Node) -> bool:
    """Return whether fusing a node may save time: it computes, and is no product."""
    is_product = any(word in node.target for word in _PRODUCTS)
    return node.kind == "op" and node.effect == "pure" and not is_product


def fused_function_of(
    segment: Segment, capture: Capture, *, asks: bool = False, folder: Path | None
) -> Function:
    """Return the function of one segment with its runs compiled; `asks`: as `function_of` does.

    One that asks for its parameters has each only while an op needs it: there nothing is fused.
    folder:   where compiled code is kept; None: where torch keeps it.
    """
    if asks:
        return function_of(segment, capture, asks=True)
    fused = [
        Fused(run.ops, run.inputs, run.outputs, call)
        for run in runs_of(segment, capture)
        if (call := _call_of(run, capture, folder)) is not None
    ]
    return function_of(segment, capture, fused=fused)


# -- which ops are fused --------------------------------------------------------------------------


def _is_fusible(op: int, capture: Capture) -> bool:
    """Return whether an op only computes, from and to tensors of known size."""
    graph, node = capture.graph, capture.fx_nodes[op]
    if graph.nodes[op].effect != "pure" or node.target in IN_GRAD_MODE:
        return False
    given = any(source.op != "call_function" for source in node.all_input_nodes)
    if node.target is torch.ops.aten.clone.default and given:
        return False  # a copy of what is written later: a compiler may hand on what it copies
    schema = _compat.schema_of(node.target)
    if node.target is not operator.getitem and (schema is None or schema.is_mutable):
        return False
    values = [node.meta["val"], *(source.meta["val"] for source in node.all_input_nodes)]
    return all(map(_is_known, values))


def _is_known(value: Any) -> bool:
    """Return whether a value consists of tensors of known size that a compiler can handle.

    Complex numbers it cannot.
    """
    rows: Any = value if isinstance(value, tuple | list) else (value,)  # pyright: ignore
    tensors = [each for each in rows if each is not None]
    return all(isinstance(t, Tensor) and is_static(t) and not t.is_complex() for t in tensors)


def _between(segment: Segment, graph: Graph, plain: set[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ops between those that are `plain`, block by block."""
    places: list[tuple[int, str]] = []
    row, block = 0, ""
    for op in segment.ops:
        row += op in plain
        block = _block(graph, op, block)
        places.append((row, block))
        row += op in plain
    both = zip(segment.ops, places, strict=True)
    for _, group in itertools.groupby(both, key=lambda each: each[1]):
        ops = tuple(op for op, _ in group)
        if plain.isdisjoint(ops):
            yield ops


def _block(graph: Graph, op: int, before: str) -> str:
    """Return the block of an op; of one that belongs to no forward op, that of the op before.

    Where gradients of a value meet, autograd adds them, and no forward op issued that.
    """
    node = graph.nodes[op]
    if node.phase == "F":
        return block_of(node.module)
    origin = graph.nodes[node.origin]
    if node.origin < 0 or (node.target == _ADD != origin.target):
        return before
    return block_of(origin.module)


def _run(
    ops: tuple[int, ...], segment: Segment, graph: Graph, outputs: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return ops, inputs in the order in which they are read, and outputs of a run."""
    own = set(ops)
    inputs = dict.fromkeys(k for op in ops for k in graph.nodes[op].inputs if k not in own)
    after = {k for op in segment.ops if op not in own for k in graph.nodes[op].inputs}
    after |= set(outputs)
    return ops, tuple(inputs), tuple(op for op in ops if op in after)


def _astride(
    run: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], capture: Capture
) -> Iterator[int]:
    """Yield the ops of a run with several results that are read beyond the run's end."""
    ops, inputs, outputs = run
    several = {k for k in (*inputs, *outputs) if not isinstance(_value(capture, k), Tensor)}
    for op in ops:
        if op in several or not several.isdisjoint(capture.graph.nodes[op].inputs):
            yield op


def _value(capture: Capture, node: int) -> Any:
    return capture.fx_nodes[node].meta["val"]


def _is_worth_it(ops: Sequence[int], graph: Graph) -> bool:
    own = (graph.nodes[op] for op in ops if graph.nodes[op].storage == op)
    return sum(node.target != "getitem" and is_light(node) for node in own) >= _LEAST


# -- compiling ------------------------------------------------------------------------------------


def _text(
    capture: Capture, ops: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]
) -> str:
    nodes = capture.fx_nodes
    names = {nodes[value]: f"%{k}" for k, value in enumerate((*inputs, *ops))}
    lines = [repr(_layout(capture, value)) for value in inputs]
    for op in ops:
        arguments = fx.map_arg((nodes[op].args, nodes[op].kwargs), lambda node: names[node])
        lines.append(f"{nodes[op].target} {arguments}")
    return "\n".join([*lines, " ".join(names[nodes[value]] for value in outputs)])


def _layout(capture: Capture, value: int) -> _compat.StridedForm:
    """Return the layout of a value in memory; the gradient's scale has the loss's dtype."""
    tensor, graph = _value(capture, value), capture.graph
    of = _value(capture, graph.loss) if graph.nodes[value].kind == "scale" else tensor
    return _compat.StridedForm(tuple(tensor.shape), tensor.stride(), of.dtype, tensor.device)


def _call_of(
    run: FusedRun, capture: Capture, folder: Path | None
) -> Callable[[list[Any]], Sequence[Any]] | None:
    """Return the compiled function of a run, made once; None, with a warning: it cannot be."""
    with _making:
        if run.text not in _made:
            module = _module(run, capture)
            layouts = [_layout(capture, value) for value in run.inputs]
            strides = [_value(capture, v).stride() for v in run.outputs]
            with _one_process(folder):
                made = _compat.compiled_by_inductor(module, layouts, strides)
            if isinstance(made, str):
                log.warning("%d ops are run one by one: %s", len(run.ops), made)
                _made[run.text] = _one_by_one(module)
            else:
                _made[run.text] = _guarded(made, module, layouts)
        return _made[run.text]


def _guarded(
    compiled: Callable[[list[Any]], Sequence[Any]],
    module: fx.GraphModule,
    layouts: Sequence[_compat.StridedForm],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Return `compiled`, and for tensors of another dtype or other strides the ops one by one."""
    plain, expected = _one_by_one(module), [(each.stride, each.dtype) for each in layouts]

    def call(arguments: list[Any]) -> Sequence[Any]:
        if [(each.stride(), each.dtype) for each in arguments] == expected:
            return compiled(arguments)
        return plain(arguments)

    return call


def _one_by_one(module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    def call(arguments: list[Any]) -> Sequence[Any]:
        given = arguments.copy()
        arguments.clear()
        return module(*given)

    return call


def _module(run: FusedRun, capture: Capture) -> fx.GraphModule:
    nodes, graph = capture.fx_nodes, fx.Graph()
    known = {nodes[value]: graph.placeholder(f"n{value}") for value in run.inputs}
    for op in run.ops:
        node = nodes[op]
        if node.target is LOSS_BACKWARD:
            arguments = fx.map_arg(node.args, known.__getitem__)
            known[node] = taken_apart(graph, arguments, _value(capture, op).dtype)
        else:
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[nodes[value]] for value in run.outputs))
    return fx.GraphModule({}, graph)


@contextmanager
def _one_process(folder: Path | None) -> Generator[None]:
    """Keep code in `folder`, unless the user's shell says where; one process at a time compiles.

    Others find there what the first one made.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    _compat.keep_compiled_code(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
