"""Copies: what is moved to far memory, and back, on one rank."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import JobError
from penstock.far import as_bytes, far_memory

Frame = dict[int, Any]  # of one stage and micro-batch: values by node


class Move(NamedTuple):
    """What is left of a move when there is room: to copy, beside the thread or not, and to end it.

    Its thread makes the room before, and ends it after, which frees what was copied.
    """

    copy: Callable[[], None]
    end: Callable[[], None]


class FarState:
    """The state of a plain optimizer, in far memory or near; room is made when it is first moved.

    The optimizer's own entries are the far tensors while they are far, so that checkpoints find
    them.  Scalars, such as the step count, stay.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.room: dict[tuple[Tensor, str], Tensor] = {}

    def offload(self) -> Move:
        """Return the move of all of it to far memory."""
        found: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    far = self._room(parameter, key, value)
                    if value is not far:
                        found.append((state, key, far, value))
        return _moved(found)

    def reload(self) -> Move:
        """Return the move of all of it back; what is near, as after reading a checkpoint, stays."""
        found: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for (parameter, key), far in self.room.items():
            state = self.optimizer.state.get(parameter, {})
            if state.get(key) is far:
                near = torch.empty_like(far, device=parameter.device, pin_memory=False)
                found.append((state, key, near, far))
        return _moved(found)

    def near(self, held: Iterable[Tensor]) -> list[Tensor]:
        """Return those of `held` that are not in far memory."""
        far = {id(tensor) for tensor in self.room.values()}
        return [tensor for tensor in held if id(tensor) not in far]

    def _room(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        place = parameter, key
        known = self.room.get(place)
        if known is None or known.shape != value.shape or known.dtype != value.dtype:
            flat = far_memory(value.numel() * value.element_size(), value.device)
            known = self.room[place] = flat.view(value.dtype).view(value.shape)
        return known


def _moved(found: Sequence[tuple[dict[str, Any], str, Tensor, Tensor]]) -> Move:
    """Return the move of entries of states: where they stand, to which tensor, and from which."""

    def copy() -> None:
        for _, _, to, value in found:
            to.copy_(value, non_blocking=True)  # its stream keeps the order

    def end() -> None:
        for state, key, to, _ in found:
            state[key] = to

    return Move(copy, end)


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


class FarFrames:
    """What F of one stage keeps of micro-batches, in far memory.

    groups:  values whose memory is moved, those of one memory together.
    """

    def __init__(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        self.groups, self.device = groups, device
        self.free: list[list[Tensor]] = []  # rooms that are not used, with a part for each group
        self.away: dict[int, list[tuple[Tensor, list[_TensorLayout]]]] = {}

    def offload(self, micro_batch: int, frame: Frame) -> Move:
        """Return the move of what `frame` holds of a micro-batch to far memory."""
        rooms: list[Tensor] = self.free.pop() if self.free else []
        away: list[tuple[Tensor, list[_TensorLayout]]] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        for group in self.groups:
            values = [(value, frame[value]) for value in group if value in frame]
            if not values:
                continue
            near, at = as_bytes(values[0][1]), len(away)
            if at == len(rooms):
                rooms.append(far_memory(len(near), self.device))
            rows = [
                _TensorLayout(v, t.dtype, t.shape, t.stride(), t.storage_offset())
                for v, t in values
            ]
            away.append((rooms[at], rows))
            pairs.append((rooms[at], near))

        def copy() -> None:
            for far, near in pairs:
                far.copy_(near, non_blocking=True)

        def end() -> None:
            pairs.clear()
            for _, rows in away:
                for row in rows:
                    del frame[row.value]
            self.away[micro_batch] = away

        return Move(copy, end)

    def reload(self, micro_batch: int, frame: Frame) -> Move:
        """Return the move of it back into `frame`."""
        away = self.away.pop(micro_batch)
        nears = [torch.empty(len(far), dtype=torch.uint8, device=self.device) for far, _ in away]

        def copy() -> None:
            for near, (far, _) in zip(nears, away, strict=True):
                near.copy_(far, non_blocking=True)

        def end() -> None:
            for near, (_, rows) in zip(nears, away, strict=True):
                for row in rows:
                    empty: Any = torch.empty(0, dtype=row.dtype, device=self.device)
                    where = row.offset, row.shape, row.stride
                    frame[row.value] = empty.set_(near.untyped_storage(), *where)
            nears.clear()
            self.free.append([far for far, _ in away])

        return Move(copy, end)
