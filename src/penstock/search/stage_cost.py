"""Stage cost: what consecutive layers cost on replicas of one device, for loops over all of them.

Source:   PipeDream, arXiv:1806.03377, and its public optimizer (replicas, sums of gradients).
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.compiled import compiled

Floats: TypeAlias = NDArray[np.float64]
Longs: TypeAlias = NDArray[np.int64]


class Costs(NamedTuple):
    """Layers and kinds of devices as arrays; [.., layer] are sums over the layers before it.

    seconds       [kind, layer]: forward and backward of one micro-batch
    sent          [layer]: bytes that layer hands on, no sum; 0 of the last one
    bytes_per_s   [kind, kind]: of a message from one to the other; on the diagonal also of sums
    every, once   bytes of sums of gradients, per byte of weights: of each micro-batch that a
                  replica takes, and divided by the micro-batches of a step
    in_flight     most micro-batches that a stage holds
    counts        [kind]: devices there are
    replicas      [.]: numbers of replicas that a stage may have, increasing
    """

    seconds: Floats
    weights: Floats
    states: Floats
    kept: Floats
    sent: Floats
    bytes_per_s: Floats
    every: float
    once: float
    in_flight: int
    memory: Floats
    counts: Longs
    replicas: Longs


@compiled
def compute_s(costs: Costs, first: int, end: int, kind: int, replicas: int) -> float:
    """Return the seconds per micro-batch of layers `first` .. `end - 1` on some replicas.

    seconds / r + (every / r + once) * (r - 1) / r * weight bytes / bytes_per_s
    """
    work = costs.seconds[kind, end] - costs.seconds[kind, first]
    weights = costs.weights[end] - costs.weights[first]
    ring = (replicas - 1) / replicas * weights / costs.bytes_per_s[kind, kind]
    return work / replicas + (costs.every / replicas + costs.once) * ring


@compiled
def message_s(costs: Costs, end: int, kind: int, following: int, replicas: int) -> float:
    """Return the seconds of an activation to the next stage and its gradient back, per replica."""
    return 2.0 * costs.sent[end - 1] / costs.bytes_per_s[kind, following] / replicas


@compiled
def fits(costs: Costs, first: int, end: int, kind: int, replicas: int, devices: int) -> bool:
    """Return whether a stage fits its devices, `devices` being those of it and all after it.

    States once, activations of ceil(devices / replicas) micro-batches.
    """
    in_flight = min(-(-devices // replicas), costs.in_flight)
    held = costs.states[end] - costs.states[first]
    held += in_flight * (costs.kept[end] - costs.kept[first])
    return held <= costs.memory[kind]
