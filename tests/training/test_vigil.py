"""Vigil: ranks that wait for each other learn of a death before any of them is connected."""

import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.errors import RunError
from penstock.members.words import Where
from penstock.training import rendezvous, vigil
from penstock.training.rendezvous import Rendezvous
from penstock.training.vigil import Vigil
from tests.runtime.as_torchrun import as_torchrun

LOOPBACK = "127.0.0.1"


@contextmanager
def vigils(count: int, monkeypatch: pytest.MonkeyPatch) -> Generator[list[Vigil]]:
    """Give vigils of ranks that are all here, none of which ends this process."""
    monkeypatch.setattr(vigil, "_GRACE_S", 1e6)
    first = Vigil(0, LOOPBACK)
    where, token = json.loads(first.told())
    others = [Vigil(rank, LOOPBACK, bytes.fromhex(token)) for rank in range(1, count)]
    for other in others:
        other.call(Where(*where))
    try:
        yield [first, *others]
    finally:
        for each in (first, *others):
            each.close()


def until(is_so) -> None:
    for _ in range(20_000):
        if is_so():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never is")


@pytest.mark.parametrize("dies", [0, 2])
def test_all_learn_of_a_rank_that_dies(dies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with vigils(3, monkeypatch) as them:
        them[dies]._is_open = False
        them[dies]._mesh.drop()
        left = [each for rank, each in enumerate(them) if rank != dies]
        for each in left:
            until(lambda each=each: each.problem)
            assert each.problem == f"rank {dies} died before all were connected"


def test_all_learn_of_a_rank_that_fails_and_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with vigils(3, monkeypatch) as them:
        them[1].fail("rank 1 failed: no such file")
        for each in (them[0], them[2]):
            until(lambda each=each: each.problem)
            assert each.problem == "rank 1 failed: no such file"
        assert not them[1].problem


def test_a_rank_that_leaves_in_good_order_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with vigils(3, monkeypatch) as them:
        them[2].close()
        until(lambda: 2 in them[0]._mesh.lost)
        assert not any(each.problem for each in them)
        them[1]._mesh.drop()
        until(lambda: them[0].problem)
        assert them[0].problem == "rank 1 died before all were connected"


def test_a_rank_that_waits_for_a_notice_ends_when_another_one_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK}.items():
        monkeypatch.setenv(name, value)
    with vigils(2, monkeypatch) as them:
        own = Rendezvous(dist.HashStore())
        own._vigil = them[0]
        them[1]._mesh.drop()
        with pytest.raises(RunError, match="rank 1 died before all were connected"):
            own.take("what never comes")


def dies_while_others_connect() -> int:
    """Be a rank of which one dies, and the others are in a call that nothing ends."""
    vigil._GRACE_S = 0.2
    own = Rendezvous(notices_store())
    own.begin()
    if own.rank == 1:
        own.put("began", "")
        own.take("all began")
        os._exit(9)
    own.take("began")
    own.put("all began", "")
    threading.Event().wait(60)
    return 0


def notices_store():
    from penstock.runtime.launch import torchrun_store

    return torchrun_store()


def test_a_rank_that_waits_inside_torch_is_ended(tmp_path: Path) -> None:
    ended = as_torchrun(dies_while_others_connect, tmp_path, ranks=2)
    assert [code for code, _, _ in ended] == [1, 9]
    assert ended[0][2] == "error: rank 1 died before all were connected\n"


def test_a_rank_that_never_comes_is_not_waited_for_longer_than_hosts_take_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "START_S", 0.0)
    with pytest.raises(RunError, match=r"ranks \[1\] have not come"):
        Rendezvous(dist.HashStore()).begin()
