"""Layerwise: optimizers for large batches, whose step is as large as the weights of its tensor.

    LARS   step = lr * (eta |w| / (|g| + decay |w|)) * (g + decay * w), summed with momentum
    LAMB   r = m / (sqrt(v) + eps) + decay * w      m, v: Adam's moments, without their bias
           step = lr * (|w| / |r|) * r

A ratio whose numerator or denominator is 0 counts as 1, as the papers' own code has it.  A group
with `adapts` off takes ratios of 1: biases and norms usually do.

Sources:  LARS, arXiv:1708.03888, algorithm 1; LAMB, arXiv:1904.00962, algorithm 2.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock import _compat
from penstock.errors import JobError

Weights = Iterable[Any]  # tensors, groups of them, or (name, tensor)


class _Layerwise(Optimizer):
    """An optimizer that takes one tensor after another, each by norms of its own."""

    def __init__(self, weights: Weights, defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            _check(name, value)
        super().__init__(weights, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights that have a gradient; nothing waits for a number of a device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            changes = [self._change(weight, weight.grad, group) for weight in weights]
            ratios = self._ratios(weights, changes, group) if group["adapts"] else None
            for place, (weight, change) in enumerate(zip(weights, changes, strict=True)):
                self._update(weight, change, None if ratios is None else ratios[place], group)
        return loss

    def _change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def _ratios(
        self, weights: list[Tensor], changes: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        raise NotImplementedError

    def _update(
        self, weight: Tensor, change: Tensor, ratio: Tensor | None, group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Lars(_Layerwise):
    """Stochastic gradient descent with momentum, whose rate is another for each tensor.

    lr:            the rate of all
    momentum:      what is kept of the step before
    weight_decay:  added to the gradient, times the weights
    eta:           the size of a step in units of the weights
    adapts:        whether rates are adapted; may be another in each group
    Raises:   JobError: a number is out of range.
    """

    def __init__(
        self,
        weights: Weights,
        lr: float = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        eta: float = 1e-3,
        adapts: bool = True,
    ) -> None:
        about = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta}
        super().__init__(weights, about | {"adapts": adapts})

    def _change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient.add(weight, alpha=group["weight_decay"])

    def _ratios(
        self, weights: list[Tensor], changes: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        sizes = _compat.gradient_norms(weights)
        slopes = _compat.gradient_norms([cast("Tensor", weight.grad) for weight in weights])
        return [
            _ratio(group["eta"] * size, slope + group["weight_decay"] * size, size * slope)
            for size, slope in zip(sizes, slopes, strict=True)
        ]

    def _update(
        self, weight: Tensor, change: Tensor, ratio: Tensor | None, group: dict[str, Any]
    ) -> None:
        step = change.mul_(group["lr"] if ratio is None else group["lr"] * ratio)
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        weight.sub_(state["momentum"].mul_(group["momentum"]).add_(step))


class Lamb(_Layerwise):
    """Adam, whose step of each tensor is as large as its weights.

    lr:            the size of a step in units of the weights
    betas, eps:    of Adam
    weight_decay:  part of the step, times the weights
    adapts:        whether steps are adapted; may be another in each group
    Raises:   JobError: a number is out of range.
    """

    def __init__(
        self,
        weights: Weights,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapts: bool = True,
    ) -> None:
        about = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(weights, about | {"adapts": adapts})

    def _change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        first, second = group["betas"]
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["mean"], state["square"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        count = int(state["step"])
        mean = state["mean"].lerp_(gradient, 1 - first)
        square = state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (square / (1 - second**count)).sqrt_().add_(group["eps"])
        return (mean / (1 - first**count)).div_(root).add_(weight, alpha=group["weight_decay"])

    def _ratios(
        self, weights: list[Tensor], changes: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        sizes, steps = _compat.gradient_norms(weights), _compat.gradient_norms(changes)
        pairs = zip(sizes, steps, strict=True)
        return [_ratio(size, step, size * step) for size, step in pairs]

    def _update(
        self, weight: Tensor, change: Tensor, ratio: Tensor | None, group: dict[str, Any]
    ) -> None:
        weight.sub_(change.mul_(group["lr"] if ratio is None else group["lr"] * ratio))


def _ratio(above: Tensor, below: Tensor, both: Tensor) -> Tensor:
    """Return above / below; 1 where one of the norms is 0."""
    return torch.where(both > 0, above / below, torch.ones_like(above))


def _check(name: str, value: Any) -> None:
    least_below_one = {"momentum", "betas"}
    numbers = cast("tuple[Any, ...]", value if isinstance(value, tuple) else (value,))
    for number in numbers:
        if isinstance(number, Tensor):
            continue  # a rate that the author changes
        if name == "adapts":
            if not isinstance(number, bool):
                raise JobError(f"adapts is {number!r}, not True or False", hint="adapts=False")
        elif not isinstance(number, int | float) or not 0 <= number < float("inf"):
            raise JobError(f"{name} is {value!r}", hint=f"give 0 or more: {name}=0.1")
        elif name in least_below_one and number >= 1:
            raise JobError(f"{name} is {value!r}", hint="what is kept of before is below 1: 0.9")
