"""Rendezvous: what the ranks of a torchrun job tell each other, through the store it gives them.

A rank that waits for a word ends as soon as another one fails, or dies (vigil.py).
"""

import ipaddress
import json
import os
import time
from typing import Any

from penstock.errors import RunError
from penstock.gauge.hosts import place_key
from penstock.listener import SILENT, Listener
from penstock.members.mesh import address_towards
from penstock.members.words import Where
from penstock.runtime.launch import HostWay, on_one_host
from penstock.training.vigil import Vigil

_FAILED = "penstock/failed"
_PLACE, _VIGIL = "penstock/place/{}", "penstock/vigil"
START_S = 900.0  # for which hosts may take to start
_SAY_S = 10.0  # after which is said who is waited for
_LOOK_S = 0.1  # how often a rank that waits looks
_STAY_S = 1.0  # for which torchrun of rank 0, which keeps the store, stays after a failure


class Rendezvous:
    """One rank's way to the store; `store` itself is for what is not waited for here.

    address:  of this host, as the other hosts reach it.
    """

    def __init__(self, store: Any) -> None:
        self.store, self.address = store, ""
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._vigil: Vigil | None = None
        self._has_left = False

    def begin(self, listener: Listener = SILENT) -> None:
        """Learn where the others are, and from then on of their deaths; every rank calls it.

        Raises:   RunError: one does not come; or this host has only a loopback.
        """
        self.address = self._own_address(listener)
        if self.rank == 0:
            self._vigil = Vigil(0, self.address)
            self.put(_VIGIL, self._vigil.told())
            return
        where, token = json.loads(self.take(_VIGIL))
        vigil = Vigil(self.rank, self.address, bytes.fromhex(token))
        vigil.call(Where(*where))
        self._vigil = vigil

    def _own_address(self, listener: Listener) -> str:
        """Return this host's address as the other hosts reach it.

        A host may know itself by another name than others do: then it is that of its way to them.
        """
        own = place_key(), address_towards(os.environ["MASTER_ADDR"])
        self.put(_PLACE.format(self.rank), json.dumps(own))
        told = [json.loads(text) for text in self._places(listener)]
        elsewhere = [address for key, address in told if key != own[0]]
        if not elsewhere or not _is_loopback(own[1]):
            return own[1]
        reached = [address_towards(address) for address in elsewhere if not _is_loopback(address)]
        if not reached:
            hint = "start torchrun with --master-addr as all hosts reach the first one"
            raise RunError(f"{os.environ['MASTER_ADDR']} is {own[1]} on several hosts", hint=hint)
        return reached[0]

    def _places(self, listener: Listener) -> list[str]:
        """Return what all ranks tell of where they are, once they do.

        Raises:   RunError: not all do, or one fails.
        """
        keys = {rank: _PLACE.format(rank) for rank in range(self.num_ranks)}
        start_s, said = time.monotonic(), False
        while missing := [rank for rank, key in keys.items() if not self._is_there(key)]:
            waited_s = time.monotonic() - start_s
            if waited_s > START_S:
                hint = "its host's own words say more; are --nnodes and --node-rank right?"
                message = f"ranks {missing} have not come within {START_S:.0f} s"
                raise RunError(message, hint=hint)
            if waited_s > _SAY_S and not said:
                said = True
                listener.say(f"waiting for ranks {missing}")
            time.sleep(_LOOK_S)
        return [self.store.get(key).decode() for key in keys.values()]

    def check(self) -> None:
        """Raise if a rank is known to have died, or to have failed.

        Raises:   RunError.
        """
        if self._vigil is not None and self._vigil.problem:
            raise RunError(self._vigil.problem, hint="the errors on its host say more")

    @property
    def way(self) -> HostWay:
        """Return how ranks reach each other."""
        return HostWay(self.address, self.check)

    def leave(self) -> None:
        """Have no more to do with the others: all are connected, and tell each other what fails."""
        if self._vigil is not None:
            self._vigil.close()

    def go(self) -> None:
        """Leave, and never ask the store again, which may be gone."""
        self._has_left = True
        self.leave()

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
        if self._has_left:
            return
        if self._vigil is not None:
            self._vigil.fail(f"rank {self.rank} failed: {problem}")
        told = json.dumps([self.rank, str(problem) or type(problem).__name__])
        try:
            if not self.store.check([_FAILED]):
                self.store.set(_FAILED, told)
        except RuntimeError:  # nobody is left to be told
            return
        if not on_one_host():
            time.sleep(_STAY_S)

    def _is_there(self, key: str) -> bool:
        self.check()
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


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
