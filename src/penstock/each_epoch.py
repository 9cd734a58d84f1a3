"""Each epoch: a scheduler of loops that step it once for each epoch, not for each update."""

from typing import Any


class EachEpoch:
    """A scheduler that is stepped after so many updates."""

    def __init__(self, scheduler: Any, updates: int) -> None:
        self.scheduler, self.updates, self.count = scheduler, updates, 0

    def step(self) -> None:
        self.count += 1
        if self.count % self.updates == 0:
            self.scheduler.step()
