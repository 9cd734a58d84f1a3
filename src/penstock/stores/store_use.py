"""Store use: how a run reads a store, and what a step waits for that; also if it read otherwise."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

from penstock.stores.predicted import Reach, StoreSpeed, long_run_s


@final
@dataclass(frozen=True, slots=True)
class StoreUse:
    """How each reader of a run reads.

    latency_s, bytes_per_s:  of the store; of its link what falls to one reader.
    requests, ahead_bytes:   at a time, and ahead.
    parts, part_bytes:       of a step, and of each in the mean.
    compute_s:               of a step, without waiting for data.
    """

    url: str
    latency_s: float
    bytes_per_s: float
    requests: int
    ahead_bytes: int
    parts: int
    part_bytes: int
    compute_s: float

    @property
    def wait_s(self) -> float:
        """Return the seconds that a step waits for data, as predicted."""
        speed = StoreSpeed(self.latency_s, self.bytes_per_s)
        reach = Reach(self.requests, self.ahead_bytes)
        return long_run_s(self.parts, self.part_bytes, self.compute_s, speed, reach)

    def otherwise(self) -> Iterator[tuple[str, "StoreUse"]]:
        """Yield what might be otherwise, in words."""
        twice, more = 2 * self.requests, 2 * self.ahead_bytes
        yield f"{twice} requests at a time", replace(self, requests=twice)
        yield "twice the bytes ahead", replace(self, ahead_bytes=more)
        yield "both of these", replace(self, requests=twice, ahead_bytes=more)
        yield "a store of half the latency", replace(self, latency_s=self.latency_s / 2)
        yield "twice the link to the store", replace(self, bytes_per_s=2 * self.bytes_per_s)
        yield "objects of half the bytes", replace(self, part_bytes=max(1, self.part_bytes // 2))
