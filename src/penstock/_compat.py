"""Every private name of torch, and of Python, that Penstock uses, in one file; each has a test.

Code runs on torch 2.11 and later.  A name that moves is fixed here and nowhere else.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false

import itertools
import multiprocessing.connection
import multiprocessing.process
import os
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.utils._foreach_utils
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from penstock.device import of

T = TypeVar("T")

__all__ = [
    "GENERATOR",
    "DispatchMode",
    "MemoryEvent",
    "add_in_place",
    "added_attributes",
    "annotate",
    "as_fake",
    "become",
    "below_autograd",
    "call_first",
    "causal_masks",
    "compiled_by_inductor",
    "draws_random",
    "dynamo_assumes",
    "dynamo_scalars",
    "fake_mode",
    "forget_parent_process",
    "gather_flat",
    "gloo_group",
    "gradient_norms",
    "groups_by_dtype",
    "has_forward_hooks",
    "has_gradient_hook",
    "has_step_hooks",
    "hooks_before",
    "hooks_behind",
    "hooks_called",
    "hooks_of",
    "in_backward",
    "is_fake",
    "is_norm",
    "keep_compiled_code",
    "make_fx",
    "memory_mark",
    "memory_profile",
    "name_by_ops",
    "named_modules",
    "nccl_group",
    "no_modes",
    "node_of",
    "num_gradient_hooks",
    "open_as",
    "opens",
    "packet_of",
    "pytree",
    "reparametrize",
    "scatter_flat",
    "schema_of",
    "scripts_as_written",
    "storage_key",
    "traced_constant",
    "tracing_backward",
    "tracing_session",
    "unrecorded",
    "unsaved_buffers",
    "unscale",
    "why_no_compiler",
    "without_order_warning",
    "without_scheduler",
]


GENERATOR = threading.RLock()  # torch's default generator is shared by ranks that are threads


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors have shapes but no data, and accepts real constants.

    A fake mode of a CUDA build registers a CUDA device where there is none; a first backward after
    that starts a thread for it, and then no forked process can compute a backward.
    So the first one is here: threads start once, for the devices that there are.
    """
    torch.ones((), requires_grad=True).backward()  # pyright: ignore[reportUnknownMemberType]
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """Return the mode of the first tensor without data among some values."""
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def as_fake(mode: FakeTensorMode, tensor: Tensor, place: torch.device | None = None) -> Tensor:
    """Return a fake tensor of the same shape, every size fixed.

    place:    the device on which it is to be; None: that of the tensor.
    """
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * tensor.dim())
    fake = mode.from_tensor(tensor, symbolic_context=context)
    if place is None or fake.device == place:
        return fake
    with mode:
        return fake.detach().to(place).requires_grad_(fake.requires_grad)


def run_backward(loss: Tensor) -> None:
    """Compute gradients as `loss.backward()` does, but with modes of torch's functions active.

    Those see a block that is computed again; inside of `backward` they would not.
    """
    torch.autograd.graph._engine_run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@contextmanager
def tracing_session(mode: FakeTensorMode) -> Generator[None]:
    """Enter all that make_fx needs to see forward and backward with their sequence numbers."""
    with ExitStack() as stack:
        stack.enter_context(shapes_in(mode))
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(preserve_node_meta())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.compiler._non_strict_tracing_context())
        stack.enter_context(scripts_as_written())
        yield


@contextmanager
def shapes_in(mode: FakeTensorMode) -> Generator[None]:
    """Enter a mode in which ops give tensors without data, those too that torch's rules refuse."""
    with _grouped_mm_of_any_dtype(), _shapes_of_ctc_losses(), mode:
        yield


@contextmanager
def scripts_as_written() -> Generator[None]:
    """Let torch.jit run what is scripted op by op: its second and third call are not fused.

    Only so do equal calls run equal ops, forward and backward.
    """
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)


@contextmanager
def _shapes_of_ctc_losses() -> Generator[None]:
    """Let a CTC loss be traced whose lengths are tensors: what it keeps is as wide as it may be."""
    op = torch.ops.aten._ctc_loss.Tensor

    def shapes_only(
        mode: FakeTensorMode, func: Any, log_probs: Tensor, targets: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        steps, samples = log_probs.shape[:2]
        with mode:
            kept = log_probs.new_empty(samples, steps, 2 * targets.shape[-1] + 1)
            return log_probs.new_empty(samples), kept

    op_implementations_dict[op] = shapes_only
    try:
        yield
    finally:
        del op_implementations_dict[op]


@contextmanager
def _grouped_mm_of_any_dtype() -> Generator[None]:
    """Let grouped_mm be traced in every dtype that it computes; its own rule insists on bf16."""
    op = getattr(torch.ops.aten, "_grouped_mm", None)
    if op is None or op.default in op_implementations_dict:
        yield
        return

    def shape_only(  # noqa: PLR0913 - torch calls it with these
        mode: FakeTensorMode,
        func: Any,
        a: Tensor,
        b: Tensor,
        offs: Any = None,
        bias: Any = None,
        out_dtype: Any = None,
    ) -> Tensor:
        with mode:
            return _create_grouped_mm_output_tensor(a, b, offs, out_dtype)

    op_implementations_dict[op.default] = shape_only
    try:
        yield
    finally:
        del op_implementations_dict[op.default]


def tracing_backward() -> AbstractContextManager[None]:
    """Mark the ops of the backward pass, with the sequence number of the op they belong to."""
    return torch.compiler._patch_engine_backward()


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, or in what one calls."""
    return torch._C._current_graph_task_id() != -1


def reparametrize(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Run `module` with other tensors; a tied parameter is given once.

    Put back in the opposite order: a module of several names has one slot, swapped several times.
    """
    return _reparametrize_module(module, tensors, tie_weights=True, stack_weights=True)


class StridedForm(NamedTuple):
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def compiled_by_inductor(
    module: fx.GraphModule, inputs: Sequence[StridedForm], strides: Sequence[tuple[int, ...]]
) -> Callable[[list[Tensor]], Sequence[Tensor]] | str:
    """Return Inductor's code for ops that write into none of their inputs, or why there is none.

    It takes one list, which it empties, runs on one thread, and draws no random numbers of its own;
    what it was given in other strides than `inputs` it computes wrongly.
    strides:  of the results.
    Ignores:  what torch warns of in its own code.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _compiled_by_inductor(module, inputs, strides)


def _compiled_by_inductor(
    module: fx.GraphModule, inputs: Sequence[StridedForm], strides: Sequence[tuple[int, ...]]
) -> Callable[[list[Tensor]], Sequence[Tensor]] | str:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
    from torch._inductor.virtualized import V

    mode = fake_mode()
    with mode:
        given = [
            torch.empty_strided(e.shape, e.stride, dtype=e.dtype, device=e.device) for e in inputs
        ]
        graph = make_fx(module, decomposition_table=select_decomp_table())(*given)
    results = graph.graph.output_node()
    results.meta["user_visible_output_idxs"] = list(range(len(strides)))
    results.meta["original_output_strides"] = list(strides)
    settings = {"compile_threads": 1, "cpp.threads": 1, "fallback_random": True}
    settings |= {"size_asserts": False, "fx_graph_cache": True}
    try:
        with config.patch(settings), V.set_fake_mode(mode), tracing(TracingContext(mode)):
            made: Any = compile_fx_inner(graph, given, is_inference=True)
    except (InductorError, CppCompileError, InvalidCxxCompiler) as problem:
        return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return made


def keep_compiled_code(folder: Path) -> None:
    """Let Inductor keep its code in `folder`, unless the user's shell says where.

    Torch writes the place that it takes by default into the environment, too.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name, default_cache_dir()) == default_cache_dir():
        os.environ[name] = str(folder)


def why_no_compiler(device: torch.device) -> str:
    """Return why Inductor cannot compile for a device; empty if it can."""
    if not of(device).is_cpu:
        return "" if find_spec("triton") else "no triton"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler"
    return ""


def can_become(one: Tensor, other: Tensor) -> bool:
    """Return whether `one.data = other` is allowed: not from the host to a kind of its own."""
    return torch._has_compatible_shallow_copy_type(one, other)  # pyright: ignore[reportPrivateImportUsage]


def draws_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call of an ATen op draws random numbers.

    Fused attention is tagged random even when it is called without dropout.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    if "scaled_dot_product" not in str(op):
        return True
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0) > 0


def dynamo_scalars() -> AbstractContextManager[Any]:
    """Let Dynamo keep `.item()` in its graph instead of giving up."""
    return torch._dynamo.config.patch(capture_scalar_outputs=True)


def dynamo_assumes() -> list[str]:
    """Return what Dynamo, calling a backend, has assumed of numbers: `s0 < 48`, s0 of a tensor.

    Sizes are constants where nothing is dynamic; whole numbers without dims have values for it.
    """
    mode: Any = TracingContext.get().fake_mode
    return [str(guard.expr) for guard in mode.shape_env.guards]


class MemoryEvent(NamedTuple):
    """An allocation (positive) or release of host memory, or a mark (no bytes)."""

    time_s: float
    size_bytes: int
    is_mark: bool


_MARK = "penstock mark"


def memory_mark(number: int) -> None:
    """Put a mark between the memory events of a `memory_profile`."""
    with torch.profiler.record_function(f"{_MARK} {number}"):
        pass


@contextmanager
def memory_profile() -> Generator[Callable[[], list[MemoryEvent]]]:
    """Note every allocation of host tensors; the result is there when the context is left.

    The profiler writes lines about itself to the process's stderr: they are discarded.
    Ignores:  releases of what was allocated before, and what other threads do.
    """
    events: list[MemoryEvent] = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        stderr_closed(),
        torch.profiler.profile(activities=activities, profile_memory=True) as profiler,
    ):
        yield lambda: events
    recorded: Any = profiler.profiler
    events += _noted(recorded.kineto_results.experimental_event_tree())


def _noted(tree: Iterable[Any]) -> Iterator[MemoryEvent]:
    """Yield the memory events and marks of a profile, by time.

    The profiler knows blocks by their addresses, and keeps those of earlier profiles: it tells the
    release of another block that came to lie there, with the size of the first.  So a release
    counts only where this profile has seen the allocation, with that one's size.
    """
    flat, stack = list[Any](), [*tree][::-1]
    while stack:
        event = stack.pop()
        flat.append(event)
        stack += reversed(event.children)
    held: dict[int, int] = {}
    for event in sorted(flat, key=lambda each: each.start_time_ns):
        time_s, fields = event.start_time_ns * 1e-9, event.extra_fields
        if event.name.startswith(_MARK):
            yield MemoryEvent(time_s, 0, is_mark=True)
        elif event.name == "[memory]" and fields.alloc_size > 0:
            held[fields.ptr] = fields.alloc_size
            yield MemoryEvent(time_s, fields.alloc_size, is_mark=False)
        elif event.name == "[memory]" and fields.ptr in held:
            yield MemoryEvent(time_s, -held.pop(fields.ptr), is_mark=False)


def unrecorded(call: Callable[..., T]) -> Callable[..., T]:
    """Return `call` so that a profiler notes only its memory.

    A message begun under a profiler reports its end to it, even after it is gone: a crash.
    """
    enable: Callable[[bool], None] = torch._C._autograd._enable_record_function  # pyright: ignore

    def quiet(*arguments: Any) -> T:
        enable(False)
        try:
            return call(*arguments)
        finally:
            enable(True)

    return quiet


@contextmanager
def stderr_closed() -> Generator[None]:
    """Discard what is written to the process's stderr, as the profiler does of itself."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def has_gradient_hook(parameter: Tensor) -> bool:
    """Return whether somebody asked to be called with this parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hooks_behind(parameter: Tensor) -> tuple[Any, ...]:
    """Return what is called once a gradient is added to this parameter's, in order."""
    return tuple((parameter._post_accumulate_grad_hooks or {}).values())


def hooks_before(parameter: Tensor) -> tuple[Any, ...]:
    """Return what is called with this parameter's gradient before it is added, in order."""
    return tuple((parameter._backward_hooks or {}).values())


def num_gradient_hooks(parameter: Tensor) -> int:
    """Return how many ask to be called with this parameter's gradient."""
    kept = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return sum(len(hooks) for hooks in kept if hooks)


@contextmanager
def without_new_gradient_hooks(model: torch.nn.Module) -> Generator[None]:
    """Take off the weights of a model the hooks that are put on their gradients meanwhile."""
    kinds = "_backward_hooks", "_post_accumulate_grad_hooks"
    places = [(p, kind) for p in model.parameters() for kind in kinds]
    before = [set(getattr(p, kind) or ()) for p, kind in places]
    try:
        yield
    finally:
        for (parameter, kind), old in zip(places, before, strict=True):
            for number in {*(getattr(parameter, kind) or ())} - old:
                del getattr(parameter, kind)[number]


def hooks_of(module: torch.nn.Module) -> tuple[int, ...]:
    """Return the ids of the hooks on a module, each used once in a process."""
    return tuple(number for hooks in _hooks(module) for number in hooks)


def hooks_called(module: torch.nn.Module) -> tuple[object, ...]:
    """Return the hooks on a module."""
    return tuple(hook for hooks in _hooks(module) for hook in hooks.values())


def _hooks(module: torch.nn.Module) -> tuple[Mapping[int, object], ...]:
    return (
        *(module._forward_pre_hooks, module._forward_hooks),
        *(module._backward_pre_hooks, module._backward_hooks),
    )


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape but no data."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def causal_masks(is_known: Callable[[Tensor], bool]) -> Generator[None]:
    """Let torch's encoders and decoders ask only a mask whose values are known if it is causal.

    Any other is taken as it is: they compute the same with it, without the word for a faster way.
    """
    module: Any = torch.nn.modules.transformer
    before = module._detect_is_causal_mask

    def detect(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and mask is not None and is_fake(mask) and not is_known(mask):
            return False
        return before(mask, is_causal, size)

    module._detect_is_causal_mask = detect
    try:
        yield
    finally:
        module._detect_is_causal_mask = before


def node_of(fake: Tensor) -> fx.Node | None:
    """Return the node of the graph that is being recorded that a tensor without data stands for."""
    mode = get_proxy_mode()
    slot: Any = None if mode is None else mode.tracer.tensor_tracker.get(fake)
    return None if slot is None else slot.proxy.node


def name_by_ops(graph: fx.Graph) -> None:
    """Name the ops of a recorded graph as a recording of them would."""
    graph._graph_namespace = type(graph._graph_namespace)()
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        called = node.op == "call_function"
        base = graph._target_to_str(node.target if packet is None else packet.__name__)
        node.name = graph._graph_namespace.create_name(base if called else node.name, node)


def traced_constant(node: fx.Node) -> Any:
    """Return the tensor that a node of the graph that is being recorded reads."""
    mode = get_proxy_mode()
    assert mode is not None, "only while recording"
    value: Any = mode.tracer.root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def become(tensor: Tensor, real: Tensor) -> None:
    """Make a tensor, wherever it is held, what another one is; the other one is nothing then."""
    tensor.__class__, real.__class__ = real.__class__, tensor.__class__
    attributes = dict(vars(real)), dict(vars(tensor))
    for one, own in zip((tensor, real), attributes, strict=True):
        vars(one).clear()
        vars(one).update(own)
    torch._C._swap_tensor_impl(tensor, real)


def no_modes() -> AbstractContextManager[Any]:
    """Return a context in which ops run as they are: on real tensors, unseen."""
    return _disable_current_modes()


def storage_key(tensor: Tensor) -> int:
    """Return a number common to all living tensors that share their memory."""
    return tensor.untyped_storage()._cdata


def opens(node: object) -> bool:
    """Return whether `pytree` knows the class of `node` as a container."""
    return not pytree.tree_is_leaf(node)


def open_as(
    kind: type,
    parts: Callable[[Any], tuple[list[Any], Any]],
    closed: Callable[[Iterable[Any], Any], Any],
) -> None:
    """Let `pytree` open objects of exactly this class: `parts(node)` is (children, rest)."""
    pytree.register_pytree_node(kind, parts, closed)


def schema_of(op: Any) -> Any:
    """Return what an ATen op declares of its arguments and results; None if it is not one."""
    return getattr(op, "_schema", None)


def packet_of(op: Any) -> Any:
    """Return the op of which `op` is one overload; None if it is no ATen op."""
    return getattr(op, "_overloadpacket", None)


def add_in_place(sums: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add each value to its sum, all in one call."""
    add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    add(list(sums), list(values))


def move_towards(averages: Sequence[Tensor], weights: Sequence[Tensor], share: float) -> None:
    """Move each average by so much of the way to its weights, all in one call; 1: all the way."""
    copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    lerp: Any = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
    if share == 1.0:
        copy(list(averages), list(weights))
    else:
        lerp(list(averages), list(weights), share)


def add_number(tensors: Sequence[Tensor], number: float) -> None:
    """Add a number to each tensor, all in one call."""
    add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    add(list(tensors), number)


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, by the call of torch.nn.utils.clip_grad_norm_."""
    norms: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
    return list(norms(list(gradients), 2.0)) if gradients else []


def unscale(gradients: Sequence[Tensor], scale: float) -> Tensor:
    """Divide gradients by `scale`, as torch.amp.GradScaler does; return whether all are finite.

    As a bool of their device, of which nobody has to wait for the number.
    """
    divide: Any = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore
    odd: list[Tensor] = []
    for gradient in gradients:
        odd.append(torch.zeros((), device=gradient.device))
        divide([gradient], odd[-1], torch.full((), 1.0 / scale, device=gradient.device))
    return torch.stack(odd).sum() == 0 if odd else torch.ones((), dtype=torch.bool)


def groups_by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the places of tensors of one device and dtype, grouped and ordered as torch does."""
    if not tensors:
        return []
    grouped: Any = torch.utils._foreach_utils._group_tensors_by_device_and_dtype(
        [list(tensors)], with_indices=True
    )
    return [list(indices) for _, indices in grouped.values()]


@contextmanager
def checkpoints_traced(*, as_calls: bool = False) -> Generator[None]:
    """Let `torch.utils.checkpoint` be what a trace can see.

    The old kind calls backward inside of backward, where gradients of weights come to nobody: it is
    the new kind, or where nothing that it is given learns, a call without gradients, as it is.
    as_calls:  the new kind, too, is a call of the function: nothing is computed again.
    """
    module: Any = torch.utils.checkpoint
    names = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
    before = {name: getattr(module, name) for name in names}
    module.CheckpointFunction = _Reentrant
    if as_calls:
        module._checkpoint_without_reentrant_generator = partial(_kept, before[names[1]])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def distributions_unchecked() -> Generator[None]:
    """Let objects of `torch.distributions` not look at the values that they are given.

    A trace has none; whose own argument is `validate_args=True` asks for it, and does look.
    """
    kind: Any = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


class _Reentrant:
    """Takes the place of the autograd function of the old kind of checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not (torch.is_grad_enabled() and any(_learns(arg) for arg in args)):
            with torch.no_grad():
                return function(*args)
        module: Any = torch.utils.checkpoint
        return module.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _learns(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _kept(
    again: Callable[..., Any], function: Any, preserve: bool, *args: Any, **options: Any
) -> Any:
    """Return what a checkpoint goes through around a call: nothing, if it would draw the same."""
    return iter((None,)) if preserve else again(function, preserve, *args, **options)


def give_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer have hooks that has not called `Optimizer.__init__`: one around another."""
    if "_optimizer_step_pre_hooks" in vars(optimizer):
        return
    if "defaults" not in vars(optimizer):
        optimizer.defaults = {}
    torch.optim.Optimizer.__setstate__(optimizer, {})


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether somebody asked to be called at the steps of this optimizer, or of all."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def call_first(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Callable[[], None]:
    """Call `hook` before every step, and before all hooks that there are; return what ends that."""
    handle = optimizer.register_step_pre_hook(hook)
    hooks: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict
    hooks.move_to_end(handle.id, last=False)
    return handle.remove


def pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what an optimizer calls before every step."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    return list(hooks.values())


def post_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what an optimizer calls after every step."""
    hooks: Any = optimizer._optimizer_step_post_hooks
    return list(hooks.values())


_TORCH_KEEPS = (
    *("defaults", "param_groups", "state", "_opt_called", "_zero_grad_profile_name"),
    *("_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"),
    *("_warned_capturable_if_run_uncaptured", "_fused_warning_suppressed"),
)


def added_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer holds as attributes beyond what torch gives every one."""
    return {
        name: value
        for name, value in without_scheduler(vars(optimizer)).items()
        if name not in _TORCH_KEEPS and not name.startswith("_optimizer_")
    }


def without_scheduler(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes of an optimizer without the `step` that a scheduler has put there."""
    patched = "_wrapped_by_lr_sched"
    return {name: value for name, value in attributes.items() if not hasattr(value, patched)}


def without_order_warning(optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler be stepped before the optimizer without a warning."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def is_norm(module: nn.Module) -> bool:
    """Return whether it is one of torch's norms with running statistics, and no class of one."""
    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether somebody asked to be called where a module is."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Return the path and module of every module, typed."""
    return model.named_modules()


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no state_dict of a model holds, by name."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            if (value := module._buffers.get(name)) is not None:
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def below_autograd() -> AbstractContextManager[None]:
    """Skip the autograd layer of the dispatcher: traced segments hold their own backward."""
    return torch._C._AutoDispatchBelowAutograd()


def gloo_group(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """Return ranks that have connected over gloo, listening at `address`, without a world.

    address:  "": the interface of GLOO_SOCKET_IFNAME, or what the host's name leads to.
    """
    gloo: Any = dist.ProcessGroupGloo
    if not address:
        return gloo(store, rank, size, timeout)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout, options._threads = timeout, 2
    return gloo(store, rank, size, options)


_LACKS = "No backend type associated"  # a group in Python whose class has no such call


def gather_flat(
    group: Any, whole: torch.Tensor, own: torch.Tensor, parts: Sequence[torch.Tensor]
) -> dist.Work:
    """Begin to fill in the parts of all ranks of a group, alike; `own` may lie in `whole`.

    parts:  those of `whole`, which are filled one by one where the group has no call for it.
    """
    try:
        return group._allgather_base(whole, own)
    except RuntimeError as error:
        if _LACKS not in str(error):
            raise
        return group.allgather([list(parts)], [own])


def scatter_flat(
    group: Any, own: torch.Tensor, whole: torch.Tensor, parts: Sequence[torch.Tensor]
) -> dist.Work:
    """Begin to sum `whole` over the ranks of a group into the part of each, likewise."""
    try:
        return group._reduce_scatter_base(own, whole)
    except RuntimeError as error:
        if _LACKS not in str(error):
            raise
        return group.reduce_scatter([own], [list(parts)])


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return ranks that connect over NCCL with the first that they do, without a world."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


# -- Python ---------------------------------------------------------------------------------------


def forget_parent_process() -> None:
    """Let this process be the main one to `multiprocessing.parent_process()` and to its children.

    Their names count from 1, as those of a process that nobody has forked.
    """
    module: Any = multiprocessing.process
    module._parent_process = None
    module._process_counter = itertools.count(1)
    module.current_process()._identity = ()


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread of this process; None: it has ended."""
    return sys._current_frames().get(thread)


LOADER_SIGNALS = "torch.utils.data._utils.signal_handling"  # where its handler of deaths is


def check_loader_workers() -> None:
    """Raise where a process of a DataLoader has died, as torch's handler of deaths does.

    Raises:   RuntimeError: "DataLoader worker (pid ...".
    """
    native: Any = torch._C
    native._error_if_any_worker_fails()


_place_of_socket: Any = multiprocessing.connection.arbitrary_address  # pyright: ignore


def let_sockets_have_no_files() -> None:
    """Let this process, and those that it forks, hand tensors over through sockets without files.

    Python makes a folder for them in that for temporary files, which stays when its process is
    killed; and where that folder's name is long none can be made, and who reads waits for ever.
    Only on Linux sockets need no files.
    """
    module: Any = multiprocessing.connection
    if sys.platform == "linux":
        module.arbitrary_address = _place_without_file


def _place_without_file(family: str) -> Any:
    if family != "AF_UNIX":
        return _place_of_socket(family)
    return f"\0penstock-{os.getpid()}-{secrets.token_hex(16)}"


@contextmanager
def after_worker_signals(call: Callable[[], None]) -> Generator[None]:
    """Call something in each process of a DataLoader, once torch has set its handlers there.

    No signal that ends a program comes in between.
    """
    from torch.utils.data._utils import signal_handling

    place: Any = signal_handling
    before: Callable[[], None] = place._set_worker_signal_handlers

    def handlers() -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        before()
        call()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    place._set_worker_signal_handlers = handlers
    try:
        yield
    finally:
        place._set_worker_signal_handlers = before
