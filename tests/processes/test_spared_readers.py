"""What reads data for a rank lives through signals to the whole group, and ends with the rank."""

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from penstock.processes.child import in_a_fork
from penstock.processes.spared_readers import sparing
from penstock.runtime.launch import _leave_signals_to_the_parent
from penstock.runtime.stop import stopping

SAMPLES = TensorDataset(torch.arange(64.0))
ENDING = signal.SIGTERM, signal.SIGINT


def by_batches(start: int):
    return ps.batches(SAMPLES, 2, shuffle=False, workers=2)(start)


def by_own_loader(start: int):
    return iter(DataLoader(SAMPLES, 2, num_workers=2, multiprocessing_context="fork"))


def by_pool(start: int):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        yield from ([x] for x in pool.imap(float, range(0, 64, 2)))


def by_process(start: int):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_sends, args=(sender,))
    process.start()
    yield from ([receiver.recv()] for _ in range(32))
    process.terminate()
    process.join()


def _sends(sender) -> None:
    for number in range(0, 64, 2):
        sender.send(float(number))
        time.sleep(1e-3)
    signal.pause()


def children() -> list[int]:
    return [int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split()]


def first_numbers(data) -> list[float]:
    """Read data in a rank whose group gets the signals that end programs, again and again."""
    _leave_signals_to_the_parent()
    source, numbers = iter(data(0)), list[float]()
    for batch in source:
        numbers.append(float(torch.as_tensor(batch[0]).flatten()[0]))
        if len(numbers) in (1, 2, 9):
            for child in children():
                for number in ENDING:
                    os.kill(child, number)
            for number in ENDING:
                os.kill(os.getpid(), number)
        if len(numbers) == 32:
            break
    return numbers


@pytest.mark.parametrize("data", [by_batches, by_own_loader, by_pool, by_process])
def test_data_is_read_to_its_end_after_signals_to_the_group(data) -> None:
    assert in_a_fork(lambda beat: first_numbers(data), 60.0) == [float(k) for k in range(0, 64, 2)]


def test_what_a_rank_ends_ends_whatever_it_ignores() -> None:
    def ends() -> int | None:
        _leave_signals_to_the_parent()
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        process.terminate()
        process.join()
        return process.exitcode

    assert in_a_fork(lambda beat: ends(), 60.0) == -signal.SIGKILL


def test_process_that_hears_signals_spares_what_it_forks_only_while_it_does() -> None:
    before = BaseProcess.terminate
    with stopping(None, tells=False) as board:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert board.asked() == 0
        assert BaseProcess.terminate is BaseProcess.kill
    with sparing():
        pass
    assert BaseProcess.terminate is before
