"""Clipped gradients are those of torch.nn.utils.clip_grad_norm_ on the whole model, to the bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from penstock.errors import RunError
from penstock.graph.cut import cut
from penstock.graph.trace import capture
from penstock.prove.prove import Planned, prove
from penstock.runtime.launch import run_processes
from penstock.state.weights import StageWeights
from tests.parity import optimizing
from tests.parity.optimizing import WIDTH, Custom, job_of, plain_loop, run_of
from tests.parity.training import differing, train

LONG = 60


class Deep(nn.Module):
    """Layers of unlike sizes; one of them may be in bfloat16, or two share a matrix."""

    def __init__(self, *, mixed: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)  # first in order, last in use
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, n), nn.Tanh(), nn.Linear(n, WIDTH)) for n in (67, 130, 9)
        )
        if mixed:
            self.layers[1].bfloat16()
        if tied:
            self.last.weight = self.layers[0][2].weight = nn.Parameter(torch.randn(WIDTH, 67) / 9)
            self.last = self.layers[0][2]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x.to(layer[0].weight.dtype)).float()
        return self.last(torch.tanh(x) if self.last.in_features == WIDTH else x @ ones())


def ones() -> Tensor:
    return torch.full((WIDTH, 67), 0.1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "float32": Deep,
    "mixed": lambda: Deep(mixed=True),
    "tied": lambda: Deep(tied=True),
}


def sgd(weights) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def job(model: str, norm: float = 0.05, **options):
    made = job_of(lambda w: torch.optim.AdamW(w, lr=3e-3), MODELS[model], clip_norm=norm, **options)
    return made


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_weights_after_many_clipped_steps_are_those_of_the_plain_loop(autocast, tmp_path):
    clipped = job("float32", autocast=autocast)
    found = train(run_of(clipped, 3), tmp_path, (1,) * LONG).weights
    assert differing(found, plain_loop(clipped, LONG).weights) == []


@pytest.mark.parametrize(
    ("model", "schedule", "options"),
    [
        ("mixed", "one_f_one_b", {}),
        ("tied", "gpipe", {"stages": 1}),  # else parts of a gradient are added up
        ("float32", "zb_h2", {"post_validation": True}),
        ("mixed", "zb_h2", {"post_validation": True}),
        ("float32", "interleaved", {"num_ranks": 2}),
    ],
)
def test_of_several_dtypes_tied_weights_and_after_the_update(model, schedule, options, tmp_path):
    options = dict(options)
    stages = options.pop("stages", 4 if schedule == "interleaved" else 2)
    run = run_of(job(model, 0.1), stages, schedule, **options)
    found = train(run, tmp_path, (1,) * optimizing.STEPS).weights
    assert differing(found, plain_loop(run.job).weights) == []


def test_an_update_that_is_taken_back_may_have_changed_the_gradients(tmp_path):
    """As that of SGD with nesterov does, which adds its momentum to them."""
    nesterov = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    run = run_of(job_of(nesterov, Deep, clip_norm=0.1), 2, "zb_h2", post_validation=True)
    found = train(run, tmp_path, (1,) * optimizing.STEPS).weights
    assert differing(found, plain_loop(run.job).weights) == []


def test_an_update_that_nobody_can_take_back_is_refused(tmp_path):
    run = run_of(job_of(Custom, clip_norm=0.1), 2, "zb_h2", post_validation=True)
    with pytest.raises(
        RunError, match=r"updates of the job.s optimizer, Custom .* cannot be undone"
    ):
        train(run, tmp_path)


def test_in_processes(tmp_path):
    run = run_of(job("mixed"), 3)
    found = train(run, tmp_path, (1,) * optimizing.STEPS, run_processes).weights
    assert differing(found, plain_loop(run.job).weights) == []


@pytest.mark.parametrize("norm", [1e-3, 1e6])
def test_replicas_clip_alike(norm, tmp_path):
    """By the norm of their sum: to the rounding of that, and never by their own shares."""
    several = train(run_of(job("float32", norm), 2, replicas=2), tmp_path / "2", (1,) * 4)
    alone = train(run_of(job("float32", norm), 2), tmp_path / "1", (1,) * 4)
    for key, value in alone.weights.items():
        assert torch.allclose(several.weights[key], value, atol=2e-4), key


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_gradient_that_is_no_number_reaches_every_parameter(is_whole):
    """As it does with torch's; a run would end before it."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return optimizing.loss(model, x) * torch.full((), float("nan"))

    run = run_of(replace(job_of(sgd, Deep, clip_norm=1.0), loss=loss), 1 if is_whole else 2)
    proof = prove(Planned(run.job, run.captured, run.plan))
    assert proof.problem == ""
    assert {"gradients", "update"} <= {row.what for row in proof.differences if row.bitwise}


class Permuted(nn.Module):
    """A matrix that is stored by columns, and a kernel of which the channels come last."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(31, 129).t())
        kernel = torch.randn(5, 7, 3, 3).to(memory_format=torch.channels_last)
        self.kernel = nn.Parameter(kernel)

    def forward(self, x: Tensor) -> Tensor:
        return (x.sum() * self.columns).square().mean() + self.kernel.square().mean()


def test_squares_are_added_up_as_they_lie_in_the_plain_loop():
    one = replace(job_of(sgd, Permuted), loss=lambda model, x: model(x))
    made = capture(one)
    weights = StageWeights(cut(made.graph).stages[0], made, one)
    gradients = {name: torch.randn(p.shape) for name, p in made.model.named_parameters()}
    for node, name in weights.names.items():
        weights.gradients[node].copy_(gradients[name])
    found = weights.norms(list(weights.live))
    for norm, name in zip(found, weights.names.values(), strict=True):
        plain = torch.empty_like(dict(made.model.named_parameters())[name])
        plain.copy_(gradients[name])
        assert torch.equal(norm, torch.linalg.vector_norm(plain)), name


def test_the_plain_loop_clips_in_every_step():
    """Else the tests above would show nothing."""
    model = MODELS["float32"]()
    loss = optimizing.loss(model, next(optimizing.data(0)))
    loss.backward()
    assert float(clip_grad_norm_(model.parameters(), 0.05)) > 0.1
