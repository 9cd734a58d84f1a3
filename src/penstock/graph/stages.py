"""Stages: the traced step cut into F, I and W segments at any set of cut points.

Every segment is a pure function of explicit inputs.  The rules:

- a forward op belongs to the stage in whose range it stands;
- a backward op belongs to the stage of its origin, or to the lowest stage whose gradients it
  reads, where that is lower (so gradients only ever travel towards the input);
- I is what the gradients sent to other stages need, W is the rest of the backward pass;
- what any stage can compute for itself (`free_ops`) is repeated there instead of sent, and
  views of parameters are repeated in the backward pass instead of saved;
- a gradient that is a sum over stages (tied weights) is left as one part for each stage.

Stages are found from what is asked of them: gradients ask for values, and so on backwards.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.errors import GraphError
from penstock.graph.cut_points import free_ops, written_buffers
from penstock.graph.graph import Graph, Phase

SegmentKind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops that run without communication inside, as a function of node values.

    ops:           nodes to compute, in order (repeated free ops included).
    inputs:        values that come from a message or an earlier segment of the micro-batch;
                   parameters, buffers, the batch and constants are not listed.
    takes:         those of `inputs` that nothing reads later.
    keeps:         values handed to a later segment of the same stage and micro-batch.
    sends:         values for each outgoing edge (by index into `Stages.edges`).
    gradients:     (parameter node, value) pairs to be added up; a parameter may occur twice.
    peak_bytes:    most bytes held above those held when the segment starts.
    change_bytes:  bytes held when it has ended and its messages are sent, against the start.
    """

    kind: SegmentKind
    ops: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    sends: tuple[tuple[int, tuple[int, ...]], ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    flop: int = 0
    peak_bytes: int = 0
    change_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive ops run as one unit: its segments, parameters and buffers (as nodes)."""

    index: int
    forward: Segment
    backward: Segment
    input_gradient: Segment
    weight_gradient: Segment
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    recompute: bool = False

    def segment(self, kind: SegmentKind) -> Segment:
        """Return the segment that an action of `kind` runs."""
        match kind:
            case "F":
                return self.forward
            case "B":
                return self.backward
            case "I":
                return self.input_gradient
            case "W":
                return self.weight_gradient


class StageEdge(NamedTuple):
    """Values made by F or B of stage `source` and used by stage `target`."""

    kind: Phase
    source: int
    target: int
    values: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stages:
    """The whole step, cut: stages, the edges between them, parameters that several hold.

    tied:  (parameter node, the stages that hold a part of its gradient or read it).
    """

    stages: tuple[Stage, ...]
    edges: tuple[StageEdge, ...]
    tied: tuple[tuple[int, tuple[int, ...]], ...]


def cut(graph: Graph, cuts: Sequence[int] = (), recompute: Sequence[bool] = ()) -> Stages:
    """Return `graph` cut before the cut points with the indices `cuts`.

    recompute:  for each stage, whether its backward pass repeats its forward pass instead of
                keeping what that computed; none by default.
    Raises:     GraphError: no such cut point, or a buffer is updated in one stage and read in
                another.
    """
    known = len(graph.cut_points)
    if list(cuts) != sorted(set(cuts)) or any(not 0 <= c < known for c in cuts):
        hint = "give increasing indices of graph.cut_points"
        raise GraphError(f"cuts are {list(cuts)}; the graph has {known} cut points", hint=hint)
    again = tuple(recompute) or (False,) * (len(cuts) + 1)
    if len(again) != len(cuts) + 1:
        raise GraphError(f"recompute is given for {len(again)} of {len(cuts) + 1} stages")
    return _Cutter(graph, [graph.cut_points[c].at for c in cuts], again).stages()


@dataclass
class _Backward:
    """What the backward pass of one stage computes and reads, before it is split."""

    wanted: set[int] = field(default_factory=set)
    ops: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)


class _Cutter:
    """Finds the stages from the last demand (gradients) to the first (inputs)."""

    def __init__(self, graph: Graph, places: list[int], again: tuple[bool, ...]) -> None:
        self.graph, self.places, self.again = graph, places, again
        self.count = len(places) + 1
        self.free = free_ops(graph)
        self.stage_of = self._assign()
        self.contributions = self._contributions()
        self.sent: dict[tuple[Phase, int, int], set[int]] = {}
        self.forward_wanted: list[set[int]] = [set() for _ in range(self.count)]
        self.repeated: list[set[int]] = [set() for _ in range(self.count)]

    def stages(self) -> Stages:
        for i, node in enumerate(self.graph.nodes):
            if node.effect == "writes" and node.phase == "F":
                self.forward_wanted[self.stage_of[i]].add(i)
            elif node.effect == "mutates" and node.phase == "F":
                self.forward_wanted[self.stage_of[i]].add(i)
        self.forward_wanted[self.stage_of[self.graph.loss]].add(self.graph.loss)
        backwards = self._backwards()
        forwards = self._forwards(backwards)
        edges = self._edges()
        self._check_buffers(forwards)
        made = [self._stage(s, forwards[s], backwards[s], edges) for s in range(self.count)]
        return Stages(tuple(made), edges, self._tied(made))

    # -- which op belongs to which stage ------------------------------------------------------

    def _assign(self) -> list[int]:
        """Return the stage of each node; for inputs and free ops it means nothing."""
        nodes, stages = self.graph.nodes, [0] * len(self.graph.nodes)
        for i, node in enumerate(nodes):
            if node.target == "getitem":
                stages[i] = stages[node.inputs[0]]
            elif node.phase == "F":
                made = [stages[k] for k in node.inputs if nodes[k].kind == "op"]
                late = node.effect == "writes" and made
                stages[i] = max(made) if late else bisect.bisect_right(self.places, i)
            else:
                of_origin = stages[node.origin] if node.origin >= 0 else self.count - 1
                gradients = (k for k in node.inputs if nodes[k].phase == "B" and not self.free[k])
                stages[i] = min([of_origin, *(stages[k] for k in gradients)])
        return stages

    def _contributions(self) -> list[list[tuple[int, int]]]:
        """Return for each stage the (parameter node, value) parts of gradients made there."""
        by_name = {n.name: i for i, n in enumerate(self.graph.nodes) if n.kind == "parameter"}
        parts: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for name, gradient in self.graph.gradients.items():
            if gradient is not None:
                for part in self._parts(gradient):
                    parts[self.stage_of[part]].append((by_name[name], part))
        return parts

    def _parts(self, value: int) -> list[int]:
        node = self.graph.nodes[value]
        stages = {self.stage_of[k] for k in node.inputs}
        if node.target == "aten.add.Tensor" and node.phase == "B" and len(stages) > 1:
            return [part for k in node.inputs for part in self._parts(k)]
        return [value]

    # -- what each segment computes and reads -------------------------------------------------

    def _is_view_of_input(self, value: int) -> bool:
        node = self.graph.nodes[value]
        return self.free[value] and self.graph.nodes[node.storage].kind in ("parameter", "buffer")

    def _close(self, wanted: set[int], inside: "set[int] | None", stage: int, phase: Phase) -> tuple[set[int], set[int]]:
        """Return (ops to compute, values from outside) so that `wanted` can be had.

        An op is computed here if it belongs to this stage and phase (and to `inside`, where
        given), or if it is free and not kept by the forward pass of this stage.
        """
        nodes, ops, outside = self.graph.nodes, set[int](), set[int]()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if nodes[value].kind != "op" or value in ops or value in outside:
                continue
            if not self._computed_here(value, inside, stage, phase):
                outside.add(value)
                continue
            ops.add(value)
            stack.extend(nodes[value].inputs)
        return ops, outside

    def _computed_here(self, value: int, inside: "set[int] | None", stage: int, phase: Phase) -> bool:
        node = self.graph.nodes[value]
        if self.free[value]:
            kept = phase == "B" and node.phase == "F" and value in self.repeated[stage]
            return not kept or self._is_view_of_input(value)
        own = node.phase == phase and self.stage_of[value] == stage
        return own and (inside is None or value in inside)

    def _backwards(self) -> list[_Backward]:
        """Ask each stage, from the first, for its gradients and what lower stages want."""
        self._note_free_forward()
        found: list[_Backward] = []
        for stage in range(self.count):
            wanted = {value for _, value in self.contributions[stage]}
            for (phase, source, _), values in self.sent.items():
                if phase == "B" and source == stage:
                    wanted |= {v for v in values if self.graph.nodes[v].phase == "B"}
            wanted |= self._backward_writes(stage)
            ops, outside = self._close(wanted, None, stage, "B")
            found.append(_Backward(wanted, ops, outside))
            for value in outside:
                self._demand(value, stage)
            for (phase, source, _), values in list(self.sent.items()):
                if phase == "B" and source == stage:  # forward values that a lower stage reads
                    passed = {v for v in values if self.graph.nodes[v].phase == "F"}
                    found[stage].outside |= passed
        return found

    def _backward_writes(self, stage: int) -> set[int]:
        rows = enumerate(self.graph.nodes)
        return {
            i
            for i, n in rows
            if n.phase == "B" and n.effect == "writes" and self.stage_of[i] == stage
        }

    def _note_free_forward(self) -> None:
        """Note which free ops the forward pass of each stage computes anyhow."""
        for stage in range(self.count):
            own = {
                i
                for i, n in enumerate(self.graph.nodes)
                if n.kind == "op"
                and n.phase == "F"
                and not self.free[i]
                and self.stage_of[i] == stage
            }
            ops, _ = self._close(own, None, stage, "F")
            self.repeated[stage] = {i for i in ops if self.free[i]}

    def _demand(self, value: int, stage: int) -> None:
        """Note that the backward pass of `stage` reads `value` from elsewhere."""
        node, source = self.graph.nodes[value], self.stage_of[value]
        if node.phase == "B":
            self.sent.setdefault(("B", source, stage), set()).add(value)
        elif self.free[value] or source == stage:
            self.forward_wanted[stage].add(value)
        elif source < stage:
            self.sent.setdefault(("F", source, stage), set()).add(value)
            self.forward_wanted[source].add(value)
        else:
            self.sent.setdefault(("B", source, stage), set()).add(value)
            self.forward_wanted[source].add(value)

    def _forwards(self, backwards: list[_Backward]) -> list[tuple[set[int], set[int]]]:
        """Ask each stage, from the last, for what backward passes and later stages want."""
        found: list[tuple[set[int], set[int]]] = []
        for stage in reversed(range(self.count)):
            ops, outside = self._close(self.forward_wanted[stage], None, stage, "F")
            for value in outside:
                source = self.stage_of[value]
                self.sent.setdefault(("F", source, stage), set()).add(value)
                self.forward_wanted[source].add(value)
            found.append((ops, outside))
        return found[::-1]

    def _edges(self) -> tuple[StageEdge, ...]:
        def size(values: set[int]) -> int:
            return sum(self.graph.nodes[v].size_bytes for v in values)

        near_first = sorted(self.sent, key=lambda e: (e[0] == "B", e[1], abs(e[2] - e[1])))
        return tuple(
            StageEdge(phase, source, target, tuple(sorted(values)), size(values))
            for phase, source, target in near_first
            if (values := self.sent[phase, source, target])
        )

    # -- one stage ----------------------------------------------------------------------------

    def _stage(
        self,
        stage: int,
        forward: tuple[set[int], set[int]],
        backward: _Backward,
        edges: tuple[StageEdge, ...],
    ) -> Stage:
        sends = {
            phase: tuple(
                (i, e.values) for i, e in enumerate(edges) if e.kind == phase and e.source == stage
            )
            for phase in ("F", "B")
        }
        received = {v for e in edges if e.kind == "F" and e.target == stage for v in e.values}
        made = _Made(self, stage, forward[0], received, backward, sends["F"], sends["B"])
        parameters, buffers = self._state_of(stage, forward[0] | backward.ops)
        again = self.again[stage]
        keeps = made.recompute_keeps() if again else made.keeps()
        return Stage(
            index=stage,
            forward=made.forward(keeps),
            backward=made.whole(keeps),
            input_gradient=made.input_gradient(keeps),
            weight_gradient=made.weight_gradient(keeps),
            parameters=parameters,
            buffers=buffers,
            recompute=again,
        )

    def _state_of(self, stage: int, ops: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        nodes = self.graph.nodes
        read = {k for i in ops for k in nodes[i].inputs}
        read |= {parameter for parameter, _ in self.contributions[stage]}
        if stage == 0:  # what no op reads still has to live, and be saved, somewhere
            used = {k for node in nodes for k in node.inputs}
            read |= {i for i, n in enumerate(nodes) if i not in used and n.kind != "op"}
        parameters = tuple(sorted(i for i in read if nodes[i].kind == "parameter"))
        return parameters, tuple(sorted(i for i in read if nodes[i].kind == "buffer"))

    def _tied(self, stages: list[Stage]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        holders: dict[int, list[int]] = {}
        for stage in stages:
            for parameter in stage.parameters:
                holders.setdefault(parameter, []).append(stage.index)
        return tuple((p, tuple(held)) for p, held in sorted(holders.items()) if len(held) > 1)

    def _check_buffers(self, forwards: list[tuple[set[int], set[int]]]) -> None:
        nodes = self.graph.nodes
        for buffer in written_buffers(self.graph):
            readers = {
                s
                for s, (ops, _) in enumerate(forwards)
                if any(buffer in nodes[i].inputs for i in ops)
            }
            if len(readers) > 1:
                raise GraphError(
                    f"buffer {nodes[buffer].name} is updated, and used by stages {sorted(readers)}",
                    hint="choose cuts that leave its users in one stage",
                )


class _Made:
    """The segments of one stage, from its ops and what is asked of it."""

    def __init__(
        self,
        cutter: _Cutter,
        stage: int,
        forward_ops: set[int],
        received: set[int],
        backward: _Backward,
        forward_sends: tuple[tuple[int, tuple[int, ...]], ...],
        backward_sends: tuple[tuple[int, tuple[int, ...]], ...],
    ) -> None:
        self.cutter, self.stage = cutter, stage
        self.nodes = cutter.graph.nodes
        self.forward_ops, self.received, self.backward = forward_ops, received, backward
        self.forward_sends, self.backward_sends = forward_sends, backward_sends
        self.gradients = tuple(cutter.contributions[stage])
        self.from_forward = {v for v in backward.outside if self.nodes[v].phase == "F"}
        arriving = cutter.sent.items()
        self.late = {
            v for (kind, _, target), vs in arriving if kind == "B" and target == stage for v in vs
        }
        self.from_forward -= self.late
        self.inner, self.inner_outside = self._input_gradient_ops()

    def keeps(self) -> set[int]:
        """Return the values that the backward pass reads from the forward pass."""
        return self.from_forward

    def recompute_keeps(self) -> set[int]:
        """Return the values from which the backward pass can repeat the forward pass."""
        again = self._again(self.from_forward)
        return {v for v in self._read(again) if v in self.received} | (
            self.from_forward & self.received
        )

    def forward(self, keeps: set[int]) -> Segment:
        outputs = {v for _, values in self.forward_sends for v in values}
        inputs = {v for v in self.received if v in self._read(self.forward_ops) or v in keeps}
        inputs |= {v for v in outputs if v in self.received}
        loss = {self.cutter.graph.loss} & self.forward_ops
        takes = inputs - keeps
        return self._segment("F", self.forward_ops, inputs, takes, keeps, outputs | loss)

    def whole(self, keeps: set[int]) -> Segment:
        ops = self.backward.ops | self._again(self.from_forward - keeps)
        inputs = keeps | self.late
        return self._segment("B", ops, inputs, inputs, set(), self._backward_outputs())

    def input_gradient(self, keeps: set[int]) -> Segment:
        handed = self._handed_to_w(keeps)
        repeated = self._again(self.from_forward - keeps)
        ops = self.inner | (repeated if self._sends_backward() else set())
        if not self._sends_backward():
            return Segment("I")
        inputs = keeps | self.late
        takes = inputs - handed
        sent = {v for _, values in self.backward_sends for v in values}
        return self._segment("I", ops, inputs, takes, handed, sent)

    def weight_gradient(self, keeps: set[int]) -> Segment:
        if not self._sends_backward():
            whole = self.whole(keeps)
            return Segment(
                "W", whole.ops, whole.inputs, whole.takes, (), (), whole.gradients,
                whole.flop, whole.peak_bytes, whole.change_bytes,
            )  # fmt: skip
        ops, outside = self._weight_ops()
        outputs = {value for _, value in self.gradients}
        return self._segment("W", ops, outside, outside, set(), outputs)

    # -- helpers ------------------------------------------------------------------------------

    def _sends_backward(self) -> bool:
        return bool(self.backward_sends)

    def _backward_outputs(self) -> set[int]:
        sent = {v for _, values in self.backward_sends for v in values}
        return sent | {value for _, value in self.gradients}

    def _input_gradient_ops(self) -> tuple[set[int], set[int]]:
        sent = {v for _, values in self.backward_sends for v in values}
        wanted = {v for v in sent if self.nodes[v].phase == "B"}
        ops, outside = self.cutter._close(wanted, None, self.stage, "B")
        makers = {self.nodes[v].inputs[0] for v in ops if self.nodes[v].target == "getitem"}
        ops |= {  # all results of an op with several leave it together
            v
            for v in self.backward.ops
            if self.nodes[v].target == "getitem" and self.nodes[v].inputs[0] in makers
        }
        return ops, outside

    def _weight_ops(self) -> tuple[set[int], set[int]]:
        """Return the ops of W and what it reads from I, from F and from messages."""
        wanted = {value for _, value in self.gradients}
        wanted |= self.cutter._backward_writes(self.stage)
        left = self.backward.ops - self.inner
        return self.cutter._close(wanted, left, self.stage, "B")

    def _handed_to_w(self, keeps: set[int]) -> set[int]:
        return self._weight_ops()[1]

    def _again(self, values: set[int]) -> set[int]:
        """Return the forward ops that repeat `values` from what the stage received."""
        ops: set[int] = set()
        stack = [v for v in values if v not in self.received]
        while stack:
            value = stack.pop()
            if value in ops or value in self.received or self.nodes[value].kind != "op":
                continue
            ops.add(value)
            stack.extend(self.nodes[value].inputs)
        return ops

    def _read(self, ops: set[int]) -> set[int]:
        return {k for i in ops for k in self.nodes[i].inputs}

    def _segment(
        self,
        kind: SegmentKind,
        ops: set[int],
        inputs: set[int],
        takes: set[int],
        keeps: set[int],
        outputs: set[int],
    ) -> Segment:
        ordered = tuple(sorted(ops))
        peak, change = segment_memory(
            self.cutter.graph, ordered, inputs, takes, keeps, outputs, self._arriving(kind)
        )
        forward = kind == "F"
        return Segment(
            kind=kind,
            ops=ordered,
            inputs=tuple(sorted(inputs)),
            takes=tuple(sorted(takes)),
            keeps=tuple(sorted(keeps)),
            sends=self.forward_sends if forward else self.backward_sends if kind != "W" else (),
            gradients=self.gradients if kind in ("B", "W") else (),
            flop=sum(self.nodes[i].flop for i in ordered),
            peak_bytes=peak,
            change_bytes=change,
        )

    def _arriving(self, kind: SegmentKind) -> set[int]:
        if kind == "F":
            return self.received
        return self.late if kind in ("B", "I") else set()


def peak_with_workspace(
    graph: Graph, stages: Stages, stage: int, kind: SegmentKind, workspace_bytes: Sequence[int]
) -> int:
    """Return the peak of a segment (as `Segment.peak_bytes`), with what ops hold while they run."""
    segment = stages.stages[stage].segment(kind)
    way = "F" if kind == "F" else "B"
    arriving = {
        v for e in stages.edges if e.target == stage and e.kind == way and kind != "W" for v in e.values
    }
    outputs = {v for _, values in segment.sends for v in values}
    outputs |= {v for _, v in segment.gradients} | ({graph.loss} & set(segment.ops))
    peak, _ = segment_memory(
        graph, segment.ops, set(segment.inputs), set(segment.takes), set(segment.keeps), outputs,
        arriving, workspace_bytes,
    )  # fmt: skip
    return peak


def segment_memory(
    graph: Graph,
    ops: Sequence[int],
    inputs: set[int],
    takes: set[int],
    keeps: set[int],
    outputs: set[int],
    arriving: set[int],
    workspace_bytes: Sequence[int] = (),
) -> tuple[int, int]:
    """Return (peak, change) of the bytes held while `ops` run, against those before.

    A value lives from its op (or its message) to its last use; views share their storage.
    Values in `takes` die at their last use, others of `inputs` stay; `keeps` outlive the
    segment, `outputs` live to its end.  `workspace_bytes` of each node of the graph are held
    only while it runs; none if not given.
    """
    nodes = graph.nodes
    storage_bytes: dict[int, int] = {}
    for v in [*inputs, *ops]:
        root = nodes[v].storage
        if nodes[root].kind == "op":
            storage_bytes[root] = max(storage_bytes.get(root, 0), nodes[v].size_bytes)
    last: dict[int, int] = {}
    for place, op in enumerate(ops):
        for v in (op, *nodes[op].inputs):
            last[nodes[v].storage] = place
    lasting = {nodes[v].storage for v in keeps | outputs | (inputs - takes)}
    held = {nodes[v].storage for v in inputs} & storage_bytes.keys()
    came = {nodes[v].storage for v in arriving & inputs} & storage_bytes.keys()
    now = peak = sum(storage_bytes[root] for root in came)
    dies: dict[int, list[int]] = {}
    for root, place in last.items():
        if root in storage_bytes and root not in lasting:
            dies.setdefault(place, []).append(root)
    for place, op in enumerate(ops):
        root = nodes[op].storage
        if root in storage_bytes and root not in held:
            held.add(root)
            now += storage_bytes[root]
        peak = max(peak, now + (workspace_bytes[op] if workspace_bytes else 0))
        for dead in dies.get(place, ()):
            if dead in held:
                held.discard(dead)
                now -= storage_bytes[dead]
    surviving = {nodes[v].storage for v in keeps | (inputs - takes)}
    now -= sum(storage_bytes[root] for root in held - surviving)
    return peak, now
