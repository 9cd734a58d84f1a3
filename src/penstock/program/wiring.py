"""Wiring: the edges between stages and the laws of the weights, as arrays for the loops."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ProgramError
from penstock.program.edges import Edge
from penstock.schedule.weight_rule import WeightRule


class Wiring(NamedTuple):
    """Edges by their ends.  F edges of stage s stand in list 2 * s, B edges in list 2 * s + 1."""

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    into: NDArray[np.int32]  # edges by target and kind
    into_offsets: NDArray[np.int64]
    out_of: NDArray[np.int32]  # edges by source and kind
    out_of_offsets: NDArray[np.int64]


class Laws(NamedTuple):
    """The versions that the law says, [stage or 1, micro-batch]: 1 where all stages read alike."""

    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    history: NDArray[np.int64]  # [stage]: versions before version 0 that are there


def wire(num_stages: int, edges: Sequence[Edge]) -> Wiring:
    """Return `edges` as arrays."""
    backward = np.array([edge.kind == "B" for edge in edges], np.int64)
    source = np.array([edge.source for edge in edges], np.int32)
    target = np.array([edge.target for edge in edges], np.int32)
    into, into_offsets = _lists(2 * target + backward, 2 * num_stages)
    out_of, out_of_offsets = _lists(2 * source + backward, 2 * num_stages)
    return Wiring(source, target, into, into_offsets, out_of, out_of_offsets)


def _lists(keys: NDArray[np.int64], num_keys: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the places in `keys` sorted by key, and where each key begins."""
    sizes = np.bincount(keys, minlength=num_keys)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]).astype(np.int64)
    return np.argsort(keys, kind="stable").astype(np.int32), offsets


def laws(rule: WeightRule, num_stages: int, per_step: int, num_steps: int) -> Laws:
    """Return the versions that F and B read under `rule`.

    Raises:   ProgramError: the rule puts a gradient into another step than its micro-batch's own.
    """
    stages = np.arange(num_stages, dtype=np.int64)[:, None]
    micro_batches = np.arange(per_step * num_steps, dtype=np.int64)[None, :]
    reads = rule.law(stages, micro_batches, num_stages, per_step)
    forward, backward, step = (
        np.broadcast_to(read, np.broadcast_shapes(np.shape(read), micro_batches.shape))
        for read in reads[:3]
    )
    if not np.array_equal(step, np.broadcast_to(micro_batches // per_step, step.shape)):
        hint = "return micro_batch // num_micro_batches as the step"
        raise ProgramError(
            f"rule {rule.name} puts a gradient into another step than its micro-batch's own",
            hint=hint,
        )
    history = rule.history(num_stages, per_step)
    return Laws(np.array(forward, order="C"), np.array(backward, order="C"), history)
