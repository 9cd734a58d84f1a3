"""Data that is no function of a micro-batch's number is found, and any other is let pass."""

import collections
import itertools
import os
import random
import re
import threading
import time
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import penstock as ps
from penstock.errors import JobError
from penstock.examine import data_check
from penstock.examine.data_check import DataFound, check_data, check_here
from penstock.graph.trace import capture
from penstock.processes.child import in_a_fork

ROWS = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))


def job_of(data) -> ps.Job:
    return ps.Job(
        lambda: nn.Linear(3, 1),
        lambda model, batch: model(batch).mean(),
        data,
        partial(torch.optim.SGD, lr=0.1),
    )


def found(data, per_step=4, first=0) -> DataFound:
    return check_data(job_of(data), per_step=per_step, first=first)


def at(index: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(index))


def pure(start):
    return map(at, itertools.count(start))


# -- what is let pass ----------------------------------------------------------------------------


def skipping(start):
    return itertools.islice(itertools.cycle(DataLoader(TensorDataset(ROWS), 3)), start, None)


def seeds_everybody(start):
    for index in itertools.count(start):
        torch.manual_seed(index)
        random.seed(index)
        yield torch.rand(2) + random.random()


def with_workers(start):
    return iter(DataLoader(ROWS, 2, sampler=range(2 * start, 64), num_workers=1))


def augments(sample):
    return sample[0] + torch.rand(3) + np.random.rand() + random.random()


GOOD = {
    "a generator for each number": pure,
    "constant": lambda start: itertools.repeat(torch.ones(2)),
    "constant for a while": lambda start: (torch.tensor(k // 40) for k in itertools.count(start)),
    "skipping": skipping,
    "a batch for each number": lambda start: (
        ROWS[k % 32 : k % 32 + 2] for k in itertools.count(start)
    ),
    "seeds everybody": seeds_everybody,
    "workers": with_workers,
    "ps.batches": ps.batches(
        TensorDataset(ROWS), 3, collate=lambda s: torch.stack(list(map(augments, s)))
    ),
    "ps.from_loader": ps.from_loader(DataLoader(ROWS, 4, shuffle=True)),
    "ends soon": lambda start: iter([at(k) for k in range(3)][start:]),
    "ends at once": lambda start: iter(()),
    "other containers": lambda start: (
        BatchEncoding({"x": at(k).numpy()}) for k in itertools.count(start)
    ),
    "a list": lambda start: [at(k) for k in range(start, start + 70)],
    "draws, and throws away": lambda start: (
        at(k + 0 * random.randrange(9)) for k in itertools.count(start)
    ),
}


@pytest.mark.parametrize("good", GOOD)
def test_function_of_the_number_is_let_pass(good):
    assert found(GOOD[good]) == DataFound()


@pytest.mark.parametrize("per_step", [1, 2, 3, 6, 200])
def test_any_step_is_let_pass_from_any_number(per_step):
    assert found(pure, per_step, first=5) == DataFound()


# -- what is found -------------------------------------------------------------------------------


def drawing(draw):
    return lambda start: (at(k) + draw() for k in itertools.count(start))


def shuffled(start):
    while True:
        yield from DataLoader(ROWS, 2, shuffle=True)


def outliving(iterator):
    return lambda start: iterator


def counting(calls):
    return lambda start: (at(k + next(calls)) for k in itertools.count(start))


class Noisy:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, start):
        return (at(k).numpy() + self.rng.random() for k in itertools.count(start))


def by_blocks(start):
    return pure(start - start % 4)


def no_numbers(start):
    return iter(DataLoader(ROWS, 2))


def first_only(start):
    return pure(0) if start == 0 else iter(())


BAD = {
    "numpy": (drawing(np.random.rand), r"draws from numpy's generator,.*default_rng\(k\)"),
    "python": (drawing(random.random), r"draws from Python's generator,.*random.Random\(k\)"),
    "torch": (drawing(lambda: torch.rand(())), r"from torch's generator,.*manual_seed\(k\)"),
    "two": (
        drawing(lambda: np.random.rand() + random.random()),
        "draws from Python's generator and numpy's generator",
    ),
    "shuffled": (shuffled, r"draws from torch's generator.*ps.batches\(dataset, batch_size\)"),
    "time": (
        drawing(lambda: time.perf_counter_ns() % 10**6),  # seconds since the boot round to equal
        "micro-batch 0 differs when .* again: the time is",
    ),
    "unseeded": (
        drawing(lambda: np.random.default_rng().random()),
        "0 differs.* again: the time",
    ),
    "shared": (lambda: outliving(pure(0)), "again: an iterator, a counter or a generator outlives"),
    "counter": (lambda: counting(itertools.count()), "again: an iterator, a counter or a gen"),
    "own generator": (Noisy, "again: an iterator, a counter or a generator outlives"),
    "no numbers": (no_numbers, r"data\(1\) begins where data\(0\) does: it ignores"),
    "by blocks": (by_blocks, r"data\(1\) begins where data\(0\) does"),
    "off by one": (
        lambda start: pure(start + (start > 3)),
        r"data\(4\) begins with micro-batch 5, not",
    ),
    "other": (
        lambda start: pure(start + 99 * (start > 1)),
        r"data\(2\) begins with another one, not with micro-batch 2 of data\(0\)",
    ),
    "ends": (first_only, r"data\(1\) yields nothing, and data\(0\) yields micro-batch 1"),
    "process": (drawing(os.getpid), "micro-batch 0 differs in another process: its number"),
}


@pytest.mark.parametrize("bad", BAD)
def test_anything_else_is_found_with_its_mend(bad):
    data, words = BAD[bad]
    data = data() if bad in ("shared", "counter", "own generator") else data
    problem = found(data).problem
    assert problem is not None
    assert re.search(words, problem), problem
    assert "ps.batches" in problem


@pytest.mark.parametrize(("wrong", "is_found"), [(2, False), (3, True), (6, True), (7, True)])
def test_place_of_a_second_replica_and_of_the_next_step_are_tried(wrong, is_found):
    problem = found(lambda start: pure(start + 100 * (start == wrong)), per_step=6).problem
    assert (problem is not None) == is_found


def test_what_is_read_differently_only_in_another_process_is_found_at_a_later_number():
    here = os.getpid()
    forks = collections.Counter()

    def data(start):
        forks[os.getpid()] += 1
        return pure(
            start + (start > 4 and len(forks) == 2 and forks[here] == 1 and forks.total() == 3)
        )

    assert "micro-batch 5 differs in another process" in found(data, per_step=3).problem


# -- memory --------------------------------------------------------------------------------------


def buffers(count, make, fill=None):
    def data(start):
        ring = [make() for _ in range(count)]
        for index in itertools.count(start):
            buffer = ring[index % count]
            buffer[:] = at(index) if isinstance(buffer, torch.Tensor) else at(index).numpy()
            yield buffer

    return data


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("per_step", [1, 8])
@pytest.mark.parametrize(
    "make",
    [lambda: torch.empty(2, 3), lambda: np.empty((2, 3), np.float32)],
    ids=["torch", "numpy"],
)
def test_memory_that_is_filled_again_is_seen(count, per_step, make):
    assert found(buffers(count, make), per_step) == DataFound(reuses_memory=True)


def test_memory_that_is_written_after_it_was_yielded_is_seen():
    def data(start):
        for batch in pure(start):
            yield batch
            batch.zero_()

    assert found(data) == DataFound(reuses_memory=True)


def test_views_of_what_stays_as_it_is_are_not_taken_for_it():
    assert not found(GOOD["a batch for each number"]).reuses_memory


def masking(model, batch):
    batch[:, 0] = 0
    return model(batch).mean()


def reading(model, batch):
    batch = batch.clone()
    return masking(model, batch)


def test_loss_that_writes_into_what_the_data_yields_again_is_found():
    views = replace(job_of(GOOD["a batch for each number"]), loss=masking)
    for writes in (None, True):
        problem = check_data(views, per_step=4, writes_batch=writes).problem
        assert "the loss writes into the micro-batch" in problem
        assert "clone()" in problem
    assert capture(views).writes_batch
    assert not capture(replace(views, loss=reading)).writes_batch
    for fine in (
        replace(views, loss=reading),
        replace(views, data=pure),
        replace(views, data=buffers(1, lambda: torch.empty(2, 3))),
    ):
        assert check_data(fine, per_step=4).problem is None
    assert check_data(views, per_step=4, writes_batch=False).problem is None
    assert check_data(replace(views, data=pure), per_step=4, writes_batch=True).problem is None


def windows(start):
    """Micro-batches that overlap, of memory that each call makes anew."""
    row = torch.arange(60.0)
    return (row[3 * k : 3 * k + 6].view(2, 3) for k in itertools.count(start % 10))


def rolling(start):
    """One buffer, of which each micro-batch fills one row and moves the other."""
    buffer = torch.stack([at(start - 1)[0], at(start)[0]])
    for k in itertools.count(start):
        yield buffer
        buffer[0] = buffer[1]
        buffer[1] = at(k + 1)[0]


def masked_rows(model, batch):
    batch[1] = 0
    return model(batch).mean()


def first_row(model, batch):
    batch[0] = 0
    return model(batch).mean()


@pytest.mark.parametrize("data", [windows, rolling])
def test_loss_that_writes_into_what_a_later_micro_batch_holds_is_found(data):
    assert check_data(job_of(data), per_step=4).problem is None
    problem = check_data(replace(job_of(data), loss=masked_rows), per_step=4).problem
    assert "later ones hold what it wrote" in problem
    assert check_data(replace(job_of(data), loss=reading), per_step=4).problem is None


def test_loss_may_write_into_what_the_data_fills_before_it_yields_it_again():
    assert check_data(replace(job_of(rolling), loss=first_row), per_step=4).problem is None
    shared = replace(job_of(buffers(1, lambda: torch.empty(2, 3))), loss=masking)
    assert check_data(shared, per_step=4).problem is None


# -- what it does to others ----------------------------------------------------------------------


def test_generators_are_left_as_they_were():
    def drawn():
        return torch.rand(()).item(), random.random(), np.random.rand()

    for data in (pure, shuffled, seeds_everybody):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        expected = drawn()
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        found(data)
        assert drawn() == expected


def test_iterator_that_is_shared_loses_one_micro_batch_here():
    source = pure(0)
    found(lambda start: source)
    assert torch.equal(next(source), at(1))


def test_about_three_steps_are_read():
    read = []

    def data(start):
        for index in itertools.count(start):
            read.append(index)
            yield at(index)

    seen = data_check._look(job_of(data), 8, 0, False, lambda: None)
    assert (seen.again, seen.begun, seen.drawn) == (None, None, [])
    assert len(read) <= 24


def test_slow_data_is_read_less(monkeypatch):
    monkeypatch.setattr(data_check, "_BUDGET_S", 0.0)
    seen = data_check._look(job_of(pure), 8, 0, False, lambda: None)
    assert len(seen.digests) == 2
    assert "begins where" in found(no_numbers).problem


def test_where_nothing_can_be_forked_it_is_read_here(monkeypatch):
    monkeypatch.setattr(data_check, "can_fork", lambda: False)
    assert found(pure) == DataFound()
    assert "draws from torch's" in found(shuffled).problem
    assert "differs when it is read again" in found(outliving(pure(0))).problem


def test_process_that_waits_for_a_thread_of_this_one_is_found(monkeypatch):
    monkeypatch.setattr(data_check, "_PATIENCE_S", 0.5)

    def data(start):
        if os.getpid() != here:
            threading.Event().wait()
        return pure(start)

    here = os.getpid()
    assert "they have none of this one's threads" in found(data).problem


def test_no_more_is_read_than_the_job_trains_on():
    def data(start):
        return map([at(k) for k in range(8)].__getitem__, itertools.count(start))

    job = job_of(data)
    assert check_data(replace(job, num_steps=2), per_step=4) == DataFound()
    assert check_data(replace(job, num_steps=2), per_step=4, first=4) == DataFound()
    with pytest.raises(JobError, match=r"(?s)data fails .* IndexError"):
        check_data(replace(job, num_steps=3), per_step=4, first=4)


@pytest.mark.parametrize(
    "asked",
    [
        lambda model: next(model.parameters()).dtype,
        lambda model: {"width": model.weight.shape[1]}["width"],
        lambda model: model.training,
    ],
)
def test_data_may_ask_the_model_which_a_loop_has_by_then(asked):
    built = list[nn.Module]()

    def model():
        built.append(nn.Linear(3, 1))
        return built[-1]

    def data(start):
        for index in itertools.count(start):
            asked(built[-1])
            yield at(index)

    job = replace(job_of(data), model=model)
    seen = check_data(job, per_step=4)
    assert seen == DataFound()
    built.clear()  # as in the process that has only loaded the job
    check_here(job, seen.begins)


def test_data_that_asks_a_model_which_is_nowhere_is_told_with_its_line():
    def data(start):
        yield [][0]

    with pytest.raises(JobError, match=r"the job's data fails from micro-batch 0 on .*yield \[\]"):
        found(data)


def test_data_that_raises_is_told_with_its_line():
    def data(start):
        yield at(0)
        raise KeyError("nothing there")

    with pytest.raises(
        JobError, match=r"(?s)data fails from micro-batch 0 on at .*KeyError.*nothing"
    ):
        found(data)


# -- this process and those that it forks ---------------------------------------------------------

LOADED_BY, LOADED_IN = os.getpid(), threading.get_native_id()


def of_its_process(start):
    return (at(k + 99 * (os.getpid() != LOADED_BY)) for k in itertools.count(start))


def of_its_thread(start):
    own = threading.get_native_id() == LOADED_IN
    return (at(k + 99 * (not own)) for k in itertools.count(start))


@pytest.mark.parametrize(
    ("data", "words"),
    [(of_its_process, "asks for the number of the process"), (of_its_thread, "a thread")],
)
def test_data_of_the_process_that_has_loaded_it_is_refused(data, words):
    seen = in_a_fork(lambda beat: asdict(check_data(job_of(data), per_step=4)), 60)
    assert seen["problem"] is None
    with pytest.raises(JobError, match="differs in forked processes, as ranks are") as caught:
        check_here(job_of(data), seen["begins"])
    assert words in caught.value.message
    assert "ps.batches" in caught.value.hint


@pytest.mark.parametrize("good", ["a generator for each number", "ps.batches", "ends at once"])
def test_data_that_forks_read_as_this_process_does_is_let_pass(good):
    seen = in_a_fork(lambda beat: asdict(check_data(job_of(GOOD[good]), per_step=4)), 60)
    check_here(job_of(GOOD[good]), seen["begins"])
