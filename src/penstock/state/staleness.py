"""Staleness: what a stage does about reading weights that are not the newest.

Predictions are made from the weights and the optimizer's state of the moment at which they are
read, parameter by parameter where they need not last; the update may change the rate and make up
for the delay of its gradient.
schedule/weight_rule.py says what is computed, and for which rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from penstock.errors import RunError
from penstock.graph.composed import parts_of
from penstock.schedule.weight_rule import WeightRule


class Staleness:
    """What one stage keeps and does; `flats` and `live` are its weights, as a whole and by node.

    delay:  mean updates between F and B.
    keeps:  divides what predictions need from update to update by node; None: nothing is needed.
    """

    def __init__(
        self,
        rule: WeightRule,
        delay: float,
        flats: Sequence[Tensor],
        optimizer: Optimizer | None,
        *,
        keeps: Callable[[Sequence[Tensor]], Mapping[int, Tensor]] | None,
    ) -> None:
        self.rule, self.delay, self.flats, self.optimizer = rule, delay, flats, optimizer
        kept = rule.predictor if keeps else None
        self.previous = [flat.clone() for flat in flats] if kept == "difference" else []
        self.average = [torch.zeros_like(flat) for flat in flats] if kept == "average" else []
        self.kept = keeps(self.previous or self.average) if keeps else dict[int, Tensor]()
        self.share = rule.decay ** (1.0 / delay) if delay > 0 else 0.0
        if optimizer is not None and (rule.predictor == "optimizer" or self.compensates):
            _check(optimizer, rule)

    @property
    def compensates(self) -> bool:
        """Whether updates are changed; where gradients are not late, there is nothing to do."""
        return self.rule.compensate and self.delay > 0

    def rate(self, step: int) -> float:
        """Return by what the learning rate of a step is multiplied."""
        if not self.rule.rescale_steps:
            return 1.0
        power = 1.0 - min(step / self.rule.rescale_steps, 1.0)
        return max(1.0, self.delay) ** -power

    def one(self, node: int, ahead: int, live: Mapping[int, Tensor]) -> Tensor:
        """Return one parameter as `ahead` updates later."""
        now = live[node].detach()
        match self.rule.predictor:
            case None:
                raise AssertionError(f"rule {self.rule.name} predicts, but does not say how")
            case "optimizer":
                made = now.clone()
                if self.optimizer is not None and (state := self.optimizer.state.get(live[node])):
                    _expect(made, _group_of(self.optimizer, live[node]), state, ahead)
                return made
            case "difference":
                return torch.add(now, now - self.kept[node], alpha=ahead)
            case "average":
                return torch.add(now, self.kept[node], alpha=ahead)

    def before_update(self) -> None:
        """Remember what the update is about to change.

        The average takes the weights before the update now and those after it later: that needs no
        copy, and is as exact as the weights are.
        """
        for old, flat in zip(self.previous, self.flats, strict=bool(self.previous)):
            old.copy_(flat)
        for average, flat in zip(self.average, self.flats, strict=bool(self.average)):
            average.mul_(self.share).add_(flat, alpha=self.share - 1.0)

    def after_update(self, live: Mapping[int, Tensor]) -> None:
        """Make up for the delay, then note what the update added."""
        if self.compensates and self.optimizer is not None:
            for node, group, state in _states(self.optimizer, live):
                _compensate(live[node], group, state, self.delay)
        for average, flat in zip(self.average, self.flats, strict=bool(self.average)):
            average.add_(flat, alpha=1.0 - self.share)


def _check(optimizer: Optimizer, rule: WeightRule) -> None:
    """Raise unless it is known what the optimizer will do.

    Raises:   RunError: neither SGD nor Adam, a variant of them, or nothing to predict from.
    """
    hint = "use SGD with momentum, Adam or AdamW, or a schedule with another weight rule"
    unforeseen = ("nesterov", "maximize", "amsgrad", *("dampening",) * rule.compensate)
    parts = parts_of(optimizer)  # an average of the weights changes nothing of them
    for part in parts:
        if not isinstance(part, SGD | Adam):
            found = type(part).__name__
            raise RunError(f"rule {rule.name} cannot foresee what a {found} does", hint=hint)
    for part, group in ((each, group) for each in parts for group in each.param_groups):
        still = isinstance(part, SGD) and not group["momentum"]
        if still and rule.predictor == "optimizer":
            message = f"rule {rule.name} predicts by the momentum, and SGD has momentum 0"
            raise RunError(message, hint=hint)
        for name in unforeseen:
            if group.get(name):
                message = f"rule {rule.name} cannot foresee an optimizer with {name}"
                raise RunError(message, hint=hint)


def _states(
    optimizer: Optimizer, live: Mapping[int, Tensor]
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yield node, group and state of every parameter that has been updated."""
    nodes = {id(parameter): node for node, parameter in live.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                yield nodes[id(parameter)], group, state


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        return groups[0]
    return next(group for group in groups if any(parameter is each for each in group["params"]))


def _expect(target: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], ahead: int) -> None:
    """Add to `target` what `ahead` further updates would, if gradients told nothing new."""
    if "exp_avg" in state:
        step = float(state["step"])
        beta1, beta2 = group["betas"]
        scale = (state["exp_avg_sq"] / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
        target.addcdiv_(state["exp_avg"], scale, value=-ahead * group["lr"] / (1.0 - beta1**step))
    elif state.get("momentum_buffer") is not None:
        target.add_(state["momentum_buffer"], alpha=-ahead * group["lr"])


def _compensate(
    parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], delay: float
) -> None:
    """Turn the update by v into one by a v + b g, with a = m^D and b = (1 - m^D) / (1 - m).

    The weights so far have the update by v.  For Adam the same with its first moment, which is
    (1 - m) v: a v + b g is then a moment of m^D times it and 1 - m^D times the gradient.
    """
    gradient = parameter.grad
    if gradient is None:
        return
    rate = group["lr"]
    if "exp_avg" in state:
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        scale = (state["exp_avg_sq"] / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
        more = gradient - state["exp_avg"]
        factor = -rate * (1.0 - beta1**delay) / (1.0 - beta1**step)
        parameter.addcdiv_(more, scale, value=factor)
    elif state.get("momentum_buffer") is not None:
        momentum, velocity = group["momentum"], state["momentum_buffer"]
        a = momentum**delay
        b = (1.0 - a) / (1.0 - momentum)
        if group["weight_decay"]:
            before = parameter + rate * velocity
            gradient = gradient + group["weight_decay"] * before
        parameter.add_(velocity, alpha=rate * (1.0 - a)).add_(gradient, alpha=-rate * b)
