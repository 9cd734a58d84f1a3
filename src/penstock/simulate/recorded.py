"""What a simulation is given when every single instruction has seconds of its own."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

SENDING, UNDER_WAY, READING = range(3)  # columns of message_s, as in kernel.py


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Seconds of the instructions of one program, each list in the order of its code.

    work_s     of every compute and update
    sum_s      of every reduction and Unshard: from when the last member came until this one is over
    message_s  of every Send: what it costs the sender's computing thread; from when that begins
               until the message is there; what it costs the reader's computing thread.
               None: what the links of a cluster say
    start_s    [rank]: when its computing thread begins
    collect_s  of every Collect, from when the last member came; empty: what the links say

    Raises:   ValueError: arrays of other shapes, or seconds below 0 or not numbers.
    """

    work_s: NDArray[np.float64]
    sum_s: NDArray[np.float64]
    message_s: NDArray[np.float64] | None
    start_s: NDArray[np.float64]
    collect_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        for name in ("work_s", "sum_s", "message_s", "start_s", "collect_s"):
            given: ArrayLike | None = getattr(self, name)
            if given is None and name == "message_s":
                continue
            array = np.ascontiguousarray(given, dtype=np.float64).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
            sizes = array.shape[1:]
            if sizes != ((3,) if name == "message_s" else ()):
                raise ValueError(f"{name} has shape {array.shape}")
            wrong = np.argwhere(~((array >= 0) & np.isfinite(array)))
            if len(wrong):
                place = tuple(wrong[0].tolist())
                raise ValueError(f"{name}{list(place)} is {array[place]} s; it must be 0 or more")
