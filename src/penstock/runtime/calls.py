"""Calls: one call of a rank's flat list, and what a rank reports of a finished step."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from penstock.timeline.spans import Lane, SpanKind

if TYPE_CHECKING:
    from penstock.runtime.host_numbers import UnseenNorm
    from penstock.runtime.lane import Begun, Queued

Call = Callable[[], object]
Quiet = Literal[
    "data", "take", "post", "begin", "versions", "tell", "settle", "turn"
]  # lanes that no timeline shows


@dataclass(frozen=True, slots=True)
class Bound:
    """One call of the flat list, how it is shown in a timeline, and whom it concerns.

    lane:   also reading data, taking a message, announcing that it will be taken, beginning a sum,
            making the versions of weights that are read, telling of a step that has no update,
            settling an update that was made before the norm was known, and taking the core, or
            giving it, where two runs have it by turns.
    ranks:  the other end of a message; all that take part in a sum.
    edge:   of a message.
    begun:  the sum that the call only waits for, of which the span is then.
    """

    call: Call
    lane: Lane | Quiet
    kind: SpanKind
    stage: int
    micro_batch: int
    ranks: tuple[int, ...] = ()
    edge: int = -1
    begun: "Begun | Queued | None" = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a rank knows of a step that it has finished.

    loss:           mean over some micro-batches of the step; None where no loss is made.
    micro_batches:  over how many; a part of one where it is divided among ranks.
    figures:        that the loss gives beside it, averaged as the loss is.
    validated:      "val_loss" and "val_" figures of the weights after the step, where one was due.
    left_out:       whether the rank was left out of the step, and has computed none of it.
    """

    step: int
    loss: float | None
    seconds: float
    micro_batches: float = 1
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    validated: Mapping[str, float] | None = None
    left_out: bool = False


@dataclass(slots=True)
class Progress:
    """Where a rank stands in its window.

    losses:  of the micro-batches of each step of the window that is not finished.
    figures: the same, each with all figures of a micro-batch.
    unseen:  the norm that the host has not looked at, on a device that queues (look.py).
    seen_losses: the mean loss of each step that it has looked at and not reported.
    updates: of stages that it has begun in this window.
    """

    first_step: int = 0
    updates: int = 0
    last_update_s: float = 0.0
    losses: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    figures: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    unseen: "UnseenNorm | None" = None
    seen_losses: dict[int, float] = field(default_factory=dict[int, float])
