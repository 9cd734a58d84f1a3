"""Buffers that forward writes: running statistics, teachers, queues, counters."""

import torch
from small import WIDTH, classes, deep, entropy, images, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import penstock as ps

THIRD = {"*": "chimera", "batch_norm": "replicas", "running_maximum": "replicas"}


def _job(model, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _convolutional(**options) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, **options), nn.SiLU()),
        *(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, **options), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)),
    )


def _slowly(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)


def batch_norm() -> ps.Job:
    """A small CNN with batch norm: mean, variance and number of batches."""
    return _job(_convolutional, entropy, images, optimizer=_slowly)


def batch_norm_that_averages_all() -> ps.Job:
    """Batch norm with momentum=None: the mean over all batches seen."""
    return _job(lambda: _convolutional(momentum=None), entropy, images, optimizer=_slowly)


def batch_norm_that_is_frozen() -> ps.Job:
    """One batch norm stays in eval mode, as fine-tuned backbones have it."""

    def model():
        made = _convolutional()
        made[1].eval()
        return made

    return _job(model, entropy, images, optimizer=_slowly)


def spectral_norms() -> ps.Job:
    """Spectral norm: a step of power iteration at every forward, and weights that depend on it."""

    def model():
        made = deep()
        for at in (0, 2, 4):
            spectral_norm(made[at])
        return made

    return _job(model)


class _Quantised(nn.Module):
    """Codes that follow the inputs nearest to them by a moving average, and replace these."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = deep(3, outputs=WIDTH), deep(3)
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x):
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        chosen = F.one_hot(nearest, 6).to(z.dtype)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(0.1 * chosen.sum(0))
                share = 0.1 * chosen.t() @ z.detach()
                self.codes.mul_(0.9).add_(share + 0.01 * self.codes)
        quantised = z + (self.codes[nearest] - z).detach()
        return self.decode(quantised)


def vector_quantisation() -> ps.Job:
    """Codes follow a moving average, and the next micro-batch is quantised by the new ones."""
    return _job(_Quantised)


class _Taught(nn.Module):
    """A teacher of buffers that follows the student."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        for name, value in self.layers.named_parameters():
            self.register_buffer(f"teacher_{name.replace('.', '_')}", value.detach().clone())

    def forward(self, x):
        teacher = {}
        for name, value in self.layers.named_parameters():
            kept = getattr(self, f"teacher_{name.replace('.', '_')}")
            with torch.no_grad():
                kept.mul_(0.95).add_(0.05 * value.detach())
            teacher[name] = kept
        with torch.no_grad():
            target = torch.func.functional_call(self.layers, teacher, (x,))
        return self.layers(x), target


def teacher_of_a_moving_average() -> ps.Job:
    """The teacher is made of buffers; every forward moves it towards the student."""

    def loss(model, batch):
        out, target = model(batch[0])
        return F.mse_loss(out, batch[1]) + F.mse_loss(out, target)

    return _job(_Taught, loss)


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += len(x)
        return self.layers(x)


def counter_of_samples() -> ps.Job:
    """A buffer counts the samples seen."""
    return _job(_Counted)


class _Warmed(_Counted):
    def forward(self, x):
        self.seen += 1
        return self.layers(x) * (self.seen / (10 + self.seen))


def counter_that_scales() -> ps.Job:
    """A buffer counts the micro-batches, and the output grows with it."""
    return _job(_Warmed)


class _Queued(nn.Module):
    """Keys of the last batches, kept in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep(outputs=WIDTH)
        self.register_buffer("queue", F.normalize(torch.randn(16, WIDTH)))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        keys = F.normalize(self.layers(x))
        negatives = self.queue.clone().detach()
        with torch.no_grad():
            rows = (self.at + torch.arange(len(x))) % 16
            self.queue.index_copy_(0, rows, keys.detach())
            self.at.copy_((self.at + len(x)) % 16)
        return keys, negatives


def _contrast(model, batch):
    queries, negatives = model(batch[0])
    keys, _ = F.normalize(batch[0] + 0.1), None
    near = (queries * keys).sum(1, keepdim=True)
    return F.cross_entropy(
        torch.cat([near, queries @ negatives.t()], 1), torch.zeros(len(near), dtype=torch.long)
    )


def queue_of_keys() -> ps.Job:
    """A memory bank: the keys of the last sixteen samples are the negatives of the next."""
    return _job(_Queued, _contrast)


class _Ranged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x):
        y = self.layers(x)
        self.largest.copy_(torch.maximum(self.largest, y.detach().abs().amax(0)))
        return y


def running_maximum() -> ps.Job:
    """A buffer keeps the largest output seen, as observers of quantisation do."""
    return _job(_Ranged)


class _Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(WIDTH, WIDTH), deep(3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.scale.lerp_(x.std(0), 0.1)
        return self.rest((x - self.mean) / (self.scale + 1e-2))


def normalised_by_running_statistics() -> ps.Job:
    """Inputs are normalised by the running statistics themselves, so order matters."""
    return _job(_Renormalised)


class _Centred(nn.Module):
    """The centre of the outputs, kept by assigning a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        y = self.layers(x)
        out = (y - self.centre).log_softmax(-1)
        self.centre = 0.9 * self.centre + 0.1 * y.detach().mean(0)
        return out


def centre_that_is_assigned() -> ps.Job:
    """`self.centre = ...` puts a new tensor in the buffer's place."""
    return _job(_Centred)


class _Balanced(nn.Module):
    """Experts whose bias for the choice follows how often they were chosen, by its sign."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        with torch.no_grad():
            load = F.one_hot(chosen, 4).sum((0, 1)).to(x.dtype)
            self.bias += 0.05 * torch.sign(load.mean() - load)
        mask = F.one_hot(chosen, 4).sum(1) * scores
        return self.head(sum(mask[:, k, None] * e(x) for k, e in enumerate(self.experts)))


def experts_balanced_by_a_bias() -> ps.Job:
    """The bias of each expert goes up or down at every micro-batch, by the sign of its load."""
    return _job(_Balanced)


class _Unsaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x):
        y = self.layers(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean


def average_that_is_not_saved() -> ps.Job:
    """A moving average in a buffer that is not persistent, which forward reads."""
    return _job(_Unsaved)


class _Histogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.register_buffer("counts", torch.zeros(4, dtype=torch.long))

    def forward(self, x):
        y = self.layers(x)
        self.counts.scatter_add_(0, y.argmax(1), torch.ones(len(x), dtype=torch.long))
        return y


def histogram_of_classes() -> ps.Job:
    """Whole numbers: how often each class was the greatest."""
    return _job(_Histogram, entropy, classes)


def buffer_that_the_loss_writes() -> ps.Job:
    """The loss, not the model, moves a buffer of the model."""

    def loss(model, batch):
        found = entropy(model.layers, batch)
        model.seen.add_(batch[1].sum())
        return found

    return _job(_Counted, loss, classes)
