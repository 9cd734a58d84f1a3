"""Lent to: models whose weights wait compute on a rehearsal GPU as ones that are there; as JSON."""

import copy
import json
import os
import sys
from typing import Any

from tests.rehearsal import cuda

# isort: split
import torch  # after the device
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.device import Device
from penstock.graph import waiting
from penstock.graph.waiting import backward_of, lent, placed, waits
from penstock.profile.measure import _peak_bytes

ours, WIDTH = cuda.library, 64


class Blocks(nn.Module):
    """Weights that are tied, looked at through a view, and read in a block that is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.table, self.norm = nn.Embedding(32, WIDTH), nn.BatchNorm1d(WIDTH)
        self.mixed = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.steps.add_(1.0)  # no buffer, though nobody trains it
        x = self.table(x)
        x = x + self.mixed(x, x, x, need_weights=False)[0]
        x = self.norm(x.flatten(0, 1)).view(x.shape) * torch.ones(
            1, device=self.table.weight.device
        )
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False).relu()
        return x @ self.table.weight.t()


def made(model: nn.Module) -> dict[str, Any]:
    """Return loss, gradients and buffers of a step, all on the host."""
    words = torch.arange(24, device="cuda").view(4, 6)
    with lent(model):
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
    backward_of(loss, model)
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: b.cpu() for name, b in model.named_buffers()}
    steps = {"steps": model.get_parameter("steps").detach().cpu()}
    return {"loss": loss.detach().cpu(), **grads, **buffers, **steps}


torch.manual_seed(0)
there = Blocks()
waiting_one = copy.deepcopy(there)
weights = waiting.bytes_of(there.parameters())
expected = made(placed(there))
there = there.cpu()
Device.usable_bytes = property(lambda device: weights)  # type: ignore[assignment, method-assign]
placed(waiting_one)
cuda._OURS["reset_peak_memory_stats"]()
before = ours.rehearsal_peak(0)
found = made(waiting_one)
near = [nn.Parameter(torch.ones(WIDTH, WIDTH, device="cuda")) for _ in range(4)]
for each in near:
    each.grad = torch.ones_like(each)
updates = torch.optim.AdamW(near, foreach=True)
updates.step()
print(
    json.dumps(
        {
            "waits": waits(waiting_one),
            "names": sorted(expected.keys() ^ found.keys()),
            "apart": max(float((found[n] - expected[n]).abs().max()) for n in expected),
            "weights": weights,
            "update": _peak_bytes(updates.step) / waiting.bytes_of(near),
            "peak": ours.rehearsal_peak(0) - before,
            "races": [ours.rehearsal_race(n).decode() for n in range(ours.rehearsal_races())],
        }
    )
)
sys.stdout.flush()
os._exit(0)  # threads of autograd may not end before the library does
