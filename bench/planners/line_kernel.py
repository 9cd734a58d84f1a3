"""Kernels of assignments: prices of stages, and the best stages on devices that stand in a line.

A stage is on consecutive devices of the line.  A suffix is known by how many stages it has, where
it begins, and the devices of its first stage; so messages between any two groups, and the
micro-batches in flight, are known when a stage is put before it.

Source:   PipeDream (arXiv:1806.03377), SPP (arXiv:2204.10562): stages on devices in order.
          DAPPLE (arXiv:2007.01045): the pivot, and plans that grow stage by stage.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.compiled import compiled
from penstock.search.transformer.partition_kernel import Choices, Floats, Longs

Bools: TypeAlias = NDArray[np.bool_]
UNFIT = 1e100  # seconds added where stages do not fit


class Arrays(NamedTuple):
    """Layers and devices; [.., layer] are sums over the layers before it."""

    seconds: Floats  # [kind, layer]: F and B of one micro-batch
    weights: Floats
    states: Floats
    kept: Floats
    sent: Floats  # [layer], no sum; 0 of the last one
    kind_of: Longs  # [device]
    per_byte_s: Floats  # [device, device]
    memory: Floats  # [device]


class Rules(NamedTuple):
    """How a planner takes the seconds of a stage.

    every, once   parts of a sum of gradients that every micro-batch bears: of each that a replica
                  takes, and anyway
    added         messages to the next stage and back that are added to the stage
    beside        the same, as if they were a stage of their own
    states, kept  whether memory holds them: 1, or 0
    in_flight     most micro-batches that a stage holds
    replicas      numbers of devices that a stage may have, increasing
    """

    every: float
    once: float
    added: float
    beside: float
    states: float
    kept: float
    in_flight: int
    replicas: Longs


class Line(NamedTuple):
    """Devices in an order; windows of it are [from, to)."""

    kinds: Bools  # [kind, from, to]: whether it is in the window
    sum_s: Floats  # [from, to]: of a ring, per byte
    message_s: Floats  # [from, to, end]: per byte to the window that begins at `to`
    memory: Floats  # [from, to]: least of the window


@compiled
def ring_s(arrays: Arrays, group: Longs) -> float:
    """Return the seconds per byte of a ring all-reduce."""
    slowest = 0.0
    for at in range(len(group)):
        slowest = max(slowest, float(arrays.per_byte_s[group[at], group[at - 1]]))
    return 2.0 * (len(group) - 1) / len(group) * slowest


@compiled
def hand_over_s(arrays: Arrays, senders: Longs, receivers: Longs) -> float:
    """Return the seconds per byte of a message whose parts lie with senders, then receivers."""
    longest = 0.0
    for way in range(2):
        own, others = (senders, receivers) if way == 0 else (receivers, senders)
        r, q = len(own), len(others)
        for i in range(r):
            total = 0.0
            for j in range(q):
                part = min((i + 1) / r, (j + 1) / q) - max(i / r, j / q)
                if part > 1e-12:
                    total += part * float(arrays.per_byte_s[own[i], others[j]])
            longest = max(longest, total)
    return longest


@compiled
def stage_prices(arrays: Arrays, ends: Longs, ranks: Longs, groups: tuple[Longs, Longs]) -> Floats:
    """Return [3, stage]: seconds of a micro-batch, of a message onwards, of the sum of gradients.

    groups   offsets [rank + 1], and the devices of all ranks
    """
    offsets, devices = groups
    found = np.zeros((3, len(ends)))
    first = 0
    for stage in range(len(ends)):
        end, rank = ends[stage], ranks[stage]
        group = devices[offsets[rank] : offsets[rank + 1]]
        for device in group:
            kind = arrays.kind_of[device]
            work = arrays.seconds[kind, end] - arrays.seconds[kind, first]
            found[0, stage] = max(found[0, stage], work / len(group))
        if stage + 1 < len(ends) and ranks[stage + 1] != rank:
            after = devices[offsets[ranks[stage + 1]] : offsets[ranks[stage + 1] + 1]]
            found[1, stage] = arrays.sent[end - 1] * hand_over_s(arrays, group, after)
        found[2, stage] = (arrays.weights[end] - arrays.weights[first]) * ring_s(arrays, group)
        first = end
    return found


@compiled
def held_bytes(
    arrays: Arrays, ends: Longs, ranks: Longs, groups: tuple[Longs, Longs], in_flight: Longs
) -> Floats:
    """Return [2, rank]: the most that a device of the group holds, and the room of the least one.

    in_flight   [rank, moment, stage]: activations held
    """
    offsets, devices = groups
    found = np.zeros((2, len(offsets) - 1))
    kept = np.empty(len(ends))
    first = 0
    for stage in range(len(ends)):
        rank = ranks[stage]
        kept[stage] = arrays.kept[ends[stage]] - arrays.kept[first]
        kept[stage] /= offsets[rank + 1] - offsets[rank]
        found[0, rank] += arrays.states[ends[stage]] - arrays.states[first]
        first = ends[stage]
    for rank in range(len(offsets) - 1):
        most = 0.0
        for moment in range(in_flight.shape[1]):
            total = 0.0
            for stage in range(len(ends)):
                total += in_flight[rank, moment, stage] * kept[stage]
            most = max(most, total)
        found[0, rank] += most
        found[1, rank] = arrays.memory[devices[offsets[rank] : offsets[rank + 1]]].min()
    return found


@compiled
def line_of(arrays: Arrays, order: Longs) -> Line:
    """Return the windows of devices in `order`."""
    count, kinds = len(order), len(arrays.seconds)
    present = np.zeros((kinds, count + 1, count + 1), np.bool_)
    sums, memory = np.zeros((count + 1, count + 1)), np.zeros((count + 1, count + 1))
    messages = np.zeros((count + 1, count + 1, count + 1))
    for start in range(count):
        for to in range(start + 1, count + 1):
            group = np.sort(order[start:to])
            sums[start, to] = ring_s(arrays, group)
            memory[start, to] = arrays.memory[group].min()
            for device in group:
                present[arrays.kind_of[device], start, to] = True
            for end in range(to + 1, count + 1):
                after = np.sort(order[to:end])
                messages[start, to, end] = hand_over_s(arrays, group, after)
    return Line(present, sums, messages, memory)


@compiled
def _work_s(arrays: Arrays, line: Line, first: int, end: int, start: int, to: int) -> float:
    """Return the seconds of layers on a window, equally shared."""
    longest = 0.0
    for kind in range(len(arrays.seconds)):
        if line.kinds[kind, start, to]:
            longest = max(longest, arrays.seconds[kind, end] - arrays.seconds[kind, first])
    return longest / (to - start)


@compiled
def _held(arrays: Arrays, rules: Rules, first: int, end: int, replicas: int, stages: int) -> float:
    """Return the bytes on a device of the first of `stages` stages, by 1F1B."""
    kept = min(stages, rules.in_flight) * (arrays.kept[end] - arrays.kept[first]) / replicas
    return rules.states * (arrays.states[end] - arrays.states[first]) + rules.kept * kept


@compiled
def best_suffixes(  # long: loops
    arrays: Arrays, line: Line, rules: Rules, limit_s: float, by_sum: bool, choice: Choices
) -> Floats:
    """Return [2, stages, first layer, from, to]: slowest and sum of the best suffix.

    Of stages and messages none is above `limit_s`; the slowest, or `by_sum` the sum, is least.
    choice[stages, first, from, to, 2]: end of the first stage, and of the window after it.
    """
    layers, count = len(arrays.sent), len(line.sum_s) - 1
    most = len(choice) - 1
    best = np.full((2, most + 1, layers + 1, count + 1, count + 1), np.inf)
    for stages in range(1, most + 1):
        for start in range(count):
            for r in rules.replicas:
                to = start + r
                if to > count - (stages - 1):
                    break
                share = (rules.every / r + rules.once) * line.sum_s[start, to]
                for first in range(layers):
                    least = np.inf
                    for end in range(first + 1, layers - stages + 2):
                        work_s = _work_s(arrays, line, first, end, start, to)
                        work_s += share * (arrays.weights[end] - arrays.weights[first])
                        held = _held(arrays, rules, first, end, r, stages)
                        if held > line.memory[start, to] or work_s > limit_s:
                            break
                        if stages == 1:
                            if end == layers:
                                best[:, stages, first, start, to] = work_s
                                choice[stages, first, start, to, 0] = end
                            continue
                        for after in range(to + 1, count + 1):
                            rest_s = best[0, stages - 1, end, to, after]
                            message_s = 2 * arrays.sent[end - 1] * line.message_s[start, to, after]
                            own_s = work_s + rules.added * message_s
                            longest = max(own_s, rules.beside * message_s)
                            if rest_s == np.inf or longest > limit_s:
                                continue
                            longest = max(longest, rest_s)
                            total = own_s + rules.beside * message_s
                            total += best[1, stages - 1, end, to, after]
                            if (total if by_sum else longest) < least:
                                least = total if by_sum else longest
                                best[0, stages, first, start, to] = longest
                                best[1, stages, first, start, to] = total
                                choice[stages, first, start, to, 0] = end
                                choice[stages, first, start, to, 1] = after
    return best


@compiled
def pivot_s(prices: Floats, entries: int, count: int) -> float:
    """Return DAPPLE's seconds of a step; prices [stages and messages in turn, (F, B, sum)].

    The pivot q begins at the last stage and moves to an earlier one whose steady state is longer
    than q's and a pass through what lies between them.  Then

        sum F[: q + 1] + (count - 1) * (F[q] + B[q]) + the longest way to the end of a stage s:
        its sum of gradients, and B[s .. q] if it is not behind q, less B[q + 1 .. s - 1] if it is
    """
    q, between = entries - 1, 0.0
    for s in range(entries - 2, -1, -1):
        own, pivot = prices[s, 0] + prices[s, 1], prices[q, 0] + prices[q, 1]
        if (count - 1) * own > (count - 1) * pivot + between:
            q, between = s, 0.0
        else:
            between += own
    total = (count - 1) * (prices[q, 0] + prices[q, 1])
    for s in range(q + 1):
        total += prices[s, 0]
    back, ending = 0.0, 0.0
    for s in range(q, -1, -1):
        back += prices[s, 1]
        ending = max(ending, back + prices[s, 2])
    ahead = 0.0
    for s in range(q + 1, entries):
        ending = max(ending, prices[s, 2] - ahead)
        ahead += prices[s, 1]
    return total + ending


@compiled
def _priced_s(arrays: Arrays, line: Line, rules: Rules, stages: Longs, number: int) -> float:
    """Return the pivot's seconds of stages [number, (first, end, from, to)], `UNFIT` added."""
    prices = np.zeros((2 * number - 1, 3))
    late = 0.0
    for at in range(number):
        first, end, start, to = stages[at]
        work = _work_s(arrays, line, first, end, start, to)
        prices[2 * at, 0], prices[2 * at, 1] = work / 3, 2 * work / 3
        weights = arrays.weights[end] - arrays.weights[first]
        prices[2 * at, 2] = weights * line.sum_s[start, to]
        if _held(arrays, rules, first, end, to - start, number - at) > line.memory[start, to]:
            late = UNFIT
        if at + 1 < number:
            message = arrays.sent[end - 1] * line.message_s[start, to, stages[at + 1, 3]]
            prices[2 * at + 1, :2] = message
    return pivot_s(prices, 2 * number - 1, rules.in_flight) + late


@compiled
def grown(arrays: Arrays, line: Line, rules: Rules) -> tuple[float, Longs]:
    """Return DAPPLE's seconds and its stages [stage, (first, end, from, to)].

    Of the plans that assign the same layers to the same devices one is kept: that whose seconds are
    least when one stage on all other devices has the other layers.
    """
    layers, count = len(arrays.sent), len(line.sum_s) - 1
    kept = np.zeros((layers + 1, count + 1, count + 1, 4), np.int64)
    sizes = np.zeros((layers + 1, count + 1), np.int64)
    least = np.full((layers + 1, count + 1), np.inf)
    least[0, 0] = 0.0
    best, chosen = np.inf, kept[0, 0, :0].copy()
    for first in range(layers):
        for start in range(count):
            if least[first, start] == np.inf:
                continue
            stages, size = kept[first, start].copy(), sizes[first, start]
            for r in rules.replicas:
                to = start + r
                if to > count:
                    break
                for end in range(first + 1, layers + 1):
                    stages[size, 0], stages[size, 1] = first, end
                    stages[size, 2], stages[size, 3] = start, to
                    number = size + 1
                    if end < layers:
                        if to == count:
                            continue
                        stages[number, 0], stages[number, 1] = end, layers
                        stages[number, 2], stages[number, 3] = to, count
                        number += 1
                    seconds = _priced_s(arrays, line, rules, stages, number)
                    if seconds < best:
                        best, chosen = seconds, stages[:number].copy()
                    if end < layers and seconds < least[end, to]:
                        least[end, to] = seconds
                        kept[end, to, : size + 1] = stages[: size + 1]
                        sizes[end, to] = size + 1
    return best, chosen
