"""By kind: what ops cost where the whole step has no room: each kind of op by itself.

Ops are of one kind if they are called alike, with tensors of the same shapes, strides and dtypes;
the blocks of a model repeat theirs.  So one op's arguments and results are held at a time, whatever
the size of the model.

Ignores:  what caches still hold of the op before; what a call of a segment adds to its ops; values:
          numbers are 0.5 and indices are 0.  An op that takes no such values costs nothing.
"""

import operator
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.device import here
from penstock.graph.code import callable_of
from penstock.graph.trace import Capture
from penstock.profile.marks import Sweep

_WARM_UPS, _RUNS = 2, 5
_QUEUED_S = 1e-4  # that the host takes to queue an op at most


class KindCost(NamedTuple):
    """What an op takes: seconds, and the bytes that it holds only while it runs."""

    seconds: float = 0.0
    workspace_bytes: int = 0


def costs_by_kind(
    capture: Capture, clock: Callable[[], Any]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return for each node its seconds, and the bytes that it holds only while it runs.

    clock:    as of `clock_of`.
    """
    known, sweep = dict[str, KindCost](), Sweep(here())
    seconds, workspaces = list[float](), list[int]()
    for op in capture.fx_nodes:
        cost = KindCost()
        if op.op == "call_function" and op.target is not operator.getitem:
            kind = f"{op.target} {fx.map_arg((op.args, op.kwargs), _form)}"
            if kind not in known:
                known[kind] = _cost(op, clock, sweep)
            cost = known[kind]
        seconds.append(cost.seconds)
        workspaces.append(cost.workspace_bytes)
    return tuple(seconds), tuple(workspaces)


def _form(node: fx.Node) -> Any:
    """Return all that an op sees of an argument but its values, as text that compares."""
    return _forms(node.meta.get("val"))


def _forms(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str((tuple(value.shape), value.stride(), value.dtype))
    if isinstance(value, tuple | list):
        return tuple(map(_forms, cast("list[Any]", value)))
    return str(value)


def _cost(op: fx.Node, clock: Callable[[], Any], sweep: Sweep) -> KindCost:
    target, device = callable_of(op.target), here()
    args, kwargs = fx.map_arg((op.args, op.kwargs), lambda node: _made(node.meta.get("val")))
    times, workspace = list[Any](), 0
    try:
        with torch.no_grad(), _compat.below_autograd():
            if device.is_queued:
                device.reset_peak()
                result = target(*args, **kwargs)
                peak = device.peak_bytes
                workspace = peak - device.reset_peak()
                del result
            sweep.ahead((_WARM_UPS + _RUNS) * _QUEUED_S)
            for _ in range(_WARM_UPS + _RUNS):
                start = clock()
                target(*args, **kwargs)
                times.append(clock() - start)
    except (RuntimeError, IndexError):  # of values that it does not take
        return KindCost()
    return KindCost(statistics.median(map(float, times[_WARM_UPS:])), workspace)


def _made(value: Any) -> Any:
    """Return values in the form of those without data, on the device of this process."""
    if isinstance(value, tuple | list):
        return tuple(map(_made, cast("list[Any]", value)))
    if not isinstance(value, Tensor):
        return value
    size = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    memory = torch.zeros(size if value.numel() else 0, dtype=value.dtype, device=here().place)
    if value.is_floating_point():
        memory += 0.5
    return memory.as_strided(value.shape, value.stride())
