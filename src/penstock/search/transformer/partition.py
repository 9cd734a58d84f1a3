"""Partition: consecutive layers as stages with replicas, on devices of one kind or several.

A stage of layers takes, per micro-batch and on r replicas, the longer of

    compute   seconds / r + sum of gradients
    message   2 * bytes handed on / bytes_per_s / r

Least is either the slowest stage, where every micro-batch is an update and the sum is
4 * (r - 1) / r^2 * weight bytes / bytes_per_s, as PipeDream's; or the step of 1F1B with M
micro-batches, (M - 1) max + sum, where a ring sums once a step and a micro-batch bears
2 * (r - 1) / r / M * weight bytes / bytes_per_s of it.

The slowest stage is found by bisection: with a limit on every stage, a dynamic program over
suffixes needs fewest devices, and the stages that it finds are themselves the next limit.  So
the result is exact, not within a tolerance.  The step is found by branch and bound on the limit;
exact to 1e-12.  Deterministic.

Ignores:  order of the replicas on the hosts; that a sum may hide behind computes.
Source:   PipeDream (arXiv:1806.03377): replicas, levels.  EdgePipe (arXiv:2110.14895): kinds in
          the state, so that their order is searched.  Alpa (arXiv:2201.12023): the step.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import PlanError
from penstock.search.transformer.partition_kernel import (
    ChainCosts,
    Choices,
    Floats,
    compute_s,
    fewest_devices,
    least_sum,
    message_s,
    strides_of,
)

_ENOUGH = 1e-12
_EXACT, _NEAR = 0.0, 1e-3  # tolerances of the slowest stage; near, to begin with


@dataclass(frozen=True, slots=True)
class Chain:
    """The bytes of every layer: weights, what it hands on, and what it holds.

    state_bytes  of weights, gradients, optimizer; default: the weights
    kept_bytes   of one micro-batch, from forward to backward; default: what is handed on
    Raises:   PlanError: no layer, lengths that differ, bytes below 0 or no number.
    """

    weight_bytes: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    state_bytes: tuple[float, ...] = ()
    kept_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, default in (("state_bytes", "weight_bytes"), ("kept_bytes", "sent_bytes")):
            if not getattr(self, name):
                object.__setattr__(self, name, getattr(self, default))
        for name in ("weight_bytes", "sent_bytes", "state_bytes", "kept_bytes"):
            _check_layers(name, getattr(self, name), len(self.weight_bytes))

    def __len__(self) -> int:
        return len(self.weight_bytes)


@dataclass(frozen=True, slots=True)
class Kind:
    """A number of like devices, and the seconds of each layer on one: forward and backward.

    Raises:   PlanError: no device, seconds below 0 or no number.
    """

    count: int
    layer_s: tuple[float, ...]
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PlanError(f"{self.count} devices of a kind", hint="give at least one")
        _check_layers("layer_s", self.layer_s, len(self.layer_s))


def _check_layers(name: str, values: Sequence[float], count: int) -> None:
    if not count or len(values) != count:
        raise PlanError(f"{name} of {len(values)} layers, not {count}", hint="one for each layer")
    for at, value in enumerate(values):
        if not 0 <= value < math.inf:
            raise PlanError(f"{name} of layer {at} is {value}", hint="it must be 0 or more")


@dataclass(frozen=True, slots=True)
class CutStage:
    """Layers `first` .. `end - 1` on `replicas` devices of kind `kind`; seconds per micro-batch."""

    first: int
    end: int
    kind: int
    replicas: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages from the input on, and the seconds that were to be least."""

    stages: tuple[CutStage, ...]
    value_s: float


def partition(
    chain: Chain,
    kinds: Sequence[Kind],
    bytes_per_s: float | Sequence[Sequence[float]],
    *,
    num_micro_batches: int | None = None,
    replicas: Sequence[int] | None = None,
) -> Partition:
    """Return the best stages on at most the devices of `kinds`.

    bytes_per_s        of the link, or [kind][kind]
    num_micro_batches  least is the step of 1F1B; None: least is the slowest stage
    replicas           numbers of replicas to choose from; None: any
    Raises:   PlanError: no partition fits the memory; arguments that do not fit together.
    """
    costs = costs_of(
        chain, kinds, bytes_per_s, num_micro_batches=num_micro_batches, replicas=replicas
    )
    low, slowest = _least_slowest(costs, _EXACT if num_micro_batches is None else _NEAR)
    if slowest is None:
        raise PlanError(
            f"no stages of {len(chain)} layers fit the memory of "
            + " + ".join(f"{k.count} x {k.memory_bytes:.4g} bytes" for k in kinds),
            hint="use more devices, or recompute",
        )
    if num_micro_batches is None:
        return slowest
    return _least_step(costs, num_micro_batches, low, slowest)


def can_be_within(costs: ChainCosts, limit_s: float) -> bool:
    """Return whether there are stages that fit the memory, none slower than `limit_s`."""
    return limit_s > 0 and _within(costs, limit_s) is not None


def costs_of(
    chain: Chain,
    kinds: Sequence[Kind],
    bytes_per_s: float | Sequence[Sequence[float]],
    *,
    num_micro_batches: int | None = None,
    replicas: Sequence[int] | None = None,
) -> ChainCosts:
    """Return the arrays that the kernels take.

    Raises:   PlanError: arguments that do not fit together.
    """
    most = max((kind.count for kind in kinds), default=0)
    numbers = sorted(set(range(1, most + 1) if replicas is None else replicas))
    links = np.broadcast_to(np.asarray(bytes_per_s, np.float64), (len(kinds), len(kinds)))
    if not kinds or any(len(kind.layer_s) != len(chain) for kind in kinds):
        raise PlanError("kinds do not have seconds for each layer", hint="give one kind or more")
    if not numbers or numbers[0] < 1 or not links.min() > 0 or (num_micro_batches or 1) < 1:
        hint = "replicas, links and micro-batches are above 0"
        raise PlanError(f"replicas {numbers[:1]}, links of {links.min()} bytes/s", hint=hint)
    sent = np.array(chain.sent_bytes, np.float64)
    sent[-1] = 0.0
    return ChainCosts(
        np.stack([_sums(kind.layer_s) for kind in kinds]),
        _sums(chain.weight_bytes),
        _sums(chain.state_bytes),
        _sums(chain.kept_bytes),
        sent,
        np.ascontiguousarray(links),
        4.0 if num_micro_batches is None else 0.0,
        0.0 if num_micro_batches is None else 2.0 / num_micro_batches,
        1 << 30 if num_micro_batches is None else num_micro_batches,
        np.array([kind.memory_bytes for kind in kinds], np.float64),
        np.array([kind.count for kind in kinds], np.int64),
        np.array(numbers, np.int64),
    )


def _sums(values: Sequence[float]) -> Floats:
    return np.array([0.0, *itertools.accumulate(values)], np.float64)


def _least_slowest(costs: ChainCosts, tolerance: float) -> tuple[float, Partition | None]:
    """Return a limit that fails, and the partition whose slowest stage is fastest, or None.

    A limit that fails is below the optimum; stages found under a limit are at or above it.  Ends
    where both are within `tolerance`; if that is 0, where the next smaller number fails.
    """
    best = _within(costs, math.inf)
    low = 0.0
    while best is not None and best.value_s - low > tolerance * best.value_s:
        middle = (low + best.value_s) / 2
        is_near = best.value_s - low <= _ENOUGH * best.value_s or middle <= low
        limit = math.nextafter(best.value_s, 0.0) if is_near else middle
        found = _within(costs, limit)
        if found is not None:
            best = found
        elif is_near:
            return limit, best
        else:
            low = middle
    return low, best


def _within(costs: ChainCosts, limit_s: float) -> Partition | None:
    """Return a partition with no stage slower than `limit_s`, on fewest devices, or None."""
    kinds, layers = len(costs.counts), len(costs.sent)
    strides = strides_of(costs.counts, kinds - 1)
    choice = np.zeros((layers + 1, strides[-1], kinds, 4), np.int32)
    used, kind = fewest_devices(costs, limit_s, choice)
    if kind < 0:
        return None
    stages = _stages(costs, choice, used, kind)
    return Partition(stages, max(stage.seconds for stage in stages))


def _stages(costs: ChainCosts, choice: Choices, used: int, kind: int) -> tuple[CutStage, ...]:
    found: list[CutStage] = []
    first, layers = 0, len(costs.sent)
    while first < layers:
        end, replicas, used, after = map(int, choice[first, used, kind])
        seconds = max(
            compute_s(costs, first, end, kind, replicas),
            message_s(costs, end, kind, after, replicas),
        )
        found.append(CutStage(first, end, kind, replicas, seconds))
        first, kind = end, after
    return tuple(found)


def _least_step(costs: ChainCosts, count: int, low: float, slowest: Partition) -> Partition:
    """Return the partition whose (count - 1) max + sum is least; a limit of `low` fails.

    The sum can only grow as the limit falls.  So between two limits no value is below
    (count - 1) * lower limit + sum at the upper one; an interval that promises less than the best
    is cut in two.
    """
    choice = np.zeros(_choices_shape(costs), np.int32)

    def within(limit_s: float) -> _Cut | None:
        used, kind, _ = least_sum(costs, limit_s, choice)
        return _cut(_stages(costs, choice, used, kind), count) if kind >= 0 else None

    best = _cut(slowest.stages, count)
    widest = within(math.inf) or best
    best = min(best, widest, key=lambda cut: cut.value_s)
    intervals = [(low, widest.longest_s, widest.sum_s)]
    while intervals:
        low, high, sum_s = intervals.pop()
        bound = (count - 1) * low + sum_s
        middle = (low + high) / 2
        if not low < middle < high or bound >= best.value_s * (1 - _ENOUGH):
            continue
        found = within(middle)
        intervals.append((middle, high, sum_s))
        if found is not None:
            best = min(best, found, key=lambda cut: cut.value_s)
            intervals.append((low, found.longest_s, found.sum_s))
    return Partition(best.stages, best.value_s)


class _Cut(NamedTuple):
    stages: tuple[CutStage, ...]
    value_s: float
    longest_s: float
    sum_s: float


def _cut(stages: tuple[CutStage, ...], count: int) -> _Cut:
    longest, total = max(stage.seconds for stage in stages), sum(stage.seconds for stage in stages)
    return _Cut(stages, (count - 1) * longest + total, longest, total)


def _choices_shape(costs: ChainCosts) -> tuple[int, int, int, int]:
    kinds = len(costs.counts)
    return len(costs.sent) + 1, int(strides_of(costs.counts, kinds)[-1]), kinds, 4
