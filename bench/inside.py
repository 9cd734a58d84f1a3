"""Inside: the seconds that the actions of a step spend computing, timed where they run.

Of ours that is a segment's function and the adding of its gradients; of the peer a module's
forward, the loss, and autograd while it is asked for gradients.  All else that a step takes is
messages, waiting, and the runtime itself.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from penstock.graph.code import Function, function_of
from penstock.graph.stages import Segment
from penstock.graph.trace import Capture
from penstock.program.program import Program
from penstock.runtime.calls import Bound
from penstock.schedule.schedule import Action
from penstock.simulate import simulate
from penstock.timeline import step_s

Call = Callable[..., Any]
Seconds = dict[Action, float]
ADDING = ("_foreach_add_", "_foreach_copy_")
ASKING = ("backward", "grad")


class Inside:
    """Adds up seconds by action; one step at a time."""

    def __init__(self) -> None:
        self.action = Action("F", 0, 0)
        self.seconds: defaultdict[Action, float] = defaultdict(float)

    def take(self, order: Sequence[Action]) -> list[float]:
        """Return the seconds of each action since the last call; 0 for one that did nothing."""
        taken = [self.seconds.get(action, 0.0) for action in order]
        self.seconds.clear()
        return taken

    def timed(self, function: Call) -> Call:
        """Return `function`, whose seconds count for the action that is under way."""
        seconds, clock = self.seconds, time.perf_counter

        def call(*args: Any, **options: Any) -> Any:
            start = clock()
            result = function(*args, **options)
            seconds[self.action] += clock() - start
            return result

        return call

    def during(self, action: Action, call: Call) -> Call:
        """Return `call`, during which `action` is under way."""

        def begun(*args: Any, **options: Any) -> Any:
            self.action = action
            return call(*args, **options)

        return begun

    # -- ours --------------------------------------------------------------------------------

    def function_of(self, segment: Segment, capture: Capture, *, asks: bool = False) -> Function:
        """Return a segment's function, timed: what a Rank is told to make."""
        function = function_of(segment, capture, asks=asks)
        return replace(function, run=self.timed(function.run))

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Time the adding of gradients in calls that are bound meanwhile."""
        timed = {name: self.timed(getattr(torch, name)) for name in ADDING}
        with patch.multiple(torch, **timed):
            yield

    def bound(self, calls: Sequence[Bound]) -> list[Bound]:
        """Return the calls, each compute of which says which action it is."""
        return [self._begun(each) if each.lane == "compute" else each for each in calls]

    def _begun(self, bound: Bound) -> Bound:
        action = Action(bound.kind, bound.stage, bound.micro_batch)  # type: ignore[arg-type]
        return replace(bound, call=self.during(action, bound.call))

    # -- the peer ----------------------------------------------------------------------------

    def stage(self, stage: Any) -> None:
        """Time the module of a PipelineStage, and have it say which action is under way."""
        stage.submod.forward = self.timed(stage.submod.forward)
        number, forward = stage.stage_index, stage.forward_one_chunk
        backward, weights = stage.backward_one_chunk, stage.backward_weight_one_chunk

        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            self.action = Action("F", number, fwd_chunk_id)
            return forward(fwd_chunk_id, *args, **options)

        def backward_one_chunk(
            bwd_chunk_id: int, *args: Any, full_backward: bool = True, **options: Any
        ) -> Any:
            self.action = Action("B" if full_backward else "I", number, bwd_chunk_id)
            return backward(bwd_chunk_id, *args, full_backward=full_backward, **options)

        def backward_weight_one_chunk(bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
            self.action = Action("W", number, bwd_chunk_id)
            return weights(bwd_chunk_id, *args, **options)

        stage.forward_one_chunk = forward_one_chunk
        stage.backward_one_chunk = backward_one_chunk
        stage.backward_weight_one_chunk = backward_weight_one_chunk

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Time autograd, whoever asks it for gradients meanwhile."""
        timed = {name: self.timed(getattr(torch.autograd, name)) for name in ASKING}
        with patch.multiple(torch.autograd, **timed):
            yield


def bound_s(program: Program, seconds: Mapping[Action, float]) -> float:
    """Return the seconds of a window that consists of these computes and its bubble: free links."""
    return step_s(simulate(program, seconds.__getitem__, spans=False))
