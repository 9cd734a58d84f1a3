"""huggingface/pytorch-image-models, train.py: mixup, label smoothing, drop path, cosine, EMA."""

import math

import torch
from drawn import pictures
from torch import nn

import penstock as ps

num_classes, mixup_alpha, smoothing, lr, warmup, steps = 4, 0.8, 0.1, 5e-3, 3, 20


def one_hot(x, off_value, on_value):
    return torch.full((x.size(0), num_classes), off_value).scatter_(1, x.view(-1, 1), on_value)


def mixup_target(target, lam):
    off_value = smoothing / num_classes
    on_value = 1.0 - smoothing + off_value
    y1, y2 = one_hot(target, off_value, on_value), one_hot(target.flip(0), off_value, on_value)
    return y1 * lam + y2 * (1.0 - lam)


def mixup_collate(samples):
    x, target = torch.utils.data.default_collate(samples)
    lam = float(torch.distributions.Beta(mixup_alpha, mixup_alpha).sample())
    return x * lam + x.flip(0) * (1.0 - lam), mixup_target(target, lam)


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if not self.training:
            return x
        mask = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.drop_prob)
        return x * mask.div_(1 - self.drop_prob)


class Block(nn.Module):
    def __init__(self, dim, drop_path):
        super().__init__()
        self.conv_dw, self.norm = nn.Conv2d(dim, dim, 3, 1, 1, groups=dim), nn.GroupNorm(1, dim)
        self.mlp = nn.Sequential(nn.Conv2d(dim, 2 * dim, 1), nn.GELU(), nn.Conv2d(2 * dim, dim, 1))
        self.gamma, self.drop_path = nn.Parameter(0.5 * torch.ones(dim)), DropPath(drop_path)

    def forward(self, x):
        y = self.mlp(self.norm(self.conv_dw(x)))
        return x + self.drop_path(y * self.gamma[:, None, None])


def create_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 2, 2), Block(8, 0.1), Block(8, 0.2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, num_classes),
    )  # fmt: skip


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * x.log_softmax(dim=-1), dim=-1).mean()


train_loss_fn = SoftTargetCrossEntropy()


# -- the port --------------------------------------------------------------------------------------


def rate(step):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def optimizer(params):
    decay, no_decay = ([p for p in params if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": no_decay, "weight_decay": 0.0}, {"params": decay}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.05, eps=1e-4)


def job() -> ps.Job:
    """Mixup in the collator, weights averaged by `ModelEmaV3`, clipping."""
    return ps.Job(
        model=create_model,
        loss=lambda model, batch: train_loss_fn(model(batch[0]), batch[1]),
        data=ps.batches(pictures(64, 3), 16, collate=mixup_collate),
        optimizer=optimizer,
        learning_rate=rate,
        clip_norm=1.0,
        average=ps.ema(0.998),
    )
