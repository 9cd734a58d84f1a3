"""Text into the parts of a schedule: our own, JSON, and the CSV of torch.distributed.pipelining.

Whether the parts make a schedule is for `Schedule` to say.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.files import Json, json_object
from penstock.schedule.far_words import FarCopy
from penstock.schedule.orders import Action
from penstock.schedule.weight_rule import SYNCHRONOUS, WeightRule, rule_named
from penstock.typed import damage, typed

_HEAD = re.compile(
    r"schedule(?: (?P<name>.+))?: stages (?P<num_stages>\d{1,9}), micro-batches "
    r"(?P<num_micro_batches>\d{1,9}), steps (?P<num_steps>\d{1,9}), "
    r"weights (?P<weight_rule>\S+?)(?:, together (?P<together>\d{1,9}))?",
    re.ASCII,
)
_SIZES = ("num_stages", "num_micro_batches", "num_steps")
_TORCH = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_TORCH_CELL = re.compile(r"[,\"(]*\d+[A-Z]", re.ASCII)
_TORCH_OTHER = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*", re.ASCII)


class Fields(NamedTuple):
    """The fields of a schedule, in their order."""

    num_stages: int
    num_micro_batches: int
    orders: list[list[Action]]
    num_steps: int
    weight_rule: WeightRule
    name: str
    together: int = 1
    far: tuple[FarCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class _ScheduleFile:
    """A schedule as in a file."""

    name: str
    num_stages: int
    num_micro_batches: int
    num_steps: int
    weight_rule: str
    orders: tuple[str, ...]
    together: int = 1


def parse_any(text: str, weight_rules: Sequence[WeightRule]) -> Fields:
    """Return the parts that `text` has, in whichever of the three forms it is.

    Raises:   ScheduleError: it is in none of them, or what that form's reader raises.
    """
    words = text.split(maxsplit=1)
    first = words[0] if words else ""
    if first.startswith(("schedule", "rank", "#")):
        return parse(text, weight_rules)
    if first.startswith(("{", "[")):
        return from_json(json_object(text, ScheduleError, "it"), weight_rules)
    if _TORCH_CELL.match(first):
        return parse_torch_csv(text)
    message = f"it begins with {first[:30]!r}" if first else "it is empty"
    hint = "give what `penstock schedule NAME --out FILE` writes, or a CSV of torch's actions"
    raise ScheduleError(message, hint=hint)


def parse(text: str, weight_rules: Sequence[WeightRule]) -> Fields:
    """Return the parts that `Schedule.__str__` printed as `text`.

    Without the first line they are one synchronous step.  Empty lines and those that begin with #
    are ignored.

    Raises:   ScheduleError: a line that is not the next rank with its actions; an unknown rule.
    """
    head: re.Match[str] | None = None
    orders: list[list[Action]] = []
    far: list[FarCopy] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if head is None and not orders:
            head = _HEAD.fullmatch(" ".join(words))
            if head is not None:
                continue
        if words[:2] != ["rank", str(len(orders))]:
            message = f"line {number} is {line[:60]!r}, where rank {len(orders)} is due"
            raise ScheduleError(message, hint=f"begin it with: rank {len(orders)}")
        orders.append(_actions(words[2:], f"line {number}", (len(orders), far)))
    if head is None:
        return _one_step(orders)._replace(far=tuple(far))
    sizes = [int(head[key]) for key in _SIZES]
    rule = _rule(head["weight_rule"], weight_rules)
    together = int(head["together"] or 1)
    named = head["name"] or ""
    return Fields(sizes[0], sizes[1], orders, sizes[2], rule, named, together, tuple(far))


def from_json(content: Mapping[str, Json], weight_rules: Sequence[WeightRule]) -> Fields:
    """Return the parts from which `Schedule.to_json` made `content`.

    Raises:   ScheduleError: a key is missing or of another type; an unknown action or rule.
    """
    if (what := content.get("penstock", "schedule")) != "schedule":
        raise ScheduleError(f"this is a {what}, not a schedule", hint="give the file of a schedule")
    rest = {key: value for key, value in content.items() if key != "penstock"}
    with damage("schedule", ScheduleError, hint="write it with `penstock schedule NAME --out`"):
        written = typed(_ScheduleFile, rest)
        far: list[FarCopy] = []
        orders = [
            _actions(line.split(), f"rank {rank}", (rank, far))
            for rank, line in enumerate(written.orders)
        ]
    sizes = written.num_stages, written.num_micro_batches
    rule = _rule(written.weight_rule, weight_rules)
    more = written.name, written.together, tuple(far)
    return Fields(*sizes, orders, written.num_steps, rule, *more)


def parse_torch_csv(text: str) -> Fields:
    """Return the parts written by torch's `_dump_csv`: a row per rank, actions like 2F5.

    Messages, shards and reductions are skipped, as `lower` makes its own; two actions that
    torch overlaps come one after the other.

    Raises:   ScheduleError: a cell that is none of these.
    """
    orders: list[list[Action]] = []
    for rank, row in enumerate(csv.reader(text.splitlines())):
        orders.append([])
        for cell in ";".join(row).split(";"):
            word = cell.strip().removeprefix("(").removesuffix(")OVERLAP_F_B")
            found = _TORCH.fullmatch(word)
            if found is not None:
                orders[rank].append(Action.parse(f"{found[2]}{found[1]}.{found[3]}"))
            elif word and _TORCH_OTHER.fullmatch(word) is None:
                hint = "write the stage, one of F B I W, and the micro-batch: 2F5"
                raise ScheduleError(f"rank {rank} has {cell!r} among its actions", hint=hint)
    return _one_step(orders)


def _actions(words: Sequence[str], where: str, rank_far: tuple[int, list[FarCopy]]) -> list[Action]:
    """Return the actions of a rank, and add its copies to those that are known."""
    (rank, far), found = rank_far, list[Action]()
    try:
        for word in words:
            if (copy := FarCopy.parse(word, rank, len(found))) is not None:
                far.append(copy)
            else:
                found.append(Action.parse(word))
    except ScheduleError as problem:
        raise ScheduleError(f"{where}: {problem.message}", hint=problem.hint) from None
    return found


def _rule(name: str, weight_rules: Sequence[WeightRule]) -> WeightRule:
    if (found := rule_named(name, weight_rules)) is not None:
        return found
    known = ", ".join(rule.name for rule in weight_rules)
    raise ScheduleError(f"there is no weight rule {name}", hint=f"use one of: {known}")


def _one_step(orders: list[list[Action]]) -> Fields:
    """Return the parts of one synchronous step with the stages and micro-batches named."""
    actions = [action for order in orders for action in order]
    num_stages = max((action.stage for action in actions), default=-1) + 1
    num_micro_batches = max((action.micro_batch for action in actions), default=-1) + 1
    return Fields(num_stages, num_micro_batches, orders, 1, SYNCHRONOUS, "")
