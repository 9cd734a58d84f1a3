"""Instructions: what one rank can be told to do, and what the instructions refer to.

F0.3          Compute: forward of stage 0 on micro-batch 3, at weights of version 0
F0.3@-1       the same at version -1 (the one before version 0)
F0.3>r1e0s2   Send: the value that F0.3 made, to rank 1, over edge 0, into its slot 2
F0.3<r0e0s2   Receive: the same message at the other end, from rank 0
tied:wte.0    Reduce: the gradients of bucket "wte", of step 0 (tied | replicas | norm)
U0.0          Update: the optimizer's step 0 on stage 0; it makes version 1
unshard0      Unshard: gather the weights of stage 0;  reshard0 drops them again
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from penstock.errors import ProgramError, ScheduleError
from penstock.schedule.schedule import Action

EdgeKind = Literal["F", "B"]
EDGE_KINDS: tuple[EdgeKind, ...] = ("F", "B")
How = Literal["tied", "replicas", "norm", "validate"]
HOWS: tuple[How, ...] = (
    "tied",
    "replicas",
    "norm",
    "validate",
)  # also the order in which they come; the last one after the updates

_MESSAGE = re.compile(r"([FBI]\d+\.\d+)([<>])r(\d{1,9})e(\d{1,9})s(\d{1,9})", re.ASCII)


class Edge(NamedTuple):
    """A value that `kind` of one stage makes and another stage uses, once per micro-batch.

    F: made by the forward of `source`, there before the forward of `target`, kept until the last
    use by `target` (source < target).  B: made by B or I of `source`, used by B, or by I and W, of
    `target` (source > target).
    """

    kind: EdgeKind
    source: int
    target: int
    size_bytes: int = 0

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


@dataclass(frozen=True, slots=True)
class Compute:
    """Run F, B, I or W of a stage on a micro-batch, at one version of its weights.

    It waits for the messages that it uses: the Receives posted before it.
    """

    action: Action
    version: int = 0

    def __str__(self) -> str:
        return f"{self.action}@{self.version}" if self.version else str(self.action)


@dataclass(frozen=True, slots=True)
class Send:
    """Issue the message (edge, micro-batch) to rank `peer`, into its slot `slot`, and go on."""

    of: Action
    edge: int
    peer: int
    slot: int

    def __str__(self) -> str:
        return f"{self.of}>r{self.peer}e{self.edge}s{self.slot}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of (edge, micro-batch) from rank `peer` into the own `slot`, and go on."""

    of: Action
    edge: int
    peer: int
    slot: int

    def __str__(self) -> str:
        return f"{self.of}<r{self.peer}e{self.edge}s{self.slot}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum a step's gradients over `ranks`; every one of them waits for all.

    tied: of a parameter that lives in several stages (a sum on the spot if they share a rank).
    replicas: of a stage that lives on several ranks.  norm: the squares, for clipping.
    validate: the same after the update, which is taken back and done again where it has to be.
    """

    bucket: str
    how: How
    ranks: tuple[int, ...]
    step: int = 0
    size_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.how}:{self.bucket}.{self.step}"


@dataclass(frozen=True, slots=True)
class Update:
    """Let the optimizer make version step + 1 of a stage's weights."""

    stage: int
    step: int = 0

    def __str__(self) -> str:
        return f"U{self.stage}.{self.step}"


@dataclass(frozen=True, slots=True)
class Unshard:
    """Begin to gather the weights of a stage, and go on; its next Compute waits for them."""

    stage: int

    def __str__(self) -> str:
        return f"unshard{self.stage}"


@dataclass(frozen=True, slots=True)
class Reshard:
    """Drop the gathered weights of a stage, all but the own shard."""

    stage: int

    def __str__(self) -> str:
        return f"reshard{self.stage}"


Instruction: TypeAlias = Compute | Send | Receive | Reduce | Update | Unshard | Reshard
Code: TypeAlias = tuple[Instruction, ...]  # of one rank, in the order of issue


def parse_instruction(text: str, reductions: Mapping[tuple[str, str], Reduce]) -> Instruction:
    """Return the instruction that prints as `text`.

    `reductions` says, by (how, bucket), over which ranks and with how many bytes a Reduce is.
    Raises:   ProgramError: no instruction prints so.
    """
    try:
        return _parse(text, reductions)
    except (ValueError, KeyError, ScheduleError) as problem:
        hint = "write F0.3 F0.3@-1 F0.3>r1e0s2 F0.3<r0e0s2 tied:wte.0 U0.0 unshard0 reshard0"
        raise ProgramError(f"{text!r} is no instruction", hint=hint) from problem


def _parse(text: str, reductions: Mapping[tuple[str, str], Reduce]) -> Instruction:
    if message := _MESSAGE.fullmatch(text):
        of, direction, *operands = message.groups()
        edge_end = Send if direction == ">" else Receive
        peer, edge, slot = map(int, operands)
        return edge_end(Action.parse(of), edge, peer, slot)
    if ":" in text:
        how, rest = text.split(":", 1)
        bucket, step = rest.rsplit(".", 1)
        return replace(reductions[how, bucket], step=int(step))
    for prefix, sharding in (("unshard", Unshard), ("reshard", Reshard)):
        if text.startswith(prefix):
            return sharding(int(text.removeprefix(prefix)))
    action, at, version = text.partition("@")
    parsed = Action.parse(action)
    if parsed.kind == "U" and not at:
        return Update(parsed.stage, parsed.micro_batch)
    if parsed.kind == "U":
        raise ValueError(text)
    return Compute(parsed, int(version) if at else 0)


def check_edges(edges: Iterable[Edge], num_stages: int) -> None:
    """Return when every edge joins two of the stages in the direction of its kind.

    Raises:   ProgramError: one does not, or two join the same stages.
    """
    seen: set[tuple[str, int, int]] = set()
    for edge in edges:
        forward = edge.source < edge.target
        if not 0 <= min(edge.source, edge.target) < max(edge.source, edge.target) < num_stages:
            hint = f"an edge joins two of the {num_stages} stages"
            raise ProgramError(f"edge {edge} is no edge of this program", hint=hint)
        if forward != (edge.kind == "F") or edge.size_bytes < 0:
            hint = "F edges lead to later stages, B edges to earlier ones; sizes are 0 or more"
            raise ProgramError(f"edge {edge} of {edge.size_bytes} bytes cannot be", hint=hint)
        if edge[:3] in seen:
            raise ProgramError(
                f"edge {edge} stands there twice", hint="put its values into one message"
            )
        seen.add(edge[:3])


def check_tied(groups: Sequence[TiedGroup], num_stages: int) -> None:
    """Return when every group joins stages that there are and has a name of its own.

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
