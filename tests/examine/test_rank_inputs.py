"""Ranks that do not share a process read the same data and build the same model, or are refused."""

import itertools
import os
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import JobError, RunError
from penstock.examine import rank_inputs
from penstock.examine.rank_inputs import RankFacts, agree_on_model, differs, facts_of_data
from penstock.examine.surroundings import NOTES
from penstock.graph.trace import capture
from penstock.training.rendezvous import Rendezvous


def at(index: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1000 * rank + index))


def job_of(data) -> ps.Job:
    return ps.Job(
        lambda: nn.Linear(3, 1), lambda m, b: m(b).mean(), data, torch.optim.SGD, micro_batches=4
    )


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch):
    monkeypatch.setattr(NOTES, "values", {})
    monkeypatch.setattr(NOTES, "lines", {})


def facts(data, rank: int, monkeypatch, first: int = 0) -> RankFacts:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    return facts_of_data(job_of(data), first)


def refused(data, monkeypatch, rank: int = 1) -> JobError:
    first, own = facts(data, 0, monkeypatch), facts(data, rank, monkeypatch)
    problem = differs(own, first, rank)
    assert problem is not None
    return problem


# -- what is let pass -----------------------------------------------------------------------------


def pure(start):
    return map(at, itertools.count(start))


def tells_of_its_rank(start):
    name = f"rank {os.environ.get('RANK')}"
    return (at(k) for k in itertools.count(start) if name)


@pytest.mark.parametrize("data", [pure, tells_of_its_rank, lambda start: iter(())])
@pytest.mark.parametrize("first", [0, 40])
def test_ranks_that_read_the_same_agree(data, first, monkeypatch):
    found = [facts(data, rank, monkeypatch, first) for rank in range(2)]
    assert differs(found[1], found[0], 1) is None


def test_four_micro_batches_of_the_first_steps_are_read_and_nothing_of_the_data_moves(monkeypatch):
    seen: list[int] = []

    def data(start):
        for k in itertools.count(start):
            seen.append(k)
            yield at(k)

    found = facts(data, 0, monkeypatch, first=8)
    numbers = [int(name.removeprefix("micro-batch ")) for name in found.digests]
    assert numbers[:2] == [8, 9]
    assert len(numbers) == 4
    assert all(10 <= number < 8 + 2 + 16 for number in numbers[2:])
    assert not seen


# -- what is refused ------------------------------------------------------------------------------


def by_rank(start):
    return (at(k, int(os.environ.get("RANK", "0"))) for k in itertools.count(start))


def by_local_rank(start):
    rank = int(os.environ["LOCAL_RANK"])
    return (at(2 * k + rank) for k in itertools.count(start))


def later(start):
    for k in itertools.count(start):
        yield at(k, int(os.environ["RANK"]) if k > 1 else 0)


def shorter(start):
    return (at(k) for k in range(start, 1 if os.environ["RANK"] == "1" else 99))


@pytest.mark.parametrize(
    ("data", "number", "name"),
    [(by_rank, 0, "RANK"), (by_local_rank, 0, "LOCAL_RANK"), (later, "", "RANK")],
)
def test_data_that_follows_the_rank_is_refused_with_its_line(data, number, name, monkeypatch):
    problem = refused(data, monkeypatch)
    assert f"micro-batch {number}" in problem.message
    lines = range(data.__code__.co_firstlineno, data.__code__.co_firstlineno + 4)
    place = problem.message.partition(" differs from that of rank 0: ")[2].partition(" reads ")[0]
    assert place in [f"{__file__}:{line}" for line in lines]
    assert f"reads {name}, which differs from rank to rank" in problem.message
    assert "Penstock divides it among them" in problem.hint


def test_data_that_ends_earlier_on_one_rank_is_refused(monkeypatch):
    assert "rank 0 alone reads micro-batch 1, of rank 0 and rank 1" in (
        refused(shorter, monkeypatch).message
    )


def test_order_of_a_set_is_the_likely_cause_where_nothing_else_is_known(monkeypatch):
    words = ["the", "pipe", "that", "brings", "water"]

    def told(order):
        ids = {word: k for k, word in enumerate(order)}
        batch = torch.tensor([ids[word] for word in words])
        return facts(lambda start: itertools.repeat(batch), 0, monkeypatch)

    first, own = told(words), told(words[::-1])
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    problem = differs(own, first, 3)
    assert problem is not None
    assert "micro-batch 0 as rank 3 reads it differs" in problem.message
    assert "the order of a set, or hashes of text" in problem.message
    assert "PYTHONHASHSEED=0" in problem.hint
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    problem = differs(own, first, 3)
    assert problem is not None
    assert "PYTHONHASHSEED" not in problem.hint


def test_data_that_fails_is_an_error_with_its_line(monkeypatch):
    def fails(start):
        yield 1 / start

    with pytest.raises(JobError, match=r"data fails near micro-batch 0(.|\n)*ZeroDivisionError"):
        facts(fails, 0, monkeypatch)


# -- model ----------------------------------------------------------------------------------------


def test_ranks_with_other_weights_or_constants_end(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = job_of(pure)

    def model(rank):
        made = nn.Sequential(nn.Linear(3, 4000), nn.Linear(4000, 1))
        made[0].weight.data[1:] += rank
        return made

    def ended(one: ps.Job, other: ps.Job) -> list[object]:
        store, found = dist.HashStore(), [None, None]

        def live(rank, given):
            try:
                agree_on_model(ends[rank], given)
            except (JobError, RunError) as problem:
                ends[rank].fail(problem)
                found[rank] = problem

        captures = [capture(each) for each in (one, other)]
        ends = []
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            ends.append(Rendezvous(store))
        threads = [threading.Thread(target=live, args=pair) for pair in enumerate(captures)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        return found

    monkeypatch.setattr("penstock.training.rendezvous.on_one_host", lambda: True)
    assert ended(job, job) == [None, None]
    jobs = [replace(job, model=lambda rank=rank: model(rank)) for rank in range(2)]
    first, second = ended(*jobs)
    assert "weight 0.weight as rank 1 makes it differs" in str(second)
    assert "rank 1 failed" in str(first)
    scaled = [
        replace(job, loss=lambda m, b, scale=scale: (scale * m(b)).mean())
        for scale in torch.tensor([1.0, 2.0])
    ]
    assert "constant 0 of the loss as rank 1 makes it differs" in str(ended(*scaled)[1])


def test_a_few_elements_of_a_large_tensor_count():
    large = torch.zeros(10**6)
    assert rank_inputs.sample(large).numel() <= 2 * 1024
    assert rank_inputs.sample(torch.zeros(())).numel() == 1
