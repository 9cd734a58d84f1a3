"""Sequential: what a weight rule means, without a pipeline.

Generated from the rule alone: micro-batch m reads, for the parameters of stage s, version
law(s, m).forward in its forward pass and law(s, m).backward in its backward pass, both predicted
as the law says; its gradient enters step law(s, m).step; the update of step t makes version t + 1
from version t.  One process, the uncut model, eager autograd.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from penstock import _compat
from penstock.batches.reads import started
from penstock.errors import RunError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.graph import Graph
from penstock.graph.lasting import lasting_buffers
from penstock.graph.merge import parts_of
from penstock.graph.parts import key_in
from penstock.graph.precision import dtype_of, narrowed
from penstock.graph.stages import Stages
from penstock.graph.trace import Capture, build, loss_of, on_device
from penstock.graph.waiting import lent, waits
from penstock.job import Job
from penstock.program.program import Program
from penstock.prove.rounded import Rounded, StepInputs
from penstock.prove.rounded_sums import RoundedSums, owners_of
from penstock.schedule.weight_rule import WeightRule
from penstock.state.optimizer.optimizer import Optimizers
from penstock.state.optimizer.updates import Updates
from penstock.state.python_state import take_named
from penstock.state.weights import load_model
from penstock.sums import HALVES

Weights = dict[str, Tensor]


@dataclass(slots=True)
class _StageState:
    """One stage's parameters, its optimizer, and what each of its versions is predicted to become.

    versions:  by number; adds: what one more update is predicted to add to each.
    """

    names: list[str]
    parameters: dict[str, torch.nn.Parameter]
    updates: Updates | None
    delay: float
    versions: dict[int, Weights] = field(default_factory=dict[int, Weights])
    adds: dict[int, Weights] = field(default_factory=dict[int, Weights])

    def read(self, version: int, ahead: int) -> Weights:
        """Return the weights that are `ahead` updates from a version."""
        weights = self.versions[version]
        if not ahead:
            return weights
        return {name: weights[name] + ahead * self.adds[version][name] for name in self.names}


class BegunWindow(NamedTuple):
    """What a run goes on from, where a window begins.

    step:     number of the first step.
    given:    called with the number of each of the steps, from 0 on, and its gradients; returns
              those by which weights are updated.
    """

    step: int
    tensors: Mapping[str, Tensor]
    plain: Mapping[str, object]
    given: Callable[[int, Weights], Weights]


def sequential(
    job: Job,
    program: Program,
    steps: int,
    stages: Stages,
    capture: Capture,
    begun: BegunWindow | None = None,
) -> dict[str, Tensor]:
    """Return weights and buffers after `steps` steps, as "weights/NAME" and "buffers/NAME".

    begun:    None: with the job's first weights, and by the gradients that it makes.
    Raises:   RunError: stages that share a parameter read different versions of it.
              CheckpointError: the state does not fit the model.
    """
    rule, per_step = program.weight_rule, program.num_micro_batches
    model, _ = build(job)
    if begun is not None:
        load_model(model, begun.tensors)
    rounded = Rounded(capture, stages, program) if program.graph.bits else None
    parts = _stages(job, model, program, stages, capture.graph)
    owners = owners_of(program, stages, capture.graph) if job.sums in HALVES else {}
    narrow = RoundedSums(owners, job.sums if job.sums in HALVES else "float32")
    first, count = _enter(job, model, parts, rule, begun), program.grid.step_micro_batches
    data = started(job.data, first * count)
    for step in range(steps):
        sums: Weights = {}
        for number in range(count):
            local = step * per_step + number % per_step
            batch = on_device(next(data))
            seed = micro_batch_seed(job.seed, (first + step) * count + number)
            if rounded is not None:
                own = _reads(parts, program, local), capture.leaves(batch)
                found = _rounded_gradients(rounded, model, *own, (step * count + number, seed))
            else:
                with SeededRandom(seed):
                    found = _gradients(job, model, parts, program, (local, batch))
            _add(narrow, sums, number, found)
        _give(parts, sums | narrow.take())
        if job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        if begun is not None:
            _give(parts, begun.given(step, _given(parts)))
        for part in parts:
            _update(part, rule, step, first)
    made = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    return {**made, **{f"buffers/{name}": value for name, value in lasting_buffers(model).items()}}


def _add(narrow: RoundedSums, sums: Weights, number: int, made: Mapping[str, Tensor]) -> None:
    """Add the gradients of a micro-batch where those of its rank are added up, or to `sums`."""
    for name, gradient in made.items():
        if not narrow.add(name, number, gradient):
            sums[name] = sums[name] + gradient if name in sums else gradient


def _rounded_gradients(
    by: Rounded,
    model: torch.nn.Module,
    reads: tuple[Weights, Weights],
    leaves: Any,
    where: tuple[int, int],
) -> Mapping[str, Tensor]:
    """Return the gradients of a micro-batch whose numbers are rounded on the way.

    where:    its place in the window, and its seed.
    """
    held = dict(model.named_parameters())
    forward, backward = ({**held, **read} for read in reads)
    read = StepInputs(forward, backward, lasting_buffers(model), leaves, *where)
    return by.micro_batch(read)[1]


def _stages(
    job: Job, model: torch.nn.Module, program: Program, stages: Stages, graph: Graph
) -> list[_StageState]:
    rule, sizes = program.weight_rule, (program.num_stages, program.num_micro_batches)
    rows = ((graph.nodes[p].name, s.index) for s in reversed(stages.stages) for p in s.parameters)
    owner = {key_in(name): stage for name, stage in rows}
    shared = [p for p, held in stages.tied if len(held) > 1]
    laws = {rule.law(s, m, *sizes) for s in range(sizes[0]) for m in range(sizes[1])}
    if shared and len(laws) > sizes[1]:
        name = graph.nodes[shared[0]].name
        message = (
            f"under rule {rule.name} the stages that share {name} read different versions of it"
        )
        raise RunError(message, hint="take another schedule, or cut the model elsewhere")
    history = rule.history(*sizes).tolist()
    made = (key_in(name) for name, gradient in graph.gradients.items() if gradient is not None)
    reached = list(dict.fromkeys(made))
    optimizers = Optimizers(job, model, reached)
    parts: list[_StageState] = []
    for stage in range(program.num_stages):
        own = {n: p for n, p in model.named_parameters() if p.requires_grad and owner[n] == stage}
        part = _StageState(list(own), own, optimizers.of(own, {}), rule.staleness(stage, *sizes))
        start = {name: parameter.detach().clone() for name, parameter in own.items()}
        part.versions = {-k: start for k in range(history[stage] + 1)}
        zero = {name: torch.zeros_like(value) for name, value in start.items()}
        part.adds = dict.fromkeys(part.versions, zero)
        parts.append(part)
    return parts


def _enter(
    job: Job,
    model: torch.nn.Module,
    parts: list[_StageState],
    rule: WeightRule,
    begun: BegunWindow | None,
) -> int:
    """Go on from where a window begins, whose weights `model` has; return its first step."""
    if begun is None:
        return 0
    take_named(job, model, begun.tensors, begun.plain)
    for part in parts:
        _take(part, rule, begun)
    return begun.step


def _take(part: _StageState, rule: WeightRule, begun: BegunWindow) -> None:
    """Take over what a stage begins with: older versions, and what predictions remember."""
    if part.updates is not None:
        part.updates.take(begun.tensors, begun.plain)
    now = {name: parameter.detach().clone() for name, parameter in part.parameters.items()}

    def kept(key: str) -> Weights:
        found = ((name, begun.tensors.get(f"{key}/{name}")) for name in part.names)
        return {name: now[name] if value is None else value.clone() for name, value in found}

    part.versions = {v: kept(f"version-{-v}") if v else now for v in part.versions}
    part.adds = {v: _added(part, rule, begun.tensors) for v in part.versions}


def _added(part: _StageState, rule: WeightRule, begun: Mapping[str, Tensor]) -> Weights:
    """Return what one more update is predicted to add to what a window begins with."""
    now = part.versions[0]
    match rule.predictor:
        case None:
            return {name: torch.zeros_like(value) for name, value in now.items()}
        case "optimizer":
            return {name: -_velocity(part, name) for name in part.names}
        case "difference":
            return {n: value - begun.get(f"previous/{n}", value) for n, value in now.items()}
        case "average":
            none = {name: torch.zeros_like(value) for name, value in now.items()}
            return {name: begun.get(f"average/{name}", none[name]).clone() for name in now}


def _given(parts: list[_StageState]) -> Weights:
    rows = (row for part in parts for row in part.parameters.items())
    return {name: p.grad for name, p in rows if p.grad is not None}


def _give(parts: list[_StageState], gradients: Weights) -> None:
    for part in parts:
        for name, parameter in part.parameters.items():
            parameter.grad = gradients.get(name)


def _reads(parts: list[_StageState], program: Program, number: int) -> tuple[Weights, Weights]:
    """Return the weights that F and B of a micro-batch read."""
    forward: Weights = {}
    backward: Weights = {}
    for stage, part in enumerate(parts):
        sizes = program.num_stages, program.num_micro_batches
        reads = program.weight_rule.law(stage, number, *sizes)
        forward |= part.read(reads.forward, reads.forward_ahead)
        backward |= part.read(reads.backward, reads.backward_ahead)
    return forward, backward


def _gradients(
    job: Job,
    model: torch.nn.Module,
    parts: list[_StageState],
    program: Program,
    of: tuple[int, Any],
) -> Weights:
    """Return the gradient of one micro-batch: (its number in the window, the batch)."""
    number, batch = of
    forward, backward = _reads(parts, program, number)
    narrow, dtype = narrowed(job, model), dtype_of(job)
    read = {n: w.to(dtype) if n in narrow else w.clone() for n, w in forward.items()}
    later = {n: w.to(dtype) if n in narrow else w for n, w in backward.items()}
    for value in read.values():
        value.requires_grad_()
    swaps = nullcontext()
    if not waits(model):
        swaps = torch.autograd.graph.saved_tensors_hooks(*_swapping(read, later))
    instead = {id(value): later[name] for name, value in read.items()}
    with _compat.reparametrize(model, dict(read)), swaps, lent(model, instead):
        parts = parts_of(job, batch)
        losses = [loss_of(job, model, part) / len(parts) for part in parts]
        loss = torch.stack(losses).sum() / program.grid.step_micro_batches
        found: Any = torch.autograd.grad(loss, list(read.values()), allow_unused=True)
    made = zip(forward.items(), found, strict=True)
    return {name: g.to(w.dtype) for (name, w), g in made if g is not None}


def _swapping(
    forward: Mapping[str, Tensor], backward: Mapping[str, Tensor]
) -> tuple[Callable[[Tensor], object], Callable[[Any], Tensor]]:
    """Return hooks that give the backward pass `backward` where it saved `forward`, or a view."""
    names = {value.untyped_storage().data_ptr(): name for name, value in forward.items()}

    def pack(saved: Tensor) -> object:
        name = names.get(saved.untyped_storage().data_ptr()) if saved.numel() else None
        if name is None:
            return saved
        return name, saved.shape, saved.stride(), saved.storage_offset()

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        name, *view = saved
        return backward[name].clone().as_strided(*view)

    return pack, unpack


def _update(part: _StageState, rule: WeightRule, step: int, first: int) -> None:
    """Make version step + 1; `first` steps of the run were made before."""
    before, factor = part.versions[step], 1.0
    if part.updates is not None:
        if rule.rescale_steps:
            power = 1.0 - min(1.0, (first + step) / rule.rescale_steps)
            factor = 1.0 / max(part.delay, 1.0) ** power
        given = {n: p.grad for n, p in part.parameters.items() if p.grad is not None}
        part.updates.step(first + step, given, factor)
        if rule.compensate and part.delay > 0:
            for name in part.names:
                _compensate(part, name, before[name])
    after = {name: p.detach().clone() for name, p in part.parameters.items()}
    part.versions[step + 1] = after
    match rule.predictor:
        case None:
            added = {name: torch.zeros_like(value) for name, value in after.items()}
        case "optimizer":
            added = {name: -_velocity(part, name) for name in part.names}
        case "difference":
            added = {name: after[name] - before[name] for name in part.names}
        case "average":
            share = rule.decay ** (1 / part.delay) if part.delay > 0 else 0.0
            old = part.adds[step]
            added = {
                name: share * old[name] + (1 - share) * (after[name] - before[name])
                for name in part.names
            }
    part.adds[step + 1] = added


def _moments(part: _StageState, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    assert part.updates is not None
    parameter, optimizer = part.updates.parameters[name], part.updates.optimizer
    for group in optimizer.param_groups:
        if any(parameter is each for each in group["params"]):
            return group, optimizer.state.get(parameter, {})
    raise AssertionError(f"{name} is in no group of the optimizer")


def _velocity(part: _StageState, name: str, moment: Tensor | None = None) -> Tensor:
    """Return what the optimizer subtracts for its first moment, or for another one."""
    group, state = _moments(part, name)
    if "exp_avg" in state:
        (beta1, beta2), t = group["betas"], float(state["step"])
        first = (state["exp_avg"] if moment is None else moment) / (1 - beta1**t)
        second = state["exp_avg_sq"] / (1 - beta2**t)
        return group["lr"] * first / (second.sqrt() + group["eps"])
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return torch.zeros_like(part.parameters[name])
    return group["lr"] * (buffer if moment is None else moment)


def _compensate(part: _StageState, name: str, before: Tensor) -> None:
    """Put what spike compensation makes of the update in its place.

    After SGD:  w(t+1) = w(t) - lr * (a * v(t+1) + b * g), a = m^D, b = (1 - m^D) / (1 - m).
    """
    parameter = part.parameters[name]
    group, state = _moments(part, name)
    if parameter.grad is None or not state:
        return
    with torch.no_grad():
        if "exp_avg" in state:
            a = group["betas"][0] ** part.delay
            moment = a * state["exp_avg"] + (1 - a) * parameter.grad
            plain, mended = _velocity(part, name), _velocity(part, name, moment)
            parameter += plain - mended
        elif state.get("momentum_buffer") is not None:
            a = group["momentum"] ** part.delay
            b = (1 - a) / (1 - group["momentum"])
            gradient = parameter.grad + group["weight_decay"] * before
            parameter.copy_(before - group["lr"] * (a * state["momentum_buffer"] + b * gradient))
