"""Trainers: objects of a class that have model, loss, hooks and counts."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


def gen(k):
    return torch.Generator().manual_seed(k)


def classes(start):
    for k in itertools.count(start):
        x = torch.randn(4, 8, generator=gen(k))
        yield x, x[:, :4].argmax(1)


def net():
    return nn.Sequential(
        nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)
    )


class Trainer:
    """Has it all."""

    def __init__(self):
        self.model, self.steps = None, 0

    def make(self):
        self.model = net()
        return self.model

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, w):
        made = torch.optim.Adam(w, 1e-2)
        made.register_step_post_hook(self.after)
        return made

    def after(self, *_):
        self.steps += 1

    def job(self):
        return ps.Job(
            model=self.make, loss=self.loss, data=classes, optimizer=self.optimizer, micro_batches=4
        )


class ResetsHead(Trainer):
    def after(self, *_):
        self.steps += 1
        if self.steps == 7:
            with torch.no_grad():
                self.model[4].weight.zero_()


def trainer_that_resets_the_head_at_step_seven() -> ps.Job:
    """A trainer's own hook zeroes the head's weights after the seventh step."""
    return ResetsHead().job()


class Swaps(Trainer):
    def loss(self, model, batch):
        self.model = model
        return super().loss(model, batch)

    def make(self):
        return net()

    def after(self, *_):
        self.steps += 1
        if self.steps == 6:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(0.9)


def trainer_that_shrinks_what_the_loss_was_given() -> ps.Job:
    """The loss keeps the model it is given; after six steps a hook shrinks all its weights."""
    return Swaps().job()


class Late(Trainer):
    def after(self, optimizer, *_):
        self.steps += 1
        if self.steps == 6:
            for g in optimizer.param_groups:
                for p in g["params"]:
                    optimizer.state[p]["exp_avg"].zero_()


def trainer_that_forgets_momentum_at_step_six() -> ps.Job:
    """A hook clears first moments after six steps."""
    return Late().job()


class Counted:
    """The callable loss keeps a count in slots."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        out = model(batch[0])
        if self.calls > 26:
            return F.cross_entropy(out, batch[1]) + 0.1 * out.square().mean()
        return F.cross_entropy(out, batch[1])


def loss_with_slots() -> ps.Job:
    """A callable loss of a class with slots counts; from call 27 on there is a penalty."""
    return ps.Job(
        model=net,
        loss=Counted(),
        data=classes,
        optimizer=lambda w: torch.optim.Adam(w, 1e-2),
        micro_batches=4,
    )
