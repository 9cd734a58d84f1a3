"""Graph: one training step of one micro-batch as a table of nodes, without torch.

A node is an input (parameter, buffer, leaf of the batch, the gradient's scale, a constant) or
one ATen op.  Nodes stand in the order in which eager PyTorch would run them: first the
forward pass up to the loss, then the backward pass.  A backward op names its `origin`, the
forward op whose autograd node issued it; that is all that is needed to cut the step anywhere.
"""

import bisect
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from penstock.errors import GraphError
from penstock.files import Json, read_noun, write_text
from penstock.graph.node_arrays import NodeArrays, node_arrays
from penstock.graph.parts import part_in
from penstock.typed import MisfitError, damage, typed

NodeKind = Literal["parameter", "buffer", "input", "scale", "constant", "op"]
Phase = Literal["F", "B"]
COLLECT_TARGET = "penstock.collect.default"
_MOST = 10**15  # bytes, FLOP, samples: sums of them fit 64 bits
Effect = Literal["pure", "random", "mutates", "writes"]


@dataclass(frozen=True, slots=True)
class Node:
    """One row of the table.

    inputs:     nodes that it reads, as indices.
    size_bytes: of its value, numel * itemsize; 0 where the value is no tensor.
    storage:    node that owns the memory of its value; itself, unless it is a view.
    origin:     forward op that a backward op belongs to; -1 if none is known.
    effect:     `random` draws random numbers, `mutates` changes a buffer without saying so in
                its schema (batch norm), `writes` copies into a buffer, else `pure`.
    """

    name: str
    kind: NodeKind
    target: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    storage: int
    phase: Phase = "F"
    origin: int = -1
    flop: int = 0
    module: str = ""
    effect: Effect = "pure"


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place where the forward pass can be divided: before node `at`.

    forward_bytes:  values that would be sent to later stages, for one micro-batch.
    """

    name: str
    at: int
    forward_bytes: int


@dataclass(frozen=True)
class Graph:
    """One whole training step of one micro-batch, and where it may be cut.

    key:        what the step was traced for, as text lines; a batch must fit it.
    loss:       node of the loss.
    gradients:  node of each trainable parameter's gradient; None if the loss ignores it.
    figures:    (name, node) of the numbers that the job's loss gives beside it.
    masters:    bytes of the parameters that are kept in more bits than the step reads, by name.
    """

    key: tuple[str, ...]
    nodes: tuple[Node, ...]
    loss: int
    gradients: Mapping[str, int | None]
    cut_points: tuple[CutPoint, ...]
    samples: int
    tokens: int
    figures: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    masters: Mapping[str, int] = field(default_factory=dict[str, int], kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.loss < len(self.nodes):
            raise GraphError(f"the loss is node {self.loss} of {len(self.nodes)}")
        for index, node in enumerate(self.nodes):
            if any(not 0 <= source < index for source in node.inputs):
                raise GraphError(f"node {index} ({node.name}) reads a later node: {node.inputs}")
            if not (0 <= node.storage <= index and -1 <= node.origin < index):
                places = f"storage {node.storage} and origin {node.origin}"
                raise GraphError(f"node {index} ({node.name}) has {places}, which come later")
            sizes = (*node.shape, node.size_bytes, node.flop)
            if not (min(sizes) >= 0 and max(sizes) < _MOST):
                raise GraphError(f"node {index} ({node.name}) has a size of {sizes}")
        places = [point.at for point in self.cut_points]
        if places != sorted(set(places)) or not -1 < min(places, default=0) <= max(
            places, default=0
        ) <= len(self.nodes):
            raise GraphError(f"cut points are not in order: {places}")
        known = (None, *range(len(self.nodes)))
        lost = [name for name, place in self.gradients.items() if place not in known]
        if lost:
            raise GraphError(f"the gradient of {lost[0]} is node {self.gradients[lost[0]]}")
        names = {node.name for node in self.nodes if node.kind == "parameter"}
        odd = [n for n, at in self.gradients.items() if at is not None and n not in names]
        if odd:
            raise GraphError(f"there is a gradient of {odd[0]}, and no such parameter")
        if not (min(self.samples, self.tokens) >= 0 and max(self.samples, self.tokens) < _MOST):
            raise GraphError(f"a micro-batch has {self.samples} samples, {self.tokens} tokens")

    @cached_property
    def digest(self) -> str:
        """Return a short hash of the nodes and the key: equal on every rank for the same job."""
        rows = [(n.kind, n.target, n.inputs, n.shape, n.dtype, n.origin) for n in self.nodes]
        figures = [self.figures] if self.figures else []
        text = json.dumps([self.key, rows, self.loss, sorted(self.gradients.items()), *figures])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def slices(self) -> tuple[tuple[str, int], ...]:
        """Return (name, count) of each parameter that is cut into slices (split.py), by name."""
        names = (node.name for node in self.nodes if node.kind == "parameter")
        parts = filter(None, map(part_in, names))
        counts = Counter(part.key for part in parts if part.order is None)
        return tuple(sorted(counts.items()))

    @cached_property
    def tensor(self) -> int:
        """Return among how many ranks the ops are divided (tensor/divided.py)."""
        return max(self._weight_ranks, self._gathering)

    @cached_property
    def context(self) -> bool:
        """Return whether those ranks divide tokens (tensor/by_tokens.py), and have all weights."""
        return self._weight_ranks < self._gathering

    @cached_property
    def _weight_ranks(self) -> int:
        names = (node.name for node in self.nodes if node.kind == "parameter")
        parts = filter(None, map(part_in, names))
        return max((part.ranks for part in parts), default=1)

    @cached_property
    def _gathering(self) -> int:
        """Return the number of ranks that gather something: it is along the first dim."""
        collects = (node for node in self.nodes if node.target == COLLECT_TARGET)
        pairs = ((node.shape, self.nodes[node.inputs[0]].shape) for node in collects)
        return max((after[0] for after, before in pairs if len(after) > len(before)), default=1)

    @property
    def told(self) -> frozenset[int]:
        """Return the nodes that a step tells of: the loss and the figures."""
        return frozenset((self.loss, *(node for _, node in self.figures)))

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """Return the nodes that are computed whatever the gradients need: those that a step tells
        of, and every change of a buffer."""
        told, rows = self.told, enumerate(self.nodes)
        return tuple(i for i, n in rows if i in told or n.effect in ("writes", "mutates"))

    @cached_property
    def state(self) -> frozenset[int]:
        """Return the parameters and buffers."""
        rows = enumerate(self.nodes)
        return frozenset(i for i, node in rows if node.kind in ("parameter", "buffer"))

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Return for each node its piece between cut points, a backward op's that of its origin."""
        places = [point.at for point in self.cut_points]
        rows = enumerate(self.nodes)
        own = (n.origin if n.phase == "B" and n.origin >= 0 else min(i, self.loss) for i, n in rows)
        return tuple(bisect.bisect_right(places, place) for place in own)

    @cached_property
    def parameter_at(self) -> Mapping[str, int]:
        """Return the node of each parameter, by name."""
        return {n.name: i for i, n in enumerate(self.nodes) if n.kind == "parameter"}

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Return for each node the nodes that read it."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for source in set(node.inputs):
                users[source].append(index)
        return tuple(map(tuple, users))

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Return for each node itself and the nodes that it reads."""
        return tuple((index, *node.inputs) for index, node in enumerate(self.nodes))

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Return for each node the bytes that a step makes of it: those of ops."""
        return tuple(node.size_bytes if node.kind == "op" else 0 for node in self.nodes)

    @cached_property
    def arrays(self) -> NodeArrays:
        """Return arrays of what the nodes read, lie in and hold."""
        return node_arrays(self)

    @cached_property
    def batch_readers(self) -> Mapping[int, frozenset[int]]:
        """Return for each op that reads some of the batch which of its leaves it reads."""
        leaves = frozenset(i for i, node in enumerate(self.nodes) if node.kind == "input")
        rows = ((i, leaves.intersection(node.inputs)) for i, node in enumerate(self.nodes))
        return {i: read for i, read in rows if read}

    @cached_property
    def written(self) -> frozenset[int]:
        """Return the buffers that a step changes."""
        written: set[int] = set()
        for node in self.nodes:
            if node.effect == "writes":
                written.add(node.inputs[0])
            elif node.effect == "mutates":
                written |= {i for i in node.inputs if self.nodes[i].kind == "buffer"}
        return frozenset(written)

    @cached_property
    def free(self) -> tuple[bool, ...]:
        """Return for each node whether any stage may repeat it instead of receiving its value.

        Such an op draws no random numbers, costs about as little as a copy, and reads either the
        batch, constants and buffers that no step changes (masks, positions), or one parameter and
        nothing else (views, casts).
        """
        free, of_parameter = list[bool](), list[bool]()
        for node in self.nodes:
            if node.kind != "op":
                free.append(node.kind != "scale")
                of_parameter.append(node.kind == "parameter")
                continue
            light = node.effect == "pure" and node.flop <= 4 * max(1, math.prod(node.shape))
            alone = len(set(node.inputs)) == 1 or not any(of_parameter[i] for i in node.inputs)
            stays = light and alone and self.written.isdisjoint(node.inputs)
            free.append(stays and all(free[i] for i in node.inputs))
            of_parameter.append(free[-1] and any(of_parameter[i] for i in node.inputs))
        return tuple(free)

    @cached_property
    def learned(self) -> frozenset[int]:
        """Return the nodes whose values come from weights or from the gradient of the loss."""
        found: set[int] = set()
        for index, node in enumerate(self.nodes):
            if node.kind in ("parameter", "scale") or not found.isdisjoint(node.inputs):
                found.add(index)
        return frozenset(found)

    @property
    def flop(self) -> int:
        """Return the floating-point operations of one micro-batch, forward and backward."""
        return sum(node.flop for node in self.nodes)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of all parameters as they are kept, tied ones counted once."""
        return sum(
            self.kept_bytes(at) for at, node in enumerate(self.nodes) if node.kind == "parameter"
        )

    def kept_bytes(self, parameter: int) -> int:
        """Return the bytes of a parameter as it is kept, as are its gradient and its update."""
        node = self.nodes[parameter]
        return self.masters.get(node.name, node.size_bytes)

    @property
    def copy_dtype(self) -> str:
        """Return the dtype in which a step reads weights that are kept in more bits; or ""."""
        kept = (n for n in self.nodes if n.kind == "parameter" and n.name in self.masters)
        return next((node.dtype for node in kept), "")

    def copy_bytes(self, parameter: int) -> int:
        """Return the bytes of a parameter's copy that a step reads; 0 if it reads the parameter."""
        node = self.nodes[parameter]
        return node.size_bytes if node.name in self.masters else 0

    def effects(self) -> tuple[tuple[str, Effect, str], ...]:
        """Return (node name, effect, module) of every op that is not pure."""
        return tuple((n.name, n.effect, n.module) for n in self.nodes if n.effect != "pure")

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        ops = [node for node in self.nodes if node.kind == "op"]
        backward = sum(node.phase == "B" for node in ops)
        return (
            f"Graph {self.digest}: {len(ops)} ops ({backward} backward), "
            f"{self.flop / 1e9:.2f} GFLOP, {len(self.cut_points)} cut points"
        )

    def to_json(self) -> dict[str, Json]:
        """Return the graph as JSON values, one row for each node."""
        columns = list(Node.__dataclass_fields__)
        content = {
            "penstock": "graph",
            "key": self.key,
            "columns": columns,
            "nodes": [[getattr(node, column) for column in columns] for node in self.nodes],
            "loss": self.loss,
            "gradients": dict(self.gradients),
            "cut_points": list(map(asdict, self.cut_points)),
            "samples": self.samples,
            "tokens": self.tokens,
            **({"figures": self.figures} if self.figures else {}),
            **({"masters": dict(self.masters)} if self.masters else {}),
        }
        return json.loads(json.dumps(content))

    def save(self, path: Path | str) -> None:
        """Write the graph as JSON, whole or not at all."""
        write_text(path, json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: Path | str) -> "Graph":
        """Read a graph written by `save`.

        Raises:   GraphError: the file is missing, damaged or not a graph.
        """
        hint = "trace the job again"
        content = read_noun(path, GraphError, "graph", hint=hint)
        with damage(f"graph {path}", GraphError, hint=hint):
            return cls._from_json(content)

    @classmethod
    def _from_json(cls, content: Mapping[str, Json]) -> "Graph":
        columns = typed(tuple[str, ...], content.get("columns"))
        rows = typed(tuple[list[Any], ...], content.get("nodes"))
        wrong = [at for at, row in enumerate(rows) if len(row) != len(columns)]
        if wrong:
            place = f"nodes[{wrong[0]}]"
            raise MisfitError.of(rows[wrong[0]], f"a row of {len(columns)}", place)
        rest = {key: value for key, value in content.items() if key != "columns"}
        nodes = [dict(zip(columns, row, strict=True)) for row in rows]
        return typed(cls, {**rest, "nodes": nodes})


def with_cut_points(graph: Graph, cut_points: tuple[CutPoint, ...]) -> Graph:
    """Return `graph` with other cut points."""
    return replace(graph, cut_points=cut_points)
