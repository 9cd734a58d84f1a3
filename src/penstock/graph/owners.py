"""Owners: the stage to which each op of a cut step belongs, and the ops that a value needs.

- A forward op belongs to the stage in whose range it stands; one that updates a buffer, to the
  stage that makes the new value.
- A backward op belongs to the stage of its origin, or to the lowest stage whose gradients it
  reads, where that is lower: so gradients only ever travel towards the input.
- A free op (`Graph.free`) belongs to nobody: every stage that needs its value repeats it.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.graph.graph import Graph, Phase


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The ops of a graph, divided among stages.

    stage_of:   of each node; for inputs and free ops it means nothing.
    repeated:   of each stage, the free ops that its forward pass computes in any case.
    once:       ops that read a buffer which the step changes: later they would read another value.
    """

    graph: Graph
    num_stages: int
    free: tuple[bool, ...]
    stage_of: tuple[int, ...]
    repeated: tuple[frozenset[int], ...]
    once: frozenset[int]

    def needed(
        self, wanted: Iterable[int], stage: int, phase: Phase, inside: set[int] | None = None
    ) -> tuple[set[int], set[int]]:
        """Return (ops to compute, op values from outside) so that `stage` has `wanted`.

        An op is computed if it belongs to this stage and phase (and is `inside`, where given), or
        is free.  A free op of the forward pass is taken from there in the backward pass, if it is
        computed there; views of weights are made again.
        """
        nodes, ops, outside = self.graph.nodes, set[int](), set[int]()
        free, stage_of = self.free, self.stage_of
        stack = list(wanted)
        while stack:  # long: what most of the time of cutting goes into
            value = stack.pop()
            if value in ops or value in outside or (node := nodes[value]).kind != "op":
                continue
            if free[value]:
                kept = phase == "B" and node.phase == "F" and value in self.repeated[stage]
                is_computed = not kept or self.is_view_of_state(value)
            else:
                is_computed = node.phase == phase and stage_of[value] == stage
                is_computed = is_computed and (inside is None or value in inside)
            if is_computed:
                ops.add(value)
                stack.extend(node.inputs)
            else:
                outside.add(value)
        return ops, outside

    def is_view_of_state(self, value: int) -> bool:
        """Return whether a value lies in the memory of a parameter or buffer."""
        owner = self.graph.nodes[self.graph.nodes[value].storage]
        return owner.kind in ("parameter", "buffer")


def owners_of(graph: Graph, places: Sequence[int]) -> Owners:
    """Return the owner of every node if `graph` is cut before the nodes `places`."""
    free = graph.free
    stage_of = _stages_of_nodes(graph, places, free)
    count = len(places) + 1
    bare = Owners(graph, count, free, stage_of, (frozenset[int](),) * count, _once(graph))
    own: list[list[int]] = [[] for _ in range(count)]
    for i, node in enumerate(graph.nodes):
        if node.kind == "op" and node.phase == "F" and not free[i]:
            own[stage_of[i]].append(i)
    return replace(bare, repeated=tuple(_repeated(bare, *row) for row in enumerate(own)))


def gradient_parts(owners: Owners) -> list[list[tuple[int, int]]]:
    """Return for each stage the (parameter node, value) parts of gradients that it makes.

    A gradient that is a sum over stages is left as its parts: adding them is the step's last act.
    """
    graph = owners.graph
    by_name = graph.parameter_at
    parts: list[list[tuple[int, int]]] = [[] for _ in range(owners.num_stages)]
    for name, gradient in graph.gradients.items():
        for part in () if gradient is None else _parts(owners, gradient):
            parts[owners.stage_of[part]].append((by_name[name], part))
    return parts


def _parts(owners: Owners, value: int) -> list[int]:
    nodes = owners.graph.nodes
    node = nodes[value]
    stages = {owners.stage_of[k] for k in node.inputs}
    alike = all((nodes[k].shape, nodes[k].dtype) == (node.shape, node.dtype) for k in node.inputs)
    sums = node.target == "aten.add.Tensor" and node.phase == "B"
    if sums and alike and len(stages) > 1:
        return [part for k in node.inputs for part in _parts(owners, k)]
    return [value]


def _stages_of_nodes(graph: Graph, places: Sequence[int], free: Sequence[bool]) -> tuple[int, ...]:
    nodes, stages = graph.nodes, [0] * len(graph.nodes)
    for i, node in enumerate(nodes):
        if node.target == "getitem":
            stages[i] = stages[node.inputs[0]]
        elif node.phase == "F":
            made = [stages[k] for k in node.inputs if nodes[k].kind == "op"]
            late = node.effect == "writes" and made
            stages[i] = max(made) if late else bisect.bisect_right(places, i)
        else:
            of_origin = stages[node.origin] if node.origin >= 0 else len(places)
            gradients = (k for k in node.inputs if nodes[k].phase == "B" and not free[k])
            stages[i] = min([of_origin, *(stages[k] for k in gradients)])
    return tuple(stages)


def _once(graph: Graph) -> frozenset[int]:
    """Return the ops whose value depends on when they run."""
    written, found = graph.written, set[int]()
    for i, node in enumerate(graph.nodes):
        reads = node.kind == "op" and node.effect == "pure" and written & set(node.inputs)
        if reads or (node.target == "getitem" and node.inputs[0] in found):
            found.add(i)
    return frozenset(found)


def _repeated(owners: Owners, stage: int, own: Sequence[int]) -> frozenset[int]:
    """Return the free ops that the forward ops of a stage, its `own`, need."""
    ops, _ = owners.needed(own, stage, "F")
    return frozenset(i for i in ops if owners.free[i])
