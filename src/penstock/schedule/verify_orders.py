"""Verify orders: nothing is missing or doubled or waits for ever; else say what and where."""

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.schedule.clock import Ranks
from penstock.schedule.compiled import compiled
from penstock.schedule.orders import (
    KINDS,
    Action,
    B,
    Columns,
    IntArray,
    Kind,
    Orders,
    U,
    W,
    excerpt,
)

_F, _B, _I, _W = (1 << code for code in range(4))  # bits of the kinds seen
_OUT_OF_RANGE, _DOUBLED, _ELSEWHERE, _NOT_FIRST, _TOO_EARLY = range(1, 6)
_MOST_LINES = 8
_MOST_TALLIED = 10**6  # without having that many actions


def check_complete(orders: Orders, sizes: tuple[int, int, int], together: int = 1) -> Ranks:
    """Return the rank of every [stage, micro-batch], each with one F and one B, or one I and one W.

    `sizes` are the stages, and in the window the micro-batches and the steps.  A schedule without
    any backward is complete too.  Each B, or W, stands for `together` micro-batches.
    Raises:   ScheduleError: an action is missing, doubled, out of range, or on another rank than
              the others of its stage and micro-batch; B or W of several not under the first of
              them, or not after all that it needs of them on its rank.
    """
    if sizes[0] * sizes[1] > max(len(orders.kinds), _MOST_TALLIED):
        work = f"{sizes[0]} stages x {sizes[1]} micro-batches"
        raise ScheduleError(f"{len(orders.kinds)} actions for {work}", hint="list every action")
    ranks, seen, wrong, index = _tally(orders.columns, sizes, together)
    if wrong == _OUT_OF_RANGE:
        raise _out_of_range(orders, index, sizes)
    if wrong == _DOUBLED:
        raise _doubled(orders, index)
    if wrong == _ELSEWHERE:
        raise _elsewhere(orders, index, ranks)
    if wrong:
        raise _apart(orders, index, together, is_early=wrong == _TOO_EARLY)
    no_backward = not (seen & ~np.uint8(_F)).any()
    complete = (seen == _F) if no_backward else (seen == _F | _B) | (seen == _F | _I | _W)
    if not complete.all():
        stage, micro_batch = np.argwhere(~complete)[0].tolist()
        raise _incomplete(orders, stage, micro_batch, int(seen[stage, micro_batch]))
    return ranks


def check_updates(orders: Orders, ranks: Ranks, num_steps: int) -> None:
    """Check that every rank on which a stage lives lists U(stage, step) once for every step.

    It lives where it does a micro-batch, and on ranks that only update it: replicas that have none.
    Raises:   ScheduleError: an update is missing, doubled, or on a rank without the stage.
    """
    if not np.isin(orders.kinds, (B, W)).any():
        hint = "leave out the updates, or add the backwards"
        raise ScheduleError("there are updates but no backward", hint=hint)
    num_stages = len(ranks)
    at = np.flatnonzero(orders.kinds == U)
    owners = np.searchsorted(orders.offsets, at, side="right") - 1
    listed = (owners * num_stages + orders.stages[at]) * num_steps + orders.micro_batches[at]
    homes = np.unique(ranks.astype(np.int64) * num_stages + np.arange(num_stages)[:, None])
    without = [rank * num_stages + stage for rank, stage in updated_only(orders)]
    homes = np.union1d(homes, np.array(without, np.int64))
    wanted = (homes[:, None] * num_steps + np.arange(num_steps)).ravel()
    unique, first, count = np.unique(listed, return_index=True, return_counts=True)
    if (count > 1).any():
        raise _doubled(orders, int(at[listed == unique[count > 1][0]][1]))
    if len(strange := np.setdiff1d(unique, wanted)):
        index = int(at[first[unique == strange[0]][0]])
        action, rank = orders.action(index), orders.rank_at(index)
        message = f"rank {rank} does {action}, and no forward of stage {action.stage}"
        hint = f"list {action} on the ranks that run stage {action.stage}"
        raise ScheduleError(f"{message}\n{excerpt(orders, rank, index)}", hint=hint)
    if len(missing := np.setdiff1d(wanted, unique)):
        home, step = divmod(int(missing[0]), num_steps)
        rank, stage = divmod(home, num_stages)
        update = Action("U", stage, step)
        line = excerpt(orders, rank, int(orders.offsets[rank]))
        hint = f"list {update} after the last backward of step {step}"
        raise ScheduleError(f"{update} is missing on rank {rank}\n{line}", hint=hint)


def updated_only(orders: Orders) -> list[tuple[int, int]]:
    """Return (rank, stage) of the updates of ranks that do nothing else."""
    found: list[tuple[int, int]] = []
    for rank in range(len(orders)):
        part = orders.slice_of(rank)
        if part.start < part.stop and (orders.kinds[part] == U).all():
            found += [(rank, stage) for stage in np.unique(orders.stages[part]).tolist()]
    return found


@compiled
def _tally(
    columns: Columns, sizes: tuple[int, int, int], together: int
) -> tuple[Ranks, npt.NDArray[np.uint8], int, int]:
    """Return, for [stage, micro-batch], rank and bits of the kinds seen; what is wrong; where."""
    kinds, stages, numbers, offsets = columns
    num_stages, num_micro_batches, num_steps = sizes
    ranks = np.full((num_stages, num_micro_batches), -1, np.int32)
    seen = np.zeros((num_stages, num_micro_batches), np.uint8)
    for rank in range(len(offsets) - 1):
        for index in range(offsets[rank], offsets[rank + 1]):
            kind, stage, number = kinds[index], stages[index], numbers[index]
            numbered_to = num_steps if kind == U else num_micro_batches
            if stage < 0 or stage >= num_stages or number < 0 or number >= numbered_to:
                return ranks, seen, _OUT_OF_RANGE, index
            if kind == U:
                continue
            bit = np.uint8(1 << kind)
            count = together if kind in (B, W) else 1
            if number % count:
                return ranks, seen, _NOT_FIRST, index
            for each in range(number, number + count):
                if seen[stage, each] & bit:
                    return ranks, seen, _DOUBLED, index
                if seen[stage, each] and ranks[stage, each] != rank:
                    return ranks, seen, _ELSEWHERE, index
                if count > 1 and seen[stage, each] != (_F if kind == B else _F | _I):
                    return ranks, seen, _TOO_EARLY, index
                seen[stage, each] |= bit
                ranks[stage, each] = rank
    return ranks, seen, 0, -1


def _find(orders: Orders, action: Action, part: slice = slice(None)) -> int:
    """Return where in the arrays, or in a part of them, `action` stands first, or -1."""
    same = orders.kinds[part] == KINDS.index(action.kind)
    same &= orders.stages[part] == action.stage
    same &= orders.micro_batches[part] == action.micro_batch
    return int(np.argmax(same)) + (part.start or 0) if same.any() else -1


def _out_of_range(orders: Orders, index: int, sizes: tuple[int, int, int]) -> ScheduleError:
    action, rank = orders.action(index), orders.rank_at(index)
    last = sizes[2] if action.kind == "U" else sizes[1]
    what = "steps" if action.kind == "U" else "micro-batches"
    message = f"rank {rank} does {action}, but there are {sizes[0]} stages and {last} {what}"
    hint = f"stages run from 0 to {sizes[0] - 1}, {what} from 0 to {last - 1}"
    return ScheduleError(f"{message}\n{excerpt(orders, rank, index)}", hint=hint)


def _doubled(orders: Orders, index: int) -> ScheduleError:
    action, rank = orders.action(index), orders.rank_at(index)
    first = _find(orders, action)
    other = rank if action.kind == "U" else orders.rank_at(first)
    where = f"on rank {rank}" if rank == other else f"on rank {other} and on rank {rank}"
    lines = [excerpt(orders, rank, index)]
    if rank != other:
        lines.insert(0, excerpt(orders, other, first))
    return ScheduleError("\n".join([f"{action} stands twice {where}", *lines]), hint="delete one")


def _elsewhere(orders: Orders, index: int, ranks: Ranks) -> ScheduleError:
    action, rank = orders.action(index), orders.rank_at(index)
    home = int(ranks[action.stage, action.micro_batch])
    kinds: list[Kind] = ["F", "B", "I", "W"]
    others = [Action(kind, action.stage, action.micro_batch) for kind in kinds]
    at, other = min((at, each) for each in others if (at := _find(orders, each)) >= 0)
    lines = [excerpt(orders, home, at), excerpt(orders, rank, index)]
    message = f"{other} is on rank {home} and {action} on rank {rank}"
    hint = f"move {action} to rank {home}: the activations are there"
    return ScheduleError("\n".join([message, *lines]), hint=hint)


def _apart(orders: Orders, index: int, together: int, *, is_early: bool) -> ScheduleError:
    action, line = orders.action(index), excerpt(orders, orders.rank_at(index), index)
    first = action.micro_batch // together * together
    if is_early:
        needs = "F and I" if action.kind == "W" else "F"
        message = (
            f"{action} is of micro-batches {first} to {first + together - 1}, and comes before"
        )
        hint = f"put it after {needs} of all of them, on the same rank"
        return ScheduleError(f"{message} {needs} of one of them\n{line}", hint=hint)
    hint = f"list {action.kind}{action.stage}.{first} once for all of them"
    return ScheduleError(f"{action} is not the first of {together} together\n{line}", hint=hint)


def _incomplete(orders: Orders, stage: int, micro_batch: int, seen: int) -> ScheduleError:
    f, b, i, w = (Action(kind, stage, micro_batch) for kind in ("F", "B", "I", "W"))
    if seen & _B and seen & (_I | _W):
        half = i if seen & _I else w
        message = f"both {b} and {half} are there"
        hint = f"B is I and W in one: delete {b} or {half}"
    elif not seen & _F:
        message, hint = f"{f} is missing", f"add {f} to the rank of stage {stage}"
    elif not seen & (_I | _W):
        message, hint = f"{f} has no backward", f"add {b}, or {i} and {w}, after it"
    else:
        there, missing = (i, w) if seen & _I else (w, i)
        message, hint = f"{there} is there and {missing} is missing", f"add {missing}"
    present = [at for each in (f, b, i, w) if (at := _find(orders, each)) >= 0]
    lines = [excerpt(orders, orders.rank_at(at), at) for at in present[:1]]
    return ScheduleError("\n".join([message, *lines]), hint=hint)


def deadlock(orders: Orders, stops: IntArray, ranks: Ranks, per_step: int) -> ScheduleError:
    """Return the error that shows a cycle of waiting ranks, given where each of them stops."""
    circle: list[int] = []
    waits_for: dict[int, int] = {}
    rank = int(np.argmax(stops < orders.offsets[1:]))
    while rank not in waits_for:
        circle.append(rank)
        waits_for[rank] = _first_unmet(orders, stops, ranks, rank=rank, per_step=per_step)
        rank = orders.rank_at(waits_for[rank])
    circle = circle[circle.index(rank) :]
    lowest = circle.index(min(circle))
    circle = circle[lowest:] + circle[:lowest]
    waited = [str(orders.action(waits_for[rank])) for rank in circle]
    links = waited[: max(1, len(waited) - 1)]
    if len(links) > _MOST_LINES:
        links[_MOST_LINES - 1 : -1] = ["..."]
    first = orders.action(int(stops[circle[0]]))
    lines = [excerpt(orders, rank, int(stops[rank])) for rank in circle[:_MOST_LINES]]
    if len(circle) > _MOST_LINES:
        lines.append(f"  ... and {len(circle) - _MOST_LINES} more ranks")
    hint = "give neighbouring stages their micro-batches in the same order"
    if len(circle) == 1:
        hint = f"put {waited[0]} before {first} on rank {circle[0]}"
    chain = ", which waits for ".join([*links, "it"])
    head = f"rank {circle[0]} stops at {first}: it waits for {chain}"
    return ScheduleError("\n".join([head, *lines]), hint=hint)


def _first_unmet(orders: Orders, stops: IntArray, ranks: Ranks, *, rank: int, per_step: int) -> int:
    """Return where in the arrays the action stands that `rank` waits for."""
    kind, stage, number = orders.action(int(stops[rank]))
    needed: list[Action] = []
    match kind:
        case "F":
            needed = [Action("F", stage - 1, number)]
        case "B" | "I":
            later = (Action("B", stage + 1, number), Action("I", stage + 1, number))
            needed = [Action("F", stage, number), *later]
        case "W":
            needed = [Action("I", stage, number)]
        case "U":
            is_backward = np.isin(orders.kinds, (B, W)) & (orders.stages == stage)
            is_of_step = orders.micro_batches // per_step == number
            at = np.flatnonzero(is_backward & is_of_step)
            owners = np.searchsorted(orders.offsets, at, side="right") - 1
            return int(at[at >= stops[owners]][0])
    for action in needed:
        if 0 <= action.stage < len(ranks):
            home = int(ranks[action.stage, action.micro_batch])
            at = _find(orders, action, orders.slice_of(home))
            if at >= stops[home]:
                return at
    raise AssertionError(f"rank {rank} waits for nothing")
