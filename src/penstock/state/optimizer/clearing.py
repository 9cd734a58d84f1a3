"""Clearing: an optimizer's own zero_grad, called after each of its steps as the author's loop does.

torch's sets every gradient to none, which a step does here anyway.  What another one leaves at the
parameters is added to the gradients of the next step, and is state of the run until then:

    optimizer-left/NAME/gradient    in a checkpoint
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import JobError

LEFT = "optimizer-left/{}/gradient"
_HINT = "clip in the optimizer, by register_step_pre_hook, and leave Job.clip_norm out"


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Return whether its class, or somebody on this object, has put another one in its place."""
    return "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not Optimizer.zero_grad


def clear(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Drop the gradients of a model and of parameters that it was built with: the optimizer has
    them still where code of the job has taken one out of it."""
    model.zero_grad()
    for parameter in parameters.values():
        parameter.grad = None


class LeftError(JobError):
    """What zero_grad leaves cannot be added to gradients that are clipped."""


class Clearing:
    """The zero_grad of one optimizer, whole or of a stage, and what it has left.

    left:  gradients by the name of their parameters.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], *, clips: bool
    ) -> None:
        self.optimizer, self.parameters, self.clips = optimizer, parameters, clips
        self.left: dict[str, Tensor] = {}

    def added(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return gradients of a step with what was left before."""
        if not self.left:
            return gradients
        sums = {n: left + gradients[n] for n, left in self.left.items() if n in gradients}
        return {**self.left, **gradients, **sums}

    def call(self) -> None:
        """Let the optimizer clear its gradients, and keep what it leaves.

        Raises:   LeftError: the job clips sums of gradients, of which these would be a part.
        """
        self.optimizer.zero_grad()
        given = ((name, parameter.grad) for name, parameter in self.parameters.items())
        self.left = {name: gradient.clone() for name, gradient in given if gradient is not None}
        if self.clips and any(bool(left.to_dense().any()) for left in self.left.values()):
            name = type(self.optimizer).__name__
            message = (
                f"zero_grad of the job's optimizer, {name}, leaves gradients, and Job.clip_norm"
            )
            raise LeftError(f"{message} clips those of a step before they are added", hint=_HINT)

    def leave_out(self) -> None:
        """Clear after a step that is left out, whose gradients nobody has."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.call()

    def put(self, tensors: dict[str, Tensor], names: AbstractSet[str] | None = None) -> None:
        """Add what a checkpoint keeps of it, of some parameters or of all."""
        for name in self.left if names is None else self.left.keys() & names:
            left = self.left[name]
            tensors[LEFT.format(name)] = left.to_dense()

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `put` added."""
        keys = {name: LEFT.format(name) for name in self.parameters}
        self.left = {name: tensors[key].clone() for name, key in keys.items() if key in tensors}
