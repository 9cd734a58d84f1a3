"""Compute: what a rank computes in one step, action by action, with messages and runtime left out.

The actions run in the rank's own order, on values that were made beforehand.  What is timed is
a segment and the adding of its gradients; by the thread's own clock, so that what other
processes take from the core does not count.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from bench.inside import Seconds
from bench.ours import Ours
from penstock import _compat
from penstock.graph.code import Function, function_of
from penstock.graph.stages import Segment
from penstock.schedule.schedule import Action
from penstock.state.weights import StageWeights


class Segments:
    """Our segments of one rank, with weights of their own."""

    def __init__(self, ours: Ours, rank: int) -> None:
        self.ours, self.order = ours, ours.orders()[rank]
        self.weights = {
            stage.index: StageWeights(stage, ours.capture, ours.job) for stage in ours.stages.stages
        }
        self.leaves = ours.capture.leaves(next(ours.job.data(0)))
        self.scale = torch.tensor(1.0 / ours.program.num_micro_batches)
        self.functions: dict[tuple[str, int], Function] = {}
        self.known: dict[int, Any] = {}
        with torch.no_grad():
            self._know_messages()

    def _know_messages(self) -> None:
        """Run one micro-batch through all stages, and keep what goes from stage to stage."""
        stages, values = self.ours.stages, dict[int, Any]()
        split = any(action.kind == "I" for action in self.order)
        kinds = ("I", "W") if split else ("B",)
        todo = [("F", stage) for stage in stages.stages]
        todo += [(kind, stage) for stage in reversed(stages.stages) for kind in kinds]
        for kind, stage in todo:
            function = self._function(kind, stage.index)
            arguments = self._arguments(stage.index, function, values, taken=0)
            with _compat.below_autograd():
                results = function.run(arguments, 0)
            values |= dict(zip(function.outputs, results, strict=True))
        self.known = {v: values[v] for edge in stages.edges for v in edge.values}
        used = {action.stage for action in self.order}
        self.weights = {stage: held for stage, held in self.weights.items() if stage in used}

    def step(self) -> list[float]:
        """Compute one step; return the seconds of each action."""
        frames: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        first = dict.fromkeys(self.weights, True)
        seconds: list[float] = []
        with torch.no_grad():
            for kind, stage, micro_batch in self.order:
                segment = self.ours.stages.stages[stage].segment(kind)  # type: ignore[arg-type]
                frame = frames[stage, micro_batch]
                self._receive(segment, stage, frame)
                combine = torch._foreach_copy_ if first[stage] else torch._foreach_add_
                seconds.append(self._compute(segment, stage, frame, combine))
                first[stage] &= not segment.gradients
        return seconds

    def _receive(self, segment: Segment, stage: int, frame: dict[int, Any]) -> None:
        way = "F" if segment.kind == "F" else "B"
        if segment.kind != "W":
            edges = (e for e in self.ours.stages.edges if e.target == stage and e.kind == way)
            frame.update((v, self.known[v].clone()) for edge in edges for v in edge.values)

    def _compute(self, segment: Segment, stage: int, frame: dict[int, Any], combine: Any) -> float:
        function = self._function(segment.kind, stage)
        if not segment.ops:
            return 0.0
        sums = self.weights[stage].gradients
        pairs = {sums[p]: function.outputs.index(v) for p, v in segment.gradients}
        targets, places = list(pairs), list(pairs.values())
        kept = [(v, function.outputs.index(v)) for v in segment.keeps if v in function.outputs]
        arguments = self._arguments(stage, function, frame, taken=len(segment.takes))
        start = time.thread_time()
        with _compat.below_autograd():
            results = function.run(arguments, 0)
            if targets:
                combine(targets, [results[place] for place in places])
        frame.update((v, results[place]) for v, place in kept)
        del results
        return time.thread_time() - start

    def _function(self, kind: str, stage: int) -> Function:
        if (kind, stage) not in self.functions:
            segment = self.ours.stages.stages[stage].segment(kind)  # type: ignore[arg-type]
            self.functions[kind, stage] = function_of(segment, self.ours.capture)
        return self.functions[kind, stage]

    def _arguments(
        self, stage: int, function: Function, frame: dict[int, Any], *, taken: int
    ) -> list[Any]:
        capture, weights = self.ours.capture, self.weights[stage]
        known = {**weights.tensors(0), **weights.buffers, **capture.constants}
        known |= {n: self.scale for n in function.statics if n not in known}
        leaves = (self.leaves[capture.inputs[node]] for node in function.leaves)
        values = (
            *map(frame.pop, function.values[:taken]),
            *map(frame.get, function.values[taken:]),
        )
        return [*(known[node] for node in function.statics), *leaves, *values]


def seconds_of(order: Sequence[Action], steps: Sequence[Sequence[float]]) -> Seconds:
    """Return the median seconds of each action over several steps."""
    return {
        action: statistics.median(times)
        for action, times in zip(order, zip(*steps, strict=True), strict=True)
    }
