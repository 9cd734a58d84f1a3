"""Memory that processes share: a look that moves it is told, and the job is refused."""

import multiprocessing
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

import penstock as ps
from penstock.errors import JobError
from penstock.examine.examine import examine
from penstock.examine.shared_state import shared_digests, what_moved


def data(start):
    for number in range(start, 999):
        yield torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def job_of(scale) -> ps.Job:
    loss = lambda model, batch: model(batch).square().mean() * scale()  # noqa: E731
    optimizer = lambda weights: torch.optim.SGD(weights, lr=0.1)  # noqa: E731
    return ps.Job(lambda: torch.nn.Linear(3, 3), loss, data, optimizer)


def counter_of_a_value():
    calls = multiprocessing.Value("i", 0)

    def scale():
        calls.value += 1
        return 1 + calls.value

    return scale


def array_without_a_lock():
    shares = multiprocessing.RawArray("d", [1.0, 1.0])

    def scale():
        shares[1] *= 0.9
        return shares[1]

    return scale


def block_of_bytes():
    block = SharedMemory(create=True, size=8)
    block.unlink()

    def scale():
        block.buf[3] += 1
        return 1 + block.buf[3]

    return scale


@pytest.mark.parametrize("make", [counter_of_a_value, array_without_a_lock, block_of_bytes])
def test_a_loss_that_counts_in_memory_that_processes_share_is_refused(make):
    with pytest.raises(JobError, match="which its processes share, is another one") as told:
        examine(job_of(make()))
    assert "Job.state" in told.value.hint


def test_what_is_only_read_there_is_no_problem():
    scale = multiprocessing.Value("d", 0.5)
    assert not examine(job_of(lambda: scale.value)).failed


def test_what_moved_is_named():
    value = multiprocessing.Value("i", 1)
    before = shared_digests()
    assert what_moved(before, shared_digests()) == ""
    value.value = 2
    assert what_moved(before, shared_digests()) == "multiprocessing.Value, or an Array"
    assert what_moved(before, {}) == "", "what is gone is no state any more"
