"""Planners: how published planners choose, each as a few settings of one search.

A planner says in which lines it puts the devices, what it takes a stage to cost, what is to be
least, and by which schedule the stages run.  What it plans is then simulated like everything else:
a synchronous step.  Its own claims are not looked at.

Reproduced is how a planner chooses stages and devices, as its paper and where there is one its
public code say it, on our problem: a chain, replicas that share every micro-batch.  Recomputing,
tensor parallel and swapping are left out, also where a planner has them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from bench.planners.device_order import Order, by_min_cut, listed, scattered
from bench.planners.line import front_on_line, on_line
from bench.planners.line_kernel import UNFIT, Arrays, Rules, grown, line_of, stage_prices
from bench.planners.problem import Assignment, Groups, Problem, slowest_links
from bench.planners.simulated import Outcome, simulated
from penstock.errors import PlanError
from penstock.search.transformer.partition import Chain, Kind, partition
from penstock.search.transformer.partition_kernel import Floats


class Found(NamedTuple):
    """What a planner takes stages to cost, and the stages."""

    value: float
    ends: tuple[int, ...]
    groups: Groups


@dataclass(frozen=True, slots=True)
class Planner:
    """The settings of a planner.

    goal          yields candidates with what it takes them to cost; the first of the least is taken
    orders        lines of devices that are tried
    alike         all devices are taken for one with the mean seconds and the least memory
    memory        times that states, and activations in flight by 1F1B, are counted; (0, 0): memory
                  is not looked at
    every_sum     parts of the ring sum of gradients that a micro-batch of a replica bears
    step_sum      parts of it that are divided by the micro-batches of a step
    message       to the next stage and back: times it is added to a stage, and times it is a stage
                  of its own
    simulates     whether it simulates its candidates and takes the fastest
    """

    name: str
    goal: "Goal"
    orders: Callable[[Problem], Iterator[Order]] = listed
    alike: bool = True
    memory: tuple[float, float] = (1.0, 1.0)
    every_sum: float = 0.0
    step_sum: float = 1.0
    message: tuple[float, float] = (0.0, 1.0)
    schedule: str = "one_f_one_b"
    simulates: bool = False


Goal = Callable[[Problem, Planner], Iterator[Found]]


def plan_as(planner: Planner, problem: Problem) -> Outcome:
    """Return the plan that a planner would have run, and its seconds; it may not fit.

    Raises:   PlanError: it finds nothing that it takes to fit.
    """
    seen = _alike(problem) if planner.alike else problem
    found = list(planner.goal(seen, planner))
    if not found:
        count = problem.num_devices
        message = (
            f"{planner.name} finds no stages of {len(problem.chain)} layers on {count} devices"
        )
        raise PlanError(message, hint="give more memory, or another planner")
    made = [Assignment(one.ends, one.groups, planner.schedule) for one in found]
    if planner.simulates:
        weighed = [one.step_s for one in simulated(seen, made)]
    else:
        weighed = [one.value for one in found]
    return simulated(problem, [made[weighed.index(min(weighed))]])[0]


def _alike(problem: Problem) -> Problem:
    """Return the problem with all devices as one mean device."""
    counts = np.array([kind.count for kind in problem.kinds])
    seconds = counts @ np.array([kind.layer_s for kind in problem.kinds]) / counts.sum()
    least = min(kind.memory_bytes for kind in problem.kinds)
    return replace(problem, kinds=(Kind(int(counts.sum()), tuple(seconds.tolist()), least),))


def rules_of(planner: Planner, problem: Problem, replicas: Sequence[int] | None = None) -> Rules:
    """Return the settings as the kernels take them; any number of replicas by default."""
    count = problem.num_micro_batches
    numbers = range(1, problem.num_devices + 1) if replicas is None else replicas
    added, beside = planner.message
    states, kept = planner.memory
    return Rules(
        planner.every_sum, planner.step_sum / count, added, beside, states, kept,
        count, np.array(numbers, np.int64),
    )  # fmt: skip


# -- goals


def slowest(
    problem: Problem, planner: Planner, *, replicas: Sequence[int] | None = None, full: bool = False
) -> Iterator[Found]:
    """Yield the stages whose slowest is fastest, for every number of them.

    full   only the greatest number
    """
    arrays, rules = problem.arrays(), rules_of(planner, problem, replicas)
    for order in planner.orders(problem):
        found = on_line(arrays, order, rules)
        for one in found[-1:] if full else found:
            yield Found(one.slowest_s, one.ends, one.groups)


def step(problem: Problem, planner: Planner) -> Iterator[Found]:
    """Yield stages of which one has the least (M - 1) max + sum."""
    arrays, rules, rounds = (
        problem.arrays(),
        rules_of(planner, problem),
        problem.num_micro_batches - 1,
    )
    for order in planner.orders(problem):
        least = min((one.slowest_s for one in on_line(arrays, order, rules)), default=math.inf)
        best = math.inf
        for front in front_on_line(arrays, order, rules):
            for one in front:
                yield Found(rounds * one.slowest_s + one.sum_s, one.ends, one.groups)
                best = min(best, rounds * one.slowest_s + one.sum_s)
            if rounds * least + min(one.sum_s for one in front) >= best:
                break


def pivot(problem: Problem, planner: Planner) -> Iterator[Found]:
    """Yield the stages that DAPPLE's dynamic program over its pivot's latency finds."""
    arrays, rules = problem.arrays(), rules_of(planner, problem)
    for order in planner.orders(problem):
        value, stages = grown(arrays, line_of(arrays, np.array(order, np.int64)), rules)
        if value < UNFIT:
            groups = tuple(order[start:to] for _, _, start, to in stages.tolist())
            yield Found(value, tuple(stages[:, 1].tolist()), groups)


Formula = Callable[[Floats, int], float]  # of [seconds, message, sum][stage] and M


def even(problem: Problem, planner: Planner, *, formula: Formula) -> Iterator[Found]:
    """Yield equally many layers on equally many neighbours, for every depth that divides."""
    arrays, layers, count = problem.arrays(), len(problem.chain), problem.num_devices
    for order in planner.orders(problem):
        for depth in range(1, min(layers, count) + 1):
            if count % depth:
                continue
            width = count // depth
            ends = tuple((at + 1) * layers // depth for at in range(depth))
            groups = tuple(order[at : at + width] for at in range(0, count, width))
            if _fits(problem, planner, ends, groups):
                offsets = np.arange(0, count + 1, width)
                places = (offsets, np.array(order, np.int64))
                prices = stage_prices(arrays, np.array(ends), np.arange(depth), places)
                yield Found(formula(prices, problem.num_micro_batches), ends, groups)


def _fits(problem: Problem, planner: Planner, ends: Sequence[int], groups: Groups) -> bool:
    """Return whether stages fit, as `planner` counts memory."""
    arrays = problem.arrays()
    bounds = np.array([0, *ends])
    in_flight = np.minimum(np.arange(len(ends), 0, -1), problem.num_micro_batches)
    kept = in_flight * np.diff(arrays.kept[bounds]) / [len(group) for group in groups]
    held = planner.memory[0] * np.diff(arrays.states[bounds]) + planner.memory[1] * kept
    room = [arrays.memory[list(group)].min() for group in groups]
    return bool((held <= room).all())


def double_buffered(prices: Floats, count: int) -> float:
    """Return 2BW's seconds per micro-batch: the slowest stage with its messages, or sum."""
    compute, message, sums = prices
    behind = np.concatenate([np.zeros(1), message[:-1]])
    return float(np.maximum(compute + behind + message, sums / count).max())


def shallowest(prices: Floats, count: int) -> float:
    """Return the stages: Megatron's rule is no more model parallelism than memory asks for."""
    return float(prices.shape[1])


def by_kind(problem: Problem, planner: Planner) -> Iterator[Found]:
    """Yield EdgePipe's stages: one device each, kinds in the state, so that their order is found.

    A forward pass alone, so weights alone are held.  Between two kinds counts their slowest link.
    """
    chain, kinds, kind_of = problem.chain, problem.kinds, np.array(problem.kind_of)
    alone = Chain(chain.weight_bytes, chain.sent_bytes, kept_bytes=(0.0,) * len(chain))
    forward = [replace(kind, layer_s=tuple(2 / 3 * s for s in kind.layer_s)) for kind in kinds]
    try:
        found = partition(alone, forward, slowest_links(problem), replicas=(1,))
    except PlanError:
        return
    devices = [iter(np.flatnonzero(kind_of == kind).tolist()) for kind in range(len(kinds))]
    groups = tuple((next(devices[stage.kind]),) for stage in found.stages)
    yield Found(found.value_s, tuple(stage.end for stage in found.stages), groups)


def halves(problem: Problem, planner: Planner) -> Iterator[Found]:
    """Yield DawnPiper's stages: halved again and again, each cut between two balanced ones.

    Those are where the seconds, and where the bytes, are shared out as the devices are.  Of the
    cuts from one to the other that is taken which makes the slowest stage fastest, and fits.
    """
    arrays, rules = problem.arrays(), rules_of(planner, problem)
    for order in planner.orders(problem):
        count = min(len(order), len(problem.chain))
        slowest_s, ends = _halved(arrays, rules, (0, len(problem.chain)), (0, count), count)
        if slowest_s < math.inf:
            yield Found(slowest_s, ends, tuple((device,) for device in order[:count]))


def _halved(
    arrays: Arrays, rules: Rules, layers: tuple[int, int], devices: tuple[int, int], count: int
) -> tuple[float, tuple[int, ...]]:
    """Return the slowest stage and the ends of `layers` on `devices`, one each, of `count` alike.

    Endless where they do not fit.
    """
    (first, end), (start, to) = layers, devices
    in_flight = min(count - start, rules.in_flight)  # of the first stage, which has the most
    held = rules.states * arrays.states + rules.kept * in_flight * arrays.kept
    if to - start == 1:
        fits = held[end] - held[first] <= arrays.memory.min()
        return float(arrays.seconds[0, end] - arrays.seconds[0, first]) if fits else math.inf, (
            end,
        )
    middle = (start + to) // 2
    balanced: list[int] = []
    for before in (arrays.seconds[0], held):
        aim = before[first] + (before[end] - before[first]) * (middle - start) / (to - start)
        at = int(np.abs(before[first : end + 1] - aim).argmin()) + first
        balanced.append(min(max(at, first + middle - start), end - to + middle))
    best: tuple[float, tuple[int, ...]] = (math.inf, (end,))
    for cut in range(min(balanced), max(balanced) + 1):
        left = _halved(arrays, rules, (first, cut), (start, middle), count)
        right = _halved(arrays, rules, (cut, end), (middle, to), count)
        best = min(best, (max(left[0], right[0]), left[1] + right[1]))
    return best


# -- the planners


def both_ways(problem: Problem) -> Iterator[Order]:
    """Yield the devices host by host, and scattered over the hosts."""
    return itertools.chain(listed(problem), scattered(problem))


_NO_MEMORY = (0.0, 0.0)
_one = partial(slowest, replicas=(1,), full=True)

PLANNERS: tuple[Planner, ...] = (
    # arXiv:1806.03377, section 3.2 and the public optimizer: 4 (r - 1) / r^2 of the weights
    Planner("PipeDream", slowest, memory=_NO_MEMORY, every_sum=2.0, step_sum=0.0),
    # arXiv:2006.09503, section 4: equal stages of a model of equal blocks
    Planner("2BW", partial(even, formula=double_buffered)),
    # arXiv:2007.01045, section 4: of its three placements one for the whole plan
    Planner("DAPPLE", pivot, both_ways),
    # arXiv:2204.10562: M times a stage and its sum, or M times a message
    Planner(
        "SPP", slowest, by_min_cut, memory=_NO_MEMORY, schedule="list_schedule", simulates=True
    ),
    # arXiv:2012.12544: all devices, one to a stage, seconds of each device as it is
    Planner("BaPipe", _one, alike=False),
    # arXiv:2110.14895
    Planner("EdgePipe", by_kind, alike=False),
    # arXiv:2104.04473, section 3: pipelines no longer than memory asks for, equal blocks
    Planner("Megatron", partial(even, formula=shallowest)),
    # arXiv:2201.12023, equation 2
    Planner("Alpa", step, message=(0.0, 0.0)),
    # arXiv:2505.05856
    Planner("DawnPiper", halves),
)
