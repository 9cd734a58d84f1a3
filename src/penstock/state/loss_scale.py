"""Loss scale: gradients in float16 neither vanish nor, for more than a step, overflow.

    backward     of the loss times the scale: what would be too small for float16 is not
    end of step  any gradient that is not finite, on any rank: the step is left out on all of them,
                 weights and optimizer stay as they are, and the scale is halved
                 else they are divided by the scale; after INTERVAL such steps it is doubled

The rule and its numbers are those of torch.amp.GradScaler.  A scale is a power of two, so that
multiplying and dividing by it changes no digit.

Source:  arXiv:1912.00286, section 3; "Mixed Precision Training", arXiv:1710.03740.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock import _compat
from penstock.errors import CheckpointError

START, INTERVAL = 2.0**16, 2000
LEAST = 2.0**-24  # what overflows with it does not do so for the scale
_KEY = "loss_scale"


class LossScale:
    """The scale of a run, the same on all its ranks.

    good:  steps in a row that did not overflow, since it was changed.
    """

    def __init__(self) -> None:
        self.scale, self.good = START, 0
        self._told = START, False  # of the last step
        self._number = -1  # that it was
        self._followers: list[tuple[Tensor, int]] = []

    def gradient(self, micro_batches: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the gradient that a loss is given, one of so many; it follows the scale."""
        made = torch.empty((), dtype=dtype, device=device)
        self._followers.append((made, micro_batches))
        self._follow()
        return made

    def unscale(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide gradients by the scale; return whether all of them are finite, on their device."""
        return _compat.unscale(gradients, self.scale)

    def end(self, step: int, *, overflowed: bool) -> None:
        """Take note of whether any gradient of a step of the run has overflowed, on any rank."""
        self._told, self._number = (self.scale, overflowed), step
        self.good = 0 if overflowed else self.good + 1
        if overflowed:
            self.scale /= 2
        elif self.good == INTERVAL:
            self.scale, self.good = 2 * self.scale, 0
        self._follow()

    def leaves_out(self, step: int) -> bool:
        """Return whether a step of the run that has ended is left out."""
        return self._number == step and self._told[1]

    def figures(self) -> dict[str, float]:
        """Return what is told of the last step: its scale, and 1 if it was left out."""
        scale, overflowed = self._told
        return {"loss_scale": scale, "left_out": float(overflowed)}

    def put(self, plain: dict[str, object]) -> None:
        """Add what a checkpoint keeps."""
        plain[_KEY] = [self.scale, self.good]

    def take(self, plain: Mapping[str, object]) -> None:
        """Restore what `put` added; one that another precision wrote has none.

        Raises:   CheckpointError: it is no scale.
        """
        match plain.get(_KEY, [START, 0]):
            case [float() | int() as scale, int() as good] if scale > 0:
                self.scale, self.good = float(scale), good
            case other:
                message = f"the checkpoint has the loss scale {other}"
                raise CheckpointError(message, hint="take another checkpoint")
        self._follow()

    def _follow(self) -> None:
        for tensor, micro_batches in self._followers:
            tensor.fill_(self.scale).div_(micro_batches)
