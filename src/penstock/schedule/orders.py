"""Orders: for every rank, the order of its actions.  Arrays inside, tuples of actions outside."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError

IntArray: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = tuple[
    npt.NDArray[np.uint8], npt.NDArray[np.int32], npt.NDArray[np.int32], IntArray
]
Kind = Literal["F", "B", "I", "W", "U"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # a kind's code in the arrays is its place here
F, B, I, W, U = range(len(KINDS))  # noqa: E741
_ACTION = re.compile(r"([FBIWU])(\d{1,9})\.(\d{1,9})", re.ASCII)


class Action(NamedTuple):
    """`kind` done by a stage on a micro-batch.  For U the last number is the step."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the action that prints as `text`, like "F2.5" (forward, stage 2, micro-batch 5).

        Raises:   ScheduleError: `text` is not an action.
        """
        found = _ACTION.fullmatch(text)
        if found is None:
            hint = f"write one of {' '.join(KINDS)}, the stage, a point and the micro-batch: F2.5"
            raise ScheduleError(f"{text!r} is not an action", hint=hint)
        code = "FBIWU".index(found[1])
        return cls(KINDS[code], int(found[2]), int(found[3]))


class Row(NamedTuple):
    """Actions of one kind on one rank, each with a time; `arrange` merges rows by time."""

    kind: Kind
    stage: int
    micro_batches: IntArray  # or steps, for U
    times: IntArray


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Orders:
    """For every rank, a sequence of actions.

    `orders[rank]` is a tuple of actions, made anew at each call; the four arrays are what is kept.
    The actions of `rank` lie in the arrays from `offsets[rank]` to `offsets[rank + 1]`.
    """

    kinds: npt.NDArray[np.uint8]  # places in KINDS
    stages: npt.NDArray[np.int32]
    micro_batches: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, dtype in zip(self.__slots__, ("uint8", "int32", "int32", "int64"), strict=True):
            column = np.ascontiguousarray(getattr(self, name), dtype).view()
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        lengths = {len(self.kinds), len(self.stages), len(self.micro_batches)}
        if (
            lengths != {int(self.offsets[-1])}
            or self.offsets[0]
            or (np.diff(self.offsets) < 0).any()
        ):
            raise ValueError(f"offsets {self.offsets} do not divide columns of length {lengths}")
        if (self.kinds >= len(KINDS)).any():
            raise ValueError(
                f"code {self.kinds.max()} is no kind; codes run from 0 to {len(KINDS) - 1}"
            )

    @classmethod
    def of(cls, orders: "Orders | Iterable[Iterable[Action]]") -> "Orders":
        """Return `orders`, given as one sequence of actions per rank, as arrays."""
        if isinstance(orders, Orders):
            return orders
        ranks = [list(order) for order in orders]
        actions = [action for order in ranks for action in order]
        offsets = np.cumsum([0, *(len(order) for order in ranks)], dtype=np.int64)
        return cls(
            np.array([KINDS.index(action.kind) for action in actions], dtype=np.uint8),
            np.array([action.stage for action in actions], dtype=np.int32),
            np.array([action.micro_batch for action in actions], dtype=np.int32),
            offsets,
        )

    @property
    def num_actions(self) -> int:
        return len(self.kinds)

    def action(self, index: int) -> Action:
        """Return the action at `index` of the arrays."""
        kind = KINDS[int(self.kinds[index])]
        return Action(kind, int(self.stages[index]), int(self.micro_batches[index]))

    @property
    def columns(self) -> Columns:
        """The arrays, as a compiled loop takes them."""
        return self.kinds, self.stages, self.micro_batches, self.offsets

    def rank_at(self, index: int) -> int:
        """Return the rank whose order holds `index` of the arrays."""
        return int(np.searchsorted(self.offsets, index, side="right")) - 1

    def slice_of(self, rank: int) -> slice:
        """Return where the actions of `rank` lie in the arrays."""
        return slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        if not -len(self) <= rank < len(self):
            raise IndexError(f"rank {rank} of {len(self)} ranks")
        part = self.slice_of(rank % len(self))
        codes: list[int] = self.kinds[part].tolist()
        kinds = [KINDS[code] for code in codes]
        places = zip(
            kinds, self.stages[part].tolist(), self.micro_batches[part].tolist(), strict=True
        )
        return tuple(map(Action._make, places))

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Orders):
            return NotImplemented
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in self.__slots__)

    def __hash__(self) -> int:
        return hash((self.kinds.tobytes(), self.offsets.tobytes()))

    def __str__(self) -> str:
        """Return one line per rank, like "rank 0  F0.0 F0.1 B0.0 B0.1"."""
        return "\n".join(
            f"rank {rank}  {words}".rstrip() for rank, words in enumerate(self.words())
        )

    def words(self) -> Iterator[str]:
        """Yield the actions of each rank as text, with spaces between."""
        return (" ".join(map(str, order)) for order in self)

    def __repr__(self) -> str:
        return f"Orders({len(self)} ranks, {self.num_actions} actions)"


def arrange(ranks: Iterable[Sequence[Row]]) -> Orders:
    """Return the orders in which every rank does the actions of its rows by increasing time.

    Where every action has a later time than all it waits for, no rank can wait forever.
    Actions of one rank at one time stay in the order of the rows.
    """
    kinds: list[npt.NDArray[np.uint8]] = []
    stages: list[npt.NDArray[np.int32]] = []
    micro_batches: list[npt.NDArray[np.int32]] = []
    for rows in ranks:
        sizes = [len(row.times) for row in rows]
        times = np.concatenate([np.empty(0, np.int64), *(row.times for row in rows)])
        by_time = np.argsort(times, kind="stable")
        codes = np.array([KINDS.index(row.kind) for row in rows], np.uint8)
        numbers = np.array([row.stage for row in rows], np.int32)
        batches = np.concatenate([np.empty(0, np.int64), *(row.micro_batches for row in rows)])
        kinds.append(np.repeat(codes, sizes)[by_time])
        stages.append(np.repeat(numbers, sizes)[by_time])
        micro_batches.append(batches.astype(np.int32)[by_time])
    offsets = np.cumsum([0, *(len(order) for order in kinds)], dtype=np.int64)
    return Orders(
        np.concatenate([np.empty(0, np.uint8), *kinds]),
        np.concatenate([np.empty(0, np.int32), *stages]),
        np.concatenate([np.empty(0, np.int32), *micro_batches]),
        offsets,
    )


def excerpt(orders: Orders, rank: int, index: int) -> str:
    """Return the line of `rank`, shortened to the actions around `index` of the arrays."""
    part = orders.slice_of(rank)
    if part.stop - part.start > 12:
        part = slice(max(part.start, index - 4), min(part.stop, index + 5))
    words = [str(orders.action(at)) for at in range(part.start, part.stop)]
    before = ["..."] if part.start > orders.offsets[rank] else []
    after = ["..."] if part.stop < orders.offsets[rank + 1] else []
    return f"  rank {rank}  {' '.join([*before, *words, *after])}".rstrip()
