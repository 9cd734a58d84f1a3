"""Memory: the bytes that a segment holds while it runs, by the lives of its values.

A value lives from its op, or its message, to its last use.  Views share the memory of what they
look at; a value that arrives in a message has its own, whatever it was a view of where it was made.
Parameters, buffers, the batch and constants are not counted here.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.graph.graph import Graph
from penstock.graph.node_arrays import Ints
from penstock.graph.stages import Segment, SegmentKind, StageEdge, Stages


def peak_with_workspace(
    graph: Graph,
    stages: Stages,
    stage: int,
    kind: SegmentKind,
    workspace_bytes: Sequence[int],
    *,
    made: AbstractSet[int] = frozenset(),
) -> int:
    """Return the peak of a segment (as `Segment.peak_bytes`), with bytes held by running ops.

    made:  parameters that are made when the segment first reads them, and freed after it.
    """
    segment = stages.stages[stage].segment(kind)
    received = {v for e in stages.edges if e.target == stage for v in e.values}
    own = MemoryOwner(graph, received)
    return segment_memory(own, segment, workspace_bytes, made=made).peak


class SegmentMemory(NamedTuple):
    """Bytes of a segment against those held before it: at its peak, when its last op has ended, and
    when what it hands over is gone.
    """

    peak: int
    end: int
    change: int


def segment_memory(
    own: "MemoryOwner",
    segment: Segment,
    workspace_bytes: Sequence[int] = (),
    *,
    made: AbstractSet[int] = frozenset(),
) -> SegmentMemory:
    """Return the bytes held while `segment` runs, against those before.

    What arrives counts from the start.  Values in `takes` die at their last use, others of
    `inputs` stay; `keeps` outlive the segment; what is sent, a gradient, the loss or a figure
    lives to its end.  `workspace_bytes` of each node of the graph are held only while it runs.

    own:       of all values that messages bring to the segment's stage, forward or backward.
    made:      parameters that live as values do, from their first use.
    Ignores:   what an allocator rounds up; gaps in a value that was written into a slice.
    """
    graph, ops = own.graph, np.array(segment.ops, np.int64)
    told = graph.told & set(segment.ops)
    handed = {v for _, values in segment.sends for v in values} | told
    handed |= {v for _, v in segment.gradients}
    stay = own.of_all(set(segment.keeps) | (set(segment.inputs) - set(segment.takes)))
    lasting, there = own.of_all(handed) | stay, own.of_all(segment.inputs)
    sizes = _sizes(graph, made)
    lives = _lives(own, ops, made)
    held = np.array([*there], np.int64)
    lives.made[held] = -1
    comes = np.flatnonzero(lives.made >= 0)
    lives.read[[*lasting]] = -1
    goes = np.concatenate([comes, held])
    goes = goes[lives.read[goes] >= 0]
    more, less = np.zeros((2, len(ops)), np.int64)
    np.add.at(more, lives.made[comes], sizes[comes])
    np.add.at(less, lives.read[goes], sizes[goes])
    start = int(sizes[[*own.of_all(segment.arrives)]].sum())
    now = start + np.cumsum(more) - np.cumsum(less) + less  # while each op runs
    if workspace_bytes:
        now += np.array(workspace_bytes, np.int64)[ops]
    left = ({*comes.tolist()} | there) - {*goes.tolist()} - stay
    end = start + int(more.sum() - less.sum())
    peak = max(start, int(now.max(initial=0)))
    return SegmentMemory(peak, end, end - int(sizes[[*left]].sum()))


def moved(graph: Graph, stages: Stages, stage: int) -> tuple[tuple[int, ...], ...]:
    """Return the values that F keeps for the backward, and that can be elsewhere meanwhile.

    By memory: those of one lie in the same.  Not what other stages may hold too: what F sends on,
    and what the stage that sent it keeps as well.
    """
    kept = _kept(graph, stages, stage)
    edges = [edge for edge in stages.edges if edge.kind == "F"]
    sent = {v for e in edges if e.source == stage for v in e.values}
    own = _owner(graph, stages, stage)
    shared = own.of_all(sent)
    for edge in edges:
        if edge.target == stage:
            others = _owner(graph, stages, edge.source)
            there = others.of_all(_kept(graph, stages, edge.source))
            shared |= {own.of(value) for value in edge.values if others.of(value) in there}
    groups: dict[int, list[int]] = {}
    for value in sorted(kept):
        root = own.of(value)
        if root not in shared and own.size_bytes(root):
            groups.setdefault(root, []).append(value)
    return tuple(map(tuple, groups.values()))


def moved_bytes(graph: Graph, stages: Stages, stage: int) -> int:
    """Return the bytes of the values that `moved` returns."""
    own = _owner(graph, stages, stage)
    return sum(own.size_bytes(own.of(group[0])) for group in moved(graph, stages, stage))


def waiting_bytes(graph: Graph, stages: Stages, edge: StageEdge) -> int:
    """Return the bytes of what an edge carries that its source does not keep: they wait for the
    target, where one rank has both stages.
    """
    own = _owner(graph, stages, edge.source)
    kept = own.of_all(_kept(graph, stages, edge.source)) if edge.kind == "F" else set[int]()
    return sum(own.size_bytes(root) for root in own.of_all(edge.values) - kept)


def _kept(graph: Graph, stages: Stages, stage: int) -> set[int]:
    """Return the values that a stage holds from its F to its backward."""
    forward = stages.stages[stage].forward
    return set(forward.keeps) | (set(forward.inputs) - set(forward.takes))


def _owner(graph: Graph, stages: Stages, stage: int) -> "MemoryOwner":
    return MemoryOwner(graph, {v for e in stages.edges if e.target == stage for v in e.values})


class _Lives(NamedTuple):
    """By memory, the places of the first op that makes it and of the last that reads it; or -1."""

    made: Ints
    read: Ints


def _lives(own: "MemoryOwner", ops: Ints, made: AbstractSet[int]) -> _Lives:
    """Return the lives of memories among `ops`; `made` as of `segment_memory`."""
    values, places = own.graph.arrays.read_by(ops)
    roots = own.roots[values]
    is_made = np.diff(places, prepend=-1) > 0  # an op itself
    if made:
        is_made |= np.isin(values, [*made])
    first, last = np.full((2, len(own.roots)), -1)
    first[roots[is_made][::-1]] = places[is_made][::-1]  # of several the last one stands
    last[roots] = places
    return _Lives(first, last)


class MemoryOwner(dict[int, int]):
    """By value, the one that owns its memory inside one stage: found when it is asked for."""

    def __init__(self, graph: Graph, received: AbstractSet[int]) -> None:
        self.graph, self.received = graph, received

    def __missing__(self, value: int) -> int:
        nodes = self.graph.nodes
        root = nodes[value].storage
        if value in self.received:
            root = value
        elif root != value:
            shared = (k for k in nodes[value].inputs if nodes[k].storage == root)
            source = next(shared, None)
            root = root if source is None else self[source]
        self[value] = root
        return root

    @cached_property
    def roots(self) -> Ints:
        """Return the owner of each value: the storage, but for what lies in a received one."""
        storage = self.graph.arrays.storage
        roots, brought = storage.copy(), storage[[*self.received]]
        for value in np.flatnonzero(np.isin(storage, brought)).tolist():
            roots[value] = self[value]
        return roots

    def of(self, value: int) -> int:
        return self[value]

    def of_all(self, values: Iterable[int]) -> set[int]:
        return {self[value] for value in values}

    def size_bytes(self, root: int) -> int:
        return self.graph.made_bytes[root]


def _sizes(graph: Graph, made: AbstractSet[int]) -> Ints:
    """Return the bytes of each value that a step makes, and those of parameters that it makes."""
    if not made:
        return graph.arrays.made_bytes
    sizes = graph.arrays.made_bytes.copy()
    for at in made:
        sizes[at] = graph.nodes[at].size_bytes
    return sizes
