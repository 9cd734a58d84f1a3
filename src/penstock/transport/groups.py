"""Groups: ranks that connect over gloo or NCCL by themselves, any number of times in a process.

torch.distributed has one world in a process, that a server keeps the addresses of, and waits for
minutes for a rank that does not come.  Here a world is an object; addresses go through any `Store`;
and whoever waits for others to connect stops when there is news of them.
"""

from __future__ import annotations

import base64
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from penstock import _compat
from penstock.device import of
from penstock.transport.shut_port import shut_when_made
from penstock.transport.torch_distributed import World
from penstock.transport.transport import Store, TransportError

T = TypeVar("T")
News = Callable[[], None]
_LOOK_S = 0.005  # between looks for addresses, and for news
_NEVER = timedelta(days=1)  # an operation ends when its rank is told to leave, not by itself
_TorchStore: Any = dist.Store  # pyright: ignore[reportPrivateImportUsage]

# A fork has none of the threads that a group waits for when it is dropped: there it never is.
_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_kept: list[Any] = []
os.register_at_fork(after_in_child=lambda: _kept.extend(_alive))


class Prefixed(NamedTuple):
    """A store with its keys under a name."""

    store: Store
    name: str

    def set(self, key: str, value: str, /) -> None:
        self.store.set(f"{self.name}/{key}", value)

    def get(self, key: str, /) -> bytes:
        return self.store.get(f"{self.name}/{key}")

    def check(self, keys: list[str], /) -> bool:
        return self.store.check([f"{self.name}/{key}" for key in keys])


def world_of(
    place: tuple[int, int],
    store: Store,
    *,
    address: str,
    device: torch.device,
    limit_s: float,
    news: News = lambda: None,
) -> World:
    """Return a world whose ranks find each other through `store`, which nobody else writes to.

    place:    which rank this is, of how many.
    address:  of this host, where others reach it; gloo listens there and nowhere else.
    limit_s:  for which others may take to connect.
    news:     is asked while they are waited for, and raises to end that.

    Ignores:  who it is that connects before all have: gloo and NCCL ask for no proof.
    """
    made: list[Any] = []
    rank, num_ranks = place
    times = Counter[str]()  # the same on all ranks

    def group(ranks: list[int]) -> Any:
        name = " ".join(map(str, ranks))
        again = f" again {times[name]}" if times[name] else ""
        times[name] += 1
        own = _TorchTexts(Prefixed(store, name + again), news, limit_s)
        about = own, ranks.index(rank), len(ranks)
        is_cpu = of(device).is_cpu
        call = _gloo_of(*about, address, limit_s) if is_cpu else _nccl_of(*about)
        found = _soon(call, news, limit_s, rank)
        made.append(found)
        _alive.add(found)
        return found

    def close() -> None:
        """Let go of the connections; that takes a while, for which nobody waits."""
        threading.Thread(target=made.clear, name="penstock drops groups", daemon=True).start()

    return World(rank, num_ranks, group, close=close)


def _gloo_of(
    store: _TorchTexts, place: int, count: int, address: str, limit_s: float
) -> Callable[[], Any]:
    def call() -> Any:
        about = store, place, count, address, timedelta(seconds=limit_s)
        group = shut_when_made(lambda: _compat.gloo_group(*about))
        group.set_timeout(_NEVER)
        return group

    return call


def _nccl_of(store: _TorchTexts, place: int, count: int) -> Callable[[], Any]:
    return lambda: _compat.nccl_group(store, place, count, _NEVER)


def _soon(call: Callable[[], T], news: News, limit_s: float, rank: int) -> T:
    """Return what `call` returns, or raise as `news` does: torch cannot be told to stop connecting.

    The thread of a call that was left ends when torch gives up.
    """
    found: list[T] = []
    problems: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            found.append(call())
        except BaseException as problem:  # noqa: BLE001 - raised below
            problems.append(problem)
        over.set()

    threading.Thread(target=run, name="penstock connects", daemon=True).start()
    until = time.monotonic() + limit_s
    while not over.wait(_LOOK_S):
        news()
        if time.monotonic() > until:
            raise TransportError(rank, f"has not connected within {limit_s:g} s")
    if problems:
        news()
        raise TransportError(rank, f"cannot connect: {problems[0]}") from problems[0]
    return found[0]


class _TorchTexts(_TorchStore):
    """A store as torch wants it, over one that keeps texts; whose waits end when there is news."""

    def __init__(self, store: Store, news: News, limit_s: float) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._store, self._news, self._limit_s = store, news, limit_s

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, base64.b64encode(value).decode())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return base64.b64decode(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + self._limit_s
        while not self._store.check(keys):
            self._news()
            if time.monotonic() > until:
                raise RuntimeError(f"{keys} are not there after {self._limit_s:g} s")
            time.sleep(_LOOK_S)

    def has_extended_api(self) -> bool:
        return False
