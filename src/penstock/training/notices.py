"""Notices: what the ranks of a torchrun job tell each other, through the store of its rendezvous.

A rank that waits for a notice ends as soon as another one tells that it has failed.
Ignores:  a rank that is killed before all are connected: the others wait for it.
"""

import json
import os
import time
from typing import Any

from penstock.errors import RunError
from penstock.runtime.launch import on_one_host

_FAILED = "penstock/failed"
_LOOK_S = 0.1  # how often a rank that waits looks
_STAY_S = 1.0  # for which torchrun of rank 0, which keeps the store, stays after a failure


class Notices:
    """One rank's way to the store; `store` itself is for what is not waited for here."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def put(self, key: str, text: str) -> None:
        """Tell all ranks `text`."""
        self.store.set(key, text)

    def take(self, key: str) -> str:
        """Return what a rank tells under `key`, as soon as it does.

        Raises:   RunError: a rank failed instead, or the store is gone.
        """
        while not self._is_there(key):
            time.sleep(_LOOK_S)
        return self.store.get(key).decode()

    def is_told(self, key: str) -> bool:
        """Return whether something was told under `key`."""
        return self.store.check([key])

    def meet(self, name: str) -> None:
        """Return once all ranks have come here.

        Raises:   as `take`.
        """
        if self.store.add(f"penstock/{name}", 1) == self.num_ranks:
            self.put(f"penstock/all {name}", "")
        self.take(f"penstock/all {name}")

    def fail(self, problem: BaseException) -> None:
        """Tell all ranks that this one has failed; the first to do so counts."""
        told = json.dumps([self.rank, str(problem) or type(problem).__name__])
        try:
            if not self.store.check([_FAILED]):
                self.store.set(_FAILED, told)
        except RuntimeError:  # nobody is left to be told
            return
        if not on_one_host():
            time.sleep(_STAY_S)

    def _is_there(self, key: str) -> bool:
        try:
            if self.store.check([key]):
                return True
            told = self.store.get(_FAILED) if self.store.check([_FAILED]) else None
        except RuntimeError as error:
            message = "rank 0 has ended, or its host cannot be reached"
            raise RunError(message, hint="the errors on its host say more") from error
        if told is not None:
            rank, text = json.loads(told)
            raise RunError(f"rank {rank} failed: {text}", hint="its own errors say more")
        return False
