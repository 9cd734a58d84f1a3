"""Groups: ranks connect without a world, wait only until there is news, and leave nothing."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from penstock.transport.groups import Prefixed, world_of
from penstock.transport.torch_distributed import TorchDistributedTransport
from penstock.transport.transport import TransportError

CPU = torch.device("cpu")


class Texts:
    """A store for threads."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self.kept[key] = value

    def get(self, key: str, /) -> bytes:
        return self.kept[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.kept for key in keys)


def end(rank: int, store: Texts, **options) -> TorchDistributedTransport:
    about = {"address": "127.0.0.1", "device": CPU, "limit_s": 30.0, **options}
    world = world_of((rank, 2), Prefixed(store, "world"), **about)
    return TorchDistributedTransport(CPU, Prefixed(store, "watch"), world=world)


def both(store: Texts) -> list[TorchDistributedTransport]:
    made: dict[int, TorchDistributedTransport] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: made.update({rank: end(rank, store)}))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[0], made[1]]


def test_a_rank_that_does_not_come_is_waited_for_until_there_is_news_of_it() -> None:
    looks = 0

    def news() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise TransportError(1, "is lost: died")

    with pytest.raises(TransportError, match="rank 1 is lost: died"):
        end(0, Texts(), news=news)


def test_a_rank_of_which_there_is_no_news_is_waited_for_until_the_limit() -> None:
    with pytest.raises(TransportError, match=r"within 0\.2 s|cannot connect"):
        end(0, Texts(), limit_s=0.2)


def count(what: str) -> int:
    return len(os.listdir(f"/proc/self/{what}"))


def until_same(what: str, before: int) -> None:
    for _ in range(10_000):
        if count(what) <= before:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{count(what)} of {what}, before {before}")


def test_no_connection_and_no_thread_outlives_its_generation() -> None:
    both(Texts())[0].abort("warm up")
    before = {what: count(what) for what in ("fd", "task")}
    for number in range(3):
        ends = both(Texts())
        if number:
            ends[0].abort("a member was lost")
        for each in ends:
            each.close()
    for what, number in before.items():
        until_same(what, number)


def test_gloo_listens_where_it_is_told_and_nowhere_else() -> None:
    def listening() -> set[str]:
        rows = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        return {row.split()[1] for row in rows if row.split()[3] == "0A"}

    before = listening()
    ends = both(Texts())
    assert {place.split(":")[0] for place in listening() - before} == {"0100007F"}
    for each in ends:
        each.close()


def dropped(limit_s: float = 30.0) -> bool:
    """Return whether all connections that were let go of are gone."""
    dropping = [each for each in threading.enumerate() if each.name == "penstock drops groups"]
    for each in dropping:
        each.join(limit_s)
    return not any(each.is_alive() for each in dropping)


def test_a_fork_may_drop_what_its_parent_has_connected() -> None:
    world = world_of(
        (0, 1), Prefixed(Texts(), "world"), address="127.0.0.1", device=CPU, limit_s=30.0
    )
    group = world.group([0])
    assert dropped()  # those of other tests: none is half gone in the fork
    gc.collect()  # nor is anything else of theirs taken for garbage there
    forked = os.fork()
    if not forked:
        gc.disable()
        del group
        world.close()
        os._exit(0 if dropped() else 1)
    assert os.waitpid(forked, 0)[1] == 0
    world.close()
