"""Keeping: what a stage may keep from F to its backward, and what else it may make again.

A value is kept, or its op is repeated; then what that op reads has to be there, and so on.  Values
in one memory, as a tensor and its views, are kept together.  What the stage received, and what
can be computed but once, is only kept; views of weights are always made again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.graph.cut import demands_of
from penstock.graph.graph import Graph, Node
from penstock.graph.owners import Owners
from penstock.graph.segment_memory import MemoryOwner
from penstock.graph.segments import StageDemand, repeated


class Keeping(NamedTuple):
    """What one stage can choose from.

    asked:   values that the backward reads.
    made:    of each value that may be needed its op; of one that can only be kept, none.
    reads:   of each op the values that it reads.
    memory:  of each value the value that owns its memory.
    bytes:   of each memory.
    """

    asked: frozenset[int]
    made: dict[int, int | None]
    reads: dict[int, tuple[int, ...]]
    memory: dict[int, int]
    bytes: dict[int, int]

    def followed(self, again: Iterable[int]) -> tuple[set[int], set[int]]:
        """Return two sets: the ops of `again` that are repeated, and the values that are kept."""
        may, ops, kept, stack = set(again), set[int](), set[int](), list(self.asked)
        while stack:
            value = stack.pop()
            op = self.made[value]
            if op is None or op not in may:
                kept.add(value)
            elif op not in ops:
                ops.add(op)
                stack.extend(self.reads[op])
        return ops, kept

    def held_bytes(self, kept: Iterable[int]) -> int:
        """Return the bytes of the memories of values that are kept."""
        return sum(self.bytes[memory] for memory in {self.memory[value] for value in kept})


def keepings_of(graph: Graph, cuts: Sequence[int], ends: Sequence[int] = ()) -> list[Keeping]:
    """Return the values that each stage of a cut graph may keep or repeat.

    ends:   cut points inside stages; what crosses one is kept, if it is needed.
    """
    owners, asked, _ = demands_of(graph, cuts)
    places = [graph.cut_points[end].at for end in ends]
    return [_keeping(owners, one, places) for one in asked]


def _keeping(owners: Owners, asked: StageDemand, places: Sequence[int]) -> Keeping:
    nodes = owners.graph.nodes
    every, kept = repeated(owners, asked, True)
    values = [v for v in every | kept if not owners.is_view_of_state(v)]
    several = {nodes[v].inputs[0] for v in values if nodes[v].target == "getitem"}
    values = [v for v in values if v not in several]
    own = MemoryOwner(owners.graph, asked.received | asked.late)
    crossing = _crossing(owners, every, places)
    reads: dict[int, tuple[int, ...]] = {}
    made: dict[int, int | None] = {}
    for value in values:
        op = _maker(nodes, value)
        made[value] = None if value in kept or value in crossing else op
        if made[value] is not None:
            inputs = (k for k in nodes[op].inputs if nodes[k].kind == "op")
            reads[op] = tuple(k for k in inputs if not owners.is_view_of_state(k))
    memory = {value: own.of(value) for value in values}
    wanted = (asked.reads - asked.late).intersection(values)
    return Keeping(wanted, made, reads, memory, {m: own.size_bytes(m) for m in {*memory.values()}})


def _maker(nodes: Sequence[Node], value: int) -> int:
    return nodes[value].inputs[0] if nodes[value].target == "getitem" else value


def _crossing(owners: Owners, ops: Iterable[int], places: Sequence[int]) -> set[int]:
    """Return the values that are made before one of `places` and read in F behind it."""
    nodes, users = owners.graph.nodes, owners.graph.users
    own = set(ops)
    return {
        value
        for value in own
        if not owners.free[value]
        for user in users[value]
        if user in own and nodes[user].phase == "F"
        if any(value < place <= user for place in places)
    }
