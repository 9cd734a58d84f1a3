"""What was read of a step that a loss broke off is not read again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.batches.reads import ReadNumbers
from penstock.job import Job
from penstock.runtime import kept_reads
from penstock.runtime.kept_reads import KeptReads
from penstock.runtime.reader import Reader


def job_that_notes(read: list[int]) -> Job:
    def data(start: int) -> Iterator[Tensor]:
        number = start
        while True:
            read.append(number)
            yield torch.full((4,), float(number))
            number += 1

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()

    return Job(lambda: nn.Linear(4, 1), loss, data, lambda own: torch.optim.SGD(own, 0.1))


def leaves(batch: Any) -> list[Any]:
    return [batch]


def read_all(reader: Reader, first: int, count: int) -> list[float]:
    reads = (ReadNumbers(first, range(count), count, at) for at in range(count))
    return [float(reader.read(each, leaves)[0][0]) for each in reads]


def test_a_second_reader_reads_only_what_the_first_has_not() -> None:
    read = list[int]()
    job, kept = job_that_notes(read), KeptReads()
    readers = [Reader(job, torch.device("cpu"), kept=kept) for _ in range(2)]
    assert read_all(readers[0], 8, 3) == [8, 9, 10]
    assert read_all(readers[1], 8, 5) == [8, 9, 10, 11, 12]
    assert read == [8, 9, 10, 11, 12]
    kept.clear()  # the step counts
    assert read_all(Reader(job, torch.device("cpu")), 8, 2) == [8, 9]
    assert read[5:] == [8, 9]


def test_another_job_may_count_them_otherwise() -> None:
    kept, jobs = KeptReads(), [job_that_notes([]) for _ in range(2)]
    kept.keep(jobs[0], 3, [torch.ones(2)])
    assert kept.found(jobs[1], 3) is None
    kept.keep(jobs[1], 4, [torch.zeros(2)])
    assert kept.found(jobs[0], 3) is None
    assert kept.found(jobs[1], 4) is not None


def test_large_micro_batches_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_reads, "_MOST_BYTES", 100)
    kept, job = KeptReads(), job_that_notes([])
    kept.keep(job, 0, [torch.ones(20), "words"])
    kept.keep(job, 1, [torch.ones(20)])
    kept.keep(job, 2, [torch.ones(5)])
    assert [kept.found(job, number) is not None for number in range(3)] == [True, False, True]
    kept.clear()
    kept.keep(job, 1, [torch.ones(20)])
    assert kept.found(job, 1) is not None
