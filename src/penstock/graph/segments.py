"""Segments: the F, B, I and W of one stage, from the demands on it.

- F computes what later stages, the backward pass and the loss need.
- B computes the gradients sent to other stages and those of the stage's own weights.
- I is the part of B that the sent gradients need, W is the rest.
- A stage that recomputes keeps only what it received, and its B (or I) begins with F again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.graph.memory import segment_memory
from penstock.graph.owners import Owners
from penstock.graph.stages import Segment, Sends


@dataclass(frozen=True, slots=True)
class StageDemand:
    """What one stage has to compute, and what messages bring it.

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
    owners: Owners, asked: StageDemand, *, recompute: bool
) -> tuple[Segment, Segment, Segment, Segment]:
    """Return F, B, I and W of one stage.

    A stage that sends no gradient has an empty I, and all of B is in its W.
    """
    make = _Maker(owners, asked, recompute=recompute)
    whole, inner, outer = make.whole(), make.input_gradient(), make.weight_gradient()
    if not asked.backward_sends:
        inner = Segment("I", inputs=make.late, keeps=make.late, arrives=make.late)
        outer = replace(whole, kind="W", arrives=())
    first = make.measured(make.forward())
    return first, make.measured(whole), make.measured(inner), make.measured(outer)


class _Maker:
    def __init__(self, owners: Owners, asked: StageDemand, *, recompute: bool) -> None:
        self.owners, self.asked = owners, asked
        self.nodes = owners.graph.nodes
        self.again, self.keeps = set[int](), set(asked.reads - asked.late)
        if recompute:
            self.again, self.keeps = self._repeat(self.keeps)
        self.received, self.late = _row(asked.received), _row(asked.late)
        self.to_backward = _row(self.keeps | asked.late)  # what B or I finds
        self.inner = self._input_gradient_ops()
        left = set(asked.backward_ops - self.inner)
        parts = {value for _, value in asked.gradients}
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
        """Return `segment` with its FLOP and bytes."""
        received = self.asked.received | self.asked.late
        peak, _, change = segment_memory(self.owners.graph, segment, received)
        flop = sum(self.nodes[i].flop for i in segment.ops)
        return replace(segment, flop=flop, peak_bytes=peak, change_bytes=change)

    def _repeat(self, values: Iterable[int]) -> tuple[set[int], set[int]]:
        """Return (ops, what is kept) to have forward `values` again in the backward pass."""
        ops, kept = set[int](), set[int]()
        stack = list(values)
        while stack:
            value = stack.pop()
            if value in ops or value in kept or self.nodes[value].kind != "op":
                continue
            if value in self.asked.received or value in self.owners.once:
                kept.add(value)
            else:
                ops.add(value)
                stack.extend(self.nodes[value].inputs)
        return ops, kept

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
