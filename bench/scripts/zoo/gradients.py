"""What people do to gradients on their way: hooks on parameters, clips of their own, noise."""

import torch
from small import WIDTH, classes, deep, entropy, sgd, tokens
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import penstock as ps


def _job(model=deep, loss=entropy, data=classes, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _hooked(*hooks) -> ps.Job:
    def model():
        made = deep()
        for name, weight in made.named_parameters():
            for hook in hooks:
                weight.register_hook(lambda gradient, name=name, hook=hook: hook(name, gradient))
        return made

    return _job(model)


def gradients_clamped_by_hooks() -> ps.Job:
    """As recurrent nets were once trained."""
    return _hooked(lambda name, gradient: gradient.clamp(-0.01, 0.01))


def gradients_clamped_in_place_by_hooks() -> ps.Job:
    """The same, and the hook returns nothing."""

    def clamp(name, gradient):
        gradient.clamp_(-0.01, 0.01)

    return _hooked(clamp)


def gradients_of_unit_norm_by_hooks() -> ps.Job:
    """Each is divided by its norm, then what is no number is left out."""
    divided = lambda name, gradient: gradient / (gradient.norm() + 1e-6)  # noqa: E731
    return _hooked(divided, lambda name, gradient: gradient.nan_to_num())


def pruned_weights_stay_zero_by_hooks() -> ps.Job:
    """A mask is laid on a weight, and on its gradient by a hook."""

    def model():
        made, mask = deep(), torch.ones(WIDTH, WIDTH).triu()
        made[2].weight.data *= mask
        made[2].weight.register_hook(mask.mul)
        return made

    return _job(model)


def gradients_that_are_counted_by_hooks() -> ps.Job:
    """Hooks that fade with their calls: no plan."""
    calls = []

    def fade(name, gradient):
        calls.append(name)
        return gradient * 0.99 ** len(calls)

    return _hooked(fade)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 16, bias=False)
        self.out.weight = self.embedding.weight
        self.out.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.embedding(x))))


def tied_weight_with_a_hook() -> ps.Job:
    """The hook of a tied weight is given the sum of both uses."""

    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return _job(_Tied, loss, tokens)


class _Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x):
        return x.triu()


def norms_and_symmetry_by_parametrizations() -> ps.Job:
    """Four layers, each made by another parametrization."""

    def model():
        made = deep(5)
        weight_norm(made[0])
        spectral_norm(made[2])
        orthogonal(made[4])
        parametrize.register_parametrization(made[6], "weight", _Symmetric())
        return made

    return _job(model)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bits):
        scale = x.abs().max().clamp(min=1e-8) / (2 ** (bits - 1) - 1)
        ctx.save_for_backward(x, scale * (2 ** (bits - 1) - 1))
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx, *gradients):
        x, limit = ctx.saved_tensors
        return gradients[0] * (x.abs() <= limit), None


class _RoundedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, _Rounded.apply(self.weight, 8), self.bias)


def weights_rounded_straight_through() -> ps.Job:
    """Weights of eight bits in forward, gradients as if they were not rounded."""

    def model():
        layers = _RoundedLinear(WIDTH, WIDTH), nn.Hardtanh(), _RoundedLinear(WIDTH, WIDTH)
        return nn.Sequential(*layers, nn.Hardtanh(), nn.Linear(WIDTH, 4))

    return _job(model)


class _Adaptive(torch.optim.SGD):
    def step(self, closure=None):
        for weight in (w for group in self.param_groups for w in group["params"] if w.ndim > 1):
            limit = 0.05 * weight.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
            norm = weight.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
            weight.grad.copy_(torch.where(norm > limit, weight.grad * (limit / norm), weight.grad))
        return super().step(closure)


def clipped_by_the_norms_of_rows() -> ps.Job:
    """Adaptive clipping: each row by its own norm."""
    return _job(optimizer=lambda weights: _Adaptive(weights, lr=0.1, momentum=0.9))


def rates_by_depth_under_a_cosine() -> ps.Job:
    """A group for each weight, rates that fade with depth, decay for matrices alone."""

    def optimizer(weights):
        groups = []
        for name, weight in weights.named():
            rate = 1e-2 * 0.8 ** int(name.partition(".")[0])
            groups.append(
                {"params": [weight], "lr": rate, "weight_decay": 0.05 * (weight.ndim > 1)}
            )
        return torch.optim.AdamW(groups)

    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    return _job(optimizer=optimizer, scheduler=lambda made: cosine(made, 20))
