"""State that no weight and no buffer holds: counters, generators, caches, what is global."""

import collections
import itertools
import random
import time

import numpy as np
import torch
from small import WIDTH, classes, deep, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F

import penstock as ps

FACTOR = {"noise": 1.0, "calls": 0}
TEMPERATURE = 2.0
LOG: list[float] = []


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


class _Deep(nn.Module):
    """The small model with something of its own around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()

    def forward(self, x):
        return self.layers(x)


class _Annealed(_Deep):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x / (1 + self.calls / 10))


def counter_that_anneals() -> ps.Job:
    """Forward counts its calls and divides by the count."""
    return _job(_Annealed)


class _Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        random.seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for layer in self.layers:
            if random.random() > 0.3:
                x = x + torch.tanh(layer(x))
        return self.head(x)


def layers_dropped_by_random() -> ps.Job:
    """Layers are left out when random.random() says so; seeded where the model is built."""
    return _job(_Dropped)


class _Noisy(_Deep):
    def __init__(self) -> None:
        super().__init__()
        self.source = np.random.default_rng(4)

    def forward(self, x):
        noise = self.source.standard_normal(tuple(x.shape)).astype(np.float32)
        return self.layers(x + torch.from_numpy(noise))


def noise_of_numpy() -> ps.Job:
    """Noise from a numpy generator that the model keeps."""
    return _job(_Noisy)


class _OwnGenerator(_Deep):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(4)

    def forward(self, x):
        return self.layers(x + 0.5 * torch.randn(x.shape, generator=self.source))


def noise_of_a_torch_generator() -> ps.Job:
    """Noise from a torch.Generator that the model keeps; its state goes on from call to call."""
    return _job(_OwnGenerator)


def global_factor() -> ps.Job:
    """A number in a dict of the module that the loss reads and halves."""

    def loss(model, batch):
        FACTOR["noise"] *= 0.97
        return FACTOR["noise"] * squares(model, batch)

    return _job(loss=loss)


def global_that_the_schedule_sets() -> ps.Job:
    """learning_rate(step) sets a temperature that the loss reads, as callbacks do."""

    def rate(step):
        global TEMPERATURE
        TEMPERATURE = 2.0 / (1 + step)
        return 1.0

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]) / TEMPERATURE, batch[1])

    return _job(loss=loss, data=classes, learning_rate=rate)


def beta_in_the_loss() -> ps.Job:
    """The weight of the second term grows with the calls of a closure."""
    calls = itertools.count()

    def loss(model, batch):
        beta = min(1.0, next(calls) / 30)
        return squares(model, batch) + beta * model(batch[0]).square().mean()

    return _job(loss=loss)


class _Smoothing:
    """Label smoothing that is annealed to nothing."""

    def __init__(self) -> None:
        self.smoothing = 0.3

    def __call__(self, model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1], label_smoothing=self.smoothing)
        self.smoothing = max(0.0, self.smoothing - 0.01)
        return loss


def smoothing_that_is_annealed() -> ps.Job:
    """The loss is an object with an attribute that every call lowers."""
    return _job(loss=_Smoothing(), data=classes)


class _Scheduled(nn.Module):
    """Feeds itself what it said before, ever more often."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen = 0

    def forward(self, x):
        own = 1 - 0.98**self.seen
        self.seen += 1
        state, out = torch.zeros_like(x), x
        for _ in range(3):
            state = self.cell(own * out + (1 - own) * x, state)
            out = self.head(state)
        return out[:, :4]


def scheduled_sampling() -> ps.Job:
    """The share of its own outputs that a recurrent model is fed grows with a counter."""
    return _job(_Scheduled)


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), deep(3)
        self.state = None

    def forward(self, x):
        state = torch.zeros(len(x), WIDTH) if self.state is None else self.state
        state = self.cell(x, state)
        self.state = state.detach()
        return self.head(state)


def hidden_state_between_batches() -> ps.Job:
    """The last hidden state is kept on the module for the next batch."""
    return _job(_Hidden)


def batch_before_in_the_loss() -> ps.Job:
    """The loss also fits the targets of the batch before, which a deque keeps."""
    before: collections.deque = collections.deque(maxlen=1)

    def loss(model, batch):
        found = squares(model, batch)
        for x, y in before:
            found = found + 0.5 * squares(model, (x, y))
        before.append(batch)
        return found

    return _job(loss=loss)


def loss_over_its_own_mean() -> ps.Job:
    """The loss is divided by the moving average of its own values, a Python float."""
    mean = {"value": 1.0}

    def loss(model, batch):
        found = squares(model, batch)
        mean["value"] = 0.9 * mean["value"] + 0.1 * found.item()
        return found / mean["value"]

    return _job(loss=loss)


def loss_over_its_own_mean_as_a_tensor() -> ps.Job:
    """The same with a tensor that the closure keeps, never turned into a number."""
    mean = torch.ones(())

    def loss(model, batch):
        found = squares(model, batch)
        mean.mul_(0.9).add_(0.1 * found.detach())
        return found / mean

    return _job(loss=loss)


class _Warm(_Deep):
    """Scales its outputs to the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.is_ready = nn.Parameter(torch.ones(4)), False

    def forward(self, x):
        y = self.layers(x)
        if not self.is_ready:
            with torch.no_grad():
                self.gain.copy_(1 / (y.std(0) + 0.1))
            self.is_ready = True
        return y * self.gain


def initialised_by_the_first_batch() -> ps.Job:
    """The first forward writes a parameter from its data."""
    return _job(_Warm, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02))


class _Cached(_Deep):
    """Keeps its table of positions for the lengths that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x):
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
        return self.layers(x + self.tables[x.shape[1]])


def table_that_is_cached() -> ps.Job:
    """A table of positions is kept in a dict; every call finds the same (nothing is wrong)."""
    return _job(_Cached)


class _Timed(_Deep):
    def forward(self, x):
        start = time.perf_counter()
        y = self.layers(x.to(next(self.parameters()).device))
        LOG.append(time.perf_counter() - start)
        return y


def clock_for_a_log() -> ps.Job:
    """Forward asks the time and the device, but only keeps a log of it."""
    return _job(_Timed)


class _Late(_Deep):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x) if self.calls <= 22 else self.layers(x).tanh()


def branch_after_some_calls() -> ps.Job:
    """Forward does something else from the 23rd call on: in the first five steps all is well."""
    return _job(_Late)


def frozen_until_step_three() -> ps.Job:
    """The schedule unfreezes the first layer at step 3, as fine-tuning recipes do."""
    made: list[nn.Module] = []

    def model():
        made.append(deep())
        made[-1][0].requires_grad_(False)
        return made[-1]

    def rate(step):
        made[-1][0].requires_grad_(step >= 3)
        return 1.0

    return _job(model, learning_rate=rate, optimizer=lambda weights: torch.optim.SGD(weights, 0.1))


class _Dropout(_Deep):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0

    def forward(self, x):
        return F.dropout(self.layers(x), self.rate, self.training)


def dropout_that_the_loss_raises() -> ps.Job:
    """The loss sets the model's dropout from the number of its calls."""
    calls = itertools.count()

    def loss(model, batch):
        model.rate = min(0.5, next(calls) / 40)
        return squares(model, batch)

    return _job(_Dropout, loss)


class _PseudoLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(WIDTH, WIDTH, bias=False), deep(3)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.rest(F.dropout(self.norm(self.first(x)), 0.2, self.training))


def targets_in_eval_mode() -> ps.Job:
    """The loss asks the model in eval mode for soft targets, then trains it towards them."""

    def loss(model, batch):
        model.eval()
        with torch.no_grad():
            target = model(batch[0]).softmax(-1)
        model.train()
        return squares(model, batch) + F.cross_entropy(model(batch[0]), target)

    return _job(_PseudoLabels, loss)


def branch_on_the_data() -> ps.Job:
    """Forward branches on the mean of its input."""

    class _Branching(_Deep):
        def forward(self, x):
            return self.layers(x) if x.mean() > 0 else self.layers(-x)

    return _job(_Branching)


def hardest_half_by_a_count() -> ps.Job:
    """The loss keeps the k hardest samples, with k from the number of its calls."""
    calls = itertools.count()

    def loss(model, batch):
        each = (model(batch[0]) - batch[1]).square().mean(1)
        return each.topk(max(1, 4 - next(calls) // 8)).values.mean()

    return _job(loss=loss, micro_batches=4)
