"""Kernels of `partition`: the best suffixes of a chain of layers under a limit on every stage.

A suffix begins at a layer with a kind of device.  What it uses of the kinds is one number in
mixed radix, `used`; what stands after a stage is known when the stage is tried, so that its
message and the micro-batches in flight are known too.

What a stage costs is in this file too: a kernel kept on disk is made anew when its file changes.

Source:   PipeDream, arXiv:1806.03377, and its public optimizer (replicas, sums of gradients).
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.compiled import kept

Floats: TypeAlias = NDArray[np.float64]
Longs: TypeAlias = NDArray[np.int64]
Choices: TypeAlias = NDArray[np.int32]  # [layer, used, kind, 4]: end, replicas, used, kind after
_NEVER = 1 << 40


class ChainCosts(NamedTuple):
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


@kept
def compute_s(costs: ChainCosts, first: int, end: int, kind: int, replicas: int) -> float:
    """Return the seconds per micro-batch of layers `first` .. `end - 1` on some replicas.

    seconds / r + (every / r + once) * (r - 1) / r * weight bytes / bytes_per_s
    """
    work = costs.seconds[kind, end] - costs.seconds[kind, first]
    weights = costs.weights[end] - costs.weights[first]
    ring = (replicas - 1) / replicas * weights / costs.bytes_per_s[kind, kind]
    return work / replicas + (costs.every / replicas + costs.once) * ring


@kept
def message_s(costs: ChainCosts, end: int, kind: int, following: int, replicas: int) -> float:
    """Return the seconds of an activation to the next stage and its gradient back, per replica."""
    return 2.0 * costs.sent[end - 1] / costs.bytes_per_s[kind, following] / replicas


@kept
def fits(costs: ChainCosts, first: int, end: int, kind: int, replicas: int, devices: int) -> bool:
    """Return whether a stage fits its devices, `devices` being those of it and all after it.

    States once, activations of ceil(devices / replicas) micro-batches.
    """
    in_flight = min(-(-devices // replicas), costs.in_flight)
    held = costs.states[end] - costs.states[first]
    held += in_flight * (costs.kept[end] - costs.kept[first])
    return held <= costs.memory[kind]


@kept
def strides_of(counts: Longs, kinds: int) -> Longs:
    """Return the strides of the first `kinds` digits, then the product of all."""
    strides = np.ones(kinds + 1, np.int64)
    for kind in range(kinds):
        strides[kind + 1] = strides[kind] * (counts[kind] + 1)
    return strides


@kept
def fewest_devices(  # long: loops
    costs: ChainCosts, limit_s: float, choice: Choices
) -> tuple[int, int]:
    """Return what the first stage uses and its kind, of a chain with no stage above `limit_s`.

    least[layer, used, kind]: fewest devices of the last kind, with `used` of the others.  Fewer
    replicas of a stage leave the rest as it is and use less, so only the fewest that do are tried.
    (-1, -1): there is none.
    """
    num_kinds, layers = costs.seconds.shape[0], costs.seconds.shape[1] - 1
    last = num_kinds - 1
    strides = strides_of(costs.counts, last)
    size = strides[last]
    least = np.full((layers + 1, size, num_kinds), _NEVER, np.int64)
    least[layers, 0, 0] = 0
    spent = np.zeros(size, np.int64)
    for used in range(size):
        for kind in range(last):
            spent[used] += used // strides[kind] % (costs.counts[kind] + 1)
    for first in range(layers - 1, -1, -1):
        for end in range(first + 1, layers + 1):
            is_short = False
            for kind in range(num_kinds):
                for after in range(num_kinds if end < layers else 1):
                    start = _fewest_replicas(costs, first, end, kind, after, limit_s)
                    is_short = is_short or start >= 0
                    if start < 0:
                        continue
                    for used in range(size):
                        rest = least[end, used, after]
                        if rest == _NEVER:
                            continue
                        digit = rest
                        if kind < last:
                            digit = used // strides[kind] % (costs.counts[kind] + 1)
                        for at in range(start, len(costs.replicas)):
                            r = costs.replicas[at]
                            if digit + r > costs.counts[kind]:
                                break
                            if compute_s(costs, first, end, kind, r) > limit_s:
                                continue  # a sum of gradients that one replica less did not need
                            if not fits(costs, first, end, kind, r, spent[used] + rest + r):
                                continue
                            to = used + r * strides[kind] if kind < last else used
                            devices = rest + r if kind == last else rest
                            if devices < least[first, to, kind]:
                                least[first, to, kind] = devices
                                choice[first, to, kind, 0] = end
                                choice[first, to, kind, 1] = r
                                choice[first, to, kind, 2] = used
                                choice[first, to, kind, 3] = after
                            break
            if not is_short and not _can_be_longer(costs, first, end, limit_s):
                break
    for used in range(size):
        for kind in range(num_kinds):
            if least[0, used, kind] < _NEVER:
                return used, kind
    return -1, -1


@kept
def _fewest_replicas(
    costs: ChainCosts, first: int, end: int, kind: int, after: int, limit_s: float
) -> int:
    """Return the place of the fewest replicas that keep compute and message in the limit, or -1.

    Starts where the computes alone are in the limit, or as good as.
    """
    work = (costs.seconds[kind, end] - costs.seconds[kind, first]) * (1 - 1e-9)
    low, high = 0, len(costs.replicas)
    while low < high:
        middle = (low + high) // 2
        if work > limit_s * costs.replicas[middle]:
            low = middle + 1
        else:
            high = middle
    for at in range(low, len(costs.replicas)):
        r = costs.replicas[at]
        if r > costs.counts[kind]:
            return -1
        compute = compute_s(costs, first, end, kind, r)
        if max(compute, message_s(costs, end, kind, after, r)) <= limit_s:
            return at
    return -1


@kept
def _can_be_longer(costs: ChainCosts, first: int, end: int, limit_s: float) -> bool:
    """Return whether layers `first` .. `end - 1` could be part of a stage, sums not counted."""
    for kind in range(costs.seconds.shape[0]):
        work = costs.seconds[kind, end] - costs.seconds[kind, first]
        if work <= limit_s * costs.counts[kind]:
            return True
    return False


@kept
def least_sum(  # long: loops
    costs: ChainCosts, limit_s: float, choice: Choices
) -> tuple[int, int, float]:
    """Return used, kind and seconds of the stages whose sum is least, none above `limit_s`.

    Here `used` counts all kinds; a stage takes the longer of compute and message.  (-1, -1, inf):
    there are none.
    """
    num_kinds, layers = costs.seconds.shape[0], costs.seconds.shape[1] - 1
    strides = strides_of(costs.counts, num_kinds)
    size = strides[num_kinds]
    best = np.full((layers + 1, size, num_kinds), np.inf)
    best[layers, 0, 0] = 0.0
    spent = np.zeros(size, np.int64)
    for used in range(size):
        for kind in range(num_kinds):
            spent[used] += used // strides[kind] % (costs.counts[kind] + 1)
    for first in range(layers - 1, -1, -1):
        for end in range(first + 1, layers + 1):
            for kind in range(num_kinds):
                for after in range(num_kinds if end < layers else 1):
                    for r in costs.replicas:
                        if r > costs.counts[kind]:
                            break
                        stage_s = compute_s(costs, first, end, kind, r)
                        stage_s = max(stage_s, message_s(costs, end, kind, after, r))
                        if stage_s > limit_s:
                            continue
                        step = r * strides[kind]
                        for used in range(size - step):
                            sum_s = best[end, used, after] + stage_s
                            to = used + step
                            if sum_s >= best[first, to, kind]:
                                continue
                            if (
                                used // strides[kind] % (costs.counts[kind] + 1) + r
                                > costs.counts[kind]
                            ):
                                continue
                            if not fits(costs, first, end, kind, r, int(spent[to])):
                                continue
                            best[first, to, kind] = sum_s
                            choice[first, to, kind, 0] = end
                            choice[first, to, kind, 1] = r
                            choice[first, to, kind, 2] = used
                            choice[first, to, kind, 3] = after
    found, kind_found, least = -1, -1, np.inf
    for used in range(size):
        for kind in range(num_kinds):
            if best[0, used, kind] < least:
                found, kind_found, least = used, kind, best[0, used, kind]
    return found, kind_found, least
