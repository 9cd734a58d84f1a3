"""What a rate or a scheduler does to model or optimizer once, later than a few steps would show."""

import torch
from small import WIDTH, classes, entropy
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import penstock as ps

FAR = 120
STEPS = {
    "thawed_by_the_rate": 130,
    "buffer_filled_by_the_scheduler": 130,
    "dropout_set_by_the_scheduler": 130,
    "momentum_set_by_the_rate": 130,
    "bias_zeroed_by_the_rate": 130,
    "group_added_by_the_scheduler": 130,
}
LAST = {}


class _Scaled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("scale", torch.ones(()))
        LAST["model"] = self

    def forward(self, x):
        return super().forward(x) * self.scale


class _FrozenAtFirst(_Scaled):
    def __init__(self) -> None:
        super().__init__()
        self[0].requires_grad_(False)


class _Acting(LambdaLR):
    """Acts once, after so many steps."""

    def __init__(self, optimizer, act) -> None:
        self.act, self.left = act, FAR
        super().__init__(optimizer, lambda step: 0.999**step)

    def step(self, epoch=None) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()
        super().step()


def _job(act, *, by_rate: bool, model=_Scaled) -> ps.Job:
    def optimizer(weights):
        LAST["optimizer"] = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
        return LAST["optimizer"]

    def rate(step):
        if step == FAR:
            act()
        return 0.999**step

    how = {"learning_rate": rate} if by_rate else {"scheduler": lambda made: _Acting(made, act)}
    return ps.Job(model, entropy, classes, optimizer, micro_batches=2, **how)


def thawed_by_the_rate() -> ps.Job:
    """The rate thaws the first layer at step 120."""
    return _job(lambda: LAST["model"][0].requires_grad_(True), by_rate=True, model=_FrozenAtFirst)


def buffer_filled_by_the_scheduler() -> ps.Job:
    """The scheduler doubles a buffer that forward reads, at step 120."""
    return _job(lambda: LAST["model"].scale.fill_(2.0), by_rate=False)


def dropout_set_by_the_scheduler() -> ps.Job:
    """The scheduler raises a dropout at step 120."""
    return _job(lambda: setattr(LAST["model"][1], "p", 0.5), by_rate=False)


def momentum_set_by_the_rate() -> ps.Job:
    """The rate sets an option of the optimizer at step 120."""
    return _job(lambda: LAST["optimizer"].param_groups[0].update(momentum=0.5), by_rate=True)


def bias_zeroed_by_the_rate() -> ps.Job:
    """The rate zeroes the last bias at step 120."""
    return _job(lambda: LAST["model"][3].bias.data.zero_(), by_rate=True)


def group_added_by_the_scheduler() -> ps.Job:
    """The scheduler gives the optimizer another group at step 120, which no plan can take."""

    def act():
        LAST["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    return _job(act, by_rate=False)
