"""Schedules of torch.distributed.pipelining, as torch computes them, without its messages."""

import torch
from torch.distributed.pipelining import schedules

from penstock.schedule import Action


class _Stage:
    """As much of a stage as the constructors of torch look at."""

    def __init__(self, rank: int, num_ranks: int, index: int, num_stages: int) -> None:
        self.group_size, self.group_rank, self.has_backward = num_ranks, rank, True
        self.stage_index, self.num_stages = index, num_stages
        self.stage_index_to_group_rank = {}
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.device, self.group, self.submod = "cpu", None, torch.nn.Identity()


def orders_of_torch(
    name: str, num_ranks: int, per_rank: int, num_micro_batches: int
) -> list[list[Action]]:
    """Return the orders that torch's Schedule`name` has for every rank."""
    stages = [_Stage(0, num_ranks, index, num_ranks * per_rank) for index in range(per_rank)]
    made = getattr(schedules, f"Schedule{name}")(
        stages, num_micro_batches, loss_fn=lambda output, target: output
    )
    return [
        [action for each in made.pipeline_order[rank] if each is not None for action in _of(each)]
        for rank in range(num_ranks)
    ]


def _of(action: schedules._Action) -> list[Action]:
    if action.sub_actions:
        return [each for part in action.sub_actions for each in _of(part)]
    kind = {"FULL_BACKWARD": "B", "FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    named = action.computation_type.name
    return [Action(kind[named], action.stage_index, action.microbatch_index)] * (named in kind)
