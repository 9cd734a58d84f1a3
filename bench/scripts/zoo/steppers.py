"""Optimizers and hooks as people write them for one paper."""

import collections
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


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def job(opt, model=net, loss=ce, data=classes, **more):
    return ps.Job(model=model, loss=loss, data=data, optimizer=opt, **{"micro_batches": 4, **more})


class Shampoo(torch.optim.Optimizer):
    def __init__(self, w):
        super().__init__(w, {"lr": 0.05, "every": 3})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                s = self.state[p]
                if p.ndim == 2:
                    if not s:
                        s["left"], s["right"] = 0.1 * torch.eye(len(p)), 0.1 * torch.eye(p.shape[1])
                        s["l"], s["r"] = torch.eye(len(p)), torch.eye(p.shape[1])
                    s["left"] += p.grad @ p.grad.t()
                    s["right"] += p.grad.t() @ p.grad
                    if self.count % g["every"] == 0:
                        s["l"], s["r"] = (self.root(s[k]) for k in ("left", "right"))
                    p.sub_(g["lr"] * s["l"] @ p.grad @ s["r"])
                else:
                    p.sub_(g["lr"] * p.grad)
        self.count += 1

    @staticmethod
    def root(m):
        values, vectors = torch.linalg.eigh(m.double())
        return ((vectors * values.clamp(min=1e-4) ** -0.25) @ vectors.t()).float()


def preconditioned_every_third() -> ps.Job:
    """Shampoo by hand: roots of two matrices are made anew each third step by a count."""
    return job(Shampoo)


def frozen_when_it_has_settled() -> ps.Job:
    """A layer whose gradient's norm falls below a bound is frozen for good: requires_grad off."""

    def opt(w):
        made = torch.optim.SGD(w, lr=0.3)

        def freeze(o, *_):
            for g in o.param_groups:
                for p in g["params"]:
                    if p.grad is not None and p.grad.norm() < 0.045:
                        p.requires_grad_(False)

        made.register_step_post_hook(freeze)
        return made

    return job(opt)


def memory_of_gradients_of_the_past() -> ps.Job:
    """GEM: each gradient is projected off kept ones that disagree, in the deque of a hook."""

    def opt(w):
        made, past = torch.optim.SGD(w, lr=0.1), collections.deque(maxlen=3)

        def project(o, *_):
            every = o.param_groups[0]["params"]
            flat = torch.cat([p.grad.flatten() for p in every])
            for old in past:
                flat = flat - (flat @ old).clamp(max=0) / old.square().sum() * old
            past.append(flat.clone())
            at = 0
            for p in every:
                p.grad.copy_(flat[at : at + p.numel()].view_as(p))
                at += p.numel()

        made.register_step_pre_hook(project)
        return made

    return job(opt)


def scaler_that_looks_for_infinity() -> ps.Job:
    """The loss is scaled by a tensor, which the optimizer divides by, and lets grow."""
    scale = torch.tensor(1024.0)

    class Scaled(torch.optim.SGD):
        good = 0

        @torch.no_grad()
        def step(self, closure=None):
            every = [p for g in self.param_groups for p in g["params"]]
            torch._foreach_div_([p.grad for p in every], scale)
            if all(torch.isfinite(p.grad).all() for p in every):
                super().step()
                self.good += 1
                if self.good % 4 == 0:
                    scale.mul_(2)
            else:
                scale.div_(2)

    def loss(model, batch):
        return ce(model, batch) * scale

    return job(lambda w: Scaled(w, lr=0.1, momentum=0.9), loss=loss)


def steps_of_the_head_first() -> ps.Job:
    """The body's gradients are dropped (set to None) until step 5, by the optimizer's step."""

    class HeadFirst(torch.optim.AdamW):
        turns = 0

        def step(self, closure=None):
            self.turns += 1
            if self.turns < 5:
                for p in self.param_groups[0]["params"][:-2]:
                    p.grad = None
            return super().step(closure)

    return job(lambda w: HeadFirst(w, 1e-2))
