"""Known shapes: of micro-batches that are padded each to its longest, looked at before a run.

Where a step is one micro-batch only a plan shares it among ranks, and a plan is of shapes that are
known.  So all micro-batches of the run are read once beforehand, in a process of its own, if that
takes little time; with few shapes, each of many steps, the job is planned as one whose data tells
its shapes.  Each of them has to be traced and proved, which takes as long as many steps do.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.batches.by_shape import ByShape
from penstock.batches.reads import started
from penstock.errors import GraphError, RunError
from penstock.graph.batch import describe, keys_of
from penstock.graph.contents import flatten
from penstock.job import Job
from penstock.processes.child import Beat, can_fork, in_a_fork
from penstock.weighted import WeightedData

MOST_SHAPES = 8
LEAST_STEPS = 20  # of a run for each of its shapes
_READ_S, _SILENT_S = 5.0, 10.0  # for which they are read; until one of them comes


def with_known_shapes(job: Job, num_steps: int) -> Job | None:
    """Return a job whose data tells the shape of each micro-batch of the run; None: too many have
    another one, it takes long to read them, or a step is several.
    """
    if job.micro_batches != 1 or num_steps < 2 * LEAST_STEPS or not can_fork():
        return None
    try:
        told = in_a_fork(lambda beat: _shapes_of(job, num_steps, beat), _SILENT_S)
    except RunError:  # its data fails: it does so in the run
        return None
    return None if told is None else told_by(job, told["names"], told["places"])


def told_by(job: Job, names: Sequence[str], places: Sequence[int]) -> Job:
    """Return a job whose data tells the shape of each micro-batch.

    places:  of each micro-batch, that of its shape among the names.
    """
    shapes, own = tuple(names[at] for at in places), job.data
    if isinstance(own, WeightedData):
        return replace(job, data=replace(own, of=ByShape(own.of, shapes)))
    return replace(job, data=ByShape(own, shapes))


def _shapes_of(job: Job, num_steps: int, beat: Beat) -> Mapping[str, Any] | None:
    """Return the shapes of the micro-batches of a run, and which one each has; None: too many."""
    own = job.data.of if isinstance(job.data, WeightedData) else job.data
    names, places, end_s = dict[str, int](), list[int](), time.monotonic() + _READ_S
    for batch in started(own, 0):
        try:
            leaves, _ = flatten(batch)
            shape = describe(keys_of(leaves, range(len(leaves)))).replace("], ", "] and ")
        except GraphError:  # a tensor that no plan takes
            return None
        places.append(names.setdefault(shape, len(names)))
        is_over = len(names) > MOST_SHAPES or time.monotonic() > end_s
        if is_over or len(places) == num_steps:
            break
        beat()
    is_known = len(places) == num_steps >= LEAST_STEPS * len(names)
    if not is_known or not 1 < len(names) <= MOST_SHAPES:
        return None
    return {"names": list(names), "places": places}
