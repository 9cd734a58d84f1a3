"""Keys: steps of other shapes that a rank runs too, over the same weights.

A trace is of one shape.  Where the steps of a job have several, each is traced, cut at the same
places and bound once; which program runs next, `Windows.ask` says by the step's number, on all
ranks alike.  State does not move: parameters and buffers have the same numbers in all these graphs.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import UnlikeShapesError
from penstock.graph.code import Function
from penstock.graph.stages import Stages
from penstock.graph.trace import Capture
from penstock.program.program import Program
from penstock.runtime.rank_terms import FunctionKey

if TYPE_CHECKING:
    from penstock.runtime.calls import Bound
    from penstock.runtime.rank import Rank


@dataclass(frozen=True, slots=True, eq=False)
class KeyStep:
    """The step of one more key, and the programs that run it.

    functions:  those of segments that were made already.
    """

    capture: Capture
    stages: Stages
    programs: tuple[Program, ...]
    functions: dict[FunctionKey, Function] = field(
        default_factory=dict[FunctionKey, Function], init=False
    )


def check_alike(first: tuple[Capture, Stages], other: tuple[Capture, Stages]) -> None:
    """Raise unless the stages of another key hold what those of the first do.

    Raises:   UnlikeShapesError: state would have to move between their steps.
    """
    for rows, its_rows in zip(_held(*first), _held(*other), strict=True):
        for row, its in zip(rows, its_rows, strict=True):
            if names := sorted(row ^ its):
                message = "a step of another shape has other weights in a stage"
                hint = "plan it as one stage (stages=1), or pad to one shape"
                raise UnlikeShapesError(f"{message}: {', '.join(names[:3])}", hint=hint)


def _held(capture: Capture, stages: Stages) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Return for each stage its parameters and buffers, and the parameters that get gradients."""
    nodes = capture.graph.nodes
    return [
        (
            frozenset(f"{node}:{nodes[node].name}" for node in (*stage.parameters, *stage.buffers)),
            frozenset(f"{node}:{nodes[node].name}" for node, _ in stage.backward.gradients),
        )
        for stage in stages.stages
    ]


def bound_of(
    rank: "Rank", programs: Sequence[Program], steps: Sequence[KeyStep]
) -> Mapping[int, "list[Bound]"]:
    """Return the calls of each program of a run by its id, of the first key and of others."""
    others = [each for step in steps for each in step.programs]
    own = [each for each in programs if not any(each is other for other in others)]
    if steps:
        rank.noise.watch(0)  # of micro-batches of unlike sizes it says nothing
    for program in own:
        rank.expect(program)
    bound = {id(program): rank.bind(program) for program in own}
    first_edge = rank.first_edge + len(rank.stages.edges)
    for step in steps:
        beside = of_key(rank, step, first_edge)
        first_edge += len(step.stages.edges)
        for program in step.programs:
            beside.expect(program)
        bound |= {id(program): beside.bind(program) for program in step.programs}
    return bound


def of_key(rank: "Rank", step: KeyStep, first_edge: int) -> "Rank":
    """Return the same rank for a step of another key: with its weights, data and progress, and with
    values and messages of its own.

    first_edge:  number by which the transport knows its edge 0.
    """
    made = copy.copy(rank)
    made.capture, made.stages, made.functions = step.capture, step.stages, step.functions
    made.frames, made.outbox, made.batches = defaultdict(dict), {}, {}
    made.begin_anew(first_edge)
    return made
