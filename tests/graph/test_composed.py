"""Several optimizers as one, the average of the weights, and what is refused of either."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import penstock as ps
from penstock.checkpoints.checkpoint import Checkpoint
from penstock.errors import CheckpointError, JobError
from penstock.graph.composed import Composed, averaged, kind_of
from penstock.graph.whole_optimizer import whole_optimizer
from penstock.job import Parameters
from penstock.runtime.validate import lent, weights_of
from penstock.state.shards import updates_by_number
from penstock.training.export import with_averages
from tests.cli import mlp


def adamw(weights):
    return torch.optim.AdamW(weights, lr=1e-2)


def muon(weights):
    return torch.optim.Muon(weights, lr=1e-2)


def job_of(optimizer, **more):
    return replace(mlp.job(), optimizer=optimizer, **more)


def made(makers, model=None):
    named = (model or mlp.model()).named_parameters()
    return ps.by_name(makers)(Parameters(named))


def test_a_parameter_belongs_to_the_first_pattern_that_matches():
    model = mlp.model()
    names = {id(p): n for n, p in model.named_parameters()}
    found = made({"4.*": adamw, "*.weight": muon, "*": adamw}, model)
    groups = [[names[id(p)] for p in group["params"]] for group in found.param_groups]
    assert groups[0] == ["4.weight", "4.bias"]
    assert groups[1] == [f"{n}.0.weight" for n in range(4)]
    assert groups[2] == [f"{n}.0.bias" for n in range(4)]
    assert kind_of(found) == "AdamW + Muon"


def test_what_parts_keep_is_in_the_state_of_the_whole():
    """There shards, far memory and the memory that is predicted look for it."""
    model = mlp.model()
    found = made({"4.*": mlp.sgd, "*": adamw}, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    found.step()
    assert {"exp_avg", "exp_avg_sq"} <= found.state[model[0][0].weight].keys()
    assert all(part.state is found.state for part in found.parts)


def elsewhere(weights):
    return adamw(mlp.model().parameters())


class Clears(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        """Leave them."""


@pytest.mark.parametrize(
    ("makers", "words", "hint"),
    [
        ({"5.*": adamw, "*": adamw}, "'5.*' matches no parameter", "0.0.weight, 0.0.bias"),
        ({"*": adamw, "4.*": adamw}, "no parameter that an earlier one leaves", "there are"),
        ({"*.weight": adamw}, "0.0.bias matches none of the patterns", '"*": None'),
        ({"*": lambda weights: 3}, "made for the pattern '\\*' is a int", "torch optimizer"),
        ({"*": elsewhere}, "holds parameters of other patterns", "that its function is given"),
        ({"*": lambda weights: Clears(weights, lr=0.1)}, "zero_grad of its own", "leave out"),
    ],
)
def test_what_patterns_cannot_be_is_refused(makers, words, hint):
    with pytest.raises(JobError, match=words) as caught:
        made(makers)
    assert hint in caught.value.hint


def test_no_patterns_no_functions_and_no_names_are_refused():
    with pytest.raises(JobError, match="has no patterns"):
        ps.by_name({})
    with pytest.raises(JobError, match=r"of '\*' is a AdamW"):
        ps.by_name({"*": adamw(mlp.model().parameters())})
    with pytest.raises(JobError, match="is given a list without names"):
        ps.by_name({"*": adamw})(list(mlp.model().parameters()))


def test_parts_of_torchs_are_known_and_others_are_not():
    model = mlp.model()
    both = job_of(ps.by_name({"*.weight": muon, "*": adamw}), average=ps.ema(0.9))
    assert whole_optimizer(both, model).is_plain
    assert not updates_by_number(both, model)  # Muon takes a matrix as a whole
    assert updates_by_number(job_of(ps.by_name({"0.*": mlp.sgd, "*": adamw})), model)
    hooked = job_of(lambda weights: _hooked(adamw(weights)), average=ps.ema(0.9))
    assert not whole_optimizer(hooked, model).is_plain


def _hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("average", "shares"),
    [
        (ps.ema(0.75), [1, 0.25, 0.25, 0.25, 0.25, 0.25]),
        (ps.ema(0.75, start=2, every=2), [1, 1, 0, 0.25, 0, 0.25]),
        (ps.swa(start=1), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]),
        (ps.swa(start=2, every=2), [1, 1, 0, 1 / 2, 0, 1 / 3]),
    ],
)
def test_the_share_of_the_weights_by_step(average, shares):
    assert [average.share_of(step) for step in range(1, 7)] == pytest.approx(shares)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: ps.ema(1.0), r"decay of an average is 1.0, not in \[0, 1\)"),
        (lambda: ps.ema(0.9, every=0), "every of an average is 0"),
        (lambda: ps.swa(start=1.5), "start of an average is 1.5"),
        (lambda: job_of(adamw, average=0.999), "Job.average is 0.999, no average"),
    ],
)
def test_what_an_average_cannot_be_is_refused(wrong, words):
    with pytest.raises(JobError, match=words):
        wrong()


def test_one_that_gets_its_first_gradient_late_has_the_average_of_all_steps():
    """As AveragedModel has it: until then the weight stays, and so does its average."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    optimizer = whole_optimizer(
        ps.Job(lambda: model, mlp.loss, mlp.data, mlp.sgd, average=ps.ema(0.5)), model
    ).optimizer
    first, late = model.parameters()
    before = late.detach().clone()
    for step in range(3):
        first.grad = torch.ones_like(first)
        late.grad = torch.full_like(late, 100.0) if step == 2 else None
        optimizer.step()
    average = optimizer.state[late]["average"]
    assert torch.allclose(average, (before + late.detach()) / 2)
    assert float(optimizer.state[late]["average_step"]) == 3


def test_averages_stand_in_for_weights_where_they_are_validated_or_exported():
    weights = {"weights/a": torch.zeros(2), "weights/b": torch.zeros(1), "buffers/c": torch.ones(1)}
    held = {**weights, "optimizer/a/average": torch.ones(2)}
    found = averaged(held)
    assert (found["weights/a"] == 1).all()
    assert (found["weights/b"] == 0).all()
    validates = job_of(adamw, average=ps.ema(0.9, validates=True))
    assert (weights_of(validates, held)["weights/a"] == 1).all()
    assert weights_of(job_of(adamw, average=ps.ema(0.9)), held) is held
    assert (with_averages(Checkpoint(3, held, {}), "run").tensors["weights/a"] == 1).all()
    with pytest.raises(CheckpointError, match="run holds no average of weights"):
        with_averages(Checkpoint(3, weights, {}), "run")


def test_a_model_has_its_own_weights_again_after_those_it_was_lent():
    model = nn.Linear(2, 1)
    own, place = model.weight.detach().clone(), model.weight.data_ptr()
    with lent(model, {"weights/weight": torch.full((1, 2), 7.0)}):
        assert (model.weight == 7).all()
    assert torch.equal(model.weight, own)
    assert model.weight.data_ptr() == place


def test_a_scheduler_of_momentum_finds_what_all_parts_have():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    parts = [torch.optim.AdamW(weights[:1], lr=1e-2), torch.optim.RAdam(weights[1:], lr=1e-3)]
    several = Composed(parts)
    assert "betas" in several.defaults
    assert "amsgrad" not in several.defaults
    OneCycleLR(several, 0.1, total_steps=10)
    assert several.param_groups[0]["betas"][0] == 0.95
    mixed = Composed([parts[0], torch.optim.SGD(weights[1:], lr=1e-3)])
    assert "betas" not in mixed.defaults
    assert "momentum" not in mixed.defaults
