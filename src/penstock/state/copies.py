"""Copies: what is moved to far memory, and back, on one rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import JobError
from penstock.far import FarMemory, FarRoom, as_bytes

Frame = dict[int, Any]  # of one stage and micro-batch: values by node


class Move(NamedTuple):
    """What is left of a move when there is room: to copy, beside the thread or not, and to end it.

    Its thread makes the room before, and ends it after, which frees what was copied.
    """

    copy: Callable[[], None]
    end: Callable[[], None]


class _Entry(NamedTuple):
    """A tensor of a state, and its place in far memory.

    far:    it there, as it would lie near.
    """

    room: FarRoom
    number: int
    far: Tensor


class FarState:
    """The state of a plain optimizer, in far memory or near; room is made when it is first moved.

    The optimizer's own entries are the far tensors while they are far, so that checkpoints find
    them.  Scalars, such as the step count, stay.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.memory: FarMemory | None = None
        self.room: dict[tuple[Tensor, str], _Entry] = {}

    def offload(self) -> Move:
        """Return the move of all of it to far memory."""
        rows = [
            ((parameter, key), state, value)
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        ]
        self._make_room({place: value for place, _, value in rows})
        away = self._away()
        found = [(place, state, value) for place, state, value in rows if id(value) not in away]

        def copy() -> None:
            pairs = ((self.room[place], _without_gaps(value)) for place, _, value in found)
            for room, nears in _by_room(pairs):
                room.put(nears)

        def end() -> None:
            for place, state, _ in found:
                state[place[1]] = self.room[place].far

        return Move(copy, end)

    def reload(self) -> Move:
        """Return the move of all of it back; what is near, as after reading a checkpoint, stays."""
        found: list[tuple[dict[str, Any], str, _Entry, Tensor]] = []
        for (parameter, key), entry in self.room.items():
            state = self.optimizer.state.get(parameter, {})
            if state.get(key) is entry.far:
                near = torch.empty_like(entry.far, device=parameter.device, pin_memory=False)
                found.append((state, key, entry, near))

        def copy() -> None:
            for room, nears in _by_room((entry, near) for _, _, entry, near in found):
                room.take(nears)

        def end() -> None:
            for state, key, _, near in found:
                state[key] = near

        return Move(copy, end)

    def near(self, held: Iterable[Tensor]) -> list[Tensor]:
        """Return those of `held` that are not in far memory."""
        away = self._away()
        return [tensor for tensor in held if id(tensor) not in away]

    def _away(self) -> set[int]:
        return {id(entry.far) for entry in self.room.values()}

    def _make_room(self, values: Mapping[tuple[Tensor, str], Tensor]) -> None:
        """Make room, at once, for all that has none, or was of another shape or type."""
        new: dict[tuple[Tensor, str], Tensor] = {}
        for place, value in values.items():
            known = self.room.get(place)
            if known is None or (known.far.shape, known.far.dtype) != (value.shape, value.dtype):
                new[place] = value
        if not new:
            return
        device = next(iter(new.values())).device
        self.memory = self.memory or FarMemory(device)
        room = self.memory.room([value.numel() * value.element_size() for value in new.values()])
        for number, (place, value) in enumerate(new.items()):
            block: Any = room.blocks[number].view(value.dtype)
            far = block.as_strided(value.shape, torch.empty_like(value, device="meta").stride())
            self.room[place] = _Entry(room, number, far)


def _without_gaps(value: Tensor) -> Tensor:
    """Return `value`, or a copy of it that lies in memory without gaps."""
    dense = torch.empty_like(value, device="meta").stride() == value.stride()
    return value if dense else torch.empty_like(value).copy_(value)


def _by_room(pairs: Iterable[tuple[_Entry, Tensor]]) -> list[tuple[FarRoom, dict[int, Tensor]]]:
    """Return by room which of its blocks are moved, and the bytes near, as they lie in memory."""
    found: dict[int, tuple[FarRoom, dict[int, Tensor]]] = {}
    for entry, near in pairs:
        flat = near.detach().as_strided((near.numel(),), (1,), near.storage_offset())
        _, nears = found.setdefault(id(entry.room), (entry.room, {}))
        nears[entry.number] = flat.view(torch.uint8)
    return [*found.values()]


def far_state(optimizer: Optimizer | None, *, is_plain: bool) -> FarState | None:
    """Return what moves the state of a stage's optimizer; None where it has none.

    Raises:   JobError: the state of this optimizer is unknown.
    """
    if optimizer is None:
        return None
    if not is_plain:
        name = type(optimizer).__name__
        message = f"the state of the job's optimizer, {name} of its own kind, cannot be offloaded"
        raise JobError(message, hint="make the plan without offload of the state")
    return FarState(optimizer)


class _TensorLayout(NamedTuple):
    """How a value lies in a memory."""

    value: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Away(NamedTuple):
    """What is away of a micro-batch: where, and how the values lie in each block."""

    room: FarRoom
    rows: list[list[_TensorLayout]]


class FarFrames:
    """What F of one stage keeps of micro-batches, in far memory.

    groups:  values whose memory is moved, those of one memory together.
    """

    def __init__(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        self.groups, self.device = groups, device
        self.memory = FarMemory(device)
        self.free: list[FarRoom] = []  # those that are not used
        self.away: dict[int, _Away] = {}

    def offload(self, micro_batch: int, frame: Frame) -> Move:
        """Return the move of what `frame` holds of a micro-batch to far memory."""
        rows: list[list[_TensorLayout]] = []
        nears: dict[int, Tensor] = {}
        for group in self.groups:
            values = [(value, frame[value]) for value in group if value in frame]
            if values:
                nears[len(rows)] = as_bytes(values[0][1])
                rows.append([_layout(value, tensor) for value, tensor in values])
        away = _Away(self._room([len(near) for near in nears.values()]), rows)

        def end() -> None:
            nears.clear()
            for each in rows:
                for row in each:
                    del frame[row.value]
            self.away[micro_batch] = away

        return Move(lambda: away.room.put(nears), end)

    def reload(self, micro_batch: int, frame: Frame) -> Move:
        """Return the move of it back into `frame`."""
        room, rows = self.away.pop(micro_batch)
        nears = {
            number: torch.empty(size, dtype=torch.uint8, device=self.device)
            for number, size in enumerate(room.sizes)
        }

        def end() -> None:
            for near, each in zip(nears.values(), rows, strict=True):
                for row in each:
                    empty: Any = torch.empty(0, dtype=row.dtype, device=self.device)
                    where = row.offset, row.shape, row.stride
                    frame[row.value] = empty.set_(near.untyped_storage(), *where)
            nears.clear()
            self.free.append(room)

        return Move(lambda: room.take(nears), end)

    def _room(self, sizes: Sequence[int]) -> FarRoom:
        """Return a room that is not used, for blocks of so many bytes."""
        known = next((room for room in self.free if room.sizes == tuple(sizes)), None)
        if known is None:
            return self.memory.room(sizes)
        self.free.remove(known)
        return known


def _layout(value: int, tensor: Tensor) -> _TensorLayout:
    offset = int(tensor.storage_offset())
    return _TensorLayout(value, tensor.dtype, tensor.shape, tensor.stride(), offset)
