"""Optimizers as people write them: groups of all kinds, norms of the whole, state of their own."""

import math

import torch
from small import deep, pairs, sgd, squares
from torch import nn
from torch.optim import Optimizer

import penstock as ps

THIRD = {"*": "zero bubble"}


def _job(optimizer, model=deep, **options) -> ps.Job:
    return ps.Job(
        model=model, loss=squares, data=pairs, optimizer=optimizer, micro_batches=4, **options
    )


def closes_over_another_instance() -> ps.Job:
    """The optimizer is given the parameters of another model than the one that is trained."""
    model = deep()
    return _job(lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1))


def closes_over_the_only_instance() -> ps.Job:
    """The model is built once, with the job, and the optimizer takes its parameters itself."""
    torch.manual_seed(3)
    model = deep()
    return _job(lambda parameters: torch.optim.SGD(model.parameters(), lr=0.1), lambda: model)


def groups_by_index() -> ps.Job:
    """The first half of the parameters learns ten times more slowly."""

    def optimizer(parameters):
        parameters = list(parameters)
        half = len(parameters) // 2
        return torch.optim.SGD(
            [{"params": parameters[:half], "lr": 0.01}, {"params": parameters[half:], "lr": 0.1}]
        )

    return _job(optimizer)


def decay_by_depth() -> ps.Job:
    """Layer-wise decay of the rate, counted from the last parameter."""

    def optimizer(parameters):
        rows = enumerate(reversed(list(parameters)))
        return torch.optim.SGD([{"params": [p], "lr": 0.2 * 0.8**k} for k, p in rows], momentum=0.9)

    return _job(optimizer)


def groups_by_identity() -> ps.Job:
    """The head, found by identity in the model that was built last, has a rate of its own."""
    built: list[nn.Module] = []

    def model():
        built.append(deep())
        return built[-1]

    def optimizer(parameters):
        head = {id(p) for p in built[-1][-1].parameters()}
        parameters = list(parameters)
        return torch.optim.SGD(
            [
                {"params": [p for p in parameters if id(p) in head], "lr": 0.2},
                {"params": [p for p in parameters if id(p) not in head], "lr": 0.02},
            ]
        )

    return _job(optimizer, model)


def decay_by_dimensions() -> ps.Job:
    """Weights decay, biases do not: by the number of dimensions (nothing is wrong)."""

    def optimizer(parameters):
        parameters = list(parameters)
        return torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.2},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=0.02,
            eps=1e-3,
        )

    return _job(optimizer)


class _Own(Optimizer):
    """What the optimizers below have in common: groups with a rate."""

    def __init__(self, parameters, lr: float, **defaults) -> None:
        super().__init__(parameters, {"lr": lr, **defaults})

    def each(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p, self.state[p]


class _GlobalNorm(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for _, p, _ in self.each()]).norm()
        for group, p, _ in self.each():
            p.add_(p.grad / (norm + 1e-6), alpha=-group["lr"])


def norm_of_all_gradients() -> ps.Job:
    """Divides by the norm of all gradients together, itself."""
    return _job(lambda parameters: _GlobalNorm(parameters, 0.1))


class _OwnRate(_Own):
    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for _, p, _ in self.each():
            p.sub_(p.grad, alpha=0.3 / math.sqrt(self.steps))


def rate_of_its_own() -> ps.Job:
    """Counts its steps on itself and divides the rate by the root of the count."""
    return _job(lambda parameters: _OwnRate(parameters, 0.1))


class _Adaptive(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.8
        for group, p, _ in self.each():
            p.sub_(p.grad, alpha=group["lr"])


def rate_that_it_writes_into_its_groups() -> ps.Job:
    """Every step multiplies the rate of its groups."""
    return _job(lambda parameters: _Adaptive(parameters, 0.2))


def schedule_in_a_hook() -> ps.Job:
    """A hook after every step lowers the rate."""

    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.2)

        def lower(optimizer, args, kwargs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.8

        made.register_step_post_hook(lower)
        return made

    return _job(optimizer)


def gradients_clipped_in_a_hook() -> ps.Job:
    """A hook before every step clips by the norm of all gradients."""

    def optimizer(parameters):
        parameters = list(parameters)
        made = torch.optim.SGD(parameters, lr=0.2)
        made.register_step_pre_hook(
            lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.05) and None
        )
        return made

    return _job(optimizer)


class _ByAttribute(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p, _ in self.each():
            p.sub_(p.grad, alpha=group["lr"] * getattr(p, "rate", 1.0))


def attributes_on_parameters() -> ps.Job:
    """The model marks parameters with a rate, which the optimizer reads."""

    def model():
        made = deep()
        for k, p in enumerate(made.parameters()):
            p.rate = 0.1 * (k + 1)
        return made

    return _job(lambda parameters: _ByAttribute(parameters, 0.3), model)


def groups_by_attributes() -> ps.Job:
    """The model marks what must not decay, and the groups are made by the mark."""

    def model():
        made = deep()
        made[0].weight.no_decay = True
        made[4].weight.no_decay = True
        return made

    def optimizer(parameters):
        parameters = list(parameters)
        free = [p for p in parameters if getattr(p, "no_decay", False)]
        rest = [p for p in parameters if not getattr(p, "no_decay", False)]
        groups = [{"params": free, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.5}]
        return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1)

    return _job(optimizer, model)


class _Assigning(_Own):
    def step(self, closure=None):
        for group, p, _ in self.each():
            p.data = p.data - group["lr"] * p.grad


def assigns_data() -> ps.Job:
    """Puts a new tensor into p.data instead of writing into it."""
    return _job(lambda parameters: _Assigning(parameters, 0.1))


class _Centralised(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.ndim > 1:
                    p.grad = p.grad - p.grad.mean(1, keepdim=True)
        return super().step(closure)


def assigns_gradients() -> ps.Job:
    """Gradient centralisation that puts a new tensor into p.grad."""
    return _job(lambda parameters: _Centralised(parameters, lr=0.1, momentum=0.9))


class _Zeroing(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


def zeroes_gradients_itself() -> ps.Job:
    """Drops the gradients after every step."""
    return _job(lambda parameters: _Zeroing(parameters, lr=0.1, momentum=0.9))


class _Lion(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p, state in self.each():
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
            update = (state["exp_avg"] * 0.9 + p.grad * 0.1) * 1e3
            p.mul_(1 - group["lr"] * 0.01).sub_(update.tanh(), alpha=group["lr"])
            state["exp_avg"].lerp_(p.grad, 0.01)


def lion() -> ps.Job:
    """Lion by hand, its sign softened (so that rounding stays rounding); nothing is wrong."""
    return _job(lambda parameters: _Lion(parameters, 0.01))


class _Adafactor(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p, state in self.each():
            square = p.grad.square() + 1e-6
            if p.ndim > 1:
                if not state:
                    state["row"], state["column"] = square.mean(1), square.mean(0)
                state["row"].lerp_(square.mean(1), 0.2)
                state["column"].lerp_(square.mean(0), 0.2)
                second = state["row"][:, None] * state["column"] / state["row"].mean()
            else:
                if not state:
                    state["square"] = square
                second = state["square"].lerp_(square, 0.2)
            update = p.grad / second.sqrt()
            update = update / max(1.0, float(update.square().mean().sqrt()))
            p.sub_(update, alpha=group["lr"])


def adafactor() -> ps.Job:
    """Adafactor by hand: factored second moments, updates clipped parameter by parameter."""
    return _job(lambda parameters: _Adafactor(parameters, 0.02))


class _Lars(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p, state in self.each():
            trust = p.norm() / (p.grad.norm() + 1e-3)
            if not state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].mul_(0.9).add_(p.grad * trust)
            p.sub_(state["momentum"], alpha=group["lr"])


def lars() -> ps.Job:
    """LARS by hand: a rate for each layer by the norms of weight and gradient."""
    return _job(lambda parameters: _Lars(parameters, 0.02))


class _Lamb(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p, state in self.each():
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 0.1)
            state["exp_avg_sq"].lerp_(p.grad.square(), 0.01)
            first = state["exp_avg"] / (1 - 0.9 ** state["step"])
            second = state["exp_avg_sq"] / (1 - 0.99 ** state["step"])
            update = first / (second.sqrt() + 1e-3) + 0.01 * p
            p.sub_(update, alpha=group["lr"] * float(p.norm() / update.norm()))


def lamb() -> ps.Job:
    """LAMB by hand, with its count of steps as a plain number."""
    return _job(lambda parameters: _Lamb(parameters, 0.02))


class _Lookahead(Optimizer):
    """Wraps another optimizer; every third step goes half-way back to the slow weights."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {"lr": 0.1})
        self.param_groups = inner.param_groups
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 3:
            return
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, kept in zip(group["params"], slow, strict=True):
                kept.lerp_(p.detach(), 0.5)
                p.data.copy_(kept)


def lookahead() -> ps.Job:
    """Lookahead around SGD; the slow weights stand in a list of its own."""
    return _job(lambda parameters: _Lookahead(sgd(parameters)))


class _Averaged(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("average", p.detach().clone()).lerp_(p.detach(), 0.2)


def averaged_weights() -> ps.Job:
    """Keeps a moving average of the weights in the state of each parameter."""
    return _job(lambda parameters: _Averaged(parameters, lr=0.1, momentum=0.9))


class _Sam(_Own):
    """Climbs in every other step and comes back in the next: SAM without a closure."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, lr)
        self.climbed = False

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for _, p, _ in self.each()]).norm() + 1e-6
        for group, p, state in self.each():
            if self.climbed:
                p.sub_(state["up"]).sub_(p.grad, alpha=group["lr"])
            else:
                state["up"] = 0.05 * p.grad / norm
                p.add_(state["up"])
        self.climbed = not self.climbed


def sharpness_aware() -> ps.Job:
    """SAM that takes two steps of the loop for one of its own, by the norm of the whole."""
    return _job(lambda parameters: _Sam(parameters, 0.1))


def lbfgs_without_a_closure() -> ps.Job:
    """L-BFGS needs a closure, which no such loop gives it."""
    return _job(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1))


def rprop() -> ps.Job:
    """Rprop: signs of gradients, step sizes of its own, previous gradients."""
    return _job(lambda parameters: torch.optim.Rprop(parameters, lr=0.01))


def averaged_sgd() -> ps.Job:
    """torch's ASGD: averages, eta and mu as tensors in its state."""
    return _job(lambda parameters: torch.optim.ASGD(parameters, lr=0.1, t0=2))


def muon_for_matrices() -> ps.Job:
    """Muon takes matrices only; the rest is left out, so biases stay as they are."""

    def optimizer(parameters):
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)

    return _job(optimizer)


class _Noisy(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p, _ in self.each():
            p.sub_(p.grad, alpha=group["lr"]).add_(torch.randn_like(p), alpha=0.01)


def langevin() -> ps.Job:
    """Adds noise from torch's own generator to every update."""
    return _job(lambda parameters: _Noisy(parameters, 0.1))


class _EveryOther(torch.optim.SGD):
    def __init__(self, parameters, **options) -> None:
        super().__init__(parameters, **options)
        self.calls, self.kept = 0, {}

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                self.kept[p] = self.kept.get(p, 0) + p.grad.clone()
        if self.calls % 2 == 0:
            for p, gradient in self.kept.items():
                p.grad.copy_(gradient / 2)
            self.kept = {}
            super().step()


def accumulates_two_steps() -> ps.Job:
    """Adds up the gradients of two steps before it updates."""
    return _job(lambda parameters: _EveryOther(parameters, lr=0.1))


def frozen_parameters_in_a_group() -> ps.Job:
    """Half of the model is frozen; groups are made of what is left, by position."""

    def model():
        made = deep()
        made[0].requires_grad_(False)
        made[4].requires_grad_(False)
        return made

    def optimizer(parameters):
        parameters = [p for p in parameters if p.requires_grad]
        groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "lr": 0.2}]
        return torch.optim.SGD([g for g in groups if g["params"]], momentum=0.9)

    return _job(optimizer, model)


def groups_by_name() -> ps.Job:
    """Biases and the last layer by the names that the optimizer is given."""

    def optimizer(weights):
        rows = list(weights.named())
        return torch.optim.SGD(
            [
                {"params": [p for n, p in rows if n.endswith("bias")], "lr": 0.02},
                {"params": [p for n, p in rows if n == "6.weight"], "lr": 0.2},
                {"params": [p for n, p in rows if n.endswith("weight") and n[0] != "6"]},
            ],
            lr=0.1,
            momentum=0.9,
        )

    return _job(optimizer)


def adam_with_global_clipping() -> ps.Job:
    """AdamW, amsgrad, clipping by Penstock to a norm that is always exceeded."""
    return _job(
        lambda weights: torch.optim.AdamW(weights, lr=0.02, eps=1e-3, amsgrad=True), clip_norm=0.05
    )


class _Mean(_Own):
    @torch.no_grad()
    def step(self, closure=None):
        everything = torch.cat([p.grad.flatten() for _, p, _ in self.each()])
        median = everything.abs().median()
        for group, p, _ in self.each():
            p.sub_(p.grad.clamp(-4 * median, 4 * median), alpha=group["lr"])


def clips_by_the_median_of_all() -> ps.Job:
    """Clamps every gradient to four times the median of all gradients."""
    return _job(lambda parameters: _Mean(parameters, 0.2))


def wide_layers_learn_slowly() -> ps.Job:
    """The rate is divided by the number of all parameters that the optimizer was given."""

    def optimizer(parameters):
        parameters = list(parameters)
        return torch.optim.SGD(parameters, lr=1.0 / len(parameters), momentum=0.5)

    return _job(optimizer, lambda: deep(5))
