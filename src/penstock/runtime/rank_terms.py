"""Rank terms: what a rank is told besides its job and its stages."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from penstock.graph.code import Function, function_of
from penstock.graph.stages import SegmentKind
from penstock.runtime.calls import StepResult
from penstock.runtime.kept_reads import KeptReads
from penstock.runtime.noise_squares import EVERY
from penstock.state.carried_buffers import Carries, Carry

FunctionKey = tuple[int, SegmentKind, bool]  # stage, kind, and whether it asks for parameters


def _report_nothing(result: StepResult) -> None:
    """Report a step to nobody."""


def _put_nowhere(number: int, outputs: dict[str, Tensor]) -> None:
    """Keep nothing of what the model returns."""


@dataclass(frozen=True, slots=True)
class RankTerms:
    """What holds for a rank as long as it is there.

    make:        makes the function of a segment.
    functions:   of segments, those that were made; a rank that comes after it may have the same.
    carries:     by stage, how buffers go on that other ranks change too.
    report:      called with every finished step.
    tells_all:   whether every rank reports validations, and not only the first.
    is_guarded:  whether a loss or norm that is not finite ends the run.
    put_outputs: called with what the model returns for a micro-batch, where that is asked for.
    first_edge:  number by which the transport knows edge 0; plans before had those below.
    noise_every: of how many steps one is watched for the noise of its gradients.
    kept:        where a step may be done again: what was read of it.
    """

    make: Callable[..., Function] = function_of
    functions: dict[FunctionKey, Function] = field(default_factory=dict[FunctionKey, Function])
    carries: Carries = field(default_factory=dict[int, Carry])
    report: Callable[[StepResult], None] = _report_nothing
    tells_all: bool = False
    is_guarded: bool = False
    put_outputs: Callable[[int, dict[str, Tensor]], None] = _put_nowhere
    first_edge: int = 0
    noise_every: int = EVERY
    kept: KeptReads | None = None
