"""Peer: torch.distributed.pipelining (gloo) on the pieces of bench/models.py, two ranks.

Its loss is divided by the number of micro-batches, and `scale_grads` is off: so it is spared
the pass over all gradients that it makes by default.  Gradients are set to None before a
step, so that the first ones are taken over without a copy.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from bench.inside import Inside
from bench.models import Pieces, Size, cross_entropy, micro_batches
from penstock.schedule import Schedule, find
from penstock.schedule.schedule import Action


class Peer(NamedTuple):
    """One of the peer's schedules: the stages of each rank, and ours that has the same order."""

    name: str
    make: Any
    stages: tuple[tuple[int, ...], ...]
    order: str = ""

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages))


GPIPE = Peer("GPipe", ScheduleGPipe, ((0,), (1,)), "gpipe")
ONE_F_ONE_B = Peer("1F1B", Schedule1F1B, ((0,), (1,)), "one_f_one_b")
INTERLEAVED = Peer("Interleaved1F1B", ScheduleInterleaved1F1B, ((0, 2), (1, 3)))
ZERO_BUBBLE = Peer("InterleavedZeroBubble", ScheduleInterleavedZeroBubble, ((0, 2), (1, 3)))
ZBV = Peer("ZBVZeroBubble", ScheduleZBVZeroBubble, ((0, 3), (1, 2)))
LOOPED_BFS = Peer("LoopedBFS", ScheduleLoopedBFS, ((0, 2), (1, 3)))
DUAL_PIPE_V = Peer("DualPipeV", ScheduleDualPipeV, ((0, 3), (1, 2)))

PEERS: dict[str, tuple[Peer, ...]] = {
    "gpipe": (GPIPE,),
    "one_f_one_b": (ONE_F_ONE_B,),
    "interleaved": (INTERLEAVED,),
    "zb_h1": (ZERO_BUBBLE, ZBV),
    "zb_v": (ZBV,),
    "breadth_first": (LOOPED_BFS,),
    "dual_pipe_v": (DUAL_PIPE_V,),
}


class Stepper:
    """One rank of the peer.  Its process group must be the default one."""

    def __init__(self, peer: Peer, size: Size, num_micro_batches: int, rank: int) -> None:
        self.inside = inside = Inside()
        count, numbers = peer.num_stages, peer.stages[rank]
        self.modules = modules_of(size, count, numbers)
        cpu = torch.device("cpu")
        stages = [
            PipelineStage(module, number, count, cpu)
            for number, module in zip(numbers, self.modules, strict=True)
        ]
        for stage in stages:
            inside.stage(stage)
        one = peer.make in (ScheduleGPipe, Schedule1F1B)
        self.schedule = peer.make(
            stages[0] if one else stages,
            num_micro_batches,
            loss_fn=inside.timed(lambda y, labels: cross_entropy(y, labels) / num_micro_batches),
            scale_grads=False,
        )
        made = micro_batches(size)
        chosen = [made[m % len(made)] for m in range(num_micro_batches)]
        tokens, labels = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        self.inputs = (tokens,) if 0 in numbers else ()
        self.target = {"target": labels} if count - 1 in numbers else {}

    def step(self) -> None:
        """Run one step: forward, backward, gradients summed up."""
        for module in self.modules:
            module.zero_grad()
        with self.inside.asking():
            self.schedule.step(*self.inputs, **self.target, return_outputs=False)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that the last step left, by name."""
        return {
            name: parameter.grad
            for module in self.modules
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }


def modules_of(size: Size, num_stages: int, numbers: Sequence[int]) -> list[Pieces]:
    """Return the modules of some stages, with the weights that the job's model has."""
    torch.manual_seed(size.job().seed)
    whole = Pieces(size, range(size.blocks + 2)).state_dict()
    stages = size.pieces_of(num_stages)
    modules = [Pieces(size, stages[number]) for number in numbers]
    for module in modules:
        module.load_state_dict({name: whole[name] for name in module.state_dict()})
    return modules


def schedule_of(peer: Peer, schedule: Any, num_micro_batches: int) -> Schedule:
    """Return the order in which a peer's schedule runs, as ours.

    torch runs GPipe and 1F1B by loops of their own, and its list for 1F1B is wrong on the last
    rank; so theirs are ours of the same name.
    """
    if peer.order:
        return find(peer.order)(peer.num_stages, num_micro_batches)
    rows = schedule.pipeline_order
    orders = tuple(
        tuple(action for cell in rows[rank] if cell is not None for action in _actions(cell))
        for rank in sorted(rows)
    )
    return Schedule(peer.num_stages, num_micro_batches, orders)


def _actions(cell: Any) -> list[Action]:
    """Return the actions of one cell; of an F beside a B, one after the other, as on a CPU."""
    return [_action(part) for part in cell.sub_actions or (cell,)]


def _action(cell: Any) -> Action:
    return Action(cell.computation_type.value, cell.stage_index, cell.microbatch_index)
