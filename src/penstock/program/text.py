"""Text: a program as JSON that a person can read, and back.

{
 "penstock": "program",
 "num_stages": 2, ...
 "edges": [
  ["F", 0, 1, 4096],
 ...
 "code": [
  "F0.0 F0.0>r1e0s0 ...",          one line per rank; the words are those of instructions.py
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from penstock.bits import AS_IT_IS
from penstock.errors import ProgramError
from penstock.files import Json
from penstock.program.codes import Codes
from penstock.program.edges import Collected, Edge, EdgeKind, StageBytes, StageGraph, TiedGroup
from penstock.program.instructions import (
    CollectHow,
    Guarding,
    Instruction,
    parse_instruction,
)
from penstock.program.reductions import AverageWeights, Reduction, Word, reduction_of
from penstock.program.step_end import StepEnd
from penstock.schedule.grid import InnerAxis, written
from penstock.schedule.weight_rule import WeightRule, rule_named
from penstock.typed import typed_flat

if TYPE_CHECKING:
    from penstock.program.program import Program

_NUMBERS = ("num_stages", "num_micro_batches", "num_steps", "replicas")


class _EdgeRow(NamedTuple):
    """An edge, as in a file."""

    kind: EdgeKind
    source: int
    target: int
    size_bytes: int


class _CollectRow(NamedTuple):
    """What ranks collect of an edge, as in a file."""

    edge: int
    how: CollectHow
    size_bytes: int


class _ReductionRow(NamedTuple):
    """Which gradients are summed, and over which ranks, as in a file."""

    word: Word
    bucket: str
    ranks: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _CountWords:
    """How many there are of what: stages, micro-batches, steps, and ranks along each axis."""

    num_stages: int
    num_micro_batches: int
    num_steps: int
    replicas: int
    shares: tuple[int, ...] = ()
    together: int = 1
    parts: tuple[int, ...] = ()
    tensor: int = 1
    context: bool = False


@dataclass(frozen=True, slots=True)
class _GraphRows:
    """The stages of a program, and what goes between them."""

    edges: tuple[_EdgeRow, ...]
    tied: tuple[TiedGroup, ...]
    stage_bytes: tuple[StageBytes, ...]
    bits: tuple[int, ...] = ()
    collects: tuple[_CollectRow, ...] = ()

    def graph(self) -> StageGraph:
        """Return what the rows say."""
        collects: dict[int, list[Collected]] = {}
        for number, how, size_bytes in self.collects:
            collects.setdefault(number, []).append(Collected(how, size_bytes))
        rows = enumerate(self.edges)
        edges = tuple(Edge(*edge, tuple(collects.get(number, ()))) for number, edge in rows)
        return StageGraph(edges, self.tied, self.stage_bytes, self.bits)


@dataclass(frozen=True, slots=True)
class _EndWords:
    """How a step ends, but for what the reductions say of it."""

    clip: bool
    commits: bool = False
    guard: Guarding | None = None
    averages: str = ""
    topology: str = ""
    served: str = ""

    def step_end(self, late: bool) -> StepEnd:
        """Return how a step ends that clips after its updates, or before."""
        agreed = self.averages, self.topology, self.served
        return StepEnd(self.clip, late, self.commits, self.guard, *agreed)


@dataclass(frozen=True, slots=True)
class _ProgramFile:
    """A program as it stands in a file, where the fields of its first three are among its own.

    due:   of each reduction, every how many steps it is, from which on; empty: all in each step.
    """

    counts: _CountWords
    graph: _GraphRows
    end: _EndWords
    weight_rule: str
    reductions: tuple[_ReductionRow, ...]
    code: tuple[str, ...]
    due: tuple[tuple[int, int], ...] = ()

    def made_reductions(self) -> list[Reduction]:
        """Return what the rows of the reductions say.

        Raises:   ProgramError: they are not due as often as there are some.
        """
        due = self.due or ((1, 1),) * len(self.reductions)
        if len(due) != len(self.reductions):
            there = f"there are {len(self.reductions)} reductions"
            raise ProgramError(f"due has {len(due)} rows, and {there}")
        return [reduction_of(*row, *when) for row, when in zip(self.reductions, due, strict=True)]


def to_json(program: "Program") -> str:
    """Return `program` as JSON: a line per field, and per item of a list."""
    fields: dict[str, object] = {"penstock": "program"}
    fields |= {name: getattr(program, name) for name in _NUMBERS}
    graph, end = program.graph, program.end
    fields |= {"clip": end.clip, "weight_rule": program.weight_rule.name}
    fields["edges"] = [edge[:4] for edge in program.edges]
    rows = enumerate(program.edges)
    collects = [(number, *each) for number, edge in rows for each in edge.collects]
    fields |= {"collects": collects} if collects else {}
    fields |= {"tied": graph.tied, "stage_bytes": graph.stage_bytes}
    fields["shares"] = program.shares
    fields |= {"bits": graph.bits} if graph.bits else {}
    fields |= {"together": program.together} if program.together > 1 else {}
    fields |= {"parts": program.parts} if program.parts else {}
    fields |= {"commits": True} if end.commits else {}
    fields |= {} if end.guard is None else {"guard": end.guard}
    fields |= {"tensor": program.tensor} if program.tensor > 1 else {}
    fields |= {"context": True} if program.axis.context else {}
    fields |= {"averages": end.averages} if end.averages else {}
    fields |= {"topology": end.topology} if end.topology else {}
    fields |= {"served": end.served} if end.served else {}
    fields["reductions"] = [
        (one.word, one.bucket, one.ranks, one.size_bytes) for one in program.code.reductions
    ]
    due = [
        (one.every, one.first) if isinstance(one, AverageWeights) else (1, 1)
        for one in program.code.reductions
    ]
    fields |= {"due": due} if end.averages else {}
    fields["code"] = [" ".join(map(str, code)) for code in program.code]
    lines = (f' "{name}": {_value(value)}' for name, value in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: object) -> str:
    if isinstance(value, list | tuple) and value:
        items = cast(Sequence[object], value)
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in items) + "\n ]"
    return json.dumps(value)


def from_json(
    content: dict[str, Json], weight_rules: Sequence[WeightRule], make: "Callable[..., Program]"
) -> "Program":
    """Return the program that `to_json` wrote, made from its fields.

    Raises:   MisfitError: a field is missing, unknown or of another type.
              ProgramError: an unknown weight rule, or something other than instructions.
    """
    read = typed_flat(_ProgramFile, content, "counts", "graph", "end")
    rule = rule_named(read.weight_rule, weight_rules)
    if rule is None:
        known = " ".join(rule.name for rule in weight_rules)
        raise ProgramError(f"weight_rule is {read.weight_rule!r}; known are {known}")
    reductions, counts = read.made_reductions(), read.counts
    late = any(one.word == "validate" for one in reductions)
    return make(
        counts.num_stages,
        counts.num_micro_batches,
        Codes.of(_code(line, rank, reductions) for rank, line in enumerate(read.code)),
        read.graph.graph(),
        read.end.step_end(late),
        counts.num_steps,
        rule,
        counts.replicas,
        axis=InnerAxis(counts.tensor, counts.context),
        shares=counts.shares,
        together=counts.together,
        parts=counts.parts,
    )


def _code(line: str, rank: int, reductions: Iterable[Reduction]) -> list[Instruction]:
    own = {(one.word, one.bucket): one for one in reductions if rank in one.ranks}
    return [parse_instruction(word, own) for word in line.split()]


def to_text(program: "Program", *, max_ranks: int = 16, max_instructions: int = 64) -> str:
    """Return the edges and the instructions of each rank; long ones are cut, and say so."""
    counts = f"{program.num_ranks} ranks, {program.num_stages} stages"
    counts += f", {written(program.shares or (program.num_micro_batches,))} micro-batches"
    window = (
        f", {program.num_steps} steps, {program.weight_rule.name}" if program.num_steps > 1 else ""
    )
    window += f", {program.together} together" if program.together > 1 else ""
    axis = "context" if program.axis.context else "tensor"
    window += f", {axis} {program.tensor}" if program.tensor > 1 else ""
    window += f", averages {program.end.averages}" if program.end.averages else ""
    window += f", sums by {program.end.topology}" if program.end.topology else ""
    window += f", served {program.end.served}" if program.end.served else ""
    window += f", parts {written(program.parts)}" if program.parts else ""
    lines = [f"program: {counts}{window}, {program.code.num_instructions} instructions"]
    bits = program.graph.bits or (AS_IT_IS,) * len(program.edges)
    words = ["" if each == AS_IT_IS else f", {each} bits a number" for each in bits]
    shown = zip(program.edges[: 2 * max_ranks], words, strict=False)
    lines += [f"edge {number}  {edge}{how}" for number, (edge, how) in enumerate(shown)]
    if len(program.edges) > 2 * max_ranks:
        lines.append(f"... {len(program.edges) - 2 * max_ranks} more edges")
    for rank in range(min(program.num_ranks, max_ranks)):
        part = program.code.slice_of(rank)
        shown = program.code.between(
            slice(part.start, min(part.stop, part.start + max_instructions))
        )
        rest = part.stop - part.start - len(shown)
        lines.append(
            f"rank {rank}  {' '.join(map(str, shown))}" + (f" ... {rest} more" if rest else "")
        )
    if program.num_ranks > max_ranks:
        lines.append(f"... {program.num_ranks - max_ranks} more ranks")
    return "\n".join(lines)
