"""Segments: the F, B, I and W of one stage, from the demands on it.

- F computes what later stages, the backward pass and the loss need.
- B computes the gradients sent to other stages and those of the stage's own weights.
- I is the part of B that the sent gradients need, W is the rest.
- A stage that recomputes keeps what it received, and its B (or I) repeats F; one that repeats some
  ops keeps what the others made, as far as it is read.  Each is repeated before it is first read,
  or all are at first, whichever holds less.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from penstock.graph.owners import Owners
from penstock.graph.segment_memory import MemoryOwner, segment_memory
from penstock.graph.stages import Recompute, Segment, Sends


@dataclass(frozen=True, slots=True)
class StageDemand:
    """The values that one stage has to compute, and those that messages bring.

    reads:      forward values that its backward pass reads, or hands on to a lower stage's.
    received:   values that come from lower stages before F.
    late:       values that come from higher stages before B or I.
    gradients:  (parameter node, value) parts to be added up.
    """

    stage: int
    forward_ops: frozenset[int]
    backward_ops: frozenset[int]
    reads: frozenset[int]
    received: frozenset[int]
    late: frozenset[int]
    forward_sends: Sends
    backward_sends: Sends
    gradients: tuple[tuple[int, int], ...]


def segments_of(
    owners: Owners, asked: StageDemand, *, recompute: Recompute
) -> tuple[Segment, Segment, Segment, Segment]:
    """Return F, B, I and W of one stage.

    A stage that sends no gradient has an empty I, and all of B is in its W.
    recompute:  whether what B reads of F is computed again, or of which ops it is.
    """
    make = _Maker(owners, asked, recompute=recompute)
    whole, inner, outer = make.whole(), make.input_gradient(), make.weight_gradient()
    if not asked.backward_sends:
        inner = Segment("I", inputs=make.late, keeps=make.late, arrives=make.late)
        outer = replace(whole, kind="W", arrives=())
    first, whole, inner = (make.measured(each) for each in (make.forward(), whole, inner))
    is_whole = not asked.backward_sends and not make.late
    outer = replace(whole, kind="W") if is_whole else make.measured(outer)
    return first, whole, inner, outer


def repeated(owners: Owners, asked: StageDemand, recompute: Recompute) -> tuple[set[int], set[int]]:
    """Return (ops that B repeats, values that F keeps for it).

    recompute:  as of `segments_of`; an op that makes several values is meant with all of them.
    What the stage received is kept, and what can be computed but once; and what lies in memory that
    is kept.  Views of weights are made again wherever they are read.
    """
    if recompute is False:
        return set(), set(asked.reads - asked.late)
    may = set(asked.forward_ops if recompute is True else recompute)
    own = MemoryOwner(owners.graph, asked.received | asked.late)
    while True:
        ops, kept = _followed(owners, asked, may)
        there = own.of_all(kept)
        shared = {_maker(owners, op) for op in ops if own.of(op) in there} & may
        if not shared:
            break
        may -= shared
    parts = (i for i in asked.forward_ops if owners.graph.nodes[i].target == "getitem")
    return ops | {i for i in parts if owners.graph.nodes[i].inputs[0] in ops}, kept


def _followed(
    owners: Owners, asked: StageDemand, may: AbstractSet[int]
) -> tuple[set[int], set[int]]:
    """Return two sets: ops of `may` that B repeats, and values that F keeps for it."""
    nodes, ops, kept = owners.graph.nodes, set[int](), set[int]()
    stack = list(asked.reads - asked.late)
    while stack:
        value = stack.pop()
        if value in ops or value in kept or nodes[value].kind != "op":
            continue
        is_kept = _maker(owners, value) not in may and not owners.is_view_of_state(value)
        only_once = value in owners.once or nodes[value].effect == "writes"
        if value in asked.received or only_once or is_kept:
            kept.add(value)
        else:
            ops.add(value)
            stack.extend(nodes[value].inputs)
    return ops, kept


def _maker(owners: Owners, value: int) -> int:
    """Return the op that makes a value, alone or with others."""
    node = owners.graph.nodes[value]
    return node.inputs[0] if node.target == "getitem" else value


class _Maker:
    def __init__(self, owners: Owners, asked: StageDemand, *, recompute: Recompute) -> None:
        self.owners, self.asked = owners, asked
        self.nodes = owners.graph.nodes
        self.again, self.keeps = repeated(owners, asked, recompute)
        self.received, self.late = _row(asked.received), _row(asked.late)
        self.to_backward = _row(self.keeps | asked.late)  # what B or I finds
        self.inner = self._input_gradient_ops()
        left = set(asked.backward_ops - self.inner)
        parts = {value for _, value in asked.gradients}
        self.own = MemoryOwner(owners.graph, asked.received | asked.late)
        self.outer, self.handed = owners.needed(parts, asked.stage, "B", left)

    def forward(self) -> Segment:
        """Return F: it takes what it received unless the backward pass reads that too."""
        return Segment(
            "F",
            ops=_row(self.asked.forward_ops),
            inputs=self.received,
            takes=_row(self.asked.received - self.keeps),
            keeps=_row(self.keeps),
            arrives=self.received,
            sends=self.asked.forward_sends,
        )

    def whole(self) -> Segment:
        """Return B."""
        return Segment(
            "B",
            ops=_row(self.asked.backward_ops | self.again),
            inputs=self.to_backward,
            takes=self.to_backward,
            arrives=self.late,
            sends=self.asked.backward_sends,
            gradients=self.asked.gradients,
        )

    def input_gradient(self) -> Segment:
        """Return I: it repeats F where that was not kept, and hands on what W reads."""
        return Segment(
            "I",
            ops=_row(self.inner | self.again),
            inputs=self.to_backward,
            takes=_row(set(self.to_backward) - self.handed),
            keeps=_row(self.handed),
            arrives=self.late,
            sends=self.asked.backward_sends,
        )

    def weight_gradient(self) -> Segment:
        """Return W."""
        handed = _row(self.handed)
        parts = self.asked.gradients
        return Segment("W", ops=_row(self.outer), inputs=handed, takes=handed, gradients=parts)

    def measured(self, segment: Segment) -> Segment:
        """Return `segment` with FLOP and bytes, its ops in the order that holds least."""
        peak, _, change = segment_memory(self.own, segment)
        if self.again.intersection(segment.ops) and segment.kind != "F":
            later = replace(segment, ops=tuple(self._as_read(segment.ops)))
            least, _, _ = segment_memory(self.own, later)
            if least < peak:
                segment, peak = later, least
        flop = sum(self.nodes[i].flop for i in segment.ops)
        return replace(segment, flop=flop, peak_bytes=peak, change_bytes=change)

    def _as_read(self, ops: Iterable[int]) -> Iterator[int]:
        """Yield `ops` with each that is repeated as late as can be, several values of one together.

        What no op reads comes at the end.
        """
        due = self.again.intersection(ops)
        for op in ops:
            if op not in self.again:
                yield from self._before(op, due)
                yield op
        yield from sorted(due)

    def _before(self, op: int, due: set[int]) -> list[int]:
        """Return the members of `due` that an op needs, in order, and remove them from `due`."""
        found, stack = set[int](), list(self.nodes[op].inputs)
        while stack:
            value = stack.pop()
            if value in due:
                due.remove(value)
                found.add(value)
                stack.extend(self.nodes[value].inputs)
                parts = (k for k in self.owners.graph.users[value] if k in due)
                stack.extend(k for k in parts if self.nodes[k].target == "getitem")
        return sorted(found)

    def _input_gradient_ops(self) -> set[int]:
        """Return the ops that the sent gradients need; results of one op leave it together."""
        sent = {v for _, values in self.asked.backward_sends for v in values}
        gradients = {v for v in sent if self.nodes[v].phase == "B"}
        ops, _ = self.owners.needed(gradients, self.asked.stage, "B")
        makers = {self.nodes[v].inputs[0] for v in ops if self.nodes[v].target == "getitem"}
        parts = {v for v in self.asked.backward_ops if self.nodes[v].target == "getitem"}
        return ops | {v for v in parts if self.nodes[v].inputs[0] in makers}


def _row(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(values))
