"""Stages: a traced step cut into F, B, I and W segments, each a pure function of its inputs.

`cut` makes them.  Nothing here computes: a Segment lists ops and values as nodes of the Graph.
"""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from penstock.graph.graph import Phase

if TYPE_CHECKING:
    from penstock.graph.known_stages import KnownStages

SegmentKind = Literal["F", "B", "I", "W"]
Sends: TypeAlias = "tuple[tuple[int, tuple[int, ...]], ...]"
Recompute: TypeAlias = bool | tuple[int, ...]  # all of F or nothing; or some ops, as nodes


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops that run without communication inside, as a function of node values.

    ops:           nodes to compute, in order (repeated free ops included).
    inputs:        values that come from a message or an earlier segment of the micro-batch;
                   parameters, buffers, the batch and constants are not listed.
    takes:         those of `inputs` that nothing reads later.
    keeps:         values handed to a later segment of the same stage and micro-batch.
    arrives:       those of `inputs` that a message brings.
    sends:         values for each outgoing edge (by index into `Stages.edges`).
    gradients:     (parameter node, value) pairs to be added up; a parameter may occur twice.
    peak_bytes:    most bytes held above those held when the segment starts.
    change_bytes:  bytes held when it has ended and its messages are sent, against the start.
    times:         micro-batches at once: its inputs are as much larger than the graph says.
    """

    kind: SegmentKind
    ops: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    arrives: tuple[int, ...] = ()
    sends: Sends = ()
    gradients: tuple[tuple[int, int], ...] = ()
    flop: int = 0
    peak_bytes: int = 0
    change_bytes: int = 0
    times: int = 1

    @property
    def digest(self) -> str:
        """Return a short hash of the ops and their inputs, equal in every plan that has them.

        The graph is the same; where messages go does not matter.
        """
        sent = tuple(values for _, values in self.sends)
        what = self.kind, self.ops, self.inputs, self.takes, self.keeps, self.gradients, sent
        return hashlib.sha256(repr((*what, self.times)).encode()).hexdigest()[:16]


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
    recompute: Recompute = False

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

    tied:   (parameter node, the stages that hold a part of its gradient or read it).
    known:  by which they were cut, where others are cut by it too.
    """

    stages: tuple[Stage, ...]
    edges: tuple[StageEdge, ...]
    tied: tuple[tuple[int, tuple[int, ...]], ...]
    known: "KnownStages | None" = field(default=None, repr=False, compare=False)

    @property
    def shared(self) -> frozenset[int]:
        """Return the parameters that several stages hold."""
        return frozenset(node for node, holders in self.tied if len(holders) > 1)

    @property
    def has_gradients(self) -> bool:
        """Whether any stage makes a gradient of its parameters: not so in inference."""
        return any(stage.backward.gradients for stage in self.stages)
