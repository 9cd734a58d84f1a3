"""What people write who pass by: late turns, holders beside the model, data with a mind of its own.

Most of it acts only long after the first steps.
"""

import contextlib
import copy
import functools
import itertools
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from small import WIDTH, deep, pair, pairs, squares
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import penstock as ps

STEPS = {
    "tied_at_step_thirty": 36,
    "hook_of_a_layer_removed_at_step_twenty_five": 32,
    "parametrized_from_step_twenty": 26,
    "hardest_quarter_from_step_thirty": 40,
    "shuffle_of_shuffles": 30,
    "rate_halved_by_losses_in_a_list": 30,
    "weights_of_classes_by_a_hook": 30,
    "layer_reset_every_fifteen_steps": 34,
    "smoothing_once_it_is_good": 40,
    "encoder_and_head_by_turns": 20,
    "relative_to_the_loss_before": 20,
    "samples_scaled_in_the_file": 24,
}


def _sgd(weights):
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    return ps.Job(
        model=model,
        loss=loss,
        data=data,
        **{"optimizer": _sgd, "micro_batches": 4, **options},
    )


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = deep(3, outputs=WIDTH)
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        return self.left(features) + self.right(features)


def tied_at_step_thirty() -> ps.Job:
    """A hook ties two heads to one weight after thirty steps."""
    models = []

    def model():
        models.append(_TwoHeads())
        return models[-1]

    def optimizer(weights):
        made = _sgd(weights)
        done = itertools.count(1)

        def tie(*_):
            if next(done) == 30:
                models[-1].right.weight = models[-1].left.weight

        made.register_step_post_hook(tie)
        return made

    return _job(model, optimizer=optimizer)


def hook_of_a_layer_removed_at_step_twenty_five() -> ps.Job:
    """A forward hook adds a penalty of activations; the optimizer's hook takes it off."""
    seen = {}

    def model():
        made = deep()
        seen["handle"] = made[1].register_forward_hook(lambda _, __, out: out * 0.9)
        return made

    def optimizer(weights):
        made = _sgd(weights)
        made.steps_done = 0

        def after(own, *_):
            own.steps_done += 1
            if own.steps_done == 25:
                seen["handle"].remove()

        made.register_step_post_hook(after)
        return made

    return _job(model, optimizer=optimizer)


def parametrized_from_step_twenty() -> ps.Job:
    """learning_rate turns a layer's weight into a symmetric one at step 20."""
    models = []

    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).T

    def model():
        models.append(deep())
        return models[-1]

    def rate(step):
        layer = models[-1][2]
        if step == 20 and not nn.utils.parametrize.is_parametrized(layer):
            nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
        return 1.0

    return _job(model, learning_rate=rate)


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.layers(x)


def hardest_quarter_from_step_thirty() -> ps.Job:
    """From its 120th call on, by a buffer, the loss is the mean of the hardest quarter."""

    def loss(model, batch):
        each = (model(batch[0]) - batch[1]).square().mean(1)
        hardest = each.topk(max(1, len(each) // 4)).values.mean()
        return torch.where(model.calls > 120, hardest, each.mean())

    return _job(_Counted, loss)


def shuffle_of_shuffles() -> ps.Job:
    """Each epoch shuffles the order of the epoch before; start skips (nothing is wrong)."""

    def data(start):
        order, chance = list(range(24)), random.Random(7)

        def endless():
            while True:
                chance.shuffle(order)
                for index in order:
                    yield pair(index)

        return itertools.islice(endless(), start, None)

    return _job(data=data)


def rate_halved_by_losses_in_a_list() -> ps.Job:
    """The loss appends what it finds; the rate halves where the last eight are no better."""
    history, factor = [], [1.0]

    def loss(model, batch):
        found = squares(model, batch)
        history.append(found.item())
        return found

    def rate(step):
        is_due = step % 8 == 7 and len(history) > 16
        if is_due and np.mean(history[-8:]) > 0.9 * np.mean(history[-16:-8]):
            factor[0] /= 2
        return factor[0]

    return _job(loss=loss, learning_rate=rate)


def weights_of_classes_by_a_hook() -> ps.Job:
    """A hook of the optimizer writes a buffer of class weights every tenth step."""
    models = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep()
            self.register_buffer("balance", torch.ones(4))

        def forward(self, x):
            return self.layers(x)

    def model():
        models.append(Model())
        return models[-1]

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, weight=model.balance)

    def data(start):
        for index in itertools.count(start):
            source = torch.Generator().manual_seed(index)
            x = torch.randn(6, WIDTH, generator=source)
            yield x, torch.randint(0, 4, (6,), generator=source)

    def optimizer(weights):
        made = _sgd(weights)
        state = {"step": 0}

        def after(*_):
            state["step"] += 1
            if state["step"] % 10 == 0:
                with torch.no_grad():
                    bias = models[-1].layers[-1].bias
                    models[-1].balance.copy_(torch.softmax(-bias, 0) * 4)

        made.register_step_post_hook(after)
        return made

    return _job(model, loss, data, optimizer=optimizer)


def layer_reset_every_fifteen_steps() -> ps.Job:
    """A hook puts the last layer back to its first weights, and clears its momentum."""

    def optimizer(weights):
        made = torch.optim.Adam(weights, lr=0.01)
        last = made.param_groups[0]["params"][-2:]
        first = [p.detach().clone() for p in last]
        made.register_step_post_hook(functools.partial(_reset, last, first))
        return made

    return _job(optimizer=optimizer)


def _reset(last, first, own, *_):
    count = int(own.state[last[0]]["step"].item())
    if count and count % 15 == 0:
        with torch.no_grad():
            for weight, value in zip(last, first, strict=True):
                weight.copy_(value)
                own.state[weight]["exp_avg"].zero_()


def smoothing_once_it_is_good() -> ps.Job:
    """Labels are smoothed once an average of the accuracy, a buffer, has passed a threshold."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep()
            self.register_buffer("accuracy", torch.zeros(()))

        def forward(self, x, y):
            out = self.layers(x)
            if self.training:
                with torch.no_grad():
                    hit = (out.argmax(1) == y).float().mean()
                    self.accuracy.mul_(0.95).add_(0.05 * hit)
            return out

    def loss(model, batch):
        x, y = batch
        out = model(x, y)
        amount = torch.where(model.accuracy > 0.5, 0.1, 0.0)
        log = F.log_softmax(out, 1)
        plain = -log.gather(1, y[:, None]).squeeze(1)
        return ((1 - amount) * plain - amount * log.mean(1)).mean()

    def data(start):
        for index in itertools.count(start):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(index))
            yield x, x[:, :4].argmax(1)

    return _job(Model, loss, data)


def encoder_and_head_by_turns() -> ps.Job:
    """A pre-hook drops the gradients of the body at odd steps, of the head at even ones."""

    class Turns(torch.optim.AdamW):
        def __init__(self, weights) -> None:
            super().__init__(weights, lr=0.01)
            self.turn = 0

        def step(self, closure=None):
            own = self.param_groups[0]["params"]
            for weight in own[:-2] if self.turn % 2 else own[-2:]:
                weight.grad = None
            self.turn += 1
            return super().step(closure)

    return _job(optimizer=Turns)


def relative_to_the_loss_before() -> ps.Job:
    """The loss is divided by its own last value, which a buffer of the model keeps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep()
            self.register_buffer("before", torch.ones(()))

        def forward(self, x):
            return self.layers(x)

    def loss(model, batch):
        found = squares(model, batch)
        out = found / model.before.clone().clamp(min=0.1)
        model.before.copy_(found.detach())
        return out

    return _job(Model, loss)


def samples_scaled_in_the_file() -> ps.Job:
    """data reads a memory map that it writes back: samples fade as they are read."""
    path = Path(tempfile.mkdtemp()) / "samples.dat"
    rows = np.memmap(path, np.float32, "w+", shape=(40, WIDTH))
    rows[:] = np.random.RandomState(3).randn(40, WIDTH)
    rows.flush()

    def data(start):
        own = np.memmap(path, np.float32, "r+", shape=(40, WIDTH))
        for index in itertools.count(start):
            at = index % 10 * 4
            x = torch.from_numpy(own[at : at + 4].copy())
            own[at : at + 4] *= 0.95
            yield x, x[:, :4] * 0.5

    return _job(data=data)


class _EMA:
    """As timm's ModelEmaV2, with a warm-up of its decay."""

    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for own, new in zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        ):
            own.copy_(own * decay + (1 - decay) * new)


def teacher_of_timm_by_a_hook() -> ps.Job:
    """ModelEmaV2 with a warm-up, moved by the optimizer's hook, is the loss's teacher."""
    held = {}

    def model():
        held["model"] = deep()
        held["ema"] = _EMA(held["model"])
        return held["model"]

    def loss(model, batch):
        x, _ = batch
        with torch.no_grad():
            aim = held["ema"].module(x + 0.1)
        return squares(model, batch) + F.mse_loss(model(x), aim)

    def optimizer(weights):
        made = _sgd(weights)
        made.register_step_post_hook(lambda *_: held["ema"].update(held["model"]))
        return made

    return _job(model, loss, optimizer=optimizer)


class _Shards(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, by = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.count, by):
            x, y = pair(index, rows=1)
            yield x[0], y[0]


def shards_by_workers() -> ps.Job:
    """An IterableDataset divides itself among two workers, epoch after epoch; start skips."""

    def data(start):
        def endless():
            while True:
                yield from DataLoader(_Shards(48), batch_size=4, num_workers=2)

        return itertools.islice(endless(), start, None)

    return _job(data=data)


class _Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.temperature = nn.Parameter(torch.ones(()))

    @functools.cached_property
    def scale(self):
        return float(self.layers[0].weight.detach().norm())

    def forward(self, x):
        return self.layers(x) * self.temperature / self.scale


def norm_of_the_first_weights_is_cached() -> ps.Job:
    """A cached_property takes the norm of a weight at the first call, and keeps it."""
    return _job(_Cached)


def distinct_labels_count() -> ps.Job:
    """The loss is divided by the number of labels that occur, a Python number of each batch."""

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum") / len(set(y.tolist()))

    def data(start):
        for index in itertools.count(start):
            source = torch.Generator().manual_seed(index)
            x = torch.randn(6, WIDTH, generator=source)
            yield x, torch.randint(0, 4, (6,), generator=source)

    return _job(loss=loss, data=data)


def noise_of_python_on_gradients() -> ps.Job:
    """Langevin: the optimizer's pre-hook adds noise from a random.Random of its own."""

    def optimizer(weights):
        made = _sgd(weights)
        chance = random.Random(11)

        def noise(own, *_):
            for group in own.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        weight.grad.add_(chance.gauss(0, 0.01))

        made.register_step_pre_hook(noise)
        return made

    return _job(optimizer=optimizer)


class _Growing(Dataset):
    """A curriculum: how long the samples' history is follows the epoch."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 16

    def __getitem__(self, index):
        x, y = pair(index, rows=1)
        x = x.clone()
        x[0, min(WIDTH, 2 + 2 * self.epoch) :] = 0
        return x[0], y[0]


def curriculum_by_epochs() -> ps.Job:
    """The dataset shows more of each sample in each epoch; start counts epochs itself."""

    def data(start):
        dataset = _Growing()
        loader = DataLoader(dataset, batch_size=4)
        epoch, skipped = divmod(start, len(loader))
        while True:
            dataset.epoch = epoch
            yield from itertools.islice(loader, skipped, None)
            epoch, skipped = epoch + 1, 0

    return _job(data=data)


class _Ghost(torch.optim.Optimizer):
    """Adds gradients up over two calls, and steps at each second one."""

    def __init__(self, weights):
        super().__init__(weights, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["sum"], state["calls"] = torch.zeros_like(weight), 0
                state["sum"] += weight.grad
                state["calls"] += 1
                if state["calls"] % 2 == 0:
                    weight.sub_(state["sum"], alpha=group["lr"])
                    state["sum"].zero_()


def gradients_of_two_steps() -> ps.Job:
    """An optimizer of the author's adds gradients up and moves at each second step."""
    return _job(optimizer=_Ghost)


def generator_that_is_sent_the_loss() -> ps.Job:
    """data is a coroutine: the loss sends it what it found, and it chooses what comes next."""
    told = []

    def data(start):
        index = start
        while True:
            hard = bool(told) and told[-1] > 1.2
            yield pair(index % 5 if hard else index)
            index += 1

    def loss(model, batch):
        found = squares(model, batch)
        with contextlib.suppress(RuntimeError):
            told.append(float(found.detach()))
        return found

    return _job(loss=loss, data=data)
