"""Program: what every rank executes, in the order of issue, message by message.

    program: 2 ranks, 2 stages, 1 micro-batches, 10 instructions
    edge 0  F 0->1
    edge 1  B 1->0
    rank 0  F0.0 F0.0>r1e0s0 B1.0<r1e1s0 B0.0 U0.0
    rank 1  F0.0<r0e0s0 F1.0 B1.0 B1.0>r0e1s0 U1.0

instructions.py says how to read them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from penstock.bits import is_wire_bits
from penstock.errors import ProgramError
from penstock.files import read_noun, write_text
from penstock.program.codes import COMPUTE, RECEIVE, RELOAD, UNSHARD, UPDATE, Codes
from penstock.program.edges import Collected as Collected
from penstock.program.edges import Edge as Edge
from penstock.program.edges import StageBytes as StageBytes
from penstock.program.edges import StageGraph as StageGraph
from penstock.program.edges import TiedGroup as TiedGroup
from penstock.program.edges import check_edges, check_tied
from penstock.program.instructions import BeginOffload as BeginOffload
from penstock.program.instructions import BeginReload as BeginReload
from penstock.program.instructions import Code as Code
from penstock.program.instructions import Collect as Collect
from penstock.program.instructions import Compute as Compute
from penstock.program.instructions import Instruction as Instruction
from penstock.program.instructions import Offload as Offload
from penstock.program.instructions import Receive as Receive
from penstock.program.instructions import Reload as Reload
from penstock.program.instructions import Reshard as Reshard
from penstock.program.instructions import Send as Send
from penstock.program.instructions import Unshard as Unshard
from penstock.program.instructions import Update as Update
from penstock.program.reductions import Sum
from penstock.program.step_end import StepEnd as StepEnd
from penstock.program.text import from_json, to_json, to_text
from penstock.program.verify import verify
from penstock.schedule.grid import Grid, InnerAxis, misfit, misplaced, unlike, written
from penstock.schedule.orders import Action, F, W
from penstock.schedule.weight_rule import SYNCHRONOUS, WEIGHT_RULES, WeightRule
from penstock.typed import damage

_COUNTS = (
    "num_stages",
    "num_micro_batches",
    "num_steps",
    "replicas",
    "num_ranks",
    "together",
    "tensor",
)


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of all ranks over a window of `num_steps` steps of `num_micro_batches`.

    Micro-batches count over the whole window, as in a Schedule.  `replicas` copies of one pipeline
    stand side by side (grid.py), and messages stay inside a replica; each has its own micro-batches
    under the same numbers.  `shares` says how many per step, by replica, where they are not
    alike; `num_micro_batches` is then the largest.

    `code` may be given as tuples of instructions, one per rank; they are kept as arrays.
    So many replicas as `axis` says have the same micro-batches, and divide each stage inside.

    Raises:   ProgramError: a rule of verify.py is broken; the message shows where.
    """

    num_stages: int
    num_micro_batches: int
    code: Codes
    graph: StageGraph = StageGraph()  # noqa: RUF009 - a frozen record
    end: StepEnd = StepEnd()  # noqa: RUF009 - a frozen record
    num_steps: int = 1
    weight_rule: WeightRule = SYNCHRONOUS
    replicas: int = 1
    axis: InnerAxis = InnerAxis()  # noqa: RUF009 - a frozen record
    shares: tuple[int, ...] = ()  # empty: all have num_micro_batches
    together: int = 1  # micro-batches of each B, or W where I stands apart, as in a Schedule
    parts: tuple[int, ...] = ()  # by rank, of what replicas divide; empty: all as much

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", Codes.of(self.code))
        self._check_sizes()
        object.__setattr__(self, "shares", unlike(self.shares))
        object.__setattr__(self, "parts", self.grid.uneven(self.parts))
        check_edges(self.edges, self.num_stages)
        check_tied(self.graph.tied, self.num_stages)
        self._check_sound()  # 6 in docs/architecture.md

    def _check_sound(self) -> None:
        verify(self)

    def _check_sizes(self) -> None:
        for name in _COUNTS:
            if (number := getattr(self, name)) < 1:
                raise ProgramError(f"{name} is {number}", hint="give 1 or more")
        if self.num_ranks % self.replicas:
            hint = "every replica has the same number of ranks"
            raise ProgramError(
                f"{self.num_ranks} ranks cannot be divided into {self.replicas} replicas", hint=hint
            )
        if self.replicas % self.tensor:
            message = f"{self.replicas} replicas cannot divide the ops of stages by {self.tensor}"
            raise ProgramError(message, hint=f"give a multiple of {self.tensor} replicas")
        self._check_shares()
        forwards = self.num_steps * self.num_stages * self.grid.step_micro_batches * self.tensor
        if self.code.num_instructions < forwards:
            hint = "every stage runs at least its forward on every micro-batch"
            raise ProgramError(
                f"{self.code.num_instructions} instructions for {forwards} forwards", hint=hint
            )
        bits, stage_bytes = self.graph.bits, self.graph.stage_bytes
        if len(bits) not in (0, len(self.edges)):
            hint = "give one number for each edge, or none"
            raise ProgramError(f"bits of {len(bits)} of {len(self.edges)} edges", hint=hint)
        if not all(map(is_wire_bits, bits)):
            hint = "a number of a message has 2 to 16 bits, or 32: as it is"
            raise ProgramError(f"bits of the edges are {written(bits)}", hint=hint)
        if len(stage_bytes) not in (0, self.num_stages):
            hint = "give one StageBytes per stage, or none"
            message = f"{len(stage_bytes)} stage_bytes for {self.num_stages} stages"
            raise ProgramError(message, hint=hint)
        if found := misplaced(self.parts, self.grid):
            raise ProgramError(found[0], hint=found[1])
        if any(number < 0 for one in stage_bytes for number in one):
            raise ProgramError("a number in stage_bytes is below 0", hint="give 0 or more bytes")

    def _check_shares(self) -> None:
        if found := misfit(self.shares, self.replicas, self.num_micro_batches):
            raise ProgramError(found[0], hint=found[1])
        if unlike(self.shares) and (self.weight_rule != SYNCHRONOUS or self.num_steps > 1):
            hint = "give all replicas the same share, or take one synchronous step"
            window = f"{self.num_steps} steps, weights {self.weight_rule.name}"
            raise ProgramError(f"shares are {written(self.shares)}, for {window}", hint=hint)
        counts = self.shares or (self.num_micro_batches,)
        if any(share % self.together for share in counts):
            message = f"{written(counts)} micro-batches cannot go {self.together} together"
            raise ProgramError(message, hint="give a number that divides those of a step")

    @property
    def num_ranks(self) -> int:
        return len(self.code)

    @property
    def tensor(self) -> int:
        return self.axis.ranks

    @property
    def edges(self) -> tuple[Edge, ...]:
        return self.graph.edges

    @property
    def grid(self) -> Grid:
        """Whose the ranks are, and who takes which micro-batches."""
        shares = self.shares or (self.num_micro_batches,) * self.replicas
        return Grid(self.num_ranks // self.replicas, shares, *self.axis)

    def group_of(self, action: Action) -> range:
        """Return the micro-batches that an action of this program is of: its own, or from it on."""
        count = self.together if action.kind in ("B", "W") else 1
        return range(action.micro_batch, action.micro_batch + count)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that live on `rank`, in increasing order.

        They are those that it computes; of a rank that computes none, those that it updates.
        """
        part = self.code.slice_of(rank)
        computes, updates = (self.code.op[part] == op for op in (COMPUTE, UPDATE))
        stages = self.code.stage[part][computes if computes.any() else updates]
        return tuple(np.unique(stages).tolist())

    def part_of(self, rank: int) -> Fraction:
        """Return which part of its sharded stages a rank keeps."""
        return self.grid.part_of(rank, self.parts)

    def stretch(self, rank: int) -> float:
        """Return how many times an equal part the largest is, of those who divide with `rank`."""
        parts = map(self.part_of, self.grid.column_of(rank))
        return float(max(parts) * self.replicas)

    @property
    def sharded(self) -> frozenset[int]:
        """Return the stages of which each rank keeps a shard, or has all in far memory."""
        sums = (one for one in self.code.reductions if isinstance(one, Sum))
        return self.far | {one.stage for one in sums if one.how == "shards"}

    @property
    def far(self) -> frozenset[int]:
        """Return the stages whose weights are in far memory but while they are used."""
        codes, trains = self.code, (self.code.op == UPDATE).any()
        rows = (codes.op == RELOAD) & (codes.kind == W) if trains else codes.op == UNSHARD
        return frozenset(np.unique(codes.stage[rows]).tolist())

    def slots(self, rank: int) -> dict[int, int]:
        """Return how many slots `rank` needs for each edge that it receives over."""
        part = self.code.slice_of(rank)
        received = self.code.op[part] == RECEIVE
        edges, slots = self.code.edge[part][received], self.code.slot[part][received]
        return {int(edge): int(slots[edges == edge].max()) + 1 for edge in np.unique(edges)}

    def unread(self, rank: int) -> dict[tuple[int, int], int]:
        """Return by edge and sender how many messages `rank` has announced and not read, at most.

        A message is read by the first action that needs it, and all older ones with it.
        """
        part = self.code.slice_of(rank)
        op, kind, stage = self.code.op[part], self.code.kind[part], self.code.stage[part]
        edge, peer, micro_batch = (
            self.code.edge[part],
            self.code.peer[part],
            self.code.micro_batch[part],
        )
        most: dict[tuple[int, int], int] = {}
        received = op == RECEIVE
        pairs = zip(edge[received].tolist(), peer[received].tolist(), strict=True)
        channels: set[tuple[int, int]] = set(pairs)
        for number, sender in channels:
            to = self.edges[number]
            came = np.flatnonzero(received & (edge == number) & (peer == sender))
            forward = kind == F if to.kind == "F" else kind != F
            reads = np.flatnonzero((op == COMPUTE) & (stage == to.target) & forward)
            readers, firsts = np.unique(micro_batch[reads], return_index=True)
            read = reads[firsts[np.searchsorted(readers, micro_batch[came])]]
            taken = np.minimum.accumulate(read[::-1])[::-1]
            waiting = np.arange(1, len(came) + 1) - np.searchsorted(taken, came)
            most[number, sender] = int(waiting.max())
        return most

    def map_ranks(self, rewrite: Callable[[Code], Iterable[Instruction]]) -> "Program":
        """Return the program in which the code of every rank is what `rewrite` makes of it.

        Raises:   ProgramError: the result is not sound.
        """
        return replace(self, code=Codes.of(map(rewrite, self.code)))

    def __str__(self) -> str:
        return to_text(self)

    def save(self, path: Path | str) -> None:
        """Write the program as JSON that a person can read: one line of instructions per rank."""
        write_text(path, to_json(self))

    @classmethod
    def load(
        cls, path: Path | str, *, weight_rules: Iterable[WeightRule] = WEIGHT_RULES
    ) -> "Program":
        """Return the program that `save` wrote, its weight rule taken from `weight_rules` by name.

        Raises:   ProgramError: the file cannot be read, is not a program, or is not sound.
        """
        hint = "is it a program file? make it again"
        content = read_noun(path, ProgramError, "program", hint=hint)
        with damage(f"program {path}", ProgramError, hint=hint):
            return from_json(content, tuple(weight_rules), cls)


class Draft(Program):
    """A program that passes still change: only what comes of the last one has to be sound."""

    __slots__ = ()

    def _check_sound(self) -> None:
        """Leave it to `sound`."""


def sound(draft: Program) -> Program:
    """Return the program that a draft has become, verified.

    Raises:   ProgramError: it is not sound.
    """
    return Program(**{each.name: getattr(draft, each.name) for each in fields(draft)})
