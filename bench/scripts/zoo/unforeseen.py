"""What was written last, to try what the others had been built for: state in places of its own."""

import contextvars
import functools
import itertools
import queue
import threading

import torch
from small import WIDTH, deep, pair, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler, TensorDataset

import penstock as ps

CALLS: contextvars.ContextVar[int] = contextvars.ContextVar("CALLS", default=0)


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()

    def forward(self, x):
        return self.layers(x)


class _OfTheClass(_Deep):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return self.layers(x) / (1 + type(self).calls / 20)


def counter_of_the_class() -> ps.Job:
    """The count of calls is an attribute of the class."""
    return _job(_OfTheClass)


def counter_in_a_default() -> ps.Job:
    """The loss keeps its state in a default argument."""

    def loss(model, batch, seen=[]):  # noqa: B006
        seen.append(len(batch[0]))
        return squares(model, batch) * (1 + sum(seen) / 100)

    return _job(loss=loss)


def counter_in_a_context_variable() -> ps.Job:
    """A ContextVar counts."""

    def loss(model, batch):
        CALLS.set(CALLS.get() + 1)
        return squares(model, batch) * 0.98 ** CALLS.get()

    return _job(loss=loss)


class _Cached(_Deep):
    @functools.cached_property
    def scale(self):
        return self.layers[0].weight.detach().norm().item()

    def forward(self, x):
        return self.layers(x) * self.scale


def scale_of_the_first_weights() -> ps.Job:
    """A cached_property is computed from the weights as they are at the first call."""
    return _job(_Cached, optimizer=lambda w: torch.optim.SGD(w, lr=0.02))


class _Scheduled(_Deep):
    def __init__(self) -> None:
        super().__init__()
        self.shares = (1 / (1 + k / 10) for k in itertools.count())

    def forward(self, x):
        return self.layers(x) * next(self.shares)


def generator_on_the_model() -> ps.Job:
    """The model holds a Python generator and takes its next value at every call."""
    return _job(_Scheduled)


def weights_clamped_by_the_loss() -> ps.Job:
    """The loss clamps weights in place before it uses them, as in WGAN."""

    def loss(model, batch):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.25, 0.25)
        return squares(model, batch)

    return _job(loss=loss)


def second_loss_backwards_itself() -> ps.Job:
    """The loss calls backward on an auxiliary loss and returns the main one."""

    def loss(model, batch):
        (0.1 * model(batch[0]).square().mean()).backward()
        return squares(model, batch)

    return _job(loss=loss)


def weight_of_the_rate() -> ps.Job:
    """The loss reads the rate of the optimizer, which a schedule moves."""
    made: list[Optimizer] = []

    def optimizer(weights):
        made.append(torch.optim.SGD(weights, lr=0.2))
        return made[-1]

    def loss(model, batch):
        return (
            squares(model, batch) + made[-1].param_groups[0]["lr"] * model(batch[0]).square().mean()
        )

    return _job(loss=loss, optimizer=optimizer, learning_rate=lambda step: 0.8**step)


class _Prodigy(Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.d, self.s = 0.01, 0.0
        self.first = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        rows = [p for g in self.param_groups for p in g["params"]]
        dots = sum(
            float((f - p).flatten() @ p.grad.flatten())
            for p, f in zip(rows, self.first, strict=True)
        )
        self.s += sum(float(p.grad.abs().sum()) for p in rows)
        self.d = max(self.d, 0.5 * dots / self.s if self.s else 0.0, self.d * 1.02)
        for p in rows:
            p.sub_(p.grad, alpha=self.d)


def rate_estimated_from_all() -> ps.Job:
    """Prodigy-like: one estimate of the distance over all parameters."""
    return _job(optimizer=_Prodigy)


def teacher_moved_after_the_step() -> ps.Job:
    """A hook of the optimizer moves a frozen teacher inside the model towards the student."""
    built: list[nn.Module] = []

    def model():
        made = nn.ModuleDict({"student": deep(), "teacher": deep().requires_grad_(False)})
        made["teacher"].load_state_dict(made["student"].state_dict())
        built.append(made)
        return made

    def optimizer(weights):
        made = torch.optim.SGD(weights, lr=0.1)

        def follow(*_):
            with torch.no_grad():
                both = built[-1]["teacher"].parameters(), built[-1]["student"].parameters()
                for old, new in zip(*both, strict=True):
                    old.lerp_(new, 0.2)

        made.register_step_post_hook(follow)
        return made

    def loss(model, batch):
        found = model["student"](batch[0])
        return F.mse_loss(found, batch[1]) + F.mse_loss(found, model["teacher"](batch[0]))

    return _job(model, loss, optimizer=optimizer)


def data_from_the_model() -> ps.Job:
    """`data` asks the model itself for a part of the targets, as self-play does."""
    built: list[nn.Module] = []

    def model():
        built.append(deep())
        return built[-1]

    def data(start):
        for index in itertools.count(start):
            x, y = pair(index)
            with torch.no_grad():
                y = y + 0.5 * built[-1](x)
            yield x, y

    return _job(model, data=data)


def data_for_the_width_of_the_model() -> ps.Job:
    """`data` asks the model how wide its batches have to be, and of which dtype."""
    built: list[nn.Module] = []

    def model():
        built.append(deep())
        return built[-1]

    def data(start):
        for index in itertools.count(start):
            weight = next(built[-1].parameters())
            x, y = pair(index)
            yield x[:, : weight.shape[1]].to(weight.dtype), y

    return _job(model, data=data)


def siamese_with_batch_norm() -> ps.Job:
    """Two forwards in a loss: the running statistics move twice a micro-batch."""

    def model():
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh(), deep(3)
        )

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1]) + 0.3 * model(2 * batch[0] + 1).square().mean()

    return _job(model, loss, optimizer=lambda w: torch.optim.SGD(w, lr=0.05))


class _Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.LazyLinear(WIDTH), deep(3)

    def forward(self, x):
        return self.rest(torch.tanh(self.first(x)))


def lazy_layer() -> ps.Job:
    """A LazyLinear, which is made by the first batch."""
    return _job(_Lazy)


def compiled_model() -> ps.Job:
    """The model is under torch.compile (its eager backend), as scripts leave it."""
    return _job(lambda: torch.compile(deep(), backend="eager"))


class _Epochs(Sampler):
    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self):
        return 60

    def __iter__(self):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        return iter(order.tolist())


def sampler_that_counts_epochs() -> ps.Job:
    """A sampler seeds each epoch by its own number, which it counts itself."""
    made = [pair(index, rows=1) for index in range(60)]
    rows = TensorDataset(torch.cat([x for x, _ in made]), torch.cat([y for _, y in made]))
    loader = DataLoader(rows, batch_size=4, sampler=_Epochs())

    def data(start):
        passes = itertools.chain.from_iterable(itertools.repeat(loader))
        return itertools.islice(passes, start, None)

    return _job(data=data)


def start_rounded_to_an_epoch() -> ps.Job:
    """`data` starts at the epoch that `start` is in, not at `start`."""
    return _job(data=lambda start: (pair(k) for k in itertools.count(start - start % 10)))


def read_ahead_by_a_thread() -> ps.Job:
    """A thread reads ahead through a queue."""

    def data(start):
        ready: queue.Queue = queue.Queue(3)

        def fill():
            for index in itertools.count(start):
                ready.put(pair(index))

        threading.Thread(target=fill, daemon=True).start()
        while True:
            yield ready.get()

    return _job(data=data)


def list_for_data() -> ps.Job:
    """`data` returns a list, not an iterator."""
    rows = [pair(index) for index in range(60)]
    return _job(data=lambda start: rows[start:])


def expanded_batches() -> ps.Job:
    """Targets are one row, expanded; inputs are transposed."""

    def data(start):
        for x, y in pairs(start):
            yield x.t().contiguous().t(), y[:1].expand(4, 4)

    return _job(data=data)


def unfreezes_itself() -> ps.Job:
    """The optimizer's hook freezes the first layer after three steps."""
    built: list[nn.Module] = []

    def model():
        built.append(deep())
        return built[-1]

    def optimizer(weights):
        made = torch.optim.SGD(weights, lr=0.1)
        calls = itertools.count(1)
        made.register_step_post_hook(
            lambda *_: built[-1][0].requires_grad_(next(calls) < 3) and None
        )
        return made

    return _job(model, optimizer=optimizer)


class _Observed(nn.Module):
    """Counts what it sees in a tensor of the module's own dict, beside the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.stats = {"mean": torch.zeros(4)}

    def forward(self, x):
        y = self.layers(x)
        self.stats["mean"] = 0.9 * self.stats["mean"] + 0.1 * y.detach().mean(0)
        return y - self.stats["mean"]


def tensor_in_a_dict() -> ps.Job:
    """A running mean in a dict of the module, replaced at every call."""
    return _job(_Observed)


def batch_norm_with_momentum_of_the_step() -> ps.Job:
    """A schedule moves the momentum of batch norm."""
    built: list[nn.Module] = []

    def model():
        built.append(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh(), deep(3)
            )
        )
        return built[-1]

    def rate(step):
        built[-1][1].momentum = 0.5 * 0.8**step
        return 1.0

    return _job(model, learning_rate=rate)


def per_sample_gradients() -> ps.Job:
    """Clipping sample by sample, by vmap over grad, in the loss."""

    def loss(model, batch):
        weights = dict(model.named_parameters())

        def one(weights, x, y):
            return F.mse_loss(torch.func.functional_call(model, weights, (x[None],))[0], y)

        each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(weights, *batch)
        norms = torch.stack([g.detach().flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        share = (0.5 / (norms + 1e-6)).clamp(max=1.0)
        return sum(
            ((share[:, None] * g.flatten(1)).mean(0).detach() * w.flatten()).sum()
            for g, w in zip(each.values(), weights.values(), strict=True)
        )

    return _job(loss=loss, optimizer=lambda w: torch.optim.SGD(w, 0.1))
