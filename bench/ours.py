"""Ours: a model of bench/models.py cut at its blocks, lowered, and bound on two ranks."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.inside import Inside
from bench.models import Size
from penstock.graph.code import function_of
from penstock.graph.stages import Stages
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.program.program import Compute, Program
from penstock.runtime.calls import Bound
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.schedule import find
from penstock.schedule.schedule import Action
from penstock.transport import Transport

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Ours(NamedTuple):
    """All that a rank needs to run."""

    capture: Capture
    stages: Stages
    job: Job
    program: Program

    def orders(self) -> list[list[Action]]:
        """Return the actions of each rank, without messages."""
        code = self.program.code
        return [
            [i.action for i in code[rank] if isinstance(i, Compute)]
            for rank in range(self.program.num_ranks)
        ]


def lowered(
    captured: Capture,
    size: Size,
    schedule: str,
    num_micro_batches: int,
    *,
    num_steps: int = 1,
    optimizer: MakeOptimizer | None = None,
) -> Ours:
    """Return a model lowered for two ranks: one stage on each, or two where stages share ranks.

    num_steps:  the window of an asynchronous schedule.
    """
    job, graph = size.job(), captured.graph
    job = job if optimizer is None else replace(job, optimizer=optimizer)
    stages = 2 if find(schedule)(2, num_micro_batches).num_ranks == 2 else 4
    pieces = size.pieces_of(stages)
    names = [point.name for point in graph.cut_points]
    cuts = [names.index(f"after pieces.{stage[-1]}") for stage in pieces[:-1]]
    plan = plan_by_hand(graph, cuts, schedule, num_micro_batches=num_micro_batches, num_ranks=2)
    return Ours(captured, stages_of(plan, graph), job, lower_plan(plan, graph, num_steps=num_steps))


def rank_of(
    ours: Ours, end: Transport, windows: int = 1, inside: Inside | None = None
) -> tuple[Rank, Callable[[], None]]:
    """Return this rank, and the call that runs some windows of its program.

    inside:  where the seconds of its computes are to be noted.
    """
    rank, calls = calls_of(ours, end, inside)
    starts = range(0, windows * ours.program.num_steps, ours.program.num_steps)

    def run() -> None:
        with torch.no_grad():
            for start in starts:
                rank.run(calls, start)

    return rank, run


def calls_of(ours: Ours, end: Transport, inside: Inside | None = None) -> tuple[Rank, list[Bound]]:
    """Return this rank, and the calls of a window; every rank calls it together."""
    make = function_of if inside is None else inside.function_of
    rank = Rank(ours.capture, ours.stages, ours.job, end, RankTerms(make=make))
    with nullcontext() if inside is None else inside.adding():
        calls = rank.bind(ours.program)
    end.barrier()
    return rank, calls if inside is None else inside.bound(calls)


def gradients_of(rank: Rank) -> dict[str, Tensor]:
    """Return the gradients that the last step left on a rank, by name."""
    return {
        weights.names[node]: gradient
        for weights in rank.weights.values()
        for node, gradient in weights.gradients.items()
    }
