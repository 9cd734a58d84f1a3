"""Mixed: the best pipelines over pools of different devices, each pool in a zone of its own.

A stage is tensor x data devices of one pool, so gradients are never summed across zones; stages
have as many blocks as their device is fast, and the order of the kinds is searched.

Candidates come in the order of a bound: blocks spread over all devices as if they could be cut
anywhere.  One that cannot be among the best, because its bound is no better or because no
stages are fast enough and fit the memory, is dropped; of the others (M - 1) max + sum is made as
small as possible (partition), and what is done once a step is added.  So the best by this
closed form are found whatever was dropped, and these are simulated.

Ignores:  what is done once a step, where it depends on the cut; degrees that differ from stage
          to stage; zones with devices of several kinds.
Source:   Sailor (SOSP 2025), whose case this is; EdgePipe (arXiv:2110.14895).
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.errors import PlanError
from penstock.estimate.constants import Constants
from penstock.estimate.peak_memory import memory_terms
from penstock.estimate.runs import Runs
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.transformer import Transformer
from penstock.estimate.work_terms import Floats, time_terms
from penstock.search.transformer.exact_step import best_steps
from penstock.search.transformer.found import (
    Configuration,
    Configurations,
    Pool,
    Pools,
    cost_of,
    front_of,
)
from penstock.search.transformer.layer_costs import LayerCosts, layer_costs
from penstock.search.transformer.partition import (
    Chain,
    Kind,
    Partition,
    can_be_within,
    costs_of,
    partition,
)
from penstock.search.transformer.space import Choice, Space, divisors, runs_of

_WORD = 2  # bytes of a number that is sent
_SLOWER = "cannot be among the fastest, or fit only when they are slower"


class _Candidates(NamedTuple):
    """All candidates, and their costs on the device of every pool."""

    pools: Sequence[Pool]
    runs: Runs
    costs: tuple[LayerCosts, ...]
    cells: Floats  # [run, pool]: stages that the pool has room for
    between_bytes_per_s: float


def mixed_configurations(
    model: Transformer,
    there: Pools,
    *,
    batch: int,
    constants: tuple[Constants, Constants],
    most: int = 8,
    space: Space = Space(),  # noqa: B008 - a frozen record
) -> Configurations:
    """Return the fastest pipelines on batches of `batch` samples, the best `most` simulated.

    constants   of time and of memory, for every candidate
    Raises:   PlanError: no pool, two with the same device; nothing fits the memory or the batch.
    """
    pools, between_bytes_per_s = there
    if not pools or len({pool.device.name for pool in pools}) < len(pools):
        raise PlanError(f"{len(pools)} pools", hint="give one for each kind of device")
    choices = list(_choices(model, pools, batch, space))
    if not choices:
        raise PlanError(f"no degrees divide a batch of {batch}", hint="give another batch")
    runs = runs_of(model, (model.blocks,), (pools[0].device,), choices)
    costs = tuple(layer_costs(runs, pool.device, constants) for pool in pools)
    cells = [pool.count // (runs.tensor * runs.data) for pool in pools]
    most_cells = np.minimum(np.stack(cells, axis=1), min(model.blocks, space.most_pipe))
    problem = _Candidates(pools, runs, costs, most_cells.astype(np.float64), between_bytes_per_s)
    found, rejected = _best(problem, constants[0], most)
    if not found:
        raise PlanError(
            f"none of {len(runs)} candidates fits the memory",
            hint="use more devices, or another batch",
        )
    made = _simulated(found, problem, constants)
    return Configurations(made[0], front_of(made), made, len(runs), rejected)


def _choices(model: Transformer, pools: Sequence[Pool], batch: int, space: Space) -> list[Choice]:
    """Return the degrees of which at least one stage fits a pool, tensor ranks inside a host."""
    found: list[Choice] = []
    count = max(pool.count for pool in pools)
    inside = min(pool.device.ranks_per_host for pool in pools)
    for tensor, data in itertools.product(divisors(model.heads), divisors(batch)):
        if tensor > inside or tensor * data > count:
            continue
        parallel = [False] if tensor == 1 else space.sequence_parallel
        for micro_batch in divisors(batch // data):
            numbers = (tensor, data, micro_batch, batch // data // micro_batch, 1)
            for words in itertools.product(space.recompute, space.sharding, parallel):
                found.append((*numbers, *words))
    return found


class _ByClosedForm(NamedTuple):
    value_s: float
    at: int
    run: TrainingRun


def _best(
    problem: _Candidates, constants: Constants, most: int
) -> tuple[list[TrainingRun], tuple[tuple[str, int], ...]]:
    """Return the best runs by their closed form, and why the others are not among them."""
    bounds = _bounds(problem)
    order = [int(at) for at in np.argsort(bounds, kind="stable") if bounds[at] < np.inf]
    found: list[_ByClosedForm] = []
    reasons = Counter({"have no stages within the memory": len(bounds) - len(order)})
    for place, at in enumerate(order):
        worst_s = found[-1].value_s if len(found) == most else np.inf
        if bounds[at] >= worst_s:
            reasons[_SLOWER] += len(order) - place
            break
        cut = _partition(problem, at, worst_s)
        if isinstance(cut, str):
            reasons[cut] += 1
            continue
        run = _run(problem, at, cut)
        value_s = cut.value_s + float(time_terms([run]).once_s(constants.array)[0])
        found = sorted([*found, _ByClosedForm(value_s, at, run)])[: most + 1]
        if len(found) > most:
            reasons[_SLOWER] += 1
            found.pop()
    rejected = tuple((reason, number) for reason, number in reasons.items() if number)
    return [each.run for each in found], rejected


def _bounds(problem: _Candidates) -> Floats:
    """Return what no partition of each run can beat: (M - 1) work / speed + least sum.

    Infinite where all devices together cannot hold the states.
    """
    totals = np.stack([cost.seconds.sum(axis=1) for cost in problem.costs], axis=1)
    speed = (problem.cells / totals).sum(axis=1)
    with np.errstate(divide="ignore"):
        bounds = (problem.runs.num_micro_batches - 1) / speed + totals.min(axis=1)
    room = np.zeros(len(bounds))
    for at, (pool, cost) in enumerate(zip(problem.pools, problem.costs, strict=True)):
        room += problem.cells[:, at] * np.maximum(pool.memory_bytes - cost.fixed_bytes, 0)
    states = problem.costs[0].state_bytes + problem.costs[0].kept_bytes
    return np.where((states.sum(axis=1) > room) | (speed == 0), np.inf, bounds)


def _least_total(problem: _Candidates, at: int) -> float:
    used = [k for k in range(len(problem.pools)) if problem.cells[at, k] > 0]
    return min(float(problem.costs[k].seconds[at].sum()) for k in used)


def _pools_of(problem: _Candidates, at: int) -> list[int]:
    """Return the pools in which a stage of run `at` fits."""
    return [
        k
        for k, pool in enumerate(problem.pools)
        if problem.cells[at, k] > 0 and pool.memory_bytes > problem.costs[k].fixed_bytes[at]
    ]


def _partition(problem: _Candidates, at: int, worst_s: float) -> Partition | str:
    """Return the best stages of run `at`, one cell each; or why it is not faster than `worst_s`."""
    used, runs = _pools_of(problem, at), problem.runs
    if not used:
        return "have no stages within the memory"
    count, blocks = int(runs.num_micro_batches[at]), runs.model.blocks
    cost = problem.costs[used[0]]
    sent = float(_WORD * runs.tokens[at] * runs.model.hidden)
    chain = Chain(
        (0.0,) * blocks, (sent,) * blocks, tuple(cost.state_bytes[at]), tuple(cost.kept_bytes[at])
    )
    kinds = [
        Kind(
            int(problem.cells[at, k]),
            tuple(problem.costs[k].seconds[at]),
            problem.pools[k].memory_bytes - float(problem.costs[k].fixed_bytes[at]),
        )
        for k in used
    ]
    links = [[_link(problem, at, a, b) for b in used] for a in used]
    if worst_s < np.inf and count > 1:
        costs = costs_of(chain, kinds, links, num_micro_batches=count, replicas=(1,))
        if not can_be_within(costs, (worst_s - _least_total(problem, at)) / (count - 1)):
            return _SLOWER
    try:
        found = partition(chain, kinds, links, num_micro_batches=count, replicas=(1,))
    except PlanError:
        return "have no stages within the memory"
    stages = tuple(replace(stage, kind=used[stage.kind]) for stage in found.stages)
    return replace(found, stages=stages)


def _link(problem: _Candidates, at: int, a: int, b: int) -> float:
    """Return the bytes per second that the message of one replica has between two pools."""
    if a == b:
        return float(problem.pools[a].device.across_bytes_per_s * problem.runs.tensor[at])
    return float(problem.between_bytes_per_s / problem.runs.data[at])


def _run(problem: _Candidates, at: int, cut: Partition) -> TrainingRun:
    blocks = tuple(stage.end - stage.first for stage in cut.stages)
    devices = tuple(problem.pools[stage.kind].device for stage in cut.stages)
    run = problem.runs.one(at, "+".join(pool.device.name for pool in problem.pools))
    return replace(run, stage_blocks=blocks, devices=devices)


def _simulated(
    runs: Sequence[TrainingRun],
    problem: _Candidates,
    constants: tuple[Constants, Constants],
) -> tuple[Configuration, ...]:
    """Return the runs simulated, messages between zones on their own link, the fastest first."""
    message_s: list[Floats] = []
    for run in runs:
        crossing = [a != b for a, b in itertools.pairwise(run.devices)]
        sent = _WORD * run.tokens * run.model.hidden * run.data / problem.between_bytes_per_s
        message_s.append(sent * np.array([*crossing, False]))
    peaks = memory_terms(runs).of(constants[1].array)
    steps = best_steps(runs, constants[0], message_s)
    made = [
        Configuration(
            run, step.schedule, step.seconds, float(peak),
            cost_of(run, problem.pools, step.seconds),
        )
        for run, step, peak in zip(runs, steps, peaks, strict=True)
    ]  # fmt: skip
    return tuple(sorted(made, key=lambda each: (each.seconds, each.peak_bytes)))
