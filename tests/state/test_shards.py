"""A stage in parts is made in the room of two stages, and holds its part alone."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from penstock import _compat
from penstock.state.flat import all_views, layouts_of
from penstock.state.shards import StageShard

SIZE_BYTES = 4 * 256 * 256


def test_a_stage_is_made_in_the_room_of_two():
    parameters = {0: nn.Parameter(torch.randn(256, 256))}
    layouts = layouts_of(parameters, {0: torch.float32}, torch.device("cpu"))
    sharers: Any = SimpleNamespace(parts=(1,), place=0, is_far=False)
    held = most = 0
    with _compat.memory_profile() as events:
        flats = [layout.new() for layout in layouts]
        all_views(layouts, flats)[0].copy_(parameters[0].detach())
        shard = StageShard(layouts, flats, flats, sharers)
    for event in events():
        held += event.size_bytes
        most = max(most, held)
    assert most <= 2.1 * SIZE_BYTES
    assert held <= 1.1 * SIZE_BYTES
    assert torch.equal(shard.parameters[0].view(256, 256), parameters[0])
    shard.make_room()
    assert shard.reads[0].shape == shard.views[0].shape == (256, 256)
