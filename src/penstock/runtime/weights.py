"""Weights: what one stage holds on one rank: parameters, gradients, versions, optimizer.

Trainable parameters of one dtype are views into one flat tensor, and so are their gradients
and every older version, so that a sum over replicas or a copy of a version is one call.
Version 0 and those after it are the live tensors, which the optimizer changes in place; an
older version that is still read is a copy in a numbered stash.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import CheckpointError, JobError
from penstock.graph.stages import Stage
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.runtime.staleness import Staleness
from penstock.schedule.weight_rule import WeightRule

_ALIGN_BYTES = 64  # a cache line; every parameter starts on one
_norm: Callable[..., Tensor] = torch.linalg.vector_norm  # pyright: ignore


@dataclass(frozen=True, slots=True)
class Flat:
    """One tensor that holds many: where each starts, and how many elements there are in all."""

    nodes: tuple[int, ...]
    starts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    size: int

    def new(self) -> Tensor:
        """Return a flat tensor of zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> dict[int, Tensor]:
        """Return for each node its part of `flat`."""
        rows = zip(self.nodes, self.starts, self.shapes, strict=True)
        return {
            node: flat[start : start + _count(shape)].view(shape) for node, start, shape in rows
        }


class StageWeights:
    """The state of one stage on one rank; without gradients where no stage makes any."""

    def __init__(
        self, stage: Stage, capture: Capture, job: Job, *, has_gradients: bool = True
    ) -> None:
        names = {node: capture.graph.nodes[node].name for node in stage.parameters}
        parameters = dict(capture.model.named_parameters())
        buffers = dict(capture.model.named_buffers())
        self.names = names
        self.buffer_names = {node: capture.graph.nodes[node].name for node in stage.buffers}
        self.buffers = {n: buffers[name].detach().clone() for n, name in self.buffer_names.items()}
        trainable = {
            n: parameters[name] for n, name in names.items() if parameters[name].requires_grad
        }
        self.layouts = _layouts(trainable)
        self.flats = [layout.new() for layout in self.layouts]
        summed = self.layouts if has_gradients else []
        self.flat_gradients = [layout.new() for layout in summed]
        self.gradients = _all_views(summed, self.flat_gradients)
        live = _all_views(self.layouts, self.flats)
        for node, value in live.items():
            value.copy_(trainable[node].detach())
        self.live = {node: nn.Parameter(value) for node, value in live.items()}
        self.frozen = {n: parameters[m].detach().clone() for n, m in names.items() if n not in live}
        self.stash: list[tuple[list[Tensor], dict[int, Tensor]]] = []
        self.predicted: list[tuple[list[Tensor], dict[int, Tensor]]] = []
        self.staleness: Staleness | None = None
        self.undo: _Undo | None = None
        self.with_gradient = {node for node, _ in stage.backward.gradients}
        self.optimizer = optimizer_of(job, list(self.live.values())) if self.live else None
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        self.base_rates = [group["lr"] for group in groups]

    def tensors(self, slot: int) -> Mapping[int, Tensor]:
        """Return node -> tensor of all parameters: slot 0 is live, slot k the k-th stash."""
        values: Mapping[int, Tensor] = self.live if slot == 0 else self.stash[slot - 1][1]
        detached = {node: value.detach() for node, value in values.items()}
        return {**detached, **self.frozen}

    def reserve(self, num_slots: int, num_predictions: int = 0) -> None:
        """Make stashes up to slot `num_slots` and places for predictions, each as live now."""
        for room, count in ((self.stash, num_slots), (self.predicted, num_predictions)):
            while len(room) < count:
                flats = [flat.clone() for flat in self.flats]
                room.append((flats, _all_views(self.layouts, flats)))

    def attend(self, rule: WeightRule, delay: float) -> None:
        """Do from now on what `rule` says about staleness; `delay` is that of this stage."""
        minds = rule.predictor is not None or rule.compensate or rule.rescale_steps > 0
        if minds and (self.staleness is None or self.staleness.rule != rule):
            self.staleness = Staleness(rule, delay, self.flats, self.optimizer)

    def prediction(self, slot: int) -> Mapping[int, Tensor]:
        """Return node -> tensor of all parameters, as predicted in `slot`."""
        return {**self.predicted[slot][1], **self.frozen}

    def predict(self, slot: int, ahead: int) -> None:
        """Predict the weights of `ahead` updates later into `slot`."""
        assert self.staleness is not None, "binding has made it"
        flats, views = self.predicted[slot]
        self.staleness.predict(ahead, flats, self.live, views)

    def keep(self, slot: int) -> None:
        """Copy the live weights into stash `slot`."""
        for kept, flat in zip(self.stash[slot - 1][0], self.flats, strict=True):
            kept.copy_(flat)

    def move(self, moved: Mapping[int, int]) -> None:
        """Give each stash the contents of another one: {to: of}."""
        taken = {of: [flat.clone() for flat in self.stash[of - 1][0]] for of in moved.values()}
        for to, of in moved.items():
            for kept, flat in zip(self.stash[to - 1][0], taken[of], strict=True):
                kept.copy_(flat)

    def use_gradients(self, tied: Iterable[int]) -> None:
        """Point each parameter at its gradient; None where the loss does not reach it."""
        reached = (self.with_gradient | set(tied)) & self.gradients.keys()
        for node, parameter in self.live.items():
            parameter.grad = self.gradients[node] if node in reached else None

    def squares(self, nodes: Iterable[int]) -> float:
        """Return the sum of the squares of the gradients of `nodes`, added in float64."""
        total = 0.0
        for gradient in map(self.gradients.__getitem__, nodes):
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            total += float(_norm(gradient, dtype=dtype)) ** 2
        return total

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        for flat in self.flat_gradients:
            flat.mul_(factor)

    def step(self, rate: float) -> None:
        """Let the optimizer make the next version in place, its own rates times `rate`."""
        if self.optimizer is None:
            return
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base * rate
        if self.undo is not None:
            self.undo.remember(rate)
        if self.staleness is None:
            self.optimizer.step()
            return
        self.staleness.before_update()
        self.optimizer.step()
        self.staleness.after_update(self.live)

    def remember_updates(self) -> None:
        """From now on keep what is needed to take the last update back."""
        if self.undo is None and self.optimizer is not None:
            self.undo = _Undo(self.flats, self.optimizer)

    def update_again(self) -> None:
        """Take the last update back, and update with the gradients as they are now."""
        if self.undo is not None:
            self.step(self.undo.take_back())

    def forget_update(self) -> None:
        """Let go of what is needed to take the last update back."""
        if self.undo is not None:
            self.undo.forget()

    def size_bytes(self) -> int:
        """Return the bytes of all that is held: weights, gradients, versions, state, buffers."""
        held: list[Tensor] = [*self.flats, *self.flat_gradients, *self.frozen.values()]
        held += [*self.buffers.values(), *(flat for flats, _ in self.stash for flat in flats)]
        held += [flat for flats, _ in self.predicted for flat in flats]
        if self.staleness is not None:
            held += [*self.staleness.previous, *self.staleness.average]
        if self.undo is not None:
            held += self.undo.held()
        if self.optimizer is not None:
            states = self.optimizer.state.values()
            held += [v for state in states for v in state.values() if isinstance(v, Tensor)]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    # -- by parameter name, independent of the plan ---------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return tensors and plain values by key: "weights/NAME", "optimizer/NAME/KEY", ..."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        for node, value in self.tensors(0).items():
            tensors[f"weights/{self.names[node]}"] = value
        for node, value in self.buffers.items():
            tensors[f"buffers/{self.buffer_names[node]}"] = value
        for slot, (_, views) in enumerate(self.stash, 1):
            for node, value in views.items():
                tensors[f"version-{slot}/{self.names[node]}"] = value
        for key, views in self._kept():
            tensors |= {f"{key}/{self.names[node]}": value for node, value in views.items()}
        if self.optimizer is not None:
            for node, parameter in self.live.items():
                optimizer_state(self.optimizer, self.names[node], parameter, tensors, plain)
        return tensors, plain

    def load(self, tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> None:
        """Take over what `state` returned, for the parameters of this stage.

        Raises:   CheckpointError: a parameter is missing or has another shape.
        """
        for node, value in self.tensors(0).items():
            value.copy_(fitting(tensors, f"weights/{self.names[node]}", value))
        for node, value in self.buffers.items():
            value.copy_(fitting(tensors, f"buffers/{self.buffer_names[node]}", value))
        for slot, (_, views) in enumerate(self.stash, 1):
            for node, value in views.items():
                older = f"version-{slot}/{self.names[node]}"
                name = older if older in tensors else f"weights/{self.names[node]}"
                value.copy_(fitting(tensors, name, value))
        for key, views in self._kept():
            for node, value in views.items():
                name = f"{key}/{self.names[node]}"
                if name in tensors:
                    value.copy_(fitting(tensors, name, value))
                elif key == "previous":  # a run by another rule wrote the checkpoint
                    value.copy_(self.live[node])
        if self.optimizer is not None:
            for node, parameter in self.live.items():
                load_optimizer_state(self.optimizer, self.names[node], parameter, tensors, plain)

    def _kept(self) -> list[tuple[str, dict[int, Tensor]]]:
        """Return what the remedies against staleness remember, by name and node."""
        if self.staleness is None:
            return []
        kept = (("previous", self.staleness.previous), ("average", self.staleness.average))
        return [(name, _all_views(self.layouts, flats)) for name, flats in kept if flats]


class _Undo:
    """Weights and optimizer state as they were before the last update, and its rate."""

    def __init__(self, flats: Sequence[Tensor], optimizer: Optimizer) -> None:
        self.flats, self.optimizer = flats, optimizer
        self.rate = 1.0
        self.before: list[Tensor] = []
        self.states: dict[Tensor, dict[str, object]] = {}

    def remember(self, rate: float) -> None:
        self.forget()
        self.rate = rate
        self.before = [flat.clone() for flat in self.flats]
        self.states = {
            parameter: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            for parameter, state in self.optimizer.state.items()
        }

    def take_back(self) -> float:
        """Put everything back as it was; return the rate of the update."""
        for flat, before in zip(self.flats, self.before, strict=True):
            flat.copy_(before)
        self.optimizer.state.clear()
        for parameter, state in self.states.items():
            self.optimizer.state[parameter] = state
        return self.rate

    def forget(self) -> None:
        self.before, self.states = [], {}

    def held(self) -> list[Tensor]:
        """Return all tensors that are kept."""
        kept = [v for state in self.states.values() for v in state.values()]
        return [*self.before, *(value for value in kept if isinstance(value, Tensor))]


def optimizer_of(job: Job, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the job's optimizer of some parameters.

    Raises:   JobError: what the job returns is none.
    """
    optimizer = job.optimizer(parameters)
    if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        found = type(optimizer).__name__
        raise JobError(f"the job's optimizer is a {found}", hint="return a torch optimizer")
    return optimizer


def optimizer_state(
    optimizer: Optimizer,
    name: str,
    parameter: nn.Parameter,
    tensors: dict[str, Tensor],
    plain: dict[str, object],
) -> None:
    """Add what the optimizer holds for one parameter, as "optimizer/NAME/KEY".

    Raises:   CheckpointError: it holds something that is neither a tensor nor a plain value.
    """
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            tensors[f"optimizer/{name}/{key}"] = value
        elif value is None or isinstance(value, bool | int | float | str):
            plain[f"optimizer/{name}/{key}"] = value
        else:
            found = type(value).__name__
            raise CheckpointError(
                f"the optimizer's {key} of {name} is a {found}, which cannot be saved"
            )


def load_optimizer_state(
    optimizer: Optimizer,
    name: str,
    parameter: nn.Parameter,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, object],
) -> None:
    """Give the optimizer back what `optimizer_state` took for one parameter."""
    prefix = f"optimizer/{name}/"
    found: dict[str, object] = {
        key.removeprefix(prefix): value.clone()
        for key, value in tensors.items()
        if key.startswith(prefix)
    }
    found |= {key.removeprefix(prefix): v for key, v in plain.items() if key.startswith(prefix)}
    if found:
        optimizer.state[parameter] = found


def _layouts(parameters: Mapping[int, Tensor]) -> list[Flat]:
    """Return one layout for each dtype and device, parameters in node order."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for node, value in parameters.items():
        groups.setdefault((value.dtype, value.device), []).append(node)
    layouts: list[Flat] = []
    for (dtype, device), nodes in groups.items():
        starts, size = list[int](), 0
        step = _ALIGN_BYTES // dtype.itemsize
        for node in nodes:
            starts.append(size)
            size += -(-parameters[node].numel() // step) * step
        shapes = tuple(tuple(parameters[node].shape) for node in nodes)
        layouts.append(Flat(tuple(nodes), tuple(starts), shapes, dtype, device, size))
    return layouts


def _all_views(layouts: Sequence[Flat], flats: Sequence[Tensor]) -> dict[int, Tensor]:
    pairs = zip(layouts, flats, strict=True)
    return {node: view for layout, flat in pairs for node, view in layout.views(flat).items()}


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def fitting(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return the tensor of that name.

    Raises:   CheckpointError: it is missing or has another shape than `like`.
    """
    found = tensors.get(name)
    if found is None:
        hint = "is it a checkpoint of another model?"
        raise CheckpointError(f"the checkpoint holds no {name}", hint=hint)
    if found.shape != like.shape:
        message = (
            f"{name} is {list(found.shape)} in the checkpoint, {list(like.shape)} in the model"
        )
        raise CheckpointError(message, hint="is it a checkpoint of another model?")
    return found
