"""Counted: what a step makes the host wait for, and what is held after it."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.plan import Plan
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.transport.threads import thread_transports

_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


def rank_of(job: Job, captured: Capture, plan: Plan) -> tuple[Rank, Callable[[], None]]:
    """Return a rank that runs a plan as a run does, looks at its numbers included, and its step."""
    (end,) = thread_transports(1)
    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    terms, steps = RankTerms(is_guarded=True), itertools.count()
    rank = Rank(captured, stages, job, end, terms)
    calls = rank.bind(program)

    def step() -> None:
        with torch.no_grad():
            rank.run(calls, next(steps))

    return rank, step


def count(step: Callable[[], None]) -> dict[str, int]:
    """Return the host's waits and the copies from pageable memory in a step."""
    pretended: Any = sys.modules.get("tests.rehearsal.cuda")
    if pretended is not None:
        ours = pretended.library
        before = ours.rehearsal_syncs(), ours.rehearsal_pageable()
        step()
        waits, pageable = ours.rehearsal_syncs() - before[0], ours.rehearsal_pageable() - before[1]
        return {"syncs": waits, "pageable": pageable}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    names = [event.name for event in profiler.events()]
    waits = sum(any(wait in name for wait in _WAITS) for name in names)
    last = 1  # the profiler's own, at its end
    return {"syncs": max(0, waits - last), "pageable": sum("Pageable" in name for name in names)}


def live_bytes() -> int:
    return torch.cuda.memory_allocated()
