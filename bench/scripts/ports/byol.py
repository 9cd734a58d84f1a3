"""lucidrains/byol-pytorch: a target that follows the online net after each step."""

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


def mlp(dim, size):
    return nn.Sequential(
        nn.Linear(dim, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, size)
    )


class BYOL(nn.Module):
    def __init__(self, moving_average_decay=0.9):
        super().__init__()
        self.online_encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), mlp(16, 8))
        self.online_predictor = mlp(8, 8)
        self.target_encoder = copy.deepcopy(self.online_encoder).requires_grad_(False)
        self.beta = moving_average_decay

    def update_moving_average(self):
        pairs = zip(self.online_encoder.parameters(), self.target_encoder.parameters(), strict=True)
        for current, moving in pairs:
            moving.data = moving.data * self.beta + (1 - self.beta) * current.data

    def forward(self, x, y):
        pred_one, pred_two = (self.online_predictor(self.online_encoder(v)) for v in (x, y))
        with torch.no_grad():
            proj_one, proj_two = self.target_encoder(x), self.target_encoder(y)
        return (loss_fn(pred_one, proj_two) + loss_fn(pred_two, proj_one)).mean()


def loss_fn(x, y):
    return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)


# -- the port --------------------------------------------------------------------------------------

learners = []


def model():
    learners.append(BYOL())
    return learners[-1]


def views(start):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        x = torch.randn(8, 12, generator=source)
        yield tuple(x + 0.2 * torch.randn(8, 12, generator=source) for _ in range(2))


def optimizer(params):
    made, learner = torch.optim.Adam(params, lr=3e-3, eps=1e-3), learners[-1]
    made.register_step_post_hook(lambda *_: learner.update_moving_average())
    return made


def job() -> ps.Job:
    """`learner.update_moving_average()` after `opt.step()`, as a hook of the optimizer."""
    return ps.Job(
        model=model, loss=lambda m, batch: m(*batch), data=views, optimizer=optimizer,
        micro_batches=2,
    )  # fmt: skip
