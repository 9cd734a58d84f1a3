"""Trace: from an unmodified model to a Graph, by running one step on fake tensors.

make_fx records forward, loss and `autograd.grad` as one list of ATen ops.  A second pass
makes it functional: no op writes into its input, and updates of buffers stand at the end.
The first pass gives each autograd node a sequence number, which its backward ops repeat; it
is carried through the second pass and becomes `Node.origin`.

A model that needs more (a mixture of experts whose op refuses fake tensors, a logged
`.item()`) is captured by Dynamo first and traced from there.
"""

import linecache
import operator
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.cut_points import find_cut_points
from penstock.graph.dynamo import Forward, forward_by_dynamo
from penstock.graph.flop import flop_of
from penstock.graph.graph import Effect, Graph, Node, NodeKind, with_cut_points
from penstock.job import Job

aten = torch.ops.aten

# Ops that change an argument although their schema does not say so.
HIDDEN_MUTATIONS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


@dataclass(frozen=True, eq=False)
class Capture:
    """A Graph together with what torch needs to run it.

    fx_nodes:   the op behind each node of the graph, by index.
    inputs:     leaf of the flat batch that each input node stands for.
    constants:  tensors that the model holds outside its parameters and buffers.
    model:      the module, with its initial weights.
    """

    graph: Graph
    fx_nodes: tuple[fx.Node, ...]
    inputs: dict[int, int]
    constants: dict[int, Tensor]
    model: nn.Module
    batch_spec: Any
    leaf_shapes: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]

    def leaves(self, batch: Any) -> list[Any]:
        """Return the leaves of a batch that fits the graph.

        Raises:   GraphError: another structure, shape or dtype than the one traced.
        """
        leaves, spec = _compat.pytree.tree_flatten(batch)
        found = tuple(_shape_of(leaf) for leaf in leaves)
        if found == self.leaf_shapes and spec == self.batch_spec:
            return leaves
        raise GraphError(
            f"this batch holds {_describe(found)}; the step was traced for "
            f"{_describe(self.leaf_shapes)}",
            hint="let `data` yield micro-batches of one shape (drop or pad the last one)",
        )


def trace(job: Job) -> Graph:
    """Return the Graph of one training step of `job` on its first micro-batch.

    Raises:   GraphError: the model cannot be traced; the message names the line.
    """
    return capture(job).graph


def capture(job: Job) -> Capture:
    """Trace `job` by make_fx or, where that fails, by Dynamo and then make_fx.

    Raises:   GraphError: neither can; the message is that of the first way.
    """
    model, batch = build(job)
    _refuse_hooks(model)
    try:
        return _capture(job, model, batch, by_dynamo=False)
    except GraphError as first:
        try:
            return _capture(job, model, batch, by_dynamo=True)
        except GraphError:
            raise first from None


def build(job: Job) -> tuple[nn.Module, Any]:
    """Return the model with its initial weights (from the job's seed) and the first batch."""
    torch.manual_seed(job.seed)
    model = job.model().to(device_here())
    batch = next(iter(job.data(0)), None)
    if batch is None:
        raise GraphError("the job's data yields no micro-batch", hint="check `data(0)`")
    return model, on_device(batch)


def device_here() -> torch.device:
    """Return the device of this process: the accelerator of its local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def on_device(batch: Any) -> Any:
    """Return the batch with its tensors on the device of this process."""
    device = device_here()
    if device.type == "cpu":
        return batch

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return _compat.pytree.tree_map(move, batch)


def _capture(job: Job, model: nn.Module, batch: Any, *, by_dynamo: bool) -> Capture:
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    trainable = [name for name, value in parameters.items() if value.requires_grad]
    leaves, spec = _compat.pytree.tree_flatten(batch)
    at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [*parameters.values(), *buffers.values(), *(leaves[i] for i in at), torch.tensor(1.0, device=device_here())]
    names = [*parameters, *buffers]

    def as_written(_: Mapping[str, Tensor], values: Sequence[Any]) -> Tensor:
        return loss_of(job, model, _compat.pytree.tree_unflatten(list(values), spec))

    forward: Forward = as_written
    if by_dynamo:
        forward = forward_by_dynamo(lambda: as_written({}, leaves), model, leaves)

    def step(*flat: Tensor) -> list[Tensor | None]:
        state = dict(zip(names, flat, strict=False))
        filled = list(leaves)
        for index, leaf in zip(at, flat[len(names) : -1], strict=True):
            filled[index] = leaf
        with _compat.reparametrize(model, state), _compat.tracing_backward():
            loss = forward(state, filled)
            wanted = [state[name] for name in trainable]
            grads = torch.autograd.grad(loss, wanted, flat[-1].to(loss), allow_unused=True)
        return [loss.detach(), *grads]

    with _ModulePaths(model):
        traced = _functional_trace(step, tensors)
    kinds: list[NodeKind] = ["parameter"] * len(parameters) + ["buffer"] * len(buffers)
    kinds += ["input"] * len(at) + ["scale"]
    input_names = [*names, *(f"batch.{i}" for i in at), "scale"]
    return _as_capture(traced, kinds, input_names, trainable, model, leaves, spec, job)


def loss_of(job: Job, model: nn.Module, batch: Any) -> Tensor:
    """Return the job's loss under its autocast.

    Raises:   GraphError: it is no scalar tensor that depends on a trainable parameter.
    """
    with autocast(job, model):
        loss = job.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise GraphError(f"the job's loss is {found}, not one number", hint="return a mean")
    if not loss.requires_grad and torch.is_grad_enabled():
        hint = "is every parameter frozen, or the loss detached?"
        raise GraphError("the job's loss depends on no trainable parameter", hint=hint)
    return loss


def autocast(job: Job, model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context in which the job's loss is computed."""
    if job.autocast is None:
        return nullcontext()
    device = next((p.device.type for p in model.parameters()), "cpu")
    return torch.autocast(device, dtype=getattr(torch, job.autocast))


def _functional_trace(step: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.GraphModule:
    mode = _compat.fake_mode()
    fakes = [_compat.as_fake(mode, tensor) for tensor in tensors]
    try:
        with _compat.tracing_session(mode):
            first = _compat.make_fx(step, record_stack_traces=False)(*fakes)
            for node in first.graph.nodes:
                found = node.meta.get("custom", {})
                sequence, backward = node.meta.get("seq_nr"), node.meta.get("autograd_backward")
                node.meta["custom"] = {**found, "sequence": sequence, "backward": bool(backward)}
            run = torch.func.functionalize(
                lambda *inputs: fx.Interpreter(first).run(*inputs), remove="mutations"
            )
            traced = _compat.make_fx(run)(*fakes)
    except GraphError:
        raise
    except Exception as problem:  # whatever the user's model raises under tracing
        raise GraphError(*_where(problem)) from problem
    traced.graph.eliminate_dead_code()
    _drop_identities(traced.graph)
    return traced


def _where(problem: Exception) -> tuple[str]:
    """Return a message that names the line of the model at which tracing stopped."""
    torch_root = str(Path(torch.__file__).parent)
    own_root = str(Path(__file__).parent.parent)
    frames = traceback.extract_tb(problem.__traceback__)
    outside = [f for f in frames if not f.filename.startswith((torch_root, own_root, "<"))]
    reason = (str(problem).strip().splitlines() or [""])[0][:200]
    what = f"{type(problem).__name__}: {reason}"
    if not outside:
        return (f"the model cannot be traced: {what}",)
    place = outside[-1]
    code = linecache.getline(place.filename, place.lineno or 0).strip()
    return (f"the model cannot be traced at {place.filename}:{place.lineno}: {code}\n  {what}",)


def _drop_identities(graph: fx.Graph) -> None:
    """Remove what costs a call and computes nothing: detach, alias, and a transpose undone."""
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target == aten.t.default and isinstance(source, fx.Node):
            if source.target == aten.t.default:
                node.replace_all_uses_with(source.args[0])
                graph.erase_node(node)
    graph.eliminate_dead_code()


def _as_capture(
    traced: fx.GraphModule,
    kinds: list[NodeKind],
    names: list[str],
    trainable: list[str],
    model: nn.Module,
    leaves: list[Any],
    spec: Any,
    job: Job,
) -> Capture:
    fx_nodes = [node for node in traced.graph.nodes if node.op != "output"]
    index = {node: i for i, node in enumerate(fx_nodes)}
    nodes = _Rows(fx_nodes, kinds, names, index).rows()
    (output,) = next(node for node in traced.graph.nodes if node.op == "output").args
    loss, *grads = output
    gradients = {
        name: None if grad is None else index[grad]
        for name, grad in zip(trainable, grads, strict=True)
    }
    shapes = tuple(_shape_of(leaf) for leaf in leaves)
    samples, tokens = _count(leaves)
    graph = Graph(
        key=_key(shapes, spec, leaves, model, job),
        nodes=nodes,
        loss=index[loss],
        gradients=gradients,
        cut_points=(),
        samples=samples,
        tokens=tokens,
    )
    inputs = [i for i, node in enumerate(nodes) if node.kind == "input"]
    tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    constants = {
        i: getattr(traced, node.target) for node, i in index.items() if node.op == "get_attr"
    }
    return Capture(
        graph=with_cut_points(graph, find_cut_points(graph)),
        fx_nodes=tuple(fx_nodes),
        inputs=dict(zip(inputs, tensor_leaves, strict=True)),
        constants=constants,
        model=model,
        batch_spec=spec,
        leaf_shapes=shapes,
    )


class _Rows:
    """Turns fx nodes into rows of a Graph: phase, origin, storage, effect."""

    def __init__(
        self,
        fx_nodes: list[fx.Node],
        kinds: list[NodeKind],
        names: list[str],
        index: dict[fx.Node, int],
    ) -> None:
        self.fx_nodes, self.kinds, self.names, self.index = fx_nodes, kinds, names, index
        self.owners: dict[int, int] = {}
        self.backward: list[bool] = []
        self.first_of: dict[int, int] = {}

    def rows(self) -> tuple[Node, ...]:
        rows: list[Node] = []
        for i, node in enumerate(self.fx_nodes):
            self.backward.append(self._is_backward(node))
            sequence = node.meta.get("custom", {}).get("sequence")
            if node.op == "call_function" and not self.backward[i] and sequence is not None:
                self.first_of.setdefault(sequence, i)
            rows.append(self._row(i, node))
        return tuple(rows)

    def _is_backward(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target in (aten.copy_.default, operator.getitem):  # belongs to its source
            source = node.args[1 if node.target == aten.copy_.default else 0]
            return isinstance(source, fx.Node) and self.backward[self.index[source]]
        custom = node.meta.get("custom", {})
        inputs = (self.index[source] for source in node.all_input_nodes)
        return bool(custom.get("backward")) or any(
            self.backward[i] or self.fx_nodes[i].op == "placeholder" and self.kinds[i] == "scale"
            for i in inputs
        )

    def _row(self, i: int, node: fx.Node) -> Node:
        value = node.meta.get("val")
        tensor = value if isinstance(value, Tensor) else None
        kind: NodeKind = "op"
        if node.op == "placeholder":
            kind = self.kinds[i]
        elif node.op == "get_attr":
            kind = "constant"
        backward = self.backward[i]
        return Node(
            name=self.names[i] if node.op == "placeholder" else node.name,
            kind=kind,
            target="" if kind != "op" else _target_name(node.target),
            inputs=tuple(self.index[source] for source in node.all_input_nodes),
            shape=tuple(int(size) for size in tensor.shape) if _static(tensor) else (),
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            size_bytes=tensor.numel() * tensor.element_size() if _static(tensor) else 0,
            storage=i if tensor is None else self._owner(i, tensor),
            phase="B" if backward else "F",
            origin=self._origin(node) if backward else -1,
            flop=flop_of(node) if kind == "op" else 0,
            module=str(node.meta.get("custom", {}).get("module", "")),
            effect=_effect(node),
        )

    def _owner(self, i: int, tensor: Tensor) -> int:
        return self.owners.setdefault(tensor.untyped_storage()._cdata, i)

    def _origin(self, node: fx.Node) -> int:
        """Return the first forward op with the node's sequence number, or the nearest before."""
        sequence = node.meta.get("custom", {}).get("sequence")
        if sequence is None:
            return -1
        if sequence in self.first_of:
            return self.first_of[sequence]
        before = [known for known in self.first_of if known < sequence]
        return self.first_of[max(before)] if before else -1


def _static(tensor: Tensor | None) -> bool:
    return tensor is not None and all(isinstance(size, int) for size in tensor.shape)


def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    return str(target)


def _effect(node: fx.Node) -> Effect:
    if node.op != "call_function":
        return "pure"
    if node.target == aten.copy_.default:
        return "writes"
    if node.target in HIDDEN_MUTATIONS:
        return "mutates" if node.args[5] else "pure"  # args[5]: in training mode
    random = _compat.draws_random(node.target, node.args, node.kwargs)
    return "random" if random else "pure"


def _shape_of(leaf: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None


def _describe(shapes: Sequence[tuple[tuple[int, ...], torch.dtype] | None]) -> str:
    known = [shape for shape in shapes if shape is not None]
    return ", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for s, d in known) or "no tensors"


def _count(leaves: Sequence[Any]) -> tuple[int, int]:
    """Return samples (first dimension) and tokens (largest integer matrix) of a micro-batch."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    samples = tensors[0].shape[0] if tensors else 1
    whole = [t.numel() for t in tensors if not t.is_floating_point() and t.dim() == 2]
    return samples, max(whole, default=0)


def _key(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype] | None],
    spec: Any,
    leaves: Sequence[Any],
    model: nn.Module,
    job: Job,
) -> tuple[str, ...]:
    """Return all that the trace took for granted, as text."""
    others = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
    training = sum(module.training for module in model.modules())
    return (
        f"batch: {_describe(shapes)}",
        f"structure: {spec}",
        f"other leaves: {others}",
        f"modules in training mode: {training} of {sum(1 for _ in model.modules())}",
        f"autocast: {job.autocast}",
        f"torch: {torch.__version__}",
    )


def _refuse_hooks(model: nn.Module) -> None:
    """Raise for what a trace would silently lose."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise GraphError(
                f"parameter {name} has a gradient hook, which a traced step would not call",
                hint="move it into the optimizer, or train with plain data parallelism",
            )


class _ModulePaths:
    """While active, every traced op notes the module path that it comes from."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.handles: list[Any] = []
        self.open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        for path, module in self.model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._enter(path)))
            self.handles.append(
                module.register_forward_hook(self._leave, always_call=True)
            )

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            note = _compat.annotate({"module": path})
            note.__enter__()
            self.open.append(note)

        return enter

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.open.pop().__exit__(None, None, None)

    def __exit__(self, *problem: object) -> None:
        while self.open:
            self.open.pop().__exit__(None, None, None)
        for handle in self.handles:
            handle.remove()
