"""Noise: squares of the gradients of micro-batches and of their sum, of one step in a few.

Gradients of micro-batches exist anyway, one after the other, before they are added up; their sum
exists before it is clipped and updated with.  Both are only looked at: a step is the same with and
without.  Of `every` steps one is watched, which costs a pass over the gradients of each micro-batch
in one of so many steps, and no message: ranks tell their parts when the run ends.

Not watched: windows of several steps (asynchronous schedules), and gradients of several
micro-batches that are made at once.  Left out: parameters of several stages, and those whose
gradient has several parts in one micro-batch, in both squares.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock import _compat
from penstock.profile.noise import EVERY, NoiseTold

_KEPT = 64  # newest steps
_Number = Tensor | float  # a tensor is looked at when it is told: on a GPU each look waits


class NoiseMeter:
    """Adds up squares of gradients on one rank.

    is_due:   whether the step that is run now is watched
    is_on:    whether steps are watched at all
    every:    of how many steps one is
    """

    def __init__(self, every: int = EVERY) -> None:
        self.every = every
        self.is_due, self.is_on, self._never = False, False, False
        self.count, self.scale = 1, 1.0
        self._small: list[Tensor] = []
        self._large: list[Tensor] = []
        self._kept: deque[tuple[_Number, _Number]] = deque(maxlen=_KEPT)

    def watch(self, micro_batches: int) -> None:
        """Watch steps of so many micro-batches from now on; of 1, or 0, none in this run."""
        self._never = self._never or micro_batches < 2
        self.is_on, self.count = not self._never, micro_batches

    def begin(self, step: int, scale: float) -> None:
        """Begin a step of the run, whose loss is scaled."""
        self.is_due, self.scale = self.is_on and step % self.every == 0, scale
        self._small.clear()  # of a step that was not finished
        self._large.clear()

    def end(self) -> None:
        """Keep what was told of the step, if it was watched."""
        if not self.is_due:
            return
        self.is_due = False
        own = self.scale**2
        small = self.count * _sum(self._small) / own
        self._kept.append((small, _sum(self._large) / own))

    def small(self, gradients: Iterable[Tensor]) -> None:
        """Take what one micro-batch adds to a stage's gradients."""
        self._small += squares(gradients)

    def large(self, gradients: Iterable[Tensor]) -> None:
        """Take a stage's gradients, summed over all micro-batches; of each number once."""
        self.add_large(squares(gradients))

    def add_large(self, found: Iterable[Tensor]) -> None:
        """Take the squares of a stage's summed gradients."""
        self._large += found

    def told(self) -> NoiseTold:
        """Return what is known of the newest steps."""
        rows = [tuple(map(float, row)) for row in self._kept]
        small, large = zip(*rows, strict=True) if rows else ((), ())
        return NoiseTold(small, large)


def squares(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return the square of each tensor's norm, in 64 bits; nothing is waited for."""
    kept = [gradient for gradient in gradients if gradient.numel()]
    if not kept:
        return []
    norms = _compat.gradient_norms(kept)
    return [torch.stack([norm.double() for norm in norms]).square().sum()]


def _sum(found: Sequence[Tensor]) -> _Number:
    return torch.stack([*found]).sum() if found else 0.0
