"""Emulate: a run whose compute is sleep, with real messages, real sums and real bytes held.

So a plan for machines that are not here can be rehearsed on a laptop: the same instructions,
the same transport, the seconds of the profile.  Losses and gradients are zeros.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock import _compat
from penstock.graph.code import Function, function_of
from penstock.graph.stages import Segment
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.profile.profile import Profile


def sleeping(job: Job, profile: Profile) -> tuple[Job, Callable[[Segment, Capture], Function]]:
    """Return `job` with an optimizer that sleeps, and what makes a segment's function that does."""
    optimizer = partial(_Sleeper, profile)
    slow = replace(job, optimizer=optimizer, learning_rate=None, scheduler=None)
    return slow, partial(_sleeping, profile)


def _sleeping(
    profile: Profile, segment: Segment, capture: Capture, *, asks: bool = False
) -> Function:
    """Return a function that sleeps, and returns zeros in the shapes of the segment's results."""
    function = function_of(segment, capture, asks=asks)
    seconds = segment.times * sum(profile.op_s[op] for op in segment.ops)
    seconds += profile.call_s if segment.ops else 0.0
    results = tuple(capture.fx_nodes[value].meta["val"] for value in function.outputs)

    def run(given: list[Any], seed: int) -> tuple[Any, ...]:
        until = time.perf_counter() + seconds
        peak = torch.empty(max(0, segment.peak_bytes), dtype=torch.uint8)
        given.clear()
        time.sleep(max(0.0, until - time.perf_counter()))
        del peak
        return _compat.pytree.tree_map(_zeros_like, results)

    return replace(function, run=run, statics=(), leaves=(), source=f"sleep({seconds})")


def _zeros_like(value: Any) -> Any:
    """Return zeros for a fake tensor; some ops also give numbers, or nothing."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


class _Sleeper(Optimizer):
    """An optimizer whose step takes its profiled seconds and changes nothing."""

    penstock_plain = True  # what it keeps and how long it takes is that of each parameter

    def __init__(self, profile: Profile, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.cost = profile.update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for parameter in held:
            if not self.state[parameter]:
                count = round(self.cost.state_bytes_per_byte * parameter.numel())
                self.state[parameter]["held"] = torch.zeros(count, dtype=parameter.dtype)
        size = sum(p.numel() * p.element_size() for p in held)
        time.sleep(self.cost.update_s + self.cost.update_s_per_byte * size)
