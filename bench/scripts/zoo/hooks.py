"""Hooks and functions of one's own in the backward pass."""

import itertools

import torch
from small import WIDTH, deep, pairs, sgd, squares
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import penstock as ps


def _job(model=deep, loss=squares, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=pairs, **options)


def gradient_hook_on_a_parameter() -> ps.Job:
    """A parameter's hook halves its gradient."""

    def model():
        made = deep()
        made[0].weight.register_hook(lambda gradient: 0.5 * gradient)
        return made

    return _job(model)


def hook_after_the_gradient_is_added() -> ps.Job:
    """A hook clamps .grad whenever a micro-batch has been added to it."""

    def clamp(parameter):
        parameter.grad.clamp_(-0.02, 0.02)

    def model():
        made = deep()
        for p in made.parameters():
            p.register_post_accumulate_grad_hook(clamp)
        return made

    return _job(model)


def backward_hook_of_a_module() -> ps.Job:
    """A full backward hook scales what goes on to the layers before."""

    def model():
        made = deep()
        made[4].register_full_backward_hook(lambda module, into, out: (into[0] * 0.3,))
        return made

    return _job(model)


def backward_hook_that_counts() -> ps.Job:
    """A full backward hook scales by the number of its calls."""
    calls = itertools.count(1)

    def model():
        made = deep()
        made[4].register_full_backward_hook(lambda module, into, out: (into[0] / next(calls),))
        return made

    return _job(model)


class _Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(WIDTH, WIDTH), deep(3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x.register_hook(lambda gradient: gradient * 0.5)
        return self.rest(x)


def hook_on_an_activation() -> ps.Job:
    """Forward hangs a hook on an activation, which halves its gradient."""
    return _job(_Hooked)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


class _Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.critic = deep(3, outputs=WIDTH), deep(2), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.body(x)
        return self.head(x), self.critic(_Reversed.apply(x))


def gradient_reversal() -> ps.Job:
    """A custom function turns the gradient of a second head round (nothing is wrong)."""

    def loss(model, batch):
        out, critic = model(batch[0])
        return F.mse_loss(out, batch[1]) + critic.sigmoid().log().neg().mean()

    return _job(_Adversarial, loss)


class _Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        _Counting.calls += 1
        return gradient / _Counting.calls


class _WithCounting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = deep(3, outputs=WIDTH), deep(2)

    def forward(self, x):
        return self.rest(_Counting.apply(self.first(x)))


def function_with_state() -> ps.Job:
    """A custom function whose backward divides by the number of its calls."""
    return _job(_WithCounting)


class _Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = deep(3, outputs=WIDTH), deep(2)

    def forward(self, x):
        x = self.first(x)
        return self.rest(x + (torch.round(4 * x) / 4 - x).detach())


def straight_through() -> ps.Job:
    """Rounding with the gradient of the identity (nothing is wrong)."""
    return _job(_Straight)


def features_taken_by_hooks() -> ps.Job:
    """Forward hooks put activations into a dict, of which the loss makes a second term."""
    features: dict[str, torch.Tensor] = {}

    def model():
        made = deep()
        for at in (1, 3):
            made[at].register_forward_hook(
                lambda module, args, out, at=at: features.__setitem__(str(at), out)
            )
        return made

    def loss(model, batch):
        found = squares(model, batch)
        return found + 0.1 * sum(value.square().mean() for value in features.values())

    return _job(model, loss)


def standardised_by_a_pre_hook() -> ps.Job:
    """A forward pre-hook standardises a weight in place before every use."""

    def standardise(module, args):
        with torch.no_grad():
            module.weight.sub_(module.weight.mean(1, keepdim=True))

    def model():
        made = deep()
        made[2].register_forward_pre_hook(standardise)
        return made

    return _job(model)


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def parametrized_weights() -> ps.Job:
    """A symmetric weight, one of norm and direction, one that is orthogonal."""

    def model():
        made = deep()
        parametrize.register_parametrization(made[2], "weight", _Symmetric())
        parametrizations.weight_norm(made[4])
        return made

    return _job(model)


def old_weight_norm() -> ps.Job:
    """The weight norm of before parametrizations: a pre-hook that writes a plain attribute."""

    def model():
        made = deep()
        torch.nn.utils.weight_norm(made[2])  # deprecated, and still in many scripts
        return made

    return _job(model)


def saved_tensors_rounded() -> ps.Job:
    """Forward runs under saved-tensor hooks that keep activations in half precision."""

    class _Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep()

        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.to(torch.bfloat16), lambda t: t.to(torch.float32)
            ):
                return self.layers(x)

    return _job(_Packed)


def counted_by_a_hook() -> ps.Job:
    """A forward hook counts calls in a list and scales the output by them."""
    calls: list[int] = []

    def scale(module, args, out):
        calls.append(1)
        return out * (1 + len(calls) / 20)

    def model():
        made = deep()
        made[2].register_forward_hook(scale)
        return made

    return _job(model)
