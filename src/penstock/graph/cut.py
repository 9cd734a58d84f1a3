"""Cut: the traced step divided into stages at any set of cut points.

Stages are found from the demands on them.  The step's gradients ask each stage, from the first
to the last, for gradients of its own weights and for those that lower stages want; these ask for
values of the forward pass, which ask the stages before, from the last to the first.  What one
stage asks of another is an edge between them.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from penstock.errors import GraphError
from penstock.graph.graph import Graph, Phase
from penstock.graph.known_stages import KnownStages, Need, range_of
from penstock.graph.owners import Owners, gradient_parts
from penstock.graph.segments import StageDemand
from penstock.graph.stages import Recompute, Stage, StageEdge, Stages


def cut(
    graph: Graph,
    cuts: Sequence[int] = (),
    recompute: Sequence[Recompute] = (),
    *,
    backward: bool = True,
    known: KnownStages | None = None,
) -> Stages:
    """Return `graph` cut before the cut points with the indices `cuts`.

    recompute:  for each stage, whether its backward pass repeats its forward pass instead of
                keeping what that computed, or which ops of it; none by default.
    backward:   without it, stages compute the loss and change buffers, and keep nothing.
    known:      of the same graph; what was made for one plan is then not made again for others.
    Raises:     GraphError: no such cut point, a buffer is updated in one stage and read in
                another, or what is to be repeated is no op of the forward pass.
    """
    most = len(graph.cut_points)
    if list(cuts) != sorted(set(cuts)) or any(not 0 <= c < most for c in cuts):
        hint = "give increasing indices of graph.cut_points"
        raise GraphError(f"cuts are {list(cuts)}; the graph has {most} cut points", hint=hint)
    again = tuple(recompute) or (False,) * (len(cuts) + 1)
    if len(again) != len(cuts) + 1:
        raise GraphError(f"recompute is given for {len(again)} of {len(cuts) + 1} stages")
    _check_repeated(graph, again)
    own = known or KnownStages(graph)  # 2 in docs/architecture.md
    owners, asked, edges = demands_of(graph, cuts, own, backward=backward)
    _check_buffers(graph, asked)
    state = _state_of_stages(own, asked)
    stages = tuple(
        Stage(one.stage, *own.segments(owners, one, recompute=repeats), *held, repeats)
        for one, repeats, held in zip(asked, again, state, strict=True)
    )
    return Stages(stages, edges, _tied(stages), known)


def demands_of(
    graph: Graph, cuts: Sequence[int], known: KnownStages | None = None, *, backward: bool = True
) -> tuple[Owners, list[StageDemand], tuple[StageEdge, ...]]:
    """Return the owners of the ops, the demands on each stage, and the edges between stages."""
    known = known or KnownStages(graph)
    owners = known.owners(cuts)
    demands = _Demands(owners, cuts, known, backward=backward)
    demands.solve()
    edges = demands.edges()
    return owners, [demands.asked(stage, edges) for stage in range(owners.num_stages)], edges


class _Demands:
    """What stages ask of each other: `sent[phase, source, target]`, and of their own F."""

    def __init__(
        self, owners: Owners, cuts: Sequence[int], known: KnownStages, *, backward: bool
    ) -> None:
        self.owners, self.nodes, self.known = owners, owners.graph.nodes, known
        self.pieces = range_of(cuts, len(owners.graph.cut_points) + 1)
        self.parts = gradient_parts(owners)
        if not backward:
            self.parts = [self.parts[0][:0]] * owners.num_stages
        self.sent: dict[tuple[Phase, int, int], set[int]] = {}
        self.forward_wanted: list[set[int]] = [set() for _ in range(owners.num_stages)]
        self.backwards: list[Need] = []
        self.forwards: list[Need] = []

    def solve(self) -> None:
        """Follow the demands of the backward pass, then of the forward pass."""
        self._want_effects()
        for stage in range(self.owners.num_stages):
            wanted = {value for _, value in self.parts[stage]}
            wanted |= {v for v in self._sent_from(stage) if self.nodes[v].phase == "B"}
            need = self._need(wanted, stage, "B")
            self.backwards.append(need)
            for value in need.outside:
                self._demand(value, stage)
        for stage in reversed(range(self.owners.num_stages)):
            need = self._need(self.forward_wanted[stage], stage, "F")
            self.forwards.insert(0, need)
            for value in need.outside:
                self._send("F", value, stage)

    def edges(self) -> tuple[StageEdge, ...]:
        """Return the edges: forward ones first, by source, the nearest target first."""
        order = sorted(self.sent, key=lambda e: (e[0] == "B", e[1], abs(e[2] - e[1])))
        return tuple(
            StageEdge(*edge, tuple(sorted(self.sent[edge])), self._bytes(self.sent[edge]))
            for edge in order
        )

    def asked(self, stage: int, edges: Sequence[StageEdge]) -> StageDemand:
        """Return the demands on one stage."""

        def arriving(phase: Phase) -> frozenset[int]:
            rows = (e.values for e in edges if (e.kind, e.target) == (phase, stage))
            return frozenset(chain.from_iterable(rows))

        def sends(phase: Phase) -> tuple[tuple[int, tuple[int, ...]], ...]:
            rows = enumerate(edges)
            return tuple((i, e.values) for i, e in rows if (e.kind, e.source) == (phase, stage))

        passed = {v for v in self._sent_from(stage) if self.nodes[v].phase == "F"}
        reads = {v for v in self.backwards[stage].outside if self.nodes[v].phase == "F"}
        return StageDemand(
            stage=stage,
            forward_ops=self.forwards[stage].ops,
            backward_ops=self.backwards[stage].ops,
            reads=frozenset(reads | passed),
            received=arriving("F"),
            late=arriving("B"),
            forward_sends=sends("F"),
            backward_sends=sends("B"),
            gradients=tuple(self.parts[stage]),
        )

    def _want_effects(self) -> None:
        """Ask for the loss, the figures beside it, and for every change of a buffer."""
        for i in self.owners.graph.wanted:
            self.forward_wanted[self.owners.stage_of[i]].add(i)

    def _need(self, wanted: Iterable[int], stage: int, phase: Phase) -> Need:
        return self.known.needed(self.owners, wanted, stage, phase, self.pieces[stage])

    def _sent_from(self, stage: int) -> set[int]:
        """Return the values that the backward pass of a stage sends."""
        rows = (v for (phase, source, _), v in self.sent.items() if (phase, source) == ("B", stage))
        return set(chain.from_iterable(rows))

    def _demand(self, value: int, stage: int) -> None:
        """Note that the backward pass of `stage` reads `value` from elsewhere."""
        source = self.owners.stage_of[value]
        if self.nodes[value].phase == "B":
            self._send("B", value, stage)
        elif self.owners.free[value] or source == stage:
            self.forward_wanted[stage].add(value)
        else:
            self._send("F" if source < stage else "B", value, stage)

    def _send(self, phase: Phase, value: int, target: int) -> None:
        source = self.owners.stage_of[value]
        self.sent.setdefault((phase, source, target), set()).add(value)
        if self.nodes[value].phase == "F":
            self.forward_wanted[source].add(value)

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self.nodes[v].size_bytes for v in values)


def _check_repeated(graph: Graph, again: Sequence[Recompute]) -> None:
    known = range(len(graph.nodes))
    for stage, ops in enumerate(again):
        for op in () if isinstance(ops, bool) else ops:
            if op not in known or (graph.nodes[op].kind, graph.nodes[op].phase) != ("op", "F"):
                message = f"stage {stage} is to repeat node {op}, which is no op of a forward pass"
                raise GraphError(message, hint="make the plan again")


def _check_buffers(graph: Graph, asked: Sequence[StageDemand]) -> None:
    for buffer in sorted(graph.written):
        readers = [
            one.stage
            for one in asked
            if any(buffer in graph.nodes[i].inputs for i in one.forward_ops)
        ]
        if len(readers) > 1:
            raise GraphError(
                f"buffer {graph.nodes[buffer].name} is updated, and used by stages {readers}",
                hint="choose cuts that leave its users in one stage",
            )


def _state_of_stages(
    known: KnownStages, asked: Sequence[StageDemand]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (parameters, buffers) of each stage; those that no stage reads live in the first."""
    nodes = known.graph.nodes
    reads = [
        known.reads(one.forward_ops) | known.reads(one.backward_ops) | {p for p, _ in one.gradients}
        for one in asked
    ]
    reads[0] |= known.graph.state.difference(*reads)
    return [
        (
            tuple(sorted(i for i in read if nodes[i].kind == "parameter")),
            tuple(sorted(i for i in read if nodes[i].kind == "buffer")),
        )
        for read in reads
    ]


def _tied(stages: Sequence[Stage]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    holders: dict[int, list[int]] = {}
    for stage in stages:
        for parameter in stage.parameters:
            holders.setdefault(parameter, []).append(stage.index)
    return tuple((p, tuple(held)) for p, held in sorted(holders.items()) if len(held) > 1)
