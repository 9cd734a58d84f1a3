"""Rates that follow the batch: the job's own steps, its rate and scheduler, and the exponent."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

import penstock as ps
from penstock.pilot.pace import Stretch, exponent, own_step, paced

lengths = st.lists(st.tuples(st.integers(1, 9), st.floats(0.2, 6.0)), min_size=1, max_size=4)


def stretches_of(rows):
    step, own, made = 0, 0.0, []
    for length, gain in rows:
        made.append(Stretch(step, own, gain, math.sqrt(gain)))
        step, own = step + length, own + length * gain
    return made


@given(lengths, st.integers(0, 40))
def test_own_steps_are_the_gains_of_the_steps_before(rows, step):
    gains = [gain for length, gain in rows for _ in range(length)]
    gains += [rows[-1][1]] * 50
    assert own_step(stretches_of(rows), step) == pytest.approx(math.fsum(gains[:step]))


def job_of(optimizer=lambda w: torch.optim.SGD(w, 0.5), **more):
    return ps.Job(lambda: nn.Linear(3, 2), lambda m, b: b, lambda s: iter(()), optimizer, **more)


def test_rate_is_that_of_the_own_step_times_the_factor():
    told = [Stretch(0, 0.0), Stretch(4, 4.0, 2.5, 1.5)]
    made = paced(job_of(learning_rate=lambda step: 1.0 / (1 + step)), told)
    assert [made.learning_rate(k) for k in range(4)] == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert [made.learning_rate(k) / 1.5 for k in (4, 5, 6)] == pytest.approx([1 / 5, 1 / 7, 1 / 10])
    assert paced(job_of(), told).learning_rate(5) == 1.5


def test_job_whose_batch_stays_is_as_it_was():
    job = job_of()
    assert paced(job, [Stretch(0, 0.0), Stretch(7, 7.0)]) is job


@pytest.mark.parametrize(
    "make",
    [
        lambda o: LambdaLR(o, lambda t: 1.0 / (1 + t)),
        lambda o: ExponentialLR(o, 0.9),
        lambda o: SequentialLR(o, [ExponentialLR(o, 0.5), ExponentialLR(o, 0.9)], [3]),
    ],
)
def test_scheduler_is_stepped_as_the_own_steps_are_done(make):
    """Chained ones, which multiply what stands in the group, know nothing of the factor."""
    told = [Stretch(0, 0.0), Stretch(3, 3.0, 2.5, 1.5)]
    plain = torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.5)
    scheduler, own = make(plain), [0.5]
    for _ in range(20):
        plain.step()
        scheduler.step()
        own.append(plain.param_groups[0]["lr"])
    own[0] = make(torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.5)).get_last_lr()[0]
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.5)
    followed = paced(replace(job_of(), scheduler=make), told).scheduler(optimizer)
    found = []
    for _ in range(7):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        followed.step()
    expected = [own[0], own[1], own[2], 1.5 * own[3], 1.5 * own[5], 1.5 * own[8], 1.5 * own[10]]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("optimizer", "power"),
    [
        (lambda w: torch.optim.SGD(w, 1e-9), 1.0),
        (lambda w: torch.optim.SGD(w, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True), 1.0),
        (lambda w: torch.optim.AdamW(w, 1e-3), 0.5),
        (lambda w: torch.optim.Adam(w, 1e-3, weight_decay=0.1), 0.5),
        (lambda w: torch.optim.Adagrad(w), 0.5),
        (lambda w: torch.optim.RMSprop(w), 0.5),
    ],
)
def test_exponent_is_that_of_what_an_update_does(optimizer, power):
    model = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert exponent(job_of(optimizer), model) == power
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


class NoRate(torch.optim.Optimizer):
    def __init__(self, weights):
        super().__init__(weights, {})


def test_optimizer_without_a_rate_has_no_exponent():
    assert exponent(job_of(lambda w: NoRate(w)), nn.Linear(3, 2)) is None
