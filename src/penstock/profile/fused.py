"""Fused: the seconds of compiled segments, measured beside their ops one by one."""

import statistics
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from penstock import _compat
from penstock.device import here
from penstock.graph.code import Function, function_of
from penstock.graph.segment_memory import MemoryOwner
from penstock.graph.stages import Segment, SegmentKind, Stages
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.profile.measure import clock_here, inputs_of
from penstock.profile.profile import FusedCost

_ORDER = {"F": 0, "B": 1, "I": 2, "W": 3}
_BUDGET_S, _LEAST = 0.4, 5  # of a segment: seconds, and times that each way is run

Frame = dict[int, Any]


def measure_fused(
    capture: Capture,
    job: Job,
    stages: Stages,
    segments: Sequence[tuple[int, SegmentKind]],
    fuse: Callable[[Segment, Capture], Function],
) -> tuple[FusedCost, ...]:
    """Return the seconds of compiled segments on this machine: one thread, nothing else running.

    segments:  by stage and kind: all that a run of the stages has.
    fuse:      makes the compiled function of a segment.
    Ignores:   other ranks, which slow both ways down, by about the same share.
    """
    values, found = inputs_of(capture, job), list[FusedCost]()
    lasting = {_compat.storage_key(v) for v in values.values() if isinstance(v, Tensor)}
    frames = {stage.index: Frame() for stage in stages.stages}
    with torch.no_grad(), _compat.below_autograd():
        for stage, kind in sorted(segments, key=_place):
            segment, frame = stages.stages[stage].segment(kind), frames[stage]
            if not segment.ops:
                continue
            functions = function_of(segment, capture), fuse(segment, capture)
            given = [[values[i] for i in (*f.statics, *f.leaves)] for f in functions]
            rows = [row + [frame[v] for v in functions[0].values] for row in given]
            ratio = _ratio(functions, rows)
            received = {v for e in stages.edges if e.target == stage for v in e.values}
            owner = MemoryOwner(capture.graph, received)
            arrived = sum(map(owner.size_bytes, owner.of_all(segment.arrives)))
            takes = frozenset(segment.takes)
            peak = arrived + _peak(functions[1], given[1], frame, takes, lasting)
            found.append(FusedCost(segment.digest, ratio, peak))
            results = functions[0].run(rows[0], 1)
            made = dict(zip(functions[0].outputs, results, strict=True))
            frame.update({value: made[value] for value in segment.keeps if value in made})
            for edge, sent in segment.sends:
                there = frames[stages.edges[edge].target]
                there.update({v: _compat.pytree.tree_map(_copied, made[v]) for v in sent})
    return tuple(found)


def _place(pair: tuple[int, SegmentKind]) -> tuple[int, int]:
    """Return when a segment is run: F of the first stage first, all else of the last one first."""
    stage, kind = pair
    return (0, stage) if kind == "F" else (1, 4 * -stage + _ORDER[kind])


def _copied(value: Any) -> Any:
    """Return a value as a message brings it: a tensor copied, all else as it is."""
    return value.clone() if isinstance(value, Tensor) else value


def _ratio(functions: Sequence[Function], given: Sequence[list[Any]]) -> float:
    """Return the seconds of the second function in those of the first; they take turns."""
    clock, times = clock_here(), [list[float]() for _ in functions]
    until = time.perf_counter() + _BUDGET_S
    while len(times[1]) <= _LEAST or time.perf_counter() < until:
        for function, row, own in zip(functions, given, times, strict=True):
            arguments = row.copy()
            start = clock()
            function.run(arguments, 1)
            own.append(clock() - start)
    plain_s, fused_s = (statistics.median(own[1:]) for own in times)
    return fused_s / max(plain_s, 1e-9)


def _peak(
    function: Function,
    given: Sequence[Any],
    frame: Frame,
    takes: AbstractSet[int],
    lasting: AbstractSet[int],
) -> int:
    """Return the most bytes held above those before; an input is freed where it dies.

    lasting:  the memory of weights, batch and constants.
    """

    def run(begins: Callable[[], object]) -> None:
        own = _apart([frame[v] for v in function.values], lasting)
        arguments = [*given, *own]
        kept = [each for v, each in zip(function.values, own, strict=True) if v not in takes]
        own.clear()
        begins()
        results = function.run(arguments, 1)
        del results, kept

    if here().is_queued:
        before, device = list[int](), here()
        device.synchronize()
        run(lambda: before.append(device.reset_peak()))
        return device.peak_bytes - before[0]
    with _compat.memory_profile() as memory:  # it knows only what was allocated under it
        run(lambda: _compat.memory_mark(0))
    now = peak = start = 0
    for event in memory():
        now += event.size_bytes
        if event.is_mark:
            peak = start = now
        peak = max(peak, now)
    return peak - start


def _apart(values: Sequence[Any], theirs: AbstractSet[int]) -> list[Any]:
    """Return copies that share memory as `values` do; those in `theirs` are not copied."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor) or (key := _compat.storage_key(value)) in theirs:
            return value
        if key not in copies:
            copies[key] = value.untyped_storage().clone()
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(copies[key], value.storage_offset(), value.shape, value.stride())

    return [_compat.pytree.tree_map(copy, value) for value in values]
