"""What a simulation is given: seconds of actions, and bytes held."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.program.codes import NUM_COSTS
from penstock.schedule.orders import KINDS

Number = TypeVar("Number", np.float64, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Seconds of every kind of action at every stage on every kind of device.

    action_s   [kind, stage, device], kinds in the order of schedule.KINDS; U is the update.  Then,
               unless they take no time, those of copies to far memory and back (codes.COPIES)
    devices    names of the device kinds; "" stands for any (then it is the only one)
    by_rank    whether there is a column for each rank in place of each kind of device
    unshard_s  [stage]: gathering the weights, besides what the links take; empty: no time
    shards_s   [stage]: leaving its gradients where they are kept, once summed, or sending them in
               few numbers; empty: no time
    unshard_bytes  [stage]: the gathered weights, for what the links take; empty: nothing
    packing_s  [packing or unpacking, edge, device]: what a message costs its sender and its
               receiver besides; empty: nothing
    guard_bytes  [rank]: what comes in a step from the rank that it guards, for a copy of what that
               one has alone; empty: nothing
    guard_s    what the slowest does with them
    The Cluster says what messages, reductions and gathers take, with the sizes that the
    Program has, and for gathers with these.

    Raises:   ValueError: arrays of other shapes, a size that is negative, or a duration that is
              negative or not a number.
    """

    action_s: NDArray[np.float64]
    devices: tuple[str, ...] = ("",)
    unshard_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    unshard_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    shards_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    packing_s: NDArray[np.float64] = field(default_factory=lambda: np.empty((2, 0, 0)))
    guard_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    guard_s: float = 0.0
    by_rank: bool = False

    def __post_init__(self) -> None:
        seconds = _frozen(self, np.float64, "action_s", "unshard_s", "shards_s", "packing_s")
        for name, array in (*seconds, *_frozen(self, np.int64, "unshard_bytes", "guard_bytes")):
            object.__setattr__(self, name, array)
        action_s, unshard_s = self.action_s, self.unshard_s
        num_stages = action_s.shape[1] if action_s.ndim == 3 else 0
        _check_rows("action_s", action_s, (num_stages, len(self.devices)))
        by_stage = ("unshard_s", unshard_s), ("shards_s", self.shards_s)
        for name, given in (*by_stage, ("unshard_bytes", self.unshard_bytes)):
            _check_shape(name, given, (num_stages if len(given) else 0,))
        for stage, size_bytes in enumerate(self.unshard_bytes.tolist()):
            if size_bytes < 0:
                raise ValueError(f"unshard_bytes[{stage}] is {size_bytes}; it must be 0 or more")
        if self.packing_s.size:
            shape = 2, self.packing_s.shape[1], len(self.devices)
            _check_shape("packing_s", self.packing_s, shape)
        timed = *by_stage, ("action_s", action_s), ("packing_s", self.packing_s)
        for name, seconds in timed:
            wrong = np.argwhere(~((seconds >= 0) & np.isfinite(seconds)))
            if len(wrong):
                place = tuple(wrong[0].tolist())
                raise ValueError(f"{name}{list(place)} is {seconds[place]} s; it must be 0 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes that a rank holds, and how its actions change them.

    start_bytes      [rank]: held from the beginning
    transient_bytes  [kind, stage]: beyond what is held, only while the action runs; as in Costs,
                     rows of copies may follow
    net_bytes        [kind, stage]: held additionally after the action, or less (negative); likewise
    unsharded_bytes  [stage]: held additionally from Unshard to Reshard; empty: nothing
    message_bytes    [edge]: held from a Receive to the first use; empty: nothing, as where messages
                     arrive only when they are used
    summed_bytes     [3, stage]: of one whose sum leaves shards, its whole gradients: held from the
                     end of the first backward of a step to the next such sum of the rank; what is
                     held besides at that end, with its results; and the gradients that stay here,
                     from that sum to the end of the update; empty: nothing
    parts            [rank, stage]: how many times the bytes above of an update, and of copies of
                     the optimizer's state and of weights, are those of a rank; empty: once
    waiting_bytes    [edge]: held from the making of a value to its use in another stage of the same
                     rank; empty: nothing

    Raises:   ValueError: arrays of other shapes.
    """

    start_bytes: NDArray[np.int64]
    transient_bytes: NDArray[np.int64]
    net_bytes: NDArray[np.int64]
    unsharded_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    message_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    summed_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty((3, 0), np.int64))
    parts: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    waiting_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        names = "start_bytes", "transient_bytes", "net_bytes", "message_bytes"
        names = *names, "unsharded_bytes", "summed_bytes", "waiting_bytes"
        arrays = *_frozen(self, np.int64, *names), *_frozen(self, np.float64, "parts")
        for name, array in arrays:
            object.__setattr__(self, name, array)
        start, transient, net = self.start_bytes, self.transient_bytes, self.net_bytes
        num_stages = net.shape[1] if net.ndim == 2 else 0
        _check_shape("start_bytes", start, (len(start),))
        for name, sizes in (("transient_bytes", transient), ("net_bytes", net)):
            _check_rows(name, sizes, (num_stages,))
        sizes = self.unsharded_bytes
        _check_shape("unsharded_bytes", sizes, (num_stages if len(sizes) else 0,))
        shape = 3, num_stages if self.summed_bytes.size else 0
        _check_shape("summed_bytes", self.summed_bytes, shape)
        if self.parts.size:
            _check_shape("parts", self.parts, (len(start), num_stages))
        for name in ("message_bytes", "waiting_bytes"):
            given: NDArray[np.int64] = getattr(self, name)
            _check_shape(name, given, (given.size,))


def _frozen(
    record: object, kind: type[np.float64] | type[np.int64], *names: str
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield the named fields as read-only arrays of `kind`."""
    for name in names:
        given: ArrayLike = getattr(record, name)
        array = np.ascontiguousarray(given, dtype=kind).view()
        array.flags.writeable = False
        yield name, array


def with_copies(rows: NDArray[Number]) -> NDArray[Number]:
    """Return rows by kind with those of copies, which are zeros where there are none."""
    missing = NUM_COSTS - len(rows)
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])


def _check_rows(name: str, array: NDArray[np.generic], shape: tuple[int, ...]) -> None:
    """Raise unless there is one of `shape` for each kind, or for each kind and copy."""
    counts = len(KINDS), NUM_COSTS
    if array.ndim == 0 or len(array) not in counts or array.shape[1:] != shape:
        raise ValueError(f"{name} has shape {array.shape}, not {(len(KINDS), *shape)}")


def _check_shape(name: str, array: NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, not {shape}")
