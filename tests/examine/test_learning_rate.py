"""A learning rate with state gives what it gives in a plain loop, whoever asks for which step."""

import itertools
import random
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.examine import learning_rate
from penstock.examine.examine import examine
from penstock.examine.learning_rate import rate_of, replayed
from penstock.job import Job
from penstock.pilot.pace import Stretch, paced
from penstock.prove.plain import Plain
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes
from penstock.state.optimizer.rates import ReplayedRate
from tests.parity.optimizing import MICRO_BATCHES, STEPS, Net, data, loss, plain_loop, windows_from
from tests.parity.optimizing import run_of as planned_run
from tests.parity.training import differing, train


def by_a_scheduler(kind, **options):
    made = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = kind(made, **options)

    def rate(step: int) -> float:
        factor = schedule.get_last_lr()[0]
        made.step()
        schedule.step()
        return factor

    return rate


def by_counting(warm_up: int):
    calls = itertools.count(1)
    return lambda step: min(1.0, next(calls) / warm_up)


def late(after: int):
    """Return a rate that is the same for a long time: only its counter tells."""
    calls = [0]

    def rate(step: int) -> float:
        calls[0] += 1
        return 1.0 if calls[0] <= after else 0.25

    return rate


def by_a_generator():
    factors = (0.8**step for step in itertools.count())
    return lambda step: next(factors)


def by_a_cycle():
    """A generator that stands at the same line, with the same variables, between any two calls."""

    def factors():
        while True:
            yield from (1.0, 0.5, 0.25, 0.5)

    source = factors()
    return lambda step: next(source)


STATEFUL = {
    "exponential": lambda: by_a_scheduler(ExponentialLR, gamma=0.8),
    "one cycle": lambda: by_a_scheduler(OneCycleLR, max_lr=1.0, total_steps=400),
    "warm-up": lambda: by_counting(4),
    "late": lambda: late(3),
    "very late": lambda: late(10**6),
    "generator": by_a_generator,
    "cycle": by_a_cycle,
}
PURE = {
    "constant": lambda step: 1.0,
    "cosine": lambda step: 0.5 + 0.01 * step,
    "whole numbers": lambda step: step // 3,
    "scheduler made anew": lambda step: by_a_scheduler(ExponentialLR, gamma=0.8)(step),
}


def job_of(rate, **options) -> Job:
    about = {"micro_batches": MICRO_BATCHES, "seed": 5, "num_steps": 300, **options}
    return Job(Net, loss, data, lambda w: SGD(w, lr=0.1), learning_rate=rate, **about)


@pytest.mark.parametrize("name", STATEFUL)
def test_one_that_keeps_state_is_found_without_moving_it(name):
    rate, untouched = fresh(name), fresh(name)
    assert rate_of(job_of(rate)).keeps
    assert [rate(step) for step in range(5)] == [untouched(step) for step in range(5)]


@pytest.mark.parametrize("steps", [300, 299])
def test_a_cycle_is_found_whose_length_divides_the_steps_though_nothing_shows_it(
    monkeypatch, steps
):
    monkeypatch.setattr(learning_rate, "held", lambda *_: ({}, ()))
    assert rate_of(job_of(by_a_cycle(), num_steps=steps)).keeps
    assert not rate_of(job_of(PURE["cosine"], num_steps=steps)).keeps


def fresh(name: str):
    return STATEFUL[name]()


@pytest.mark.parametrize("name", PURE)
def test_one_that_keeps_none_is_left_as_it_is(name):
    job = job_of(PURE[name])
    assert not rate_of(job).keeps
    assert replayed(job) is job


def test_what_no_replay_gives_again_is_named_with_its_line():
    timed = rate_of(job_of(lambda step: 1.0 + 0.0 * time.time()))
    assert "test_learning_rate.py" in timed.beside
    assert "the time" in timed.beside
    drawn = rate_of(job_of(lambda step: random.random()))
    assert "test_learning_rate.py" in drawn.beside
    assert (
        replayed(job_of(lambda step: random.random())).learning_rate.__class__ is not ReplayedRate
    )


def test_a_rate_that_fails_is_left_to_the_run():
    def rate(step: int) -> float:
        raise ValueError("no such step")

    assert not rate_of(job_of(rate)).keeps


def test_it_is_asked_for_once_for_each_step_in_order():
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return float(len(asked))

    replays = ReplayedRate(rate)
    assert [replays(step) for step in (4, 0, 4, 2)] == [5.0, 1.0, 5.0, 3.0]
    assert asked == [0, 1, 2, 3, 4]


def test_another_batch_asks_for_the_steps_of_its_own():
    told = (Stretch(0, 0.0), Stretch(2, 2.0, gain=2.0, factor=1.0))
    rate = paced(job_of(ReplayedRate(by_counting(10))), told).learning_rate
    assert [rate(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.5, 0.7])


@pytest.mark.parametrize("name", ["exponential", "warm-up", "generator"])
def test_a_resumed_run_goes_on_with_it(name, tmp_path):
    expected = plain_loop(job_of(fresh(name))).weights
    for first, steps in ((0, 3), (3, STEPS - 3)):
        run = planned_run(replayed(job_of(fresh(name))), 2)
        windows, newest = windows_from(run, first)[:steps], checkpoint.latest(tmp_path)
        found = train(run, tmp_path, launcher=run_processes, windows=windows, resume=newest)
    assert differing(found.weights, expected) == []


def test_so_do_replicas_without_a_plan(tmp_path):
    expected = plain_loop(job_of(fresh("exponential"))).weights
    for first, steps in ((0, 3), (3, STEPS - 3)):
        job, newest = replayed(job_of(fresh("exponential"))), checkpoint.latest(tmp_path)
        task = EagerTask(job, first, steps, newest, policy=SavePolicy(tmp_path))
        run_processes(partial(work_eagerly, task), 1, lambda step: None)
    found = checkpoint.load(checkpoint.latest(tmp_path)).tensors
    assert differing(found, expected) == []


def test_the_plain_loop_may_begin_with_a_later_step():
    plain, rate = Plain(replayed(job_of(fresh("exponential")))), fresh("exponential")
    plain.rate(3)
    factors = [rate(step) for step in range(4)]
    assert plain.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factors[3])


def test_one_that_draws_is_trained_in_one_process():
    found = examine(job_of(lambda step: 0.5 + random.random()))
    assert "the learning rate depends on more than the step" in found.one_process
