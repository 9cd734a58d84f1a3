"""A forked process that waits for a thread that it does not have ends with the line; no other."""

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from penstock.errors import RunError
from penstock.processes import child
from penstock.processes.child import Aside, SilentError, in_a_fork
from penstock.processes.stuck_forks import StuckWatch
from penstock.runtime import launch
from penstock.runtime.launch import run_processes
from penstock.runtime.worker import RankResult

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(child, "_STUCK_LOOK_S", 0.1)
    monkeypatch.setattr(launch, "_STUCK_LOOK_S", 0.1)


def held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@pytest.mark.parametrize(
    "wait",
    [
        lambda pool: queue.Queue().get(),
        lambda pool: pool.submit(int).result(),
        lambda pool: threading.Event().wait(),
        lambda pool: held().acquire(),
    ],
)
def test_who_waits_for_a_thread_that_is_not_there_is_told_with_the_line(wait):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread is here
        words = r"waits for ever at .*test_stuck_forks\.py:\d+, for a"
        with pytest.raises(SilentError, match=words):
            in_a_fork(lambda beat: wait(pool), 60.0)


def with_a_thread() -> None:
    """Wait for a thread that waits for another process."""
    receiver, sender = FORK.Pipe(duplex=False)
    threading.Thread(target=receiver.recv, daemon=True).start()
    threading.Event().wait()
    sender.close()


@pytest.mark.parametrize(
    "wait",
    [
        lambda shared: shared.acquire(),
        lambda shared: queue.Queue().get(timeout=60.0),
        lambda shared: FORK.Pipe(duplex=False)[0].poll(60.0),
        lambda shared: with_a_thread(),
    ],
)
def test_who_waits_for_others_or_with_a_limit_is_not_stuck(wait: Callable[[object], object]):
    shared, (receiver, sender) = FORK.Lock(), FORK.Pipe(duplex=False)
    shared.acquire()
    process = FORK.Process(target=lambda: (sender.send(""), wait(shared)), daemon=True)
    process.start()
    receiver.recv()
    with closing(StuckWatch()) as watch:
        for _ in range(20):
            assert not watch.is_stuck(process.pid or 0)
            receiver.poll(0.01)
    process.kill()
    process.join()


def test_a_rank_that_is_stuck_ends_the_run_with_its_line():
    def work(transport: object, report: object) -> RankResult:
        if transport.rank == 1:
            queue.Queue().get()
        return RankResult(0, (), (), 0, (0.0,), 0.0, {})

    with pytest.raises(RunError, match=r"rank 1 waits for ever at .*test_stuck_forks\.py:\d+"):
        run_processes(work, 2, lambda step: None)


def test_a_process_beside_that_is_stuck_is_told():
    def told(aside: Aside) -> object:
        while (told := aside.poll(0.1)) is None:
            pass
        return told

    beside = closing(Aside(lambda: queue.Queue().get()))
    with beside as aside, pytest.raises(SilentError, match="waits for ever at"):
        told(aside)


def test_nobody_is_stuck_who_is_not_there():
    with closing(StuckWatch()) as watch:
        assert not any(watch.is_stuck(2**22 + 1) for _ in range(3))


def test_what_has_answered_can_be_closed_again():
    beside = Aside(lambda: 7)
    found = None
    while found is None:
        found = beside.poll(1.0)
    assert found == (7,)
    with open(os.devnull) as other:
        beside.close()
        assert os.fstat(other.fileno())
