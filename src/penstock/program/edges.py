"""Edges and groups: what the instructions of a program refer to, and the bytes of its stages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.errors import ProgramError
from penstock.program.instructions import COLLECT_HOWS, CollectHow

EdgeKind = Literal["F", "B"]


class Collected(NamedTuple):
    """What of an edge's values ranks collect, and the bytes of what each of them has made."""

    how: CollectHow
    size_bytes: int = 0


class Edge(NamedTuple):
    """A value that `kind` of one stage makes and another stage uses, once per micro-batch.

    F: made by the forward of `source`, there before the forward of `target`, kept until the last
    use by `target` (source < target).  B: made by B or I of `source`, used by B, or by I and W, of
    `target` (source > target).
    collects: what ranks that divide the ops of a stage have made in parts, at most once each how.
    """

    kind: EdgeKind
    source: int
    target: int
    size_bytes: int = 0
    collects: "tuple[Collected, ...]" = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.source}->{self.target}"


class TiedGroup(NamedTuple):
    """One parameter that several stages use: its gradients are summed before they update it."""

    name: str
    stages: tuple[int, ...]
    size_bytes: int = 0


class StageBytes(NamedTuple):
    """The bytes that one stage holds on its rank, by how long it holds them."""

    weights: int = 0  # one version of the parameters; their gradient is as large
    optimizer: int = 0  # the optimizer's state
    activations: int = 0  # from F to B (or I), per micro-batch, received values not counted
    deferred: int = 0  # from I to W, per micro-batch
    summed: int = 0  # of gradients, in the dtype in which they travel; 0: as large as the weights


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The stages of a program: what goes from one to another, what they share and hold.

    stage_bytes:  empty: sizes unknown.
    bits:         of a number in messages of each edge; empty: all as they are.
    stages:       what a runtime executes for each; it is not saved in a file.
    """

    edges: tuple[Edge, ...] = ()
    tied: tuple[TiedGroup, ...] = ()
    stage_bytes: tuple[StageBytes, ...] = ()
    bits: tuple[int, ...] = ()
    stages: object = field(default=(), compare=False, repr=False)


def check_edges(edges: Iterable[Edge], num_stages: int) -> None:
    """Check that every edge joins two of the stages in the direction of its kind.

    Raises:   ProgramError: one does not, or two join the same stages.
    """
    seen: set[tuple[str, int, int]] = set()
    for edge in edges:
        forward = edge.source < edge.target
        if not 0 <= min(edge.source, edge.target) < max(edge.source, edge.target) < num_stages:
            hint = f"an edge joins two of the {num_stages} stages"
            raise ProgramError(f"edge {edge} is not an edge of this program", hint=hint)
        if forward != (edge.kind == "F") or edge.size_bytes < 0:
            hint = "F edges lead to later stages, B edges to earlier ones; sizes are 0 or more"
            raise ProgramError(f"edge {edge} of {edge.size_bytes} bytes cannot be", hint=hint)
        if edge[:3] in seen:
            raise ProgramError(f"edge {edge} appears twice", hint="put its values into one message")
        seen.add(edge[:3])
        hows = [each.how for each in edge.collects]
        if len(set(hows)) < len(hows) or not set(hows) <= set(COLLECT_HOWS):
            hint = f"name each of {', '.join(COLLECT_HOWS)} at most once"
            raise ProgramError(f"edge {edge} collects {', '.join(hows)}", hint=hint)


def check_tied(groups: Sequence[TiedGroup], num_stages: int) -> None:
    """Check that every group joins existing stages and has its own name.

    Raises:   ProgramError: one does not.
    """
    for group in groups:
        stages = set(group.stages)
        if (
            len(stages) < 2
            or len(stages) < len(group.stages)
            or not stages <= set(range(num_stages))
        ):
            hint = "a tied group joins two or more different stages"
            raise ProgramError(
                f"tied group {group.name} joins stages {group.stages} of {num_stages}", hint=hint
            )
        if not group.name or group.name.split() != [group.name]:
            raise ProgramError(
                f"tied group {group.name!r} has no name of one word", hint="name its parameter"
            )
    if len({group.name for group in groups}) < len(groups):
        names = " ".join(group.name for group in groups)
        raise ProgramError(f"two tied groups of one name: {names}", hint="give each its own")
