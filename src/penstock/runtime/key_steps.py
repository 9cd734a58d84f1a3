"""Keys: steps of other shapes, or other turns, that a rank runs too, over the same weights.

A trace is of one shape.  Where the steps of a job have several, each is traced, cut at the same
places and bound once; which program runs next, `Windows.ask` says by the step's number, on all
ranks alike.  State does not move: parameters and buffers have the same numbers in all these graphs.
Which weights get a gradient, and so an update, is each step's own.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from penstock.batches.read_on import ReadOn
from penstock.errors import UnlikeCutsError
from penstock.graph.code import Function
from penstock.graph.merge import over, unjoined
from penstock.graph.stages import Stages
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.program.program import Program
from penstock.runtime.calls import Bound, StepResult
from penstock.runtime.rank_terms import FunctionKey
from penstock.taken import Taken, counted

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank


@dataclass(frozen=True, slots=True, eq=False)
class KeyStep:
    """The step of one more key, and the programs that run it.

    job:        its micro-batches, joined or divided as its plan says; None: as those of the task.
    counts:     how many of the task's micro-batches one of these is.
    functions:  those of segments that were made already.
    """

    capture: Capture
    stages: Stages
    programs: tuple[Program, ...]
    job: Job | None = None
    counts: Taken = 1
    functions: dict[FunctionKey, Function] = field(
        default_factory=dict[FunctionKey, Function], init=False
    )


def check_alike(first: tuple[Capture, Stages], other: tuple[Capture, Stages]) -> None:
    """Raise unless the stages of another key hold what those of the first do.

    Raises:   UnlikeCutsError: state would have to move between their steps.
    """
    for row, its in zip(_held(*first), _held(*other), strict=True):
        if names := sorted(row ^ its):
            message = "a step of another shape or turn has other weights in a stage"
            hint = "plan it as one stage: stages=1"
            raise UnlikeCutsError(f"{message}: {', '.join(names[:3])}", hint=hint)


def _held(capture: Capture, stages: Stages) -> list[frozenset[str]]:
    """Return the parameters and buffers of each stage."""
    nodes = capture.graph.nodes
    return [
        frozenset(f"{node}:{nodes[node].name}" for node in (*stage.parameters, *stage.buffers))
        for stage in stages.stages
    ]


def bound_of(
    rank: "Rank", programs: Sequence[Program], steps: Sequence[KeyStep]
) -> Mapping[int, list[Bound]]:
    """Return the calls of each program of a run by its id, of the first key and of others."""
    others = [each for step in steps for each in step.programs]
    own = [each for each in programs if not any(each is other for other in others)]
    if steps:
        rank.noise.watch(0)  # of micro-batches of unlike sizes it says nothing
    source = None
    if any(step.job is not None for step in steps):
        source = ReadOn(unjoined(rank.job)[0].data)
        rank.read_by(over(rank.job, source))
    for program in own:
        rank.expect(program)
    bound = {id(program): _bound(rank, program, has_others=bool(steps)) for program in own}
    first_edge = rank.first_edge + len(rank.stages.edges)
    for step in steps:
        beside = of_key(rank, step, first_edge)
        if source is not None:
            beside.read_by(over(step.job or rank.job, source))
        first_edge += len(step.stages.edges)
        for program in step.programs:
            beside.expect(program)
        bound |= {id(p): _bound(beside, p, has_others=True) for p in step.programs}
    return bound


def _bound(rank: "Rank", program: Program, *, has_others: bool) -> list[Bound]:
    """Return the calls of a program; first, if there are others, that which gives the optimizer
    the gradients of this step, and no others.
    """
    calls = rank.bind(program)
    if not has_others:
        return calls
    rows = [(own, own.gradients_of(rank.reached(stage))) for stage, own in rank.weights.items()]

    def give() -> None:
        for own, gradients in rows:
            own.give(gradients)

    return [Bound(give, "settle", "U", -1, 0), *calls]


def of_key(rank: "Rank", step: KeyStep, first_edge: int) -> "Rank":
    """Return the same rank for a step of another key: with its weights, data and progress, and with
    values and messages of its own.

    first_edge:  number by which the transport knows its edge 0.
    """
    made = copy.copy(rank)
    made.capture, made.stages, made.functions = step.capture, step.stages, step.functions
    made.frames, made.outbox, made.batches = defaultdict(dict), {}, {}
    made.begin_anew(first_edge)
    made.report = partial(_report, rank, step.counts)
    return made


def _report(rank: "Rank", counts: Taken, result: StepResult) -> None:
    """Report a step by the micro-batches of the task, to all who hear the rank by then."""
    rank.report(replace(result, micro_batches=counted(counts, Fraction(result.micro_batches))))
