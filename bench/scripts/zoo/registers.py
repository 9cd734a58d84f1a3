"""Buffers as published layers keep them: means of classes, codebooks, ranges, counts, switches."""

import torch
from small import WIDTH, classes, deep, entropy, images, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F

import penstock as ps


def _job(model, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


class _Kept(nn.Module):
    """Layers, and buffers by name."""

    def __init__(self, layers=deep, **buffers) -> None:
        super().__init__()
        self.layers = layers()
        for name, value in buffers.items():
            self.register_buffer(name, value)


class _Means(_Kept):
    def __init__(self) -> None:
        super().__init__(means=torch.zeros(4, 4), seen=torch.zeros(4))


def means_of_classes() -> ps.Job:
    """Mean and number of each class's outputs; samples are drawn to the mean of their class."""

    def loss(model, batch):
        out, labels = model.layers(batch[0]), batch[1]
        near = (out - model.means[labels]).square().mean()
        with torch.no_grad():
            ones = F.one_hot(labels, 4).float()
            model.seen += ones.sum(0)
            share = ones.sum(0) / model.seen.clamp(min=1)
            means = ones.t() @ out / ones.sum(0).clamp(min=1)[:, None]
            model.means += share[:, None] * (means - model.means)
        return F.cross_entropy(out, labels) + near

    return _job(_Means, loss, classes)


class _Codes(_Kept):
    """A codebook by moving averages of counts and sums; codes of no use take a sample."""

    def __init__(self) -> None:
        codes = torch.randn(6, 4)
        super().__init__(codes=codes, counts=torch.ones(6), sums=codes.clone())

    def forward(self, x):
        out = self.layers(x)
        nearest = torch.cdist(out, self.codes).argmin(1)
        found = self.codes[nearest]
        with torch.no_grad():
            ones = F.one_hot(nearest, 6).float()
            self.counts.mul_(0.8).add_(0.2 * ones.sum(0))
            self.sums.mul_(0.8).add_(0.2 * ones.t() @ out)
            codes = self.sums / self.counts[:, None].clamp(min=1e-3)
            self.codes.copy_(torch.where(self.counts[:, None] < 0.1, out[:1], codes))
        return out + (found - out).detach(), (out - found.detach()).square().mean()


def codebook_that_revives_codes() -> ps.Job:
    """A VQ layer whose codes follow samples; unused ones are set to a sample, which comes late."""

    def loss(model, batch):
        out, near = model(batch[0])
        return F.mse_loss(out, batch[1]) + 0.25 * near

    return _job(_Codes, loss)


class _Conditional(_Kept):
    def __init__(self) -> None:
        super().__init__(high=torch.zeros(()), low=torch.zeros(()))

    def forward(self, x):
        is_high = x.mean() > 0
        self.high.add_(is_high.float())
        self.low.add_((~is_high).float())
        return self.layers(x) * (1 + self.high) / (1 + self.low)


def counters_by_a_condition() -> ps.Job:
    """One counter goes up where the micro-batch's mean is above zero, else the other."""
    return _job(_Conditional)


class _Saturating(_Kept):
    def __init__(self) -> None:
        super().__init__(warmth=torch.zeros(()))

    def forward(self, x):
        self.warmth.add_(1).clamp_(max=30)
        return self.layers(x) * self.warmth / 30


def warm_up_that_ends_at_thirty() -> ps.Job:
    """A buffer goes up by one to thirty and stays there; the output is scaled by it."""
    return _job(_Saturating)


class _Round(_Kept):
    def __init__(self) -> None:
        super().__init__(turn=torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.turn.copy_((self.turn + 1) % 11)
        return self.layers(x) * (1 + self.turn / 20)


def turn_of_eleven() -> ps.Job:
    """A counter that begins anew after eleven micro-batches."""
    return _job(_Round)


class _Slowing(_Kept):
    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(4), count=torch.zeros(()))

    def forward(self, x):
        y = self.layers(x)
        self.count.add_(1)
        share = torch.where(self.count > 24, torch.tensor(0.01), torch.tensor(0.2))
        self.mean.lerp_(y.detach().mean(0), share)
        return y - self.mean


def average_that_slows_after_24() -> ps.Job:
    """A moving average whose share is a twentieth after 24 micro-batches."""
    return _job(_Slowing)


class _Third(_Kept):
    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(WIDTH), count=torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.count.add_(1)
        due = self.count % 3 == 0
        self.mean.copy_(torch.where(due, 0.5 * self.mean + 0.5 * x.mean(0), self.mean))
        return self.layers(x - self.mean)


def mean_of_every_third() -> ps.Job:
    """A mean that every third micro-batch moves."""
    return _job(_Third)


class _Welford(_Kept):
    def __init__(self) -> None:
        super().__init__(n=torch.zeros(()), mean=torch.zeros(WIDTH), m2=torch.ones(WIDTH))

    def forward(self, x):
        self.n += len(x)
        apart = x.mean(0) - self.mean
        self.mean += apart * len(x) / self.n
        self.m2 += x.var(0, unbiased=False) * len(x) + apart.square()
        return self.layers((x - self.mean) / (self.m2 / self.n).sqrt())


def inputs_standardised_by_welford() -> ps.Job:
    """Count, mean and squares over all samples so far, as reinforcement learning has them."""
    return _job(_Welford)


class _Unbiased(_Kept):
    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(4), weight=torch.zeros(()))

    def forward(self, x):
        y = self.layers(x)
        with torch.no_grad():
            self.mean.mul_(0.95).add_(y.mean(0), alpha=0.05)
            self.weight.mul_(0.95).add_(0.05)
        return y - 0.5 * self.mean / self.weight


def average_without_bias() -> ps.Job:
    """A moving average divided by the weight that it has so far, as PopArt's."""
    return _job(_Unbiased)


class _Actnorm(_Kept):
    def __init__(self) -> None:
        super().__init__(ready=torch.zeros((), dtype=torch.bool))
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-3))
                self.ready.fill_(True)
        return self.layers((x + self.shift) * self.scale)


def activation_norm_with_a_switch() -> ps.Job:
    """The first batch sets two parameters; a buffer says that it has been there."""
    return _job(_Actnorm)


class _Decaying(_Kept):
    def __init__(self) -> None:
        super().__init__(largest=torch.full((), 1e-3))

    def forward(self, x):
        y = self.layers(x)
        self.largest.copy_(torch.maximum(0.97 * self.largest, y.detach().abs().max()))
        return y / self.largest.clamp(min=0.5)


def largest_that_fades() -> ps.Job:
    """The largest output so far, which fades by 3 % a micro-batch, scales the output."""
    return _job(_Decaying)


def observers_of_quantisation() -> ps.Job:
    """torch.ao's FakeQuantize with a moving average of the range, as in training for int8."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    def model():
        fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        return nn.Sequential(deep(outputs=WIDTH), fake, nn.Linear(WIDTH, 4))

    return _job(model)


def instance_norm_with_statistics() -> ps.Job:
    """InstanceNorm2d that keeps running statistics."""

    def model():
        norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        return nn.Sequential(
            *(nn.Conv2d(3, 6, 3), norm, nn.Softplus(), nn.Conv2d(6, 6, 3)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
        )

    return _job(model, entropy, images)


def batch_norm_of_the_batch_alone() -> ps.Job:
    """Batch norm without running statistics: samples meet, and no buffer tells of it."""

    def model():
        norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), deep())

    return _job(model)


class _Centres(nn.Module):
    """A criterion with a buffer of its own, which is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(4, 4))

    def forward(self, out, labels):
        near = (out - self.centres[labels]).square().mean()
        with torch.no_grad():
            self.centres.index_add_(0, labels, 0.1 * (out - self.centres[labels]))
        return F.cross_entropy(out, labels) + near


def criterion_with_a_buffer() -> ps.Job:
    """Centres of classes stand in the criterion, beside the model."""
    criterion = _Centres()

    def loss(model, batch):
        return criterion(model(batch[0]), batch[1])

    return _job(deep, loss, classes)
