"""A small model, optimizers as people write them, and the plain loop, written of torch alone."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
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
    clip = job.awaits_all
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


def windows_from(run: Run, step: int):
    """Return the windows of the steps from `step` on."""
    program = lower_plan(run.plan, run.captured.graph)
    return tuple((program, number) for number in range(step, STEPS))


# -- optimizers as people write them --------------------------------------------------------------


class Custom(Optimizer):
    """A gradient descent; what differs from it is said by each kind."""

    def __init__(self, weights, lr: float = 0.05, **options) -> None:
        super().__init__(weights, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p, group)

    def change(self, p: nn.Parameter, group: dict) -> None:
        p.add_(p.grad, alpha=-group["lr"])


class Assigns(Custom):
    def change(self, p, group):
        p.data = p.data - group["lr"] * p.grad


class Spoils(Custom):
    """Scales gradients in place, replaces them, and throws them away."""

    def change(self, p, group):
        p.grad.mul_(0.5)
        p.grad = p.grad.clone().clamp_(-0.1, 0.1)
        super().change(p, group)
        p.grad = None


class Zeroes(Custom):
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad(set_to_none=False)


class OwnRate(Custom):
    """Keeps its own rate, in its group and by a count of its own."""

    def __init__(self, weights) -> None:
        super().__init__(weights)
        self.t = 0

    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / math.sqrt(1 + self.t)
        super().step(closure)


class Halves(Custom):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.7


class ByAttribute(Custom):
    def change(self, p, group):
        p.add_(p.grad, alpha=-group["lr"] * p.scale)


class OwnMoments(Custom):
    """Keeps moments outside its state: by parameter, made when they are first needed."""

    def __init__(self, weights) -> None:
        super().__init__(weights)
        self.moments = {}

    def change(self, p, group):
        moment = self.moments.setdefault(p, torch.zeros_like(p))
        moment.mul_(0.9).add_(p.grad)
        p.add_(moment, alpha=-group["lr"])


class NamedMoments(Custom):
    """Keeps moments by name, and some plain values in lists and tuples in its state."""

    def __init__(self, named) -> None:
        super().__init__([p for _, p in named])
        self.names = {p: n for n, p in named}
        self.moments = {n: torch.zeros_like(p) for n, p in named}

    def change(self, p, group):
        moment = self.moments[self.names[p]].mul_(0.9).add_(p.grad)
        steps, last = self.state[p].get("seen", ([], (0.0, None)))
        self.state[p]["seen"] = ([*steps[-2:], len(steps)], (math.inf, last[0]))
        p.add_(moment, alpha=-group["lr"] * (1 + len(steps)))


class Lookahead(Optimizer):
    """Slow weights around another optimizer; every second step they meet."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner, self.count = inner, 0
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.count % 2 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


def hooked(weights) -> Optimizer:
    """Schedules itself after every step."""
    made = AdamW(weights, lr=1e-2)

    def after(optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.8

    made.register_step_post_hook(after)
    return made


def with_attributes(weights) -> Optimizer:
    for number, p in enumerate(weights):
        p.scale = 0.5 + number
    return ByAttribute(weights)


def patched(weights) -> Optimizer:
    """Its step is replaced on the object."""
    made = SGD(weights, lr=0.1)
    step = made.step

    def twice(closure=None):
        step()
        step()

    made.step = twice
    return made


APART = {  # each parameter by itself
    "assigns": Assigns,
    "spoils": Spoils,
    "zeroes": Zeroes,
    "own_rate": OwnRate,
    "halves": Halves,
    "hooked": hooked,
    "attributes": with_attributes,
    "moments": OwnMoments,
    "names": lambda weights: NamedMoments(weights.named()),
    "lookahead": lambda weights: Lookahead(AdamW(weights, lr=1e-2)),
}


def one_norm(weights) -> Optimizer:
    """Divides by the norm of all gradients."""
    weights = list(weights)

    class Normed(Custom):
        def step(self, closure=None):
            total = sum(float(p.grad.square().sum()) for p in weights if p.grad is not None)
            self.param_groups[0]["lr"] = 0.1 / (1e-3 + math.sqrt(total))
            super().step(closure)

    return Normed(weights)


class Clips(Custom):
    def step(self, closure=None):
        clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.2)
        super().step(closure)


class Carries(Custom):
    """Adds to each parameter what the one before it has moved by."""

    def step(self, closure=None):
        self.moved = 0.0
        super().step(closure)

    def change(self, p, group):
        before = p.clone()
        p.add_(p.grad + self.moved, alpha=-group["lr"])
        self.moved = float((p - before).mean())


class Skips(Custom):
    """Does nothing where any gradient is not finite."""

    def step(self, closure=None):
        held = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if all(bool(g.isfinite().all()) for g in held):
            super().step(closure)


class Noisy(Custom):
    def change(self, p, group):
        p.add_(p.grad + 0.1 * torch.randn_like(p), alpha=-group["lr"])


def counting(weights) -> Optimizer:
    """A hook that counts, shared by all that share the optimizer."""
    made, calls = SGD(weights, lr=0.1), [0]

    def after(optimizer, args, kwargs) -> None:
        calls[0] += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / calls[0]

    made.register_step_post_hook(after)
    return made


def schedules_itself(weights) -> Optimizer:
    made = SGD(weights, lr=0.1, momentum=0.9)
    scheduler = ExponentialLR(made, 0.8)
    made.register_step_post_hook(lambda *_: scheduler.step())
    return made


TOGETHER = {
    "one_norm": one_norm,
    "clips": Clips,
    "carries": Carries,
    "counting": counting,
    "schedules_itself": schedules_itself,
    "patched": patched,
}
