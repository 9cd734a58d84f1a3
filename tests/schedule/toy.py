"""A schedule run the slow way, by dictionaries: what the compiled loops are compared with."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.cluster import Link
from penstock.program.lower import lower
from penstock.schedule import Action, Schedule
from penstock.simulate import simulate
from penstock.timeline import step_s
from tests.simulate.strategies import one_host

Order = Sequence[Action]
UNIT = {"F": 1, "I": 1, "W": 1, "B": 2, "U": 0}


class Span(NamedTuple):
    action: Action
    start: int
    end: int


def actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def needs(action: Action, orders: Iterable[Order], per_step: int) -> list[Action]:
    """Return what `action` waits for, out of the actions that there are."""
    kind, stage, m = action
    there = {each for order in orders for each in order}
    match kind:
        case "F":
            return [Action("F", stage - 1, m)] if stage else []
        case "W":
            return [Action("I", stage, m)]
        case "U":
            return [each for each in there if each[0] in "BW" and each[1] == stage
                    and each[2] // per_step == m]  # fmt: skip
        case "B" | "I":
            later = [Action("B", stage + 1, m), Action("I", stage + 1, m)]
            return [Action("F", stage, m), *(each for each in later if each in there)]


def run(
    orders: Sequence[Order], per_step: int, seconds: Mapping[str, int] = UNIT
) -> tuple[list[list[Span]], bool]:
    """Return the spans of every rank, and whether all actions were done; links are free."""
    needed = {action: needs(action, orders, per_step) for order in orders for action in order}
    ended: dict[Action, int] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                if not all(other in ended for other in needed[action]):
                    break
                clock = spans[rank][-1].end if spans[rank] else 0
                start = max([clock, *(ended[other] for other in needed[action])])
                ended[action] = start + seconds[action.kind]
                spans[rank].append(Span(action, start, ended[action]))
                moved = True
    return spans, all(len(s) == len(o) for s, o in zip(spans, orders, strict=True))


def step(schedule: Schedule, seconds: Mapping[str, int] = UNIT) -> int:
    """Return when the last action of `schedule` ends."""
    spans, done = run(list(schedule.orders), schedule.num_micro_batches, seconds)
    assert done
    return max(span.end for rank in spans for span in rank)


def costs(f: int, i: int, w: int, u: int = 0) -> dict[str, int]:
    return {"F": f, "I": i, "W": w, "B": i + w, "U": u}


def is_valid(orders: Sequence[Order], num_stages: int, num_micro_batches: int) -> bool:
    """Return whether the orders are a synchronous schedule of one step, by its definition."""
    counts = Counter(action for order in orders for action in order)
    homes: dict[tuple[int, int], set[int]] = {}
    for rank, order in enumerate(orders):
        for kind, stage, m in order:
            if kind == "U" or not (0 <= stage < num_stages and 0 <= m < num_micro_batches):
                return False
            homes.setdefault((stage, m), set()).add(rank)
    ways = {"F"} if not any(a.kind != "F" for a in counts) else {"FB", "FIW"}
    for stage in range(num_stages):
        for m in range(num_micro_batches):
            kinds = "".join(kind * counts[Action(kind, stage, m)] for kind in "FBIW")
            if kinds not in ways or len(homes[stage, m]) != 1:
                return False
    return run(orders, num_micro_batches)[1]


def peak(order: Order, together: int = 1) -> int:
    """Return the most forwards of `order` whose B or W is not done; 0 where none is ever done.

    together:  micro-batches of one B or W.
    """
    held, most = 0, 0
    if not {"B", "W"} & {action.kind for action in order}:
        return 0
    for action in order:
        held += {"F": 1, "B": -together, "W": -together}.get(action.kind, 0)
        most = max(most, held)
    return most


def alive(schedule: Schedule, stage: int, rank: int, reads: Mapping[Action, int]) -> int:
    """Return the most versions of `stage` on `rank` that some action or the end still needs."""
    order = [action for action in schedule.orders[rank] if action.stage == stage]
    sizes = schedule.num_stages, schedule.num_micro_batches
    history, most, newest = int(schedule.weight_rule.history(*sizes)[stage]), 0, 0
    at_end = set(range(schedule.num_steps - history, schedule.num_steps + 1))
    for index, action in enumerate(order):
        needed = {reads[later] for later in order[index:] if later.kind != "U"} | at_end
        held = {version for version in needed | {newest} if version <= newest}
        most = max(most, len(held))
        if action.kind == "U":
            newest = action.micro_batch + 1
    return max(most, len(at_end))


def picture(schedule: Schedule, seconds: Mapping[str, int] = UNIT, *, stages: bool = False) -> str:
    """Return a row per rank and a column per second, each action by its kind and micro-batch."""
    spans, _ = run(list(schedule.orders), schedule.num_micro_batches, seconds)
    end = max(span.end for rank in spans for span in rank)
    rows: list[str] = []
    for rank, row in enumerate(spans):
        cells = ["."] * end
        for action, start, stop in row:
            name = str(action) if stages else f"{action.kind}{action.micro_batch}"
            cells[start:stop] = [name] * (stop - start)
        width = 4 if stages else 2
        rows.append(f"    rank {rank}  {' '.join(cell.ljust(width) for cell in cells)}".rstrip())
    return "\n".join(rows) + "\n"


def simulated(
    schedule: Schedule, seconds: Mapping[str, float] = UNIT, *, message_s: float = 0.0
) -> float:
    """Return the seconds of a step where a message takes `message_s` from rank to rank."""
    cluster = one_host(schedule.num_ranks, Link(message_s, math.inf))
    return step_s(simulate(lower(schedule), lambda a: float(seconds[a.kind]), cluster))
