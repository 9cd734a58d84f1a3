"""Trace: from an unmodified model to a Graph, by running one step on fake tensors.

make_fx records forward, loss and `autograd.grad` as one list of ATen ops (`functional`).  What
an op is, where its backward ops come from and what it does besides is noted in `rows`.

A model that needs more (a mixture of experts whose op refuses fake tensors, a logged
`.item()`) is captured by Dynamo first and traced from there.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from penstock import _compat
from penstock.batches.reads import started
from penstock.device import here
from penstock.errors import GraphError, JobError, PenstockError
from penstock.graph.aliases import (
    PastModuleError,
    refuse_generators,
    refuse_read,
    refuse_shared,
    refuse_written,
)
from penstock.graph.answers import Answers, Questions
from penstock.graph.batch import (
    PLAIN,
    BatchKey,
    TensorKey,
    count,
    describe,
    key_of,
    keys_of,
    with_strides,
)
from penstock.graph.caches import RemadeError, fill_caches, remade
from penstock.graph.cast_once import cast_once
from penstock.graph.contents import own, rebuilt
from penstock.graph.cut_points import find_cut_points
from penstock.graph.dynamo import Forward, forward_by_dynamo
from penstock.graph.functional import (
    UntraceableError,
    functional_trace,
    results_of,
    where,
)
from penstock.graph.gradient_hooks import check_hooks, hooked
from penstock.graph.graph import Graph, Node, NodeKind, with_cut_points
from penstock.graph.held import StandIns
from penstock.graph.lasting import lasting_buffers, note_built
from penstock.graph.module_facts import Facts, changes, traced_facts, value_facts
from penstock.graph.parts import PartName, in_order, part_in
from penstock.graph.precision import computed_in, narrowed, traced_in
from penstock.graph.rows import Placeholder, RedrawnError, rows_of
from penstock.graph.shared_memory_views import laid_together, overlaps_with
from penstock.graph.traced_constants import KnownValues
from penstock.graph.unread import any_key, unread_of, without
from penstock.graph.waiting import is_hollow, placed
from penstock.graph.without_gradients import without_gradients
from penstock.job import ROW, SCALED, Job

_ASKED = 32  # micro-batches whose answers are compared before a plan


class LateLook(Protocol):
    """Looks at what the code of a job keeps in Python, and its loss reads."""

    def changes(self, model: nn.Module) -> list[str]:
        """Return in words what is another value than when the step was traced."""
        ...


@dataclass(frozen=True, eq=False)
class Capture:
    """A Graph together with all that torch needs to run it.

    fx_nodes:   the op behind each node of the graph, by index.
    inputs:     leaf of the flat batch that each input node stands for.
    constants:  tensors that the model holds outside its parameters and buffers.
    model:      the module, with its initial weights.
    batch:      what a batch must be to fit.
    rank:       of the ranks that divide its ops (tensor/divided.py), the one whose step it is.
    facts:      that the step takes for granted of the model's modules.
    values:     of modules that nobody changes while ranks train.
    late:       looks at what the job's code keeps besides; None: nobody does.
    """

    graph: Graph
    fx_nodes: tuple[fx.Node, ...]
    inputs: dict[int, int]
    constants: dict[int, Tensor]
    model: nn.Module
    batch: BatchKey
    rank: int = 0
    facts: Facts = field(default_factory=Facts)
    values: weakref.WeakKeyDictionary[nn.Module, Facts] = field(
        default_factory=weakref.WeakKeyDictionary[nn.Module, Facts]
    )
    late: LateLook | None = None

    @property
    def writes_batch(self) -> bool:
        """Return whether the loss writes into the batch; a run does it in a copy."""
        return bool(self.batch.written)

    @property
    def changes(self) -> list[str]:
        """What is another fact now of the model's modules than when they were traced.

        Those of the model that was built last count as well: the job's code may hold that one.
        """
        found = list[str]()
        for model in dict.fromkeys([self.model, newest_beside(self.model)]):
            found += changes(self.facts, traced_facts(model))
            found += self.late.changes(model) if self.late is not None else []
            if model in self.values:
                found += changes(self.values[model], value_facts(model))
        return found

    def note_values(self, others: Collection[nn.Module] = (), *, again: bool = False) -> None:
        """Note what the modules hold that have other tensors than the run.

        others:  have the run's own.
        again:   whether what was noted before does not count any more.
        """
        for model in {self.model, newest_beside(self.model)}:
            if model in others:
                self.values.pop(model, None)
            elif again or model not in self.values:
                self.values[model] = value_facts(model)

    def leaves(self, batch: object) -> list[Any]:
        """Return the leaves of a batch that fits the graph.

        Raises:   GraphError: another structure, shape, dtype or plain value than the one traced.
        """
        return self.batch.leaves_of(batch)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by the names that they have in the graph.

        Those that are cut into slices (split.py) are not there, but each slice, in their memory.
        """
        whole, found = dict(self.model.named_parameters()), dict[str, nn.Parameter]()
        for node in self.graph.nodes:
            if node.kind == "parameter":
                part = part_in(node.name)
                found[node.name] = (
                    whole[node.name] if part is None else _rows(whole[part.key], part, node)
                )
        return found


def _rows(whole: nn.Parameter, part: PartName, node: Node) -> nn.Parameter:
    """Return the part of a parameter that is the slice of a node."""
    if part.order is None:
        first = part.start // math.prod(part.shape[1:])
        rows = whole.detach()[first : first + node.shape[0]]
    else:
        numbers = in_order(whole.detach(), part.order)
        rows = numbers[part.start : part.start + math.prod(node.shape)].view(node.shape)
    return nn.Parameter(rows, requires_grad=whole.requires_grad)


def trace(job: Job) -> Graph:
    """Return the Graph of one training step of `job` on its first micro-batch.

    Raises:   GraphError: the model cannot be traced; the message names the line.
    """
    return capture(job).graph


def capture(job: Job) -> Capture:
    """Trace `job` by make_fx or, where the model cannot run so, by Dynamo and then make_fx.

    Raises:   GraphError: neither can, and the message is that of the first way; or the step does
              what a run would lose.
    """
    try:
        with _compat.checkpoints_traced(), _compat.distributions_unchecked():
            return _traced(job)
    except RedrawnError:  # a block that draws what it drew before: the same as one that is kept
        with _compat.checkpoints_traced(as_calls=True), _compat.distributions_unchecked():
            return _traced(job)


def _traced(job: Job) -> Capture:
    model, batch = build(job)
    check_hooks(model, job)
    refuse_shared(model)
    masters = {name: p.numel() * p.element_size() for name, p in narrowed(job, model).items()}
    with traced_in(job, model), torch.autograd.set_detect_anomaly(mode=False):  # looks at values
        try:
            return _captured(_TracedStep(job, model, batch, masters))  # 1 in docs/architecture.md
        except RemadeError:
            pass
        _fill_caches(job, model, batch)
        return _captured(_TracedStep(job, model, batch, masters, filled=True))


def _fill_caches(job: Job, model: nn.Module, batch: Any) -> None:
    """Let forward fill the caches of a model, which are state from then on, as other buffers.

    Without any, it is as it was.
    """
    before = _PlainTensors(model)
    with _compat.GENERATOR, torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        if fill_caches(model, lambda: _figures_of(job, model, on_device(batch))):
            note_built(model, again=True)
        else:
            before.put_back()


def _captured(step: "_TracedStep") -> Capture:
    """Trace a step, twice where it writes into leaves that overlap: then as views of one tensor.

    Raises:   RemadeError: forward makes caches, and may have filled none before.
    """
    found = _unread_if_so(step)
    if not found.batch.written:
        return found
    overlaps = overlaps_with(found.batch.written, step.leaves)
    step.key = replace(found.batch, overlaps=overlaps)
    return replace(_by_either_way(step) if overlaps else found, batch=step.key)


def _unread_if_so(step: "_TracedStep") -> Capture:
    """Trace a step without the values that its loss does not look at, if there are any."""
    places = [at for at, leaf in enumerate(step.leaves) if any_key(leaf) is not None]

    def attempt(left: Sequence[int]) -> Capture:
        step.leave_out(left)
        return _by_either_way(step)

    try:
        return unread_of(places, attempt)
    except GraphError:
        odd = [at for at in step.unread if not isinstance(step.leaves[at], PLAIN)]
        if len(odd) == len(step.unread):
            raise
    return unread_of(odd, attempt)  # code in C takes no stand-in for text, or for a number


def _by_either_way(step: "_TracedStep") -> Capture:
    try:
        return step.capture(step.forward)
    except UntraceableError:
        pass
    try:
        return _for_answers(step)
    except UntraceableError as first:
        if is_hollow(step.model):  # it computes nothing
            raise
        step.figures = _run_eagerly(step.job)
        try:
            return step.capture(step.by_dynamo(step.model))
        except GraphError:
            raise first from None


def _for_answers(step: "_TracedStep") -> Capture:
    """Return the trace for the answers of the first batch.

    Raises:   UntraceableError: there is none, or one of the first batches answers otherwise.
    """
    found = step.capture(step.forward, asks=True)
    try:
        for batch in itertools.islice(started(step.job.data, 0), _ASKED):
            found.leaves(batch)
    except GraphError as problem:
        raise UntraceableError(f"the model cannot be traced: {problem}") from None
    return found


def _run_eagerly(job: Job) -> tuple[str, ...]:
    """Compute the loss of the first batch without tracing: failures here are the job's own.

    Return the names of its figures.  The buffers of the model, which may be the one that is then
    trained, are as they were.

    Raises:   JobError: the model or the loss raises; the message names the line.
    """
    model, batch = build(job)
    rows = [(each, *row) for each in model.modules() for row in each.named_buffers(recurse=False)]
    before = [buffer.detach().clone() for _, _, buffer in rows]
    try:
        return _figures_of(job, model, batch)
    finally:
        with torch.no_grad():
            for (module, name, buffer), value in zip(rows, before, strict=True):
                setattr(module, name, buffer.copy_(value))


def _figures_of(job: Job, model: nn.Module, batch: Any) -> tuple[str, ...]:
    try:
        return tuple(without_gradients(lambda: loss_and_figures(job, model, batch))[1])
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, "the job's model or loss fails")
        raise JobError(message, hint="does it run without Penstock?") from problem


def build(job: Job) -> tuple[nn.Module, Any]:
    """Return the model with its initial weights (from the job's seed) and the first batch."""
    model = build_model(job)
    return model, first_batch(job)


def first_batch(job: Job) -> Any:
    """Return the first micro-batch as the loss sees it.

    Raises:   JobError: there is none.
    """
    batch = next(started(job.data, 0), None)
    if batch is None:
        raise JobError("the job's data yields no micro-batch", hint="check `data(0)`")
    return on_device(batch)


def build_model(job: Job) -> nn.Module:
    """Return the model with its initial weights (from the job's seed); no data is read.

    Raises:   JobError: a parameter has no shape before a batch has come.
    """
    with _compat.GENERATOR:
        torch.manual_seed(job.seed)  # pyright: ignore[reportUnknownMemberType]
        model = built_by(job)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            message = f"parameter {name} of the job's model has no shape yet: its layer is lazy"
            hint = "run one batch through the model in `model()`, or give the layer its sizes"
            raise JobError(message, hint=hint)
    return model


class _LastBuilt:
    """What a job's `model` has built last: hooks of its optimizer may look at that module."""

    def __init__(self) -> None:
        self.newest: Callable[[], nn.Module | None] = lambda: None


_built_of: "weakref.WeakKeyDictionary[object, _LastBuilt]" = weakref.WeakKeyDictionary()
_built_with: "weakref.WeakKeyDictionary[nn.Module, _LastBuilt]" = weakref.WeakKeyDictionary()


def built_by(job: Job) -> nn.Module:
    """Return a module that the job's `model` builds now, on the device of this process or waiting
    for it (waiting.py)."""
    model = placed(job.model())
    note_built(model)
    try:
        known = _built_of.setdefault(job.model, _LastBuilt())
    except TypeError:  # an object that has no hash
        return model
    known.newest = weakref.ref(model)
    _built_with[model] = known
    return model


def newest_beside(model: nn.Module) -> nn.Module:
    """Return the newest module of the function that built `model`; `model` if that one is gone."""
    known = _built_with.get(model)
    return (known.newest() if known is not None else None) or model


def on_device(batch: Any) -> Any:
    """Return the batch as the loss sees it: tensors of its own, on the device of this process."""
    return own(batch, here().place)


class _TracedStep:
    """One training step of one micro-batch as a function of flat tensors.

    These are parameters, buffers, the batch's tensors, and the factor of the gradients.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        batch: object,
        masters: Mapping[str, int],
        *,
        filled: bool = False,
    ) -> None:
        self.job, self.model, self.masters = job, model, masters
        self.key = key_of(batch, unread=True)
        self.filled = filled  # as far as it can be: forward may still put buffers in others' place
        self.leaves: list[Any] = self.key.leaves_of(batch)
        self.unread: Sequence[int] = ()  # places of what is left out
        parameters, buffers = dict(model.named_parameters()), lasting_buffers(model)
        self.figures: tuple[str, ...] = ()  # known once the loss has been computed
        self.trainable = [name for name, value in parameters.items() if value.requires_grad]
        self.state_names = [*parameters, *buffers]
        self.own, self._parameter_names = parameters, [*parameters]
        self.hooks = {name: _compat.hooks_before(p) for name, p in parameters.items()}
        self.kept: Mapping[str, Tensor] = {}  # what code has past the module: looked for if need be
        self.at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        weights = map(_contiguous, parameters.values())
        self.tensors = [*weights, *buffers.values(), *self._distinct_leaves()]
        self.tensors.append(torch.tensor(1.0, device=here().place))
        self.placeholders = [
            *(Placeholder(name, "parameter") for name in parameters),
            *(Placeholder(name, "buffer") for name in buffers),
            *(Placeholder(f"batch.{k}", "input") for k in range(len(self.at))),
            Placeholder("scale", "scale"),
        ]

    def leave_out(self, places: Sequence[int]) -> None:
        """Trace it without the leaves of these places, which then may have any value."""
        self.unread = places
        self.key = replace(self.key, leaves=keys_of(self.leaves, places))

    def _distinct_leaves(self) -> list[Tensor]:
        """Return the batch's tensors, one that it holds twice as two: later batches may differ."""
        found: dict[int, Tensor] = {}
        for i in self.at:
            leaf = self.leaves[i]
            again = id(leaf) in map(id, found.values())
            found[i] = with_strides(leaf, leaf.stride()) if again else leaf
        return list(found.values())

    def forward(
        self, _: Mapping[str, Tensor], leaves: Sequence[Any]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss as the job computes it, and the figures beside it."""
        batch = rebuilt(leaves, self.key.spec)
        loss, figures = loss_and_figures(self.job, self.model, batch)
        self.figures = tuple(figures)
        return loss, tuple(figures.values())

    def by_dynamo(self, model: nn.Module) -> Forward:
        """Return the forward pass as Dynamo captures it: loss, and figures in one tensor."""

        if any(map(is_output, self.figures)):
            raise GraphError("Dynamo does not keep what a model returns")

        def computed() -> Any:
            batch = rebuilt(without(self.leaves, self.unread), self.key.spec)
            loss, figures = loss_and_figures(self.job, self.model, batch)
            values = [value.detach().double() for value in figures.values()]
            return (loss, torch.stack(values)) if values else loss

        return forward_by_dynamo(computed, model, self.leaves, num_figures=len(self.figures))

    def capture(self, forward: Forward, *, asks: bool = False) -> Capture:
        """Return the trace of this step; `forward` computes the loss from weights and leaves.

        asks:  Python may be told what the values of the batch are; others have to be alike.
        """
        try:
            return self._captured(forward, asks=asks)
        except PastModuleError:
            if self.kept:
                raise
        self.kept = {**self.own, **lasting_buffers(self.model)}
        return self._captured(forward, asks=asks)

    def _captured(self, forward: Forward, *, asks: bool) -> Capture:

        def step(*flat: Tensor) -> list[Tensor | None]:
            state = dict(zip(self.state_names, flat, strict=False))
            leaves = without(self.leaves, self.unread)
            for i, leaf in zip(self.at, flat[len(self.state_names) : -1], strict=True):
                leaves[i] = leaf
            for overlap in self.key.overlaps:
                for i, view in laid_together(leaves, overlap):
                    leaves[i] = view
            module = _compat.reparametrize(self.model, state)
            with module, _compat.tracing_backward(), self._stand_ins(state):
                loss, found = forward(state, leaves)
                self._refuse_remade(state)
                with _compat.annotate({"figure": True}):
                    named = zip(self.figures, found, strict=True)
                    figures = [_as_figure(name, value) for name, value in named]
                grads = self._gradients(loss, state, flat[-1].to(loss))
                _write_replaced_buffers(self.model, state)  # autograd has read the old ones
            return [loss.detach(), *grads, *figures]

        kinds: list[NodeKind] = [placeholder.kind for placeholder in self.placeholders]
        asked = Questions(dict(enumerate(self.at, len(self.state_names)))) if asks else None
        constants = KnownValues(self.model, self.tensors, kinds, asked)
        try:
            with _ModulePaths(self.model), _PlainTensors(self.model) as plain:
                watched = constants.watching(step)
                traced = functional_trace(watched, self.tensors, kinds, constants.compute_kept)
        finally:
            constants.make_kept_real()
        capture = self._as_capture(traced, asked and asked.answers())
        refuse_generators(capture.constants.values())
        plain.refuse_replaced(capture.constants.values())
        written = {capture.graph.nodes[i].name for i in capture.graph.written}
        refuse_written(self.model, written)
        refuse_read(self.model, capture.constants.values(), written)
        return capture

    def _gradients(
        self, loss: Tensor, state: Mapping[str, Tensor], scale: Tensor
    ) -> list[Tensor | None]:
        wanted = [state[name] for name in self.trainable]
        found = torch.autograd.grad(loss, wanted, scale, allow_unused=True)
        return hooked(found, self.trainable, self.hooks)

    def _stand_ins(self, state: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        return StandIns(self.kept, state) if self.kept else nullcontext()

    def _refuse_remade(self, state: Mapping[str, Tensor]) -> None:
        if not self.filled and remade(self.model, state):
            raise RemadeError

    def _as_capture(self, traced: fx.GraphModule, answers: Answers | None) -> Capture:
        masters = {**self.masters}
        if self.job.autocast is not None:
            masters |= cast_once(traced.graph, self._parameter_names, self.trainable)
        fx_nodes = [node for node in traced.graph.nodes if node.op != "output"]
        index = {node: i for i, node in enumerate(fx_nodes)}
        nodes = rows_of(traced.graph, self.placeholders)
        loss, *others = results_of(traced.graph)
        gradients, figures = others[: len(self.trainable)], others[len(self.trainable) :]
        places = [None if gradient is None else index[gradient] for gradient in gradients]
        samples, tokens = count(self.leaves)
        graph = Graph(
            key=self._key(answers),
            nodes=nodes,
            loss=index[loss],
            gradients=dict(zip(self.trainable, places, strict=True)),
            cut_points=(),
            samples=samples,
            tokens=tokens,
            figures=tuple(zip(self.figures, map(index.__getitem__, figures), strict=True)),
            masters=masters,
        )
        inputs = [i for i, node in enumerate(nodes) if node.kind == "input"]
        held = {i: node.target for node, i in index.items() if node.op == "get_attr"}
        written: tuple[int, ...] = traced.meta["written"]
        return Capture(
            graph=with_cut_points(graph, find_cut_points(graph)),
            fx_nodes=tuple(fx_nodes),
            inputs=dict(zip(inputs, self.at, strict=True)),
            constants={i: getattr(traced, str(name)) for i, name in held.items()},
            model=self.model,
            batch=replace(
                self.key, written=tuple(map(self.at.__getitem__, written)), answers=answers
            ),
            facts=traced_facts(self.model),
        )

    def _key(self, answers: Answers | None) -> tuple[str, ...]:
        """Return all that the trace assumed, as text."""
        others = [str(key) for key in self.key.leaves if not isinstance(key, TensorKey)]
        modules = list(self.model.modules())
        training = sum(module.training for module in modules)
        return (
            f"batch: {describe(self.key.leaves)}",
            f"structure: {self.key.spec}",
            f"other leaves: {others}",
            *([f"asked of its values: {answers}"] if answers is not None else []),
            *(f"written, in one memory: {overlap}" for overlap in self.key.overlaps),
            f"modules in training mode: {training} of {len(modules)}",
            f"autocast: {self.job.autocast}",
            *([f"precision: {self.job.precision}"] if self.job.precision else []),
            f"torch: {torch.__version__}",
        )


def _contiguous(parameter: Tensor) -> Tensor:
    """Return a parameter as a run holds it: contiguous, whatever the model made it from."""
    if parameter.is_contiguous():
        return parameter
    return nn.Parameter(parameter.detach().contiguous(), requires_grad=parameter.requires_grad)


def _as_figure(name: str, value: Tensor) -> Tensor:
    """Return a figure as a step gives it: numbers in double precision, what a model says as is."""
    if is_output(name):
        return value.detach().clone()
    return value.detach().to(torch.float64, copy=True)


def _write_replaced_buffers(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the tensor that a model has put in a buffer's place into the buffer, in the trace."""
    for name, value in model.named_buffers():
        known = state.get(name)
        if known is None or value is known:
            continue
        if (value.shape, value.dtype) != (known.shape, known.dtype):
            raise GraphError(
                f"buffer {name} is {known.dtype}{list(known.shape)}; the model replaces it by "
                f"{value.dtype}{list(value.shape)}",
                hint="keep a buffer's shape and dtype",
            )
        with torch.no_grad():
            known.copy_(value)


def loss_of(job: Job, model: nn.Module, batch: Any) -> Tensor:
    """Return the job's loss under its autocast, without the figures beside it.

    Raises:   as `loss_and_figures`.
    """
    return loss_and_figures(job, model, batch)[0]


def loss_and_figures(job: Job, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the job's loss under its autocast, and the figures that it gives beside it, by name.

    Raises:   JobError: it is not a scalar tensor that depends on a trainable parameter; a figure is
              not a number, or has an invalid name.
    """
    with computed_in(job, model):
        told: Any = job.loss(model, batch)
    pair = cast("tuple[Any, ...]", told if isinstance(told, tuple) else ())
    if len(pair) == 2 and isinstance(pair[1], Mapping):
        given = cast("Mapping[Any, Any]", pair[1])
        return _loss(pair[0]), {name: _figure(name, value) for name, value in given.items()}
    return _loss(told), {}


class ModelOutput(NamedTuple):
    """A tensor that a loss of Penstock's own gives beside the loss, of any shape."""

    value: Tensor


OUTPUT = "\0"  # how the name of such a figure begins; no name that a person gives does


def is_output(name: str) -> bool:
    """Return whether the figure of this name is a `ModelOutput`."""
    return name.startswith(OUTPUT)


def _figure(name: object, value: Any) -> Tensor:
    if isinstance(value, ModelOutput):
        return value.value
    taken = (*ROW, *SCALED)
    if (
        not isinstance(name, str)
        or not name
        or name in taken
        or name.startswith(("val_", "train_"))
    ):
        known = f"not {', '.join(taken)}, nor what begins with val_ or train_"
        raise JobError(f"the loss gives a figure named {name!r}", hint=f"give it a name, {known}")
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.reshape(())
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return torch.tensor(value)
    found = f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise JobError(f"the figure {name} of the loss is {found}, not one number", hint="take a mean")


def _loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise JobError(f"the job's loss is {found}, not one number", hint="return a mean")
    if not loss.requires_grad and torch.is_grad_enabled():
        hint = "is every parameter frozen, or the loss detached?"
        raise JobError("the job's loss depends on no trainable parameter", hint=hint)
    return loss.reshape(()) if loss.dim() else loss


class _ModulePaths:
    """While active, every traced op notes the module path that it comes from."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.handles: list[Any] = []
        self.open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        for path, module in _compat.named_modules(self.model):
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            self.handles.append(module.register_forward_pre_hook(self._enter(path)))
            self.handles.append(module.register_forward_hook(self._leave(), always_call=True))

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            note = _compat.annotate({"module": path})
            note.__enter__()
            self.open.append(note)

        return enter

    def _leave(self) -> Callable[..., None]:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.open.pop().__exit__(None, None, None)

        return leave  # no method: a copy of a module, made in forward, would copy all this with it

    def __exit__(self, *problem: object) -> None:
        while self.open:
            self.open.pop().__exit__(None, None, None)
        for handle in self.handles:
            handle.remove()


_MEMBERS = {"_buffers", "_modules"}  # of a module; what a trace adds there is taken out again
_TORCHS = set(vars(nn.Module())) - _MEMBERS - {"training"}


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return each attribute by name: its value, and a copy of the items if it is a container."""
    own = ((name, value) for name, value in vars(module).items() if name not in _TORCHS)
    kinds = (dict, list, set)
    return {name: (v, v.copy() if type(v) in kinds else None) for name, v in own}


def _put_back(value: Any, inside: Any) -> None:
    """Give a container its items from before the trace; an item that is still there stays."""
    if isinstance(value, dict):
        held = cast("dict[Any, Any]", value)
        for key in held.keys() - inside.keys():
            del held[key]
        held.update(inside)
    elif type(value) is list:
        value[:] = inside
    else:
        value.intersection_update(inside)
        value.update(inside)


class _PlainTensors:
    """Notes the plain attributes of modules, and puts them back: a trace leaves fakes."""

    def __init__(self, model: nn.Module) -> None:
        self.before = [
            (path, module, _attributes(module)) for path, module in _compat.named_modules(model)
        ]
        self.replaced: list[tuple[str, Tensor]] = []

    def __enter__(self) -> "_PlainTensors":
        return self

    def __exit__(self, *problem: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        for path, module, before in self.before:
            now = vars(module)
            for name in now.keys() - before.keys() - _TORCHS:
                del now[name]
            for name, (value, inside) in before.items():
                if isinstance(value, Tensor) and now.get(name) is not value:
                    self.replaced.append((f"{path}.{name}".lstrip("."), value))
                if name not in _MEMBERS:
                    now[name] = value
                if inside is not None:
                    _put_back(value, inside)

    def refuse_replaced(self, constants: Iterable[Tensor]) -> None:
        """Raise if the step reads one of the `constants` and the model then replaced it."""
        read = {_compat.storage_key(constant) for constant in constants}
        for name, value in self.replaced:
            if _compat.storage_key(value) in read:
                raise GraphError(
                    f"the model reads and replaces {name}, which is neither a parameter nor a "
                    "buffer: its next value would be lost",
                    hint="register it as a buffer",
                )
