"""Far: activations that wait in far memory, said by words among the actions of a rank.

    rank 0  F0.0 F0.1 F0.0>far F0.2 F0.0<<far I0.1 W0.1 I0.0 ...

F0.0>far    from here on, what F0.0 keeps is away: its copy to far memory, which begins as F0.0 is
            over, has ended
F0.0<<far   from here on, it takes room again: its copy back begins, and is over when it is used

A rank comes to these places in its order, however long actions and copies take.  So what it holds
at any of them is counted from the words, and is never more.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.orders import Action, IntArray, Orders, excerpt

_COPY = re.compile(r"F(\d{1,9})\.(\d{1,9})(>far|<<far)", re.ASCII)
_Kept: TypeAlias = tuple[int, int]  # of a stage and a micro-batch


class FarCopy(NamedTuple):
    """A copy of F's activations, and the action before which it has ended or, back, begins."""

    rank: int
    place: int  # of that action in the order of the rank
    stage: int
    micro_batch: int
    back: bool

    def __str__(self) -> str:
        return f"F{self.stage}.{self.micro_batch}{'<<far' if self.back else '>far'}"

    @classmethod
    def parse(cls, word: str, rank: int, place: int) -> Self | None:
        """Return the copy that prints as `word`, None if none does."""
        found = _COPY.fullmatch(word)
        if found is None:
            return None
        return cls(rank, place, int(found[1]), int(found[2]), found[3] == "<<far")


def words(orders: Orders, far: Iterable[FarCopy]) -> Iterator[str]:
    """Yield actions and copies of each rank as text, with spaces between."""
    before = by_place(far)
    for rank, order in enumerate(orders):
        row = [str(one) for at, action in enumerate(order) for one in (*before[rank, at], action)]
        yield " ".join([*row, *map(str, before[rank, len(order)])])


def by_place(far: Iterable[FarCopy]) -> defaultdict[tuple[int, int], list[FarCopy]]:
    """Return the copies before each [rank, place]."""
    found: defaultdict[tuple[int, int], list[FarCopy]] = defaultdict(list)
    for copy in far:
        found[copy.rank, copy.place].append(copy)
    return found


def check_far(orders: Orders, far: Sequence[FarCopy], together: int) -> tuple[FarCopy, ...]:
    """Return the copies by rank and place.

    Raises:   ScheduleError: one is of what its rank does not keep there, or does not have back.
    """
    for copy in far:
        if not 0 <= copy.rank < len(orders):
            hint = f"ranks run from 0 to {len(orders) - 1}"
            raise ScheduleError(f"{copy} is on rank {copy.rank}", hint=hint)
    before = by_place(far)
    for rank in sorted({copy.rank for copy in far}):
        order = orders[rank]
        here: dict[_Kept, str] = {}
        for at, action in enumerate((*order, None)):
            for copy in before[rank, at]:
                now = here.get((copy.stage, copy.micro_batch), "not kept")
                if now != ("away" if copy.back else "kept"):
                    raise _misplaced(orders, copy, now)
                here[copy.stage, copy.micro_batch] = "back" if copy.back else "away"
            if action is not None:
                _act(orders, (rank, at), action, here, together)
        for (stage, number), now in here.items():
            if now == "away":
                message = f"what F{stage}.{number} keeps stays in far memory"
                raise ScheduleError(message, hint=f"put F{stage}.{number}<<far before its backward")
    return tuple(sorted(far, key=lambda copy: copy[:2]))


def _act(
    orders: Orders, where: tuple[int, int], action: Action, here: dict[_Kept, str], together: int
) -> None:
    """Note the activations that an action keeps or uses."""
    kind, stage, number = action
    if kind == "F":
        here[stage, number] = "kept"
    count = 1 if kind == "I" else together
    for each in range(number, number + count) if kind in ("B", "I") else ():
        if here.get((stage, each)) == "away":
            rank, at = where
            message = f"rank {rank} does {action} while what F{stage}.{each} keeps is in far memory"
            line = excerpt(orders, rank, int(orders.offsets[rank]) + at)
            raise ScheduleError(f"{message}\n{line}", hint=f"put F{stage}.{each}<<far before it")
        here[stage, each] = "used"


def _misplaced(orders: Orders, copy: FarCopy, now: str) -> ScheduleError:
    rank = copy.rank
    why = {
        "not kept": "which is not done there before",
        "kept": "which is not away",
        "used": "whose backward has begun",
        "away": "which is away already",
        "back": "which was there already" if copy.back else "which was away already",
    }[now]
    at = min(int(orders.offsets[rank]) + copy.place, int(orders.offsets[rank + 1]) - 1)
    hint = f"after F{copy.stage}.{copy.micro_batch} list >far and then <<far once"
    message = f"rank {rank} has {copy} of a forward {why}"
    return ScheduleError(f"{message}\n{excerpt(orders, rank, at)}", hint=hint)


def moved(
    far: Iterable[FarCopy], place: Callable[[int, int], int], units: Sequence[range]
) -> tuple[FarCopy, ...]:
    """Return the copies where each stage is cut into `units`, at new places [rank, place]."""
    return tuple(
        FarCopy(copy.rank, place(copy.rank, copy.place), unit, copy.micro_batch, copy.back)
        for copy in far
        for unit in (reversed(units[copy.stage]) if copy.back else units[copy.stage])
    )


def with_far(
    changes: IntArray, orders: Orders, far: Sequence[FarCopy]
) -> tuple[IntArray, IntArray]:
    """Return the changes of actions and copies in order, and where those of each rank begin."""
    if not far:
        return changes, orders.offsets
    rows = [int(orders.offsets[copy.rank]) + copy.place for copy in far]
    own = [1 if copy.back else -1 for copy in far]
    counts = np.bincount([copy.rank for copy in far], minlength=len(orders))
    offsets = orders.offsets + np.concatenate([[0], np.cumsum(counts)])
    return np.insert(changes, rows, own), offsets
