"""Rounded: what a step means whose numbers are rounded on their way between ranks.

One process, one micro-batch after the other, the stages of the plan in order: F of each from the
first to the last, then B of each from the last to the first.  A value that a stage makes for one
on another rank is there

    step = max(greatest of its row, 1e-30) / (2 ** (bits - 1) - 1)
    x'   = round(x / step) * step

and what stays on its rank is there as it is.  No schedule, no messages, and not one line of the
codec: proofs compare runs with this.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock import _compat
from penstock.bits import AS_IT_IS
from penstock.device import here
from penstock.graph.code import Function, function_of
from penstock.graph.stages import Segment, Stages
from penstock.graph.trace import Capture
from penstock.graph.wire import is_packed, row_length
from penstock.program.codes import SEND
from penstock.program.program import Program
from penstock.state.tensor_parts import sliced, whole

Tensors = Mapping[str, Tensor]


class StepInputs(NamedTuple):
    """What a micro-batch reads: weights by name in its F and in its B, buffers, and its leaves.

    number:  of the micro-batch in its window, over all replicas; seed: of its random ops.
    """

    forward: Tensors
    backward: Tensors
    buffers: Tensors
    leaves: Sequence[Any]
    number: int
    seed: int


class Rounded:
    """Computes the step of a program for one micro-batch after the other.

    exactly:  whether nothing is rounded all the same: then it is the step as it was traced.
    """

    def __init__(
        self, capture: Capture, stages: Stages, program: Program, *, exactly: bool = False
    ) -> None:
        self.capture, self.stages, self.program = capture, stages, program
        edges = len(stages.edges)
        self.bits = (AS_IT_IS,) * edges if exactly or not program.graph.bits else program.graph.bits
        self.sent = _sent(program)
        self._functions: dict[int, Function] = {}
        self.count = program.grid.step_micro_batches
        self.rescale(1.0)

    def rescale(self, scale: float) -> None:
        """Let gradients be those of the loss times `scale` from now on."""
        graph, device = self.capture.graph, here().place
        dtype = getattr(torch, graph.nodes[graph.loss].dtype)
        self.scale = torch.tensor(scale, dtype=dtype, device=device) / self.count

    def micro_batch(
        self, read: StepInputs, *, backward: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, and its part of each parameter's gradient by name."""
        frames: list[dict[int, Any]] = [{} for _ in self.stages.stages]
        gradients: dict[str, Tensor] = {}
        loss, graph = torch.empty(0), self.capture.graph
        forward, backward_reads = (sliced(row, graph) for row in (read.forward, read.backward))
        read = read._replace(forward=forward, backward=backward_reads)
        with torch.no_grad(), _compat.below_autograd():
            for stage in self.stages.stages:
                found = self._run(stage.index, stage.forward, read.forward, read, frames)
                loss = found.get(graph.loss, loss)
            for stage in reversed(self.stages.stages) if backward else ():
                found = self._run(stage.index, stage.backward, read.backward, read, frames)
                for parameter, value in stage.backward.gradients:
                    name = graph.nodes[parameter].name
                    part = found[value].to(read.forward[name].dtype)
                    gradients[name] = gradients[name] + part if name in gradients else part
        return loss, whole(gradients)

    def _run(
        self,
        stage: int,
        segment: Segment,
        weights: Tensors,
        read: StepInputs,
        frames: list[dict[int, Any]],
    ) -> dict[int, Any]:
        """Run a segment, hand on what it makes, and return that."""
        function = self._function(segment)
        if not segment.ops and not function.outputs:
            return {}
        nodes, frame = self.capture.graph.nodes, frames[stage]
        known = {**weights, **read.buffers}
        statics = [
            self.scale
            if nodes[node].kind == "scale"
            else self.capture.constants[node]
            if nodes[node].kind == "constant"
            else known[nodes[node].name].to(self.scale.device, getattr(torch, nodes[node].dtype))
            for node in function.statics
        ]
        leaves = [read.leaves[self.capture.inputs[node]] for node in function.leaves]
        values = [frame[value] for value in function.values]
        results = function.run([*statics, *leaves, *values], read.seed)
        found = dict(zip(function.outputs, results, strict=True))
        frame |= {value: found[value] for value in segment.keeps if value in found}
        for edge, row in segment.sends:
            target = frames[self.stages.edges[edge].target]
            target |= {value: self._there(edge, value, read.number, found[value]) for value in row}
        return found

    def _function(self, segment: Segment) -> Function:
        if id(segment) not in self._functions:
            self._functions[id(segment)] = function_of(segment, self.capture)
        return self._functions[id(segment)]

    def _there(self, edge: int, value: int, number: int, made: Any) -> Any:
        """Return a value as the stage has it that an edge leads to."""
        bits = self.bits[edge]
        if not is_packed(self.capture.graph, value, bits):
            return made
        if (edge, *self._place_of(number)) not in self.sent:
            return made
        return rounded_to(made, bits)

    def _place_of(self, number: int) -> tuple[int, int]:
        """Return the replica that takes a micro-batch, and its number there."""
        grid = self.program.grid
        step, place = divmod(number, grid.step_micro_batches)
        ends = list(accumulate(grid.shares))
        replica = next(at for at, end in enumerate(ends) if place < end)
        return replica, step * grid.stride + place - (ends[replica] - grid.shares[replica])


def rounded_to(made: Tensor, bits: int) -> Tensor:
    """Return a tensor of which each number is a whole number of steps, laid out as it was."""
    most = 2 ** (bits - 1) - 1
    wide = made.double() if made.dtype == torch.float64 else made.float()
    rows = wide.contiguous().view(-1, row_length(tuple(made.shape)))
    step = rows.abs().max(dim=1, keepdim=True).values.clamp(min=1e-30) / most
    return torch.empty_like(made).copy_(((rows / step).round() * step).view(made.shape))


def _sent(program: Program) -> frozenset[tuple[int, int, int]]:
    """Return edge, replica and micro-batch of each message between two ranks."""
    code = program.code
    rows = np.flatnonzero(code.op == SEND)
    ranks = np.searchsorted(code.offsets, rows, side="right") - 1
    replicas = program.grid.places()[0][ranks]
    columns = code.edge[rows].tolist(), replicas.tolist(), code.micro_batch[rows].tolist()
    return frozenset(zip(*columns, strict=True))
