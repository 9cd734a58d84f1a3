"""Alike: stages that are made of the same ops in the same way, such as one block of many like it.

The segments of a stage follow from its ops, what they read and how large that is, and from what is
asked of it; not from the numbers of its nodes.  So what `segments_of` finds for one stage holds for
all that have the same form, with their own nodes in place of its own, in the same order.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.graph.graph import Graph
from penstock.graph.known_stages import Segments
from penstock.graph.owners import Owners
from penstock.graph.segments import StageDemand, segments_of
from penstock.graph.stages import Recompute, Segment, Sends


class _Likeness(NamedTuple):
    """What tells stages apart that are not alike, and the nodes of one, in order."""

    key: Hashable
    nodes: tuple[int, ...]


class AlikeStages:
    """The segments of the stages of a graph, made once for all that are alike."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        kinds: dict[Hashable, int] = {}
        rows = zip(graph.nodes, graph.made_bytes, graph.free, strict=True)
        told = (
            (n.kind, n.target, n.effect, n.phase, size, n.flop, free, len(n.inputs))
            for n, size, free in rows
        )
        self._kinds = np.array([kinds.setdefault(each, len(kinds)) for each in told], np.int64)
        self._storage = np.array([node.storage for node in graph.nodes], np.int64)
        counts = [len(node.inputs) for node in graph.nodes]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._inputs = np.array([*chain.from_iterable(n.inputs for n in graph.nodes)], np.int64)
        self._at = np.full(len(graph.nodes), -1, np.int64)  # of the stage that is looked at
        self._made: dict[Hashable, tuple[tuple[int, ...], Segments]] = {}

    def segments(self, owners: Owners, asked: StageDemand, recompute: Recompute) -> Segments:
        """Return the segments of a stage, as `segments_of` does."""
        form = self._likeness(owners, asked, recompute)
        if form.key not in self._made:
            made = segments_of(owners, asked, recompute=recompute)
            self._made[form.key] = form.nodes, made
            return made
        nodes, made = self._made[form.key]
        new = dict(zip(nodes, form.nodes, strict=True))
        sends = asked.forward_sends, asked.backward_sends, asked.backward_sends, ()
        first, whole, inner, outer = (
            _moved(segment, new, own if segment.sends else ())
            for segment, own in zip(made, sends, strict=True)
        )
        return first, whole, inner, outer

    def _likeness(self, owners: Owners, asked: StageDemand, recompute: Recompute) -> _Likeness:
        ops = asked.forward_ops | asked.backward_ops
        sent = [values for _, values in (*asked.forward_sends, *asked.backward_sends)]
        again = () if isinstance(recompute, bool) else recompute
        given = (asked.reads, asked.received, asked.late, *sent, *asked.gradients, again)
        nodes = self._with_read({*ops, *chain.from_iterable(given)}, ops)
        own = np.array(nodes, np.int64)
        self._at[own] = np.arange(len(own))
        sets = (asked.forward_ops, asked.backward_ops, asked.reads, asked.received, asked.late)
        marked = (owners.repeated[asked.stage], owners.once, self.graph.told & ops)
        more = [each.intersection(nodes) for each in marked]
        key = (
            self._kinds[own].tobytes(),
            self._at[self._storage[own]].tobytes(),
            self._read_by(own).tobytes(),
            tuple(np.sort(self._places(each)).tobytes() for each in (*sets, *more)),
            tuple(self._places(each).tobytes() for each in (*sent, *asked.gradients, again)),
            (len(asked.forward_sends), len(asked.backward_sends), len(asked.gradients)),
            recompute if isinstance(recompute, bool) else None,
        )
        self._at[own] = -1
        return _Likeness(key, nodes)

    def _places(self, values: Collection[int]) -> NDArray[np.int64]:
        """Return the places of values among the nodes of the stage that is looked at."""
        return self._at[np.fromiter(values, np.int64, len(values))]

    def _read_by(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of all inputs of nodes, one node after the other; -1 for others'."""
        first, counts = self._first[own], self._first[own + 1] - self._first[own]
        ends = np.cumsum(counts)
        steps = np.arange(int(ends[-1]) if len(ends) else 0)
        return self._at[self._inputs[steps + np.repeat(first - ends + counts, counts)]]

    def _with_read(self, values: set[int], ops: frozenset[int]) -> tuple[int, ...]:
        """Return values with all that they read or lie in, as far as a stage may look, in order."""
        table, free = self.graph.nodes, self.graph.free
        found, stack = set(values), list(values)
        while stack:
            value = stack.pop()
            node = table[value]
            read = node.inputs if value in ops or free[value] else ()
            for each in (*read, node.storage):
                if each not in found:
                    found.add(each)
                    stack.append(each)
        return tuple(sorted(found))


def _moved(segment: Segment, new: Mapping[int, int], sends: Sends) -> Segment:
    """Return the segment of a stage that is alike, by its own nodes."""

    def row(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(new.__getitem__, values))

    return replace(
        segment,
        ops=row(segment.ops),
        inputs=row(segment.inputs),
        takes=row(segment.takes),
        keeps=row(segment.keeps),
        arrives=row(segment.arrives),
        sends=sends,
        gradients=tuple((new[p], new[value]) for p, value in segment.gradients),
    )
