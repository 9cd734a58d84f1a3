"""Alike: stages that are made of the same ops in the same way, such as one block of many like it.

The segments of a stage follow from its ops, what they read and how large that is, and from what is
asked of it; not from the numbers of its nodes.  So what `segments_of` finds for one stage holds for
all that have the same form, with their own nodes in place of its own, in the same order.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

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
        self._kinds = [
            kinds.setdefault((n.kind, n.target, n.effect, n.phase, size, n.flop, free), len(kinds))
            for n, size, free in rows
        ]
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
        at = {node: place for place, node in enumerate(nodes)}
        table = self.graph.nodes
        repeated = owners.repeated[asked.stage]
        rows = tuple(
            (
                self._kinds[node],
                at[table[node].storage],
                tuple([at[k] for k in table[node].inputs if k in at]),
                node in repeated,
                node in owners.once,
            )
            for node in nodes
        )
        sets = (asked.forward_ops, asked.backward_ops, asked.reads, asked.received, asked.late)
        asks = tuple(tuple(sorted(map(at.__getitem__, each))) for each in sets)
        more = tuple(tuple(map(at.__getitem__, each)) for each in (*sent, *asked.gradients, again))
        counts = len(asked.forward_sends), len(asked.backward_sends), len(asked.gradients)
        told = tuple(at[node] for node in sorted(self.graph.told & ops))
        is_again = recompute if isinstance(recompute, bool) else None
        return _Likeness((rows, asks, more, counts, told, is_again), nodes)

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
