"""A run that would begin anew what the job keeps in Python is refused, with the line and a mend."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import penstock as ps
from penstock.errors import JobError, PlanError
from penstock.examine.examine import examine
from penstock.job import Job
from penstock.training.resumed import check_resumed, forgotten


def batches(start: int):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        yield torch.randn(3, 4, generator=source), torch.randn(3, 2, generator=source)


def plainly(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict) -> None:
        self.calls = state["calls"]

    def next(self) -> int:
        self.calls += 1
        return self.calls


def job_of(loss=plainly, data=batches, model=None, **options) -> Job:
    make = model or (lambda: nn.Linear(4, 2))
    return Job(make, loss, data, lambda w: SGD(w, lr=0.1), micro_batches=2, num_steps=6, **options)


def by_iterator() -> Job:
    calls = itertools.count(1)
    return job_of(lambda m, b: plainly(m, b) / next(calls))


def by_object() -> Job:
    counter = Counter()
    return job_of(lambda m, b: plainly(m, b) / counter.next())


def by_tensor() -> Job:
    kept = {"last": torch.zeros(3, 2)}

    def loss(model, batch):
        y = model(batch[0]) + kept["last"]
        kept["last"] = 0.5 * y.detach()
        return F.mse_loss(y, batch[1])

    return job_of(loss)


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.source = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=self.source))


def by_generator() -> Job:
    return job_of(model=Noisy)


def other_counter_named() -> Job:
    counter, other = Counter(), Counter()
    return job_of(lambda m, b: plainly(m, b) / counter.next(), state={"other": other})


def by_batches_written() -> Job:
    rows = list(itertools.islice(batches(0), 5))

    def loss(model, batch):
        batch[0].mul_(0.8)
        return plainly(model, batch)

    return job_of(loss, lambda start: itertools.islice(itertools.cycle(rows), start, None))


ANEW = [by_batches_written, by_iterator, by_object, by_tensor, by_generator, other_counter_named]


def by_name() -> Job:
    counter = Counter()
    return job_of(lambda m, b: plainly(m, b) / counter.next(), state={"calls": counter})


def by_flow() -> Job:
    def loss(model, batch):
        found = plainly(model, batch)
        return 2 * found if found > 1.0 else found

    return job_of(loss)


EPOCH = [0]


def by_data() -> Job:
    def data(start: int):
        for number, batch in enumerate(batches(start), start):
            EPOCH[0] = number // 3
            yield batch

    return job_of(lambda m, b: plainly(m, b) * (1 + EPOCH[0]), data)


def by_rate() -> Job:
    scale = {"now": 1.0}

    def rate(step: int) -> float:
        scale["now"] = 1.0 + step
        return 1.0

    return job_of(lambda m, b: plainly(m, b) * scale["now"], learning_rate=rate)


def by_chance() -> Job:
    random.seed(3)
    return job_of(lambda m, b: plainly(m, b) * random.random())


GOES_ON = [by_name, by_flow, by_data, by_rate, by_chance, job_of]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", ANEW)
def test_what_would_begin_anew_is_refused_with_its_line(make):
    job = make()
    with pytest.raises(JobError, match="would begin anew") as refused:
        check_resumed(job, examine(job))
    assert "test_resumed.py:" in refused.value.message
    assert "Job.state" in refused.value.hint


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", GOES_ON)
def test_what_a_checkpoint_or_a_replay_brings_back_is_not(make):
    job = make()
    check_resumed(job, examine(job))


def test_what_acts_can_be_found_by_doing_it():
    assert "weights/" in forgotten(by_tensor())
    assert forgotten(by_name()) == ""


def test_what_is_named_and_moves_in_the_loss_is_trained_in_one_process():
    counter = Counter()

    def loss(model, batch):
        counter.next()  # a figure that nobody reads
        return plainly(model, batch)

    found = examine(job_of(loss, state={"calls": counter}))
    assert 'Job.state["calls"]' in found.one_process
    assert found.forgets == ()


def test_a_command_refuses_and_goes_on_where_it_is_told_to(tmp_path):
    about = {"out": tmp_path / "run", "ranks": 1}
    ps.train(by_iterator(), num_steps=2, **about)
    with pytest.raises(JobError, match="would begin anew"):
        ps.train(by_iterator(), num_steps=4, resume=True, **about)
    trained = ps.train(by_iterator(), num_steps=4, resume=True, forget_state=True, **about)
    assert trained.summary["steps"] == 4


def test_ranks_that_come_and_go_are_refused_where_no_plan_trains_the_job(tmp_path):
    with pytest.raises(PlanError, match="ranks that come and go need a plan"):
        ps.train(by_name(), num_steps=2, elastic=True, out=tmp_path / "run", ranks=1)
    with pytest.raises(JobError, match="would begin anew"):
        ps.train(by_iterator(), num_steps=2, elastic=True, out=tmp_path / "run", ranks=1)
