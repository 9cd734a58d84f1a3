"""Emulate: a run whose compute is sleep, with real messages, real sums and real bytes held.

So a plan for machines that are not here can be rehearsed on a laptop: the same instructions,
the same transport, the seconds of the profile.  Losses and gradients are zeros.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.graph.code import Function
from penstock.graph.stages import Segment
from penstock.graph.trace import Capture
from penstock.profile import Profile
from penstock.runtime.worker import Task


def emulated(task: Task, profile: Profile) -> Task:
    """Return `task` with every compute and every update replaced by its profiled seconds.

    A segment holds its profiled peak while it sleeps, then its results.  Messages and
    reductions are real, so are weights and the optimizer's state.
    Ignores:  that a sleeping rank leaves its core to the others.
    """
    job = replace(task.job, optimizer=partial(_Sleeper, profile), learning_rate=None)
    return replace(task, job=job, function_of=partial(_sleeping, profile))


def _sleeping(profile: Profile, segment: Segment, capture: Capture) -> Function:
    nodes = capture.graph.nodes
    seconds = sum(profile.op_s[op] for op in segment.ops) + profile.call_s
    sent = [v for _, values in segment.sends for v in values]
    inputs = set(segment.inputs)
    kept = [v for v in segment.keeps if v not in inputs]
    gradients = [v for _, v in segment.gradients]
    loss = [v for v in segment.ops if v == capture.graph.loss]
    outputs = tuple(dict.fromkeys((*sent, *kept, *gradients, *loss)))
    if not segment.ops:
        seconds = 0.0
    shapes = [(nodes[v].shape, getattr(torch, nodes[v].dtype)) for v in outputs]
    values = (*segment.takes, *(v for v in segment.inputs if v not in set(segment.takes)))

    def run(given: list[Any], seed: int) -> tuple[Any, ...]:
        until = time.perf_counter() + seconds
        peak = torch.empty(max(0, segment.peak_bytes), dtype=torch.uint8)
        given.clear()
        time.sleep(max(0.0, until - time.perf_counter()))
        del peak
        return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)

    return Function(run, (), (), values, outputs, f"sleep({seconds})")


class _Sleeper(Optimizer):
    """An optimizer whose step takes its profiled seconds and changes nothing."""

    def __init__(self, profile: Profile, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        held = [p for group in self.param_groups for p in group["params"]]
        size = sum(p.numel() * p.element_size() for p in held)
        self.seconds = profile.update_s + profile.update_s_per_byte * size
        for parameter in held:
            count = round(profile.state_bytes_per_byte * parameter.numel())
            self.state[parameter]["held"] = torch.zeros(count, dtype=parameter.dtype)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(self.seconds)
