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
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from penstock.errors import PenstockError, ProgramError
from penstock.files import Json
from penstock.program.codes import Codes
from penstock.program.instructions import (
    EDGE_KINDS,
    HOWS,
    Edge,
    Instruction,
    Reduce,
    StageBytes,
    TiedGroup,
    parse_instruction,
)
from penstock.schedule.weight_rule import WeightRule

if TYPE_CHECKING:
    from penstock.program.program import Program

T = TypeVar("T")
_NUMBERS = ("num_stages", "num_micro_batches", "num_steps", "replicas")


class Saved(NamedTuple):
    """The fields of a program, as read from a file."""

    num_stages: int
    num_micro_batches: int
    num_steps: int
    replicas: int
    clip: bool
    weight_rule: WeightRule
    edges: tuple[Edge, ...]
    tied: tuple[TiedGroup, ...]
    stage_bytes: tuple[StageBytes, ...]
    code: Codes


def to_json(program: "Program") -> str:
    """Return `program` as JSON: a line per field, and per item of a list."""
    fields: dict[str, object] = {"penstock": "program"}
    fields |= {name: getattr(program, name) for name in _NUMBERS}
    fields |= {"clip": program.clip, "weight_rule": program.weight_rule.name}
    fields["edges"] = program.edges
    fields["tied"] = program.tied
    fields["stage_bytes"] = program.stage_bytes
    fields["reductions"] = [
        (one.how, one.bucket, one.ranks, one.size_bytes) for one in program.code.reductions
    ]
    fields["code"] = [" ".join(map(str, code)) for code in program.code]
    lines = (f' "{name}": {_value(value)}' for name, value in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: object) -> str:
    if isinstance(value, list | tuple) and value:
        items = cast(Sequence[object], value)
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in items) + "\n ]"
    return json.dumps(value)


def from_json(content: dict[str, Json], weight_rules: Sequence[WeightRule], where: str) -> Saved:
    """Return the fields that `to_json` wrote; `where` names the file in errors.

    Raises:   ProgramError: a field is missing or of another shape, or no instruction.
    """
    try:
        if content["penstock"] != "program":
            raise ValueError(f"it is a {content['penstock']}")
        return _read(content, weight_rules)
    except (KeyError, TypeError, ValueError, PenstockError) as problem:
        why = f"{problem.args[0]} is missing" if isinstance(problem, KeyError) else str(problem)
        raise ProgramError(
            f"{where} cannot be used: {why}", hint="is it a program file? make it again"
        ) from problem


def _read(content: dict[str, Json], weight_rules: Sequence[WeightRule]) -> Saved:
    rule = next((rule for rule in weight_rules if rule.name == content["weight_rule"]), None)
    if rule is None:
        known = " ".join(rule.name for rule in weight_rules)
        raise ValueError(f"weight_rule is {content['weight_rule']!r}; known are {known}")
    reductions = _each(content, "reductions", _reduce)
    lines = _each(content, "code", _text)
    return Saved(
        num_stages=_number(content["num_stages"]),
        num_micro_batches=_number(content["num_micro_batches"]),
        num_steps=_number(content["num_steps"]),
        replicas=_number(content["replicas"]),
        clip=_truth(content["clip"]),
        weight_rule=rule,
        edges=_each(content, "edges", _edge),
        tied=_each(content, "tied", _tied),
        stage_bytes=_each(content, "stage_bytes", _stage_bytes),
        code=Codes.of(_code(line, rank, reductions) for rank, line in enumerate(lines)),
    )


def _stage_bytes(item: Json) -> StageBytes:
    return StageBytes(*map(_number, _items(item, len(StageBytes._fields))))


def _code(line: str, rank: int, reductions: Iterable[Reduce]) -> list[Instruction]:
    own = {(one.how, one.bucket): one for one in reductions if rank in one.ranks}
    return [parse_instruction(word, own) for word in line.split()]


def _each(content: dict[str, Json], name: str, read: Callable[[Json], T]) -> tuple[T, ...]:
    return tuple(read(item) for item in _items(content[name]))


def _items(value: Json, count: int | None = None) -> list[Json]:
    if not isinstance(value, list):
        raise ValueError(f"{json.dumps(value)} is no list")
    if count is not None and len(value) != count:
        raise ValueError(f"{json.dumps(value)} has not {count} items")
    return value


def _number(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{json.dumps(value)} is no whole number")
    if abs(value) >= 2**63:
        raise ValueError(f"{value} is no whole number below 2**63")
    return value


def _truth(value: Json) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{json.dumps(value)} is neither true nor false")
    return value


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{json.dumps(value)} is no text")
    return value


def _edge(item: Json) -> Edge:
    kind, source, target, size_bytes = _items(item, 4)
    ends = _number(source), _number(target)
    return Edge(_one_of(EDGE_KINDS, kind), *ends, _number(size_bytes))


def _tied(item: Json) -> TiedGroup:
    name, stages, size_bytes = _items(item, 3)
    return TiedGroup(_text(name), tuple(map(_number, _items(stages))), _number(size_bytes))


def _reduce(item: Json) -> Reduce:
    how, bucket, ranks, size_bytes = _items(item, 4)
    members = tuple(map(_number, _items(ranks)))
    return Reduce(_text(bucket), _one_of(HOWS, how), members, 0, _number(size_bytes))


def _one_of(words: tuple[T, ...], value: Json) -> T:
    for word in words:
        if word == value:
            return word
    raise ValueError(f"{json.dumps(value)} is none of {' '.join(map(str, words))}")


def to_text(program: "Program", *, max_ranks: int = 16, max_instructions: int = 64) -> str:
    """Return the edges and the instructions of each rank; long ones are cut, and say so."""
    counts = f"{program.num_ranks} ranks, {program.num_stages} stages"
    counts += f", {program.num_micro_batches} micro-batches"
    window = (
        f", {program.num_steps} steps, {program.weight_rule.name}" if program.num_steps > 1 else ""
    )
    lines = [f"program: {counts}{window}, {program.code.num_instructions} instructions"]
    lines += [
        f"edge {number}  {edge}" for number, edge in enumerate(program.edges[: 2 * max_ranks])
    ]
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
