"""Optimizers and schedulers as people write them: a plan trains as the plain loop, or says no.

The plain loop is written here, of torch alone.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.runtime.launch import run_threads
from tests.parity.training import Run, differing, train

WIDTH, STEPS, MICRO_BATCHES = 6, 6, 2


class Net(nn.Module):
    """Layers, a norm, a frozen layer, one that is not used, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.still(self.norm(self.first(x))) + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def data(start: int) -> Iterator[Tensor]:
    while True:
        yield 3 * torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(start))
        start += 1


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().mean()


def job_of(optimizer: Callable[..., Optimizer], model: Callable[[], nn.Module] = Net, **options):
    return Job(model, loss, data, optimizer, micro_batches=MICRO_BATCHES, seed=5, **options)


@cache
def net() -> Capture:
    return capture(job_of(SGD))


def run_of(job: Job, stages: int, schedule: str = "one_f_one_b", **options) -> Run:
    made = net() if job.model is Net else capture(job)
    points = len(made.graph.cut_points)
    cuts = [points * number // stages for number in range(1, stages)]
    clip = job.clip_norm is not None
    options = {"num_ranks": stages, "clip": clip, **options}
    per_replica = MICRO_BATCHES // options.get("replicas", 1)
    plan = plan_by_hand(made.graph, cuts, schedule, num_micro_batches=per_replica, **options)
    return Run(plan, job, made)


class Plain(NamedTuple):
    weights: dict[str, Tensor]
    optimizer: Optimizer
    model: nn.Module


def plain_loop(job: Job, steps: int = STEPS) -> Plain:
    """Train as a script does."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(WithNames(model))
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    rates = [group.get("lr") for group in optimizer.param_groups]
    batches = job.data(0)
    for step in range(steps):
        model.zero_grad()
        for _ in range(MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16, enabled=job.autocast is not None):
                part = job.loss(model, next(batches))
            (part / MICRO_BATCHES).backward()
        if job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        if job.learning_rate is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * job.learning_rate(step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    weights = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    return Plain(weights, optimizer, model)


class WithNames(list):
    """The parameters of a module, as a script has them at hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.named = lambda: list(model.named_parameters())


def expected_state(plain: Plain) -> dict[str, Tensor]:
    return {
        f"optimizer/{name}/{key}": value
        for name, parameter in plain.model.named_parameters()
        if parameter.requires_grad
        for key, value in plain.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def assert_as_plain(job: Job, folder, stages: int, launcher=run_threads, **options) -> None:
    found = train(run_of(job, stages, **options), folder, (1,) * STEPS, launcher).weights
    plain = plain_loop(job)
    assert differing(found, plain.weights) == []
    assert differing(found, expected_state(plain)) == []


# -- groups and names -----------------------------------------------------------------------------


def by_name(weights) -> Optimizer:
    decayed = [p for n, p in weights.named() if "weight" in n]
    others = [p for n, p in weights.named() if "weight" not in n]
    return AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 5e-3}], lr=1e-2
    )


def by_index(weights) -> Optimizer:
    """Groups by place in the list, of which the last is another one in every stage."""
    weights = list(weights)
    return SGD([{"params": weights[:3], "lr": 0.02}, {"params": weights[3:]}], lr=0.1, momentum=0.9)


def by_dimensions(weights) -> Optimizer:
    groups = [
        {"params": [p for p in weights if p.dim() == d], "lr": 0.01 * (d + 1)} for d in (1, 2)
    ]
    return Adam(groups)


def named(weights) -> Optimizer:
    return AdamW(weights.named(), lr=1e-2)


def some(weights) -> Optimizer:
    """The others are left as they are, on purpose."""
    return SGD([p for n, p in weights.named() if n.startswith("layers")], lr=0.1)


def a_group_each(weights) -> Optimizer:
    return SGD([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(weights)], momentum=0.5)


GROUPS = [by_name, by_index, by_dimensions, named, some, a_group_each]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("optimizer", GROUPS)
def test_groups_are_those_of_the_whole_model(optimizer, stages, tmp_path):
    assert_as_plain(job_of(optimizer, clip_norm=0.5), tmp_path, stages)


TORCH = {
    "sgd": lambda w: SGD(w, lr=0.05),
    "nesterov": lambda w: SGD(w, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda w: Adam(w, lr=1e-2, amsgrad=True),
    "adamw": lambda w: AdamW(w, lr=1e-2, fused=True),
    "adamax": lambda w: torch.optim.Adamax(w, lr=1e-2),
    "nadam": lambda w: torch.optim.NAdam(w, lr=1e-2),
    "radam": lambda w: torch.optim.RAdam(w, lr=1e-2, foreach=True),
    "adagrad": lambda w: torch.optim.Adagrad(
        w, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "adadelta": lambda w: torch.optim.Adadelta(w),
    "adafactor": lambda w: torch.optim.Adafactor(w, lr=1e-2),
    "rmsprop": lambda w: torch.optim.RMSprop(w, lr=1e-3, centered=True, momentum=0.9),
    "rprop": lambda w: torch.optim.Rprop(w, lr=1e-3),
    "asgd": lambda w: torch.optim.ASGD(w, lr=1e-2, t0=2),
    "muon": lambda w: torch.optim.Muon([p for p in w if p.dim() == 2], lr=1e-2),
}


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_are_divided_and_resumed_to_the_bit(name, tmp_path):
    job = job_of(TORCH[name])
    run = run_of(job, 2)
    plain = plain_loop(job)
    train(run, tmp_path / "part", (1, 1))
    rest = windows_from(run, 2)
    done = tmp_path / "part" / "step-000002"
    found = train(run, tmp_path / "rest", windows=rest, resume=done).weights
    assert differing(found, plain.weights) == []
    assert differing(found, expected_state(plain)) == []


def windows_from(run: Run, step: int):
    from penstock.program.lower_plan import lower_plan

    program = lower_plan(run.plan, run.captured.graph)
    return tuple((program, number) for number in range(step, STEPS))
