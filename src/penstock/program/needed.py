"""Needed: what has to be summed over which ranks before a stage may be updated."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import product
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.program.edges import StageBytes, StageGraph
from penstock.program.partners import averages_of
from penstock.program.reductions import (
    AT_THE_END,
    WORDS,
    Commit,
    Guard,
    Norm,
    Reduction,
    Sum,
    SumHow,
    Validate,
)
from penstock.program.step_end import StepEnd
from penstock.schedule.grid import Grid
from penstock.schedule.orders import B, Orders, W

Holders: TypeAlias = Sequence[
    Sequence[tuple[int, ...]]
]  # [replica][stage] -> the ranks it lives on


class Needed(NamedTuple):
    """A reduction, once per step, and the stages whose update it must precede."""

    reduction: Reduction
    stages: tuple[int, ...]


class NeededSums(NamedTuple):
    """Needed reductions as arrays; `needs[len(WORDS) * stage + how]` counts those of its update."""

    hows: NDArray[np.int64]  # places in WORDS
    stages: NDArray[np.int32]
    stage_offsets: NDArray[np.int64]
    ranks: NDArray[np.int32]
    rank_offsets: NDArray[np.int64]
    needs: NDArray[np.int64]


def needed(  # long: its words
    holders: Holders,
    graph: StageGraph,
    end: StepEnd,
    *,
    sharded: AbstractSet[int] = frozenset(),
    delays: bool = False,
    grid: Grid,
) -> tuple[Needed, ...]:
    """Return the reductions of every step, in the order in which a gradient needs them.

    Tied groups inside each replica, then each stage over all its ranks, then (to clip by it) the
    norm over each replica: with `post_validation` after the updates.  A stage on one rank needs no
    sum over replicas, and where weights are averaged gradients are summed over the ranks of a
    replica only.  Last, where a step commits, a word of all ranks; right before it, where there are
    guards, what each rank gives its guard.

    sharded:  stages of which each rank keeps a shard, or all of it in far memory, and which their
              sum leaves there; with any, a norm is over all replicas.
    delays:   whether sums over replicas are of the step before.
    grid:     whose ranks divide the ops of each stage: each is summed with those that have the
              same slices of weights; a norm is over all of them.
    """
    found: list[Needed] = []
    for group in graph.tied:
        for stages in holders:
            ranks = _union(stages[stage] for stage in group.stages)
            found.append(Needed(Sum("tied", group.name, ranks, 0, group.size_bytes), group.stages))
    num_stages = len(holders[0])
    tensor, slices = grid.tensor, grid.slices
    groups = [holders[slice_::slices] for slice_ in range(slices)]
    if end.averages:
        groups = [[replica] for replica in holders]
    for stage, group in product(range(num_stages), groups):
        ranks = _union(replica[stage] for replica in group)
        held = graph.stage_bytes[stage] if graph.stage_bytes else StageBytes()
        size_bytes = held.weights if end.averages else held.summed or held.weights
        if len(ranks) > 1 or stage in sharded:
            how: SumHow = "shards" if stage in sharded else "delayed" if delays else "replicas"
            found.append(Needed(Sum(how, f"stage{stage}", ranks, 0, size_bytes), (stage,)))
    if end.clip:
        clips = Validate if end.post_validation else Norm
        everywhere = [[ranks for stages in holders for ranks in stages]]
        sliced = [
            [_union(ranks) for ranks in zip(*holders[at : at + tensor], strict=True)]
            for at in range(0, len(holders), tensor)
        ]
        for stages in everywhere if sharded else sliced:
            found.append(Needed(clips(_union(stages)), tuple(range(num_stages))))
    everyone = _union(ranks for stages in holders for ranks in stages)
    if end.guard is not None:
        found.append(Needed(Guard(everyone), tuple(range(num_stages))))
    if end.commits:
        found.append(Needed(Commit(everyone), tuple(range(num_stages))))
    for stage in range(num_stages) if end.averages else ():
        held = graph.stage_bytes[stage] if graph.stage_bytes else StageBytes()
        among = [replica[stage] for replica in holders]
        made = averages_of(end.averages, stage, among, held.weights)
        found += (Needed(one, (stage,)) for one in made)
    return tuple(found)


def last_gradients(orders: Orders) -> dict[tuple[int, int], int]:
    """Return by rank and stage the place among all actions of its last gradient there."""
    at = np.flatnonzero((orders.kinds == B) | (orders.kinds == W))[::-1]
    ranks = np.searchsorted(orders.offsets, at, side="right") - 1
    num_stages = int(orders.stages.max(initial=0)) + 1
    keys, first = np.unique(ranks * num_stages + orders.stages[at], return_index=True)
    pairs = zip((keys // num_stages).tolist(), (keys % num_stages).tolist(), strict=True)
    return dict(zip(pairs, at[first].tolist(), strict=True))


def as_made(sums: Sequence[Needed], orders: Orders, grid: Grid) -> tuple[Needed, ...]:
    """Return `sums` in the order in which the last of their gradients are made, norms last.

    All ranks come to their sums in this one order, so none waits for another forever.  A sum is
    made when the last of its ranks has done so many actions; before a stage's sum over replicas
    come those of its tied parameters.  Where ranks divide ops, tied ones come behind all actions:
    ranks that collect beside a rank of another stage would wait for that one's later actions.

    orders:   of one replica, as all others have them, but for the number of micro-batches.
    """
    last, places = last_gradients(orders) if sums else {}, grid.places()[1].tolist()
    last = {key: at - int(orders.offsets[key[0]]) for key, at in last.items()}
    tied: defaultdict[int, int] = defaultdict(int)  # by stage
    made: list[float] = []
    for one in sums:
        pairs = {(places[rank], stage) for rank in one.reduction.ranks for stage in one.stages}
        at = max((last[pair] for pair in pairs if pair in last), default=0)
        at = sys.maxsize if waits_for_all(one.reduction.word, grid) else at
        for stage in one.stages if one.reduction.word == "tied" else ():
            tied[stage] = max(tied[stage], at)
        at = max(at, tied[one.stages[0]]) if one.reduction.word in ("replicas", "shards") else at
        made.append(inf if one.reduction.word in AT_THE_END else at)
    return tuple(sums[number] for number in sorted(range(len(sums)), key=made.__getitem__))


def waits_for_all(word: str, grid: Grid) -> bool:
    """Return whether a sum comes behind all actions of its ranks.

    One of ranks that divide tokens does: they collect among themselves until then, and what two
    threads of a rank send to the same others would be mixed up.
    """
    return word in AT_THE_END or (word == "tied" and grid.tensor > 1) or grid.context


def _union(many: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for ranks in many for rank in ranks}))


def holders_of(where: NDArray[np.int32]) -> Holders:
    """Return the ranks of every stage, from the rank of every [replica, stage, micro-batch].

    Where a replica has no such micro-batch, the rank is -1.
    """
    some = np.where(where < 0, np.iinfo(where.dtype).max, where)
    lowest, highest = some.min(axis=2).tolist(), where.max(axis=2).tolist()
    return tuple(
        tuple(
            (low,)
            if low == high
            else tuple(np.unique(where[replica, stage][where[replica, stage] >= 0]).tolist())
            for stage, (low, high) in enumerate(zip(lowest[replica], highest[replica], strict=True))
        )
        for replica in range(len(where))
    )


def stages_by_rank(holders: Holders, num_ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the stages of each rank, one rank after the other, and where each rank's begin."""
    pairs = [
        (rank, stage) for stages in holders for stage, ranks in enumerate(stages) for rank in ranks
    ]
    ranks, stages = np.array(pairs, np.int64).reshape(-1, 2).T
    sizes = np.bincount(ranks, minlength=num_ranks)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return np.ascontiguousarray(stages[np.argsort(ranks, kind="stable")]), offsets


def as_arrays(reductions: Sequence[Needed], num_stages: int, replicas: int) -> NeededSums:
    """Return `reductions` as arrays for the loops over a program."""
    hows = np.array([WORDS.index(one.reduction.word) for one in reductions], np.int64)
    stages, stage_offsets = _ragged([one.stages for one in reductions])
    ranks, rank_offsets = _ragged([one.reduction.ranks for one in reductions])
    needs = np.bincount(
        len(WORDS) * stages.astype(np.int64) + np.repeat(hows, np.diff(stage_offsets)),
        minlength=len(WORDS) * num_stages,
    )
    for how in ("tied", "norm", "validate"):  # stand there once per replica
        own = needs[WORDS.index(how) :: len(WORDS)]
        own[:] = -(-own // replicas)  # or once for all
    for how in ("delayed", "replicas", "shards", "average"):  # of several, a rank has its own
        own = needs[WORDS.index(how) :: len(WORDS)]
        own[:] = np.minimum(own, 1)
    return NeededSums(hows, stages, stage_offsets, ranks, rank_offsets, needs)


def _ragged(lists: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return np.array([number for numbers in lists for number in numbers], np.int32), offsets
