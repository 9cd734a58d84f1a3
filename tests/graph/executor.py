"""Executor: runs the segments of a cut step one after another, without ranks or schedules.

One frame of values for each (stage, micro-batch), as in a run: a message is put into the frame
of its target when it is sent, a segment takes and keeps what it says, and nothing may be left.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock import _compat
from penstock.graph.code import SeededRandom, function_of, micro_batch_seed
from penstock.graph.stages import Segment, Stages
from penstock.graph.trace import Capture, build, loss_of
from penstock.job import Job


@dataclass
class Step:
    """What one step gives: the loss of each micro-batch, gradients and buffers by name."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def run_eager(job: Job, micro_batches: int = 2) -> Step:
    """Return one step of the plain model under eager autograd."""
    model, _ = build(job)
    step, data = Step(), job.data(0)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for index in range(micro_batches):
        batch = next(data)
        with SeededRandom(micro_batch_seed(job.seed, index)):
            loss = loss_of(job, model, batch)
            scale = torch.tensor(1 / micro_batches).to(loss)
            found = torch.autograd.grad(loss, [*parameters.values()], scale, allow_unused=True)
        step.losses.append(loss.detach())
        _add(step, zip(parameters, found, strict=True))
    step.buffers = {name: value.clone() for name, value in model.named_buffers()}
    return step


def run_cut(
    job: Job, capture: Capture, stages: Stages, *, split: bool, micro_batches: int = 2
) -> Step:
    """Return one step of the stages: every F from the first, every B (or I, W) from the last."""
    return _Executor(job, capture, stages, micro_batches).run(split)


def measure_bytes(
    job: Job, capture: Capture, stages: Stages, *, split: bool
) -> list[tuple[Segment, int, int]]:
    """Return (segment, stage, most bytes above those at its start) of one micro-batch."""
    executor = _Executor(job, capture, stages, 1)
    executor.before = executor.after = lambda: _compat.memory_mark(len(executor.ran))
    with _compat.memory_profile() as memory:
        executor.leaves = [[_copy(leaf) for leaf in leaves] for leaves in executor.leaves]
        executor.run(split)
    peaks: list[int] = []
    inside, now, peak = False, 0, 0
    for event in memory():
        if event.is_mark and inside:
            peaks.append(peak)
        if event.is_mark:
            inside, now, peak = not inside, 0, 0
        now += event.size_bytes
        peak = max(peak, now)
    rows = zip(executor.ran, peaks, strict=True)
    return [(segment, stage, peak) for (segment, stage), peak in rows]


def _copy(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


class _Executor:
    def __init__(self, job: Job, capture: Capture, stages: Stages, micro_batches: int) -> None:
        self.capture, self.stages, self.seed = capture, stages, job.seed
        self.nodes = capture.graph.nodes
        model, _ = build(job)
        state = {**replace(capture, model=model).parameters, **dict(model.named_buffers())}
        self.statics: dict[int, Tensor] = dict(capture.constants)
        for i, node in enumerate(self.nodes):
            if node.kind in ("parameter", "buffer"):
                held = state[node.name].detach().to(getattr(torch, node.dtype))
                self.statics[i] = held.contiguous() if node.kind == "parameter" else held
            elif node.kind == "scale":
                self.statics[i] = torch.tensor(1 / micro_batches)
        data = job.data(0)
        self.leaves = [capture.leaves(next(data)) for _ in range(micro_batches)]
        self.frames: dict[tuple[int, int], dict[int, object]] = defaultdict(dict)
        self.messages: dict[tuple[int, int], dict[int, object]] = {}
        self.parts: dict[tuple[str, int], Tensor] = {}
        self.losses: list[Tensor] = []
        self.ran: list[tuple[Segment, int]] = []
        self.before = self.after = lambda: None

    def run(self, split: bool) -> Step:
        count = len(self.stages.stages)
        for m in range(len(self.leaves)):
            for stage in self.stages.stages:
                self._segment(stage.forward, stage.index, m)
        for m in range(len(self.leaves)):
            for stage in reversed(self.stages.stages):
                if split:
                    self._segment(stage.input_gradient, stage.index, m)
                else:
                    self._segment(stage.backward, stage.index, m)
            for stage in self.stages.stages if split else ():
                self._segment(stage.weight_gradient, stage.index, m)
        left = {key: sorted(frame) for key, frame in self.frames.items() if frame}
        assert not left, f"values left in frames of (stage, micro-batch): {left}"
        assert not self.messages, f"messages nobody received: {sorted(self.messages)}"
        step = Step(losses=self.losses)
        for stage in range(count):
            own = {name: part for (name, at), part in self.parts.items() if at == stage}
            _add(step, own.items())
        buffers = (node for node in enumerate(self.nodes) if node[1].kind == "buffer")
        step.buffers = {node.name: self.statics[i] for i, node in buffers}
        return step

    def _segment(self, segment: Segment, stage: int, m: int) -> None:
        frame = self.frames[stage, m]
        self._receive(segment, stage, m, frame)
        if not (segment.ops or segment.sends or segment.takes or segment.gradients):
            return
        function = function_of(segment, self.capture)
        assert set(function.values) == set(segment.inputs)
        arguments = [self.statics[i] for i in function.statics]
        arguments += [self.leaves[m][self.capture.inputs[i]] for i in function.leaves]
        taken = len(segment.takes)
        arguments += [frame.pop(v) for v in function.values[:taken]]
        arguments += [frame[v] for v in function.values[taken:]]
        with torch.no_grad(), _compat.below_autograd():
            self.before()
            found = function.run(arguments, micro_batch_seed(self.seed, m))
            self.after()
        self.ran.append((segment, stage))
        outputs = dict(zip(function.outputs, found, strict=True))
        frame.update((v, outputs[v]) for v in segment.keeps if v in outputs)
        for edge, values in segment.sends:
            assert (edge, m) not in self.messages
            self.messages[edge, m] = {v: self._sent(v, outputs[v]) for v in values}
        for parameter, value in segment.gradients:
            name = self.nodes[parameter].name
            wide = torch.float32 if name in self.capture.graph.masters else outputs[value].dtype
            self._add_part(name, stage, outputs[value].to(wide))  # as it is summed
        if segment.kind == "F" and self.capture.graph.loss in outputs:
            self.losses.append(outputs[self.capture.graph.loss].clone())

    def _receive(self, segment: Segment, stage: int, m: int, frame: dict[int, object]) -> None:
        """Put what has been sent to this stage for this way into its frame."""
        way = "F" if segment.kind == "F" else "B"
        for index, edge in enumerate(self.stages.edges):
            if edge.target == stage and edge.kind == way and (index, m) in self.messages:
                message = self.messages.pop((index, m))
                assert set(message) == set(edge.values)
                frame.update(message)

    def _sent(self, value: int, tensor: object) -> Tensor:
        """Return what arrives at the other end: a copy, laid out as it was traced."""
        node, traced = self.nodes[value], self.capture.fx_nodes[value].meta["val"]
        assert isinstance(tensor, Tensor), f"{node.name} is sent, but is a {type(tensor).__name__}"
        assert tuple(tensor.shape) == node.shape
        assert str(tensor.dtype) == f"torch.{node.dtype}"
        if traced.is_contiguous() or 0 in traced.stride():
            return tensor.clone(memory_format=torch.contiguous_format)
        return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype).copy_(tensor)

    def _add_part(self, name: str, stage: int, part: Tensor) -> None:
        known = self.parts.get((name, stage))
        self.parts[name, stage] = part.clone() if known is None else known + part


def _add(step: Step, pairs) -> None:
    for name, gradient in pairs:
        if gradient is not None:
            known = step.gradients.get(name)
            step.gradients[name] = gradient.clone() if known is None else known + gradient
