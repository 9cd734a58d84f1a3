"""Judge replicas: the plain loop's side of a proof, where each replica trains weights of its own.

There is a plain loop for each replica, on its part of each step's micro-batches; all of their
weights together are then averaged by the definition (averaging.py).
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.checkpoints import checkpoint
from penstock.errors import CheckpointError
from penstock.files import read_json
from penstock.job import Job
from penstock.prove.averaging import Memory, averaged, first_memory
from penstock.prove.compare import (
    Difference,
    Tensors,
    apart_of,
    compared_gradients,
    greatest,
    in_widths,
    least_scale,
)
from penstock.prove.plain import Plain
from penstock.prove.read_digest import ReadDigests, recorded
from penstock.prove.step_differences import (
    data_differences,
    found_step,
    loss_difference,
    part_of,
    state_differences,
)
from penstock.state.replica_keys import WEIGHTS, goes_on, own_of
from penstock.sums import SumsWay, sums_way

_ROUNDINGS = 8  # in the last bit of a weight, by an average


class AveragedReplicas(NamedTuple):
    """Replicas that average weights: how (penstock/sums.py), and how many there are."""

    averages: str
    replicas: int


class LookedAt(NamedTuple):
    """The steps that are compared, and with which checkpoint they begin; as in `Case`."""

    steps: tuple[int, ...]
    resume: Path | None
    updates: bool


def steps_of_replicas(
    job: Job, apart: AveragedReplicas, looked_at: LookedAt, folder: Path
) -> Iterator[Difference]:
    """Yield the differences of each step of all replicas.

    Raises:   as `judged`.
    """
    way, reads = sums_way(apart.averages), ReadDigests()
    losses = read_json(folder / "losses.json", CheckpointError, "losses")
    job = replace(job, data=recorded(job.data, reads))
    loops, memory = _begun(job, apart, looked_at.resume)
    for step in looked_at.steps:
        found, before, told = found_step(folder, step), list[dict[str, Tensor]](), list[float]()
        for replica, plain in enumerate(loops):
            before.append(plain.weights())
            own = _own(found, replica)
            given = part_of(own.tensors, "gradients/")
            made = plain.gradients(step)
            told.append(made.loss)
            least = least_scale(made.gradients)
            yield from in_widths(partial(compared_gradients, least=least), given, made.gradients)
            if looked_at.updates:
                plain.update(step, given)
                yield from state_differences(plain, own)
        yield from data_differences(found, reads.taken())
        yield loss_difference(loops[0], "loss", losses.get(str(step)), statistics.fmean(told))
        if not looked_at.updates:
            continue
        rows, memory = averaged(way, step, [plain.weights() for plain in loops], memory)
        for replica, pair in enumerate(zip(rows, before, strict=True)):
            had = part_of(_own(found, replica).tensors, WEIGHTS)
            yield from in_widths(partial(_averages_apart, "update", pair), had, pair[0])
        trained = {name for name, p in loops[0].parameters.items() if p.requires_grad}
        for place, values in memory.items():
            had = part_of(found.tensors, f"{place}/")
            wanted = {name: values[name] for name in trained}
            pair = rows[0], before[0]
            yield from in_widths(partial(_averages_apart, "average", pair), had, wanted)
        for replica, plain in enumerate(loops):
            own = _own(found, replica)
            plain.load(own.tensors, own.plain)
        memory = _memory(way, found.tensors, loops[0])


def _averages_apart(
    what: str, pair: tuple[Tensors, Tensors], found: Tensors, expected: Tensors
) -> Difference:
    """Return how far apart averages are, relative to what the step changes of weights.

    pair:     the weights after the step and before it.
    """
    after, before = pair
    worst, where, bitwise = 0.0, "", True
    for name, right in expected.items():
        if name not in found:
            return Difference(what, name, math.inf, bitwise=False)
        apart = apart_of(found[name], right)
        if apart is None:
            continue
        bitwise = False
        if math.isfinite(apart) and right.is_floating_point():
            least = _ROUNDINGS * torch.finfo(right.dtype).eps
            apart = max(0.0, apart - least * greatest(after[name]))
        moved = float((after[name].double() - before[name].double()).abs().max())
        value = apart / moved if 0 < apart < math.inf and moved > 0 else apart
        if not value <= worst:
            worst, where = value, name
    return Difference(what, where, worst, bitwise)


def _begun(job: Job, apart: AveragedReplicas, resume: Path | None) -> tuple[list[Plain], Memory]:
    """Return the plain loop of each replica, and what all of them remember, before the steps."""
    way, each = sums_way(apart.averages), job.micro_batches // apart.replicas
    loops = [Plain(job) for _ in range(apart.replicas)]
    tensors: Mapping[str, Tensor] = {}
    for replica, plain in enumerate(loops):
        plain.share = range(replica * each, (replica + 1) * each)
        if resume is not None:
            state = checkpoint.load(resume)
            tensors = state.tensors
            plain.load(*goes_on(state.tensors, state.plain, (replica, apart.replicas)))
    return loops, _memory(way, tensors, loops[0])


def _memory(way: SumsWay, tensors: Mapping[str, Tensor], plain: Plain) -> Memory:
    """Return what a checkpoint remembers; if it has nothing, what begins with the weights."""
    first, trained = first_memory(way, plain.weights()), {*plain.parameters}
    return {
        place: {name: tensors.get(f"{place}/{name}", values[name]) for name in trained}
        for place, values in first.items()
    }


def _own(found: checkpoint.Checkpoint, replica: int) -> checkpoint.Checkpoint:
    return checkpoint.Checkpoint(
        found.step, own_of(found.tensors, replica), own_of(found.plain, replica)
    )
