"""The noise of gradients that ranks tell is that of a plain loop, by any plan; and a known one."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock.graph.trace import build, capture
from penstock.job import Job
from penstock.profile.noise import EVERY, GradientNoise, noise_of
from penstock.runtime.launch import run_processes
from penstock.runtime.noise_squares import NoiseMeter
from tests.parity.models import captured, job_of, plan_of
from tests.parity.training import Run, train

FLOAT = torch.float32
PLANS = (
    ("gpipe", 1, 4, {}),
    ("gpipe", 1, 2, {"replicas": 2}),
    ("one_f_one_b", 2, 4, {}),
    ("one_f_one_b", 2, 3, {"replicas": 2}),
    ("zb_h1", 2, 4, {}),
    ("chimera", 2, 4, {}),
    ("one_f_one_b", 2, 4, {"recompute": (True, True)}),
    ("gpipe", 1, 3, {"replicas": 2, "shard": ("shard",)}),
    ("one_f_one_b", 2, 4, {"clip": True}),
)


@cache
def plain(micro_batches: int) -> tuple[float, float]:
    """Return the mean of |gradient of a micro-batch|^2 and |mean gradient|^2 at the first step."""
    job = job_of("gpt", FLOAT)
    model, _ = build(job)
    batches, rows = job.data(0), list[Tensor]()
    for _ in range(micro_batches):
        loss = job.loss(model, next(batches))
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        rows.append(torch.cat([g.flatten().double() for g in gradients if g is not None]))
    found = torch.stack(rows)
    return float(found.square().sum(1).mean()), float(found.mean(0).square().sum())


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "options"), PLANS)
def test_what_ranks_tell_is_what_a_plain_loop_has(
    schedule, stages, micro_batches, options, tmp_path
):
    graph = captured("gpt", FLOAT).graph
    plan = plan_of(graph, schedule, stages, micro_batches, **options)
    job = job_of("gpt", FLOAT, "adamw", clip_norm=0.3 if plan.agreement.clip else None)
    outcome = train(Run(plan, job, captured("gpt", FLOAT)), tmp_path, (2,))
    found = noise_of(outcome.noise, plan.step_micro_batches, 1)
    assert found is not None
    assert found.steps == 1
    small, large = plain(plan.step_micro_batches)
    assert (found.small, found.large) == (
        pytest.approx(small, rel=1e-4),
        pytest.approx(large, rel=1e-4),
    )


def test_looking_does_not_change_a_bit(tmp_path, monkeypatch):
    graph = captured("gpt", FLOAT).graph
    plan = plan_of(graph, "one_f_one_b", 2, 4, replicas=2)
    run = Run(plan, job_of("gpt", FLOAT, "adamw"), captured("gpt", FLOAT))
    watched = train(run, tmp_path / "with", (3,))
    monkeypatch.setattr(NoiseMeter, "watch", lambda meter, count: None)
    plain = train(run, tmp_path / "without", (3,))
    assert [one.small for one in plain.noise] == [()] * 4
    for key, value in plain.weights.items():
        assert torch.equal(watched.weights[key], value)


def test_asynchronous_plans_are_not_watched(tmp_path):
    graph = captured("gpt", FLOAT).graph
    plan = plan_of(graph, "pipedream", 2, 4)
    outcome = train(Run(plan, job_of("gpt", FLOAT), captured("gpt", FLOAT)), tmp_path, (3,))
    assert noise_of(outcome.noise, plan.step_micro_batches, 1) is None


# a known noise

DIMS, SAMPLES, STD, FAR = 400, 3, 0.7, 0.25


class Point(nn.Module):
    """A point; its distance to samples around 0 is to be least."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.full((DIMS,), FAR))

    def forward(self, x: Tensor) -> Tensor:
        return self.at - x


def data(start: int):
    while True:
        draw = torch.Generator().manual_seed(1000 + start)
        yield {"x": STD * torch.randn(SAMPLES, DIMS, generator=draw)}
        start += 1


def loss(model, batch):
    return model(batch["x"]).square().sum(1).mean() / 2


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 4), (2, 2)])
def test_noise_scale_of_a_known_problem_is_found_within_a_tenth(tmp_path, replicas, micro_batches):
    """The gradient is at - x: |g|^2 = DIMS * FAR^2, the variance of a sample DIMS * STD^2."""
    job = Job(Point, loss, data, lambda ps: torch.optim.SGD(ps, 1e-9), seed=3)
    there = capture(job)
    plan = plan_of(there.graph, "gpipe", 1, micro_batches, replicas=replicas)
    launcher = {"launcher": run_processes} if replicas > 1 else {}
    outcome = train(Run(plan, job, there), Path(tmp_path), (20 * EVERY,), **launcher)
    found = noise_of(outcome.noise, plan.step_micro_batches, there.graph.samples)
    assert found is not None
    assert (found.steps, found.samples) == (20, SAMPLES)
    assert found.gradient_sq == pytest.approx(DIMS * FAR**2, rel=0.1)
    assert found.variance == pytest.approx(DIMS * STD**2, rel=0.1)
    assert found.scale == pytest.approx(STD**2 / FAR**2, rel=0.1)
    assert math.isfinite(found.scale)
    assert isinstance(found, GradientNoise)
