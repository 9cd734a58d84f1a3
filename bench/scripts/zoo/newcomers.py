"""What people who had read the documents alone brought: two odd things in each."""

from collections import OrderedDict

import torch
from small import WIDTH, classes, deep, entropy, pairs, sgd
from torch import nn

import penstock as ps

STEPS = {
    "gated_after_48_calls": 16,
    "norm_in_eval_after_48_batches": 18,
    "heads_by_the_epoch_of_the_batch": 16,
    "heads_that_grow_in_number": 12,
}


def _job(model=deep, loss=entropy, data=classes, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


# -- whole numbers in buffers that Python asks for -------------------------------------------------


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate, self.head = (
            nn.Linear(WIDTH, 16),
            nn.Linear(WIDTH, 16),
            nn.Linear(16, 4),
        )
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        h = self.into(x).relu()
        if self.calls.item() >= 48:
            h = h * self.gate(x).sigmoid()
        self.calls += 1
        return self.head(h)


def gated_after_48_calls() -> ps.Job:
    """A count without dims, a buffer, chooses the plain path for 48 calls and a gated one later."""
    return _job(_Gated)


def norm_in_eval_after_48_batches() -> ps.Job:
    """The loss sets a batch norm to eval once the norm's own count of batches says so."""

    def loss(model, batch):
        if int(model[1].num_batches_tracked) >= 48:
            model[1].eval()
        return entropy(model, batch)

    return _job(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
        ),
        loss,
    )


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = deep(2, outputs=16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.register_buffer("clock", torch.tensor(0))

    def forward(self, x, epoch):
        h = self.body(x).tanh()
        self.clock.add_(1)
        if int(epoch) + int(self.clock) // 40 >= 1:
            return self.first(h) + self.second(h)
        return self.first(h)


def heads_by_the_epoch_of_the_batch() -> ps.Job:
    """A second head learns from an epoch on that the batch tells, or a clock that is a buffer."""

    def data(start):
        for number, (x, y) in enumerate(classes(start), start):
            yield {"x": x, "y": y, "epoch": torch.tensor(number // 48)}

    return _job(
        _TwoHeads,
        lambda model, b: nn.functional.cross_entropy(model(b["x"], b["epoch"]), b["y"]),
        data,
    )


class _Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(4))
        self.register_buffer("used", torch.tensor(1))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        out = sum(head(x) for head in list(self.heads)[: int(self.used)])
        self.calls += 1
        self.used.copy_((1 + self.calls // 20).clamp(max=4))
        return out


def heads_that_grow_in_number() -> ps.Job:
    """How many heads are added up is a buffer that grows every 20 calls, under Adam."""
    return _job(_Growing, optimizer=lambda weights: torch.optim.Adam(weights, 1e-2))


# -- batches ---------------------------------------------------------------------------------------


class _Parts(OrderedDict):
    """Its items are attributes, too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def ordered_dict_of_its_own_class() -> ps.Job:
    """The loss goes over the items of a batch that is an ordered dict of a class of its own."""

    def loss(model, batch):
        parts = (
            weight * (model(x) - len(name)).square().mean()
            for weight, (name, x) in enumerate(batch.items(), 1)
        )
        return sum(parts) + 0.1 * model(batch.first).abs().mean()

    def data(start):
        for x, y in pairs(start):
            yield _Parts(first=x, second=x.flip(0) + y.sum())

    return _job(loss=loss, data=data)
