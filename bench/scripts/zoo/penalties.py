"""Losses as papers have them, with penalties and tables of their own."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


def gen(k):
    return torch.Generator().manual_seed(k)


def net(inputs=8, outputs=4):
    return nn.Sequential(
        nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, outputs)
    )


def adam(w):
    return torch.optim.AdamW(w, 3e-3)


def classes(start):
    for k in itertools.count(start):
        x = torch.randn(4, 8, generator=gen(k))
        yield x, x[:, :4].argmax(1)


def numbered(start):
    for k in itertools.count(start):
        index = torch.arange(4 * k, 4 * k + 4) % 24
        x = torch.randn(24, 8, generator=gen(7))[index]
        yield index, x, x[:, :4].argmax(1)


def job(loss, model=net, data=classes, opt=adam, **more):
    return ps.Job(model=model, loss=loss, data=data, optimizer=opt, **{"micro_batches": 4, **more})


def penalty_each_sixteenth() -> ps.Job:
    """R1: a gradient penalty at each sixteenth call only, times sixteen."""

    class Loss:
        def __init__(self):
            self.calls = 0

        def __call__(self, model, batch):
            x, y = batch
            regular = self.calls % 16 == 0
            self.calls += 1
            x = x.requires_grad_(regular)
            out = model(x)
            loss = F.cross_entropy(out, y)
            if regular:
                (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = loss + 0.1 * 16 * grad.square().sum(1).mean()
            return loss

    return job(Loss())


def projected_conflicts() -> ps.Job:
    """PCGrad: gradients of two tasks, projected where they conflict, given as a surrogate."""

    def model():
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))

    def loss(model, batch):
        x, y = batch
        out = model(x)
        first, second = F.cross_entropy(out[:, :4], y), F.mse_loss(out[:, 4], x.sum(1))
        weights = list(model.parameters())
        a = torch.autograd.grad(first, weights, retain_graph=True)
        b = torch.autograd.grad(second, weights, retain_graph=True)
        dot = sum((u * v).sum() for u, v in zip(a, b, strict=True))
        na, nb = sum(u.square().sum() for u in a), sum(v.square().sum() for v in b)
        less = dot.clamp(max=0)
        final = [u - less / nb * v + v - less / na * u for u, v in zip(a, b, strict=True)]
        surrogate = sum((w * g.detach()).sum() for w, g in zip(weights, final, strict=True))
        return surrogate - surrogate.detach() + (first + second).detach()

    return job(loss, model)


def temporal_ensemble_in_a_buffer() -> ps.Job:
    """The same table as a buffer of the model, by number of the sample."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.register_buffer("table", torch.full((24, 4), 0.25))

        def forward(self, x):
            return self.net(x)

    def loss(model, batch):
        index, x, y = batch
        out = model(x)
        target = model.table[index]
        model.table[index] = 0.6 * target + 0.4 * out.detach().softmax(1)
        return F.cross_entropy(out, y) + 0.5 * F.mse_loss(out.softmax(1), target)

    return job(loss, Net, numbered)


def held_by_fisher() -> ps.Job:
    """EWC: after the 24th call the weights and a Fisher diagonal are kept, and a penalty begins."""

    class Ewc:
        def __init__(self):
            self.calls, self.old, self.fisher = 0, None, None

        def __call__(self, model, batch):
            x, y = batch
            self.calls += 1
            if self.calls == 24:
                loss = F.cross_entropy(model(x), y)
                grads = torch.autograd.grad(loss, list(model.parameters()))
                self.fisher = [g.square() for g in grads]
                self.old = [p.detach().clone() for p in model.parameters()]
            loss = F.cross_entropy(model(x), y)
            if self.old is not None:
                loss = loss + 50 * sum(
                    (f * (p - o).square()).sum()
                    for f, p, o in zip(self.fisher, model.parameters(), self.old, strict=True)
                )
            return loss

    return job(Ewc())


def attacked_inputs() -> ps.Job:
    """FGSM: the input is moved along the sign (a tanh of it) of its gradient in eval mode, BN."""

    def model():
        return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))

    def loss(model, batch):
        x, y = batch
        model.eval()
        moved = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
        model.train()
        return F.cross_entropy(model((x + 0.1 * torch.tanh(30 * grad)).detach()), y)

    return job(loss, model)


def virtual_adversary() -> ps.Job:
    """VAT: one power iteration from random noise, for a direction in which outputs change most."""

    def loss(model, batch):
        x, y = batch
        out = model(x)
        with torch.no_grad():
            target = out.softmax(1)
        d = F.normalize(torch.randn_like(x), dim=1)
        d.requires_grad_()
        shift = F.kl_div(model(x + 1e-1 * d).log_softmax(1), target, reduction="batchmean")
        (g,) = torch.autograd.grad(shift, d)
        d = F.normalize(g, dim=1).detach()
        return F.cross_entropy(out, y) + F.kl_div(
            model(x + d).log_softmax(1), target, reduction="batchmean"
        )

    return job(loss)


def margin_that_grows() -> ps.Job:
    """ArcFace: a hook of the optimizer makes the margin of the angle grow."""
    margin = torch.zeros(())

    class Arc(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.centres = net(8, 6), nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            return F.normalize(self.net(x), dim=1) @ F.normalize(self.centres, dim=1).t()

    def loss(model, batch):
        cos = model(batch[0]).clamp(-0.99, 0.99)
        one = F.one_hot(batch[1], 4).bool()
        return F.cross_entropy(
            8 * torch.where(one, torch.cos(torch.acos(cos) + margin), cos), batch[1]
        )

    def opt(w):
        made = torch.optim.SGD(w, lr=0.05, momentum=0.9)
        made.register_step_post_hook(lambda *_: margin.add_(0.03).clamp_(max=0.2))
        return made

    return job(loss, Arc, opt=opt)
