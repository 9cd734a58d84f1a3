"""The job's optimizer is made of the module that its author means."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from penstock.errors import JobError, RunError
from penstock.graph.hollow import stand_ins
from penstock.graph.whole_optimizer import Loan, is_closed, whole_optimizer
from penstock.job import Job, Parameters

RATE = 0.1
MODEL = nn.Linear(2, 2)
HELD = {"model": MODEL}


def helper(weights):
    return [p for p in weights if p.dim() > 1]


def looks(weights):
    return HELD["model"]


def job_of(optimizer, model=lambda: nn.Linear(2, 2)):
    return Job(model, lambda m, x: m(x).sum(), lambda start: iter([torch.ones(1, 2)]), optimizer)


def closed(weights):
    def inner(p):
        return p.dim() > 1

    rows = [p for p in weights if inner(p)]
    return AdamW([{"params": rows, "lr": RATE * math.sqrt(2)}, {"params": helper(weights)}])


@pytest.mark.parametrize(
    "function",
    [SGD, functools.partial(SGD, lr=0.1), closed, lambda w: torch.optim.Adam(w, lr=RATE), helper],
)
def test_functions_that_hold_no_module_are_known(function):
    assert is_closed(function)


def shut(value):
    return lambda weights: value


@pytest.mark.parametrize(
    "function",
    [
        looks,
        lambda weights: looks(weights),
        lambda weights: MODEL.parameters(),
        lambda weights, model=MODEL: None,
        shut(MODEL),
        shut([1]),
        functools.partial(SGD, lr=MODEL),
        HELD.get,
    ],
)
def test_others_are_not(function):
    assert not is_closed(function)


def test_parameters_are_a_list_with_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    given = Parameters(model.named_parameters())
    assert isinstance(given, list)
    assert all(a is b for a, b in zip(given, model.parameters(), strict=True))
    assert [name for name, _ in given.named()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert given.named()[2][1] is model[1].weight


def test_a_closure_over_the_model_that_was_built_last_finds_that_one():
    built = []

    def model():
        built.append(nn.Linear(2, 2))
        return built[-1]

    def optimizer(weights):
        own = {id(built[-1].bias)}
        groups = ([p for p in weights if (id(p) in own) == flag] for flag in (True, False))
        return SGD([{"params": group} for group in groups], lr=0.1)

    first, job = model(), job_of(optimizer, model)
    for _ in range(2):  # as the last one, and as an older one
        whole = whole_optimizer(job, first)
        assert [len(group["params"]) for group in whole.optimizer.param_groups] == [1, 1]
        assert whole.model is built[-1]
        assert all(map(torch.equal, whole.model.parameters(), first.parameters()))


def test_where_groups_are_the_same_the_given_module_is_kept():
    built = []

    def model():
        built.append(nn.Linear(2, 2))
        return built[-1]

    first, job = model(), job_of(lambda weights: SGD(weights, lr=RATE if built else 0.0), model)
    assert whole_optimizer(job, first).model is first
    assert whole_optimizer(job, first).model is first
    assert len(built) == 2  # looked at once


def test_parameters_of_others_are_refused():
    job = job_of(lambda weights: SGD([*weights, nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(JobError, match="holds 1 parameter that is not among those it was given"):
        whole_optimizer(job, nn.Linear(2, 2))


def test_building_another_module_draws_nothing_from_the_generator():
    torch.manual_seed(1)
    job = job_of(lambda weights: looks(weights) and SGD(weights, lr=0.1))
    model, state = nn.Linear(2, 2), torch.get_rng_state()
    whole_optimizer(job, model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loan_ends_with_the_step_and_leaves_what_it_did_in_what_was_lent():
    model = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.named_parameters()}
    whole = whole_optimizer(job_of(lambda weights: SGD(weights, lr=1.0)), model)
    values = {name: torch.full_like(value, 3.0).detach() for name, value in before.items()}
    Loan(whole, values).run({"weight": torch.ones(2, 2)}, whole.optimizer.step)
    assert values["weight"].eq(2.0).all()
    assert values["bias"].eq(3.0).all()
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_parameter_of_another_shape_is_no_update():
    model = nn.Linear(2, 2)
    whole = whole_optimizer(job_of(lambda weights: SGD(weights, lr=1.0)), model)
    values = {name: value.detach().clone() for name, value in model.named_parameters()}

    def grow():
        model.bias.data = torch.zeros(3)

    with pytest.raises(RunError, match=r"the optimizer makes bias a torch.float32\[3\]"):
        Loan(whole, values).run({}, grow)
    assert model.bias.shape == (2,)


def test_stand_ins_are_small_and_gone_afterwards():
    model = nn.Linear(200, 3)
    with stand_ins(model, 64) as values:
        assert {n: tuple(v.shape) for n, v in values.items()} == {"weight": (3, 64), "bias": (3,)}
        assert model.weight.shape == (3, 64)
    assert model.weight.shape == (3, 200)
