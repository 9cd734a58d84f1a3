"""Hooks, callbacks, optimizers and losses as people write them."""

import math
import random
from itertools import count, islice

import torch
import torch.nn.functional as F
from torch import nn

from penstock import Job


def rng(n):
    return torch.Generator().manual_seed(31 * n + 5)


def rows(start, width=12, size=6, classes=4):
    for n in count(start):
        g = rng(n)
        yield torch.randn(size, width, generator=g), torch.randint(0, classes, (size,), generator=g)


def ce(m, b):
    return F.cross_entropy(m(b[0]), b[1])


def mlp():
    return nn.Sequential(
        nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)
    )


def tensor_hooks() -> Job:
    """Hooks on parameters: gradients are clipped by value one by one, and one is scaled."""

    def model():
        m = mlp()
        for p in m.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        m[0].weight.register_hook(lambda g: g * 0.5)
        return m

    return Job(model, ce, rows, lambda w: torch.optim.SGD(w, 0.1), micro_batches=4)


def post_accumulate() -> Job:
    """A hook after a gradient is accumulated, which counts and normalizes."""

    def model():
        m = mlp()
        m[2].weight.register_post_accumulate_grad_hook(
            lambda p: (p.grad.div_(p.grad.norm() + 1), None)[1]
        )
        return m

    return Job(model, ce, rows, lambda w: torch.optim.SGD(w, 0.1), micro_batches=2)


def activation_hook() -> Job:
    """A forward hook that adds the mean of an activation to a list which the loss empties."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.caught = mlp(), []
            self.net[1].register_forward_hook(lambda m, i, o: self.caught.append(o))
            self.net[3].register_forward_hook(lambda m, i, o: self.caught.append(o))

        def forward(self, x):
            return self.net(x)

    def loss(m, b):
        out = ce(m, b)
        reg = sum(a.abs().mean() for a in m.caught)
        m.caught.clear()
        return out + 0.01 * reg

    return Job(Net, loss, rows, lambda w: torch.optim.Adam(w, 1e-3), micro_batches=4)


def backward_hook() -> Job:
    """A full backward hook that changes the gradient of an input."""

    def model():
        m = mlp()
        m[2].register_full_backward_hook(lambda mod, gi, go: (gi[0] * 0.1,))
        return m

    return Job(model, ce, rows, lambda w: torch.optim.SGD(w, 0.1), micro_batches=2)


class Reverse(torch.autograd.Function):
    strength = 0.0

    @staticmethod
    def forward(ctx, x):
        Reverse.strength = min(1.0, Reverse.strength + 0.01)
        ctx.s = Reverse.strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.s * g


def reversal() -> Job:
    """Gradient reversal by an autograd function whose strength grows with its calls."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.y, self.d = nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def loss(m, b):
        h = torch.relu(m.f(b[0]))
        return F.cross_entropy(m.y(h), b[1]) + F.cross_entropy(m.d(Reverse.apply(h)), b[1] % 2)

    return Job(Net, loss, rows, lambda w: torch.optim.SGD(w, 0.05), micro_batches=2)


class STE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, t):
        ctx.save_for_backward(x, t)
        return (x > t).float()

    @staticmethod
    def backward(ctx, g):
        x, t = ctx.saved_tensors
        s = torch.exp(-(x - t).abs())
        return g * s, -(g * s).sum(0)


def spiking() -> Job:
    """Spiking net: membrane potentials over time, surrogate gradient with a learned threshold."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)
            self.t = nn.Parameter(torch.full((16,), 0.5))

        def forward(self, x):
            v, out = 0, 0
            for _ in range(5):
                v = 0.9 * v + self.a(x)
                s = STE.apply(v, self.t)
                v = v * (1 - s.detach())
                out = out + self.b(s)
            return out / 5

    return Job(Net, ce, rows, lambda w: torch.optim.Adam(w, 1e-2), micro_batches=4)


def curriculum() -> Job:
    """Data that grow harder by index; class weights that follow too."""

    def data(start):
        for n in count(start):
            g = rng(n)
            noise = 2.0 * (1 - math.exp(-n / 30))
            y = torch.randint(0, 4, (6,), generator=g)
            x = F.one_hot(y, 12).float() + noise * torch.randn(6, 12, generator=g)
            yield x, y, torch.tensor([1.0, 1 + n / 50, 1.0, 2.0])

    return Job(
        mlp,
        lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=b[2]),
        data,
        lambda w: torch.optim.Adam(w, 1e-3),
        micro_batches=4,
    )


def accumulate_inside() -> Job:
    """Gradient accumulation written inside the loss: parts of a batch one after the other."""

    def loss(m, b):
        total = b[0].new_zeros(())
        for x, y in zip(b[0].split(2), b[1].split(2), strict=False):
            total = total + F.cross_entropy(m(x), y) / 3
        return total

    return Job(mlp, loss, rows, lambda w: torch.optim.SGD(w, 0.1, 0.9), micro_batches=2)


def backward_inside() -> Job:
    """The loss calls backward itself on all but the last part."""

    def loss(m, b):
        parts = list(zip(b[0].split(2), b[1].split(2), strict=False))
        for x, y in parts[:-1]:
            (F.cross_entropy(m(x), y) / 6).backward()
        x, y = parts[-1]
        return F.cross_entropy(m(x), y) / 3

    return Job(mlp, loss, rows, lambda w: torch.optim.SGD(w, 0.1), micro_batches=2)


def reptile() -> Job:
    """MAML by functional_call: one inner step with create_graph."""

    def loss(m, b):
        params = dict(m.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(m, params, (b[0][:3],)), b[1][:3])
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=False)}
        return F.cross_entropy(torch.func.functional_call(m, fast, (b[0][3:],)), b[1][3:])

    return Job(mlp, loss, rows, lambda w: torch.optim.Adam(w, 1e-3), micro_batches=2)


def vmapped() -> Job:
    """Per-sample gradient norms by vmap, to weight samples."""

    def loss(m, b):
        params = {n: p.detach() for n, p in m.named_parameters()}

        def one(p, x, y):
            return F.cross_entropy(torch.func.functional_call(m, p, (x[None],)), y[None])

        grads = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(params, b[0], b[1])
        norms = sum(g.flatten(1).pow(2).sum(1) for g in grads.values()).sqrt()
        w = 1 / (1 + norms)
        return (F.cross_entropy(m(b[0]), b[1], reduction="none") * w).sum() / w.sum()

    return Job(mlp, loss, rows, lambda w: torch.optim.SGD(w, 0.1), micro_batches=2)


class Callback:
    def before_batch(self, learner): ...
    def after_loss(self, learner): ...


class MixUp(Callback):
    def before_batch(self, learner):
        lam = torch.distributions.Beta(0.4, 0.4).sample((learner.x.shape[0], 1))
        lam = torch.max(lam, 1 - lam)
        perm = torch.randperm(learner.x.shape[0])
        learner.x = lam * learner.x + (1 - lam) * learner.x[perm]
        learner.y2, learner.lam = learner.y[perm], lam.squeeze(1)

    def after_loss(self, learner):
        other = F.cross_entropy(learner.pred, learner.y2, reduction="none")
        learner.loss = (learner.lam * learner.each + (1 - learner.lam) * other).mean()


class Recorder(Callback):
    def __init__(self):
        self.losses, self.n = [], 0

    def after_loss(self, learner):
        self.n += 1
        self.losses.append(learner.loss.detach())


class Learner:
    def __init__(self, *cbs):
        self.cbs = cbs

    def __call__(self, name):
        for cb in self.cbs:
            getattr(cb, name)(self)

    def one_batch(self, model, b):
        self.x, self.y = b
        self("before_batch")
        self.pred = model(self.x)
        self.each = F.cross_entropy(self.pred, self.y, reduction="none")
        self.loss = self.each.mean()
        self("after_loss")
        return self.loss


def fastai_mixup() -> Job:
    """A learner with callbacks: mixup, and a recorder that only records."""
    learner = Learner(MixUp(), Recorder())
    return Job(mlp, learner.one_batch, rows, lambda w: torch.optim.AdamW(w, 1e-3), micro_batches=4)


def one_cycle() -> Job:
    """OneCycleLR, which moves momentum too, discriminative rates by group."""

    def opt(w):
        ps = list(w)
        return torch.optim.Adam([{"params": ps[:2], "lr": 1e-4}, {"params": ps[2:], "lr": 1e-3}])

    sched = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [1e-3, 1e-2], total_steps=50)  # noqa: E731
    return Job(mlp, ce, rows, opt, scheduler=sched, micro_batches=2)


def warm_restarts() -> Job:
    """SequentialLR of LinearLR and CosineAnnealingWarmRestarts."""
    L = torch.optim.lr_scheduler

    def sched(o):
        return L.SequentialLR(
            o, [L.LinearLR(o, 0.1, total_iters=3), L.CosineAnnealingWarmRestarts(o, 4)], [3]
        )

    return Job(
        mlp, ce, rows, lambda w: torch.optim.SGD(w, 0.1, 0.9), scheduler=sched, micro_batches=2
    )


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, k=3, alpha=0.5):
        self.base, self.k, self.alpha, self.n = base, k, alpha, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]
        super().__init__([p for g in base.param_groups for p in g["params"]], {})
        self.param_groups = base.param_groups

    def step(self, closure=None):
        out = self.base.step(closure)
        self.n += 1
        if self.n % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=False):
                for p, s in zip(group["params"], slow, strict=False):
                    s.add_(p.data - s, alpha=self.alpha)
                    p.data.copy_(s)
        return out


def lookahead() -> Job:
    """Lookahead around Adam, its slow weights and counter in attributes."""
    return Job(mlp, ce, rows, lambda w: Lookahead(torch.optim.Adam(w, 1e-2)), micro_batches=2)


class GC(torch.optim.SGD):
    """Gradient centralization, adaptive clipping by unit."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim > 1:
                    p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True))
                    limit = 0.1 * p.norm(dim=1, keepdim=True).clamp(min=1e-3)
                    norm = p.grad.norm(dim=1, keepdim=True)
                    p.grad.mul_((limit / norm.clamp(min=1e-6)).clamp(max=1))
        return super().step(closure)


def centralized() -> Job:
    """An optimizer of one's own: centralized gradients, clipped by unit."""
    return Job(
        mlp, ce, rows, lambda w: GC(w, 0.1, momentum=0.9, weight_decay=1e-4), micro_batches=4
    )


def noisy_labels() -> Job:
    """Small-loss selection: keep 70 % of samples of least loss (Co-teaching)."""

    def loss(m, b):
        each = F.cross_entropy(m(b[0]), b[1], reduction="none")
        keep = each.detach().argsort()[: int(0.7 * len(each))]
        return each[keep].mean()

    return Job(mlp, loss, rows, lambda w: torch.optim.Adam(w, 1e-3), micro_batches=4)


def shuffled_epochs() -> Job:
    """Python's random seeded by epoch, batches by islice of a cycle."""
    table = [
        (torch.randn(6, 12, generator=rng(i)), torch.randint(0, 4, (6,), generator=rng(i + 99)))
        for i in range(7)
    ]

    def data(start):
        def forever():
            for epoch in count():
                order = list(range(7))
                random.Random(epoch).shuffle(order)
                for i in order:
                    yield table[i]

        return islice(forever(), start, None)

    return Job(mlp, ce, data, lambda w: torch.optim.SGD(w, 0.1), micro_batches=3)


class Centers(nn.Module):
    """VQ with EMA codebook: cluster sizes and sums in buffers, dead codes revived."""

    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(12, 8), nn.Linear(8, 12)
        self.register_buffer("code", torch.randn(10, 8))
        self.register_buffer("size", torch.ones(10))
        self.register_buffer("sum", self.code.clone())

    def forward(self, x):
        z = self.enc(x)
        idx = torch.cdist(z.detach(), self.code).argmin(1)
        one = F.one_hot(idx, 10).float()
        q = self.code[idx]
        if self.training:
            with torch.no_grad():
                self.size.lerp_(one.sum(0), 0.1)
                self.sum.lerp_(one.T @ z, 0.1)
                n = self.size.sum()
                self.code.copy_(self.sum / ((self.size + 1e-5) / (n + 1e-4) * n)[:, None])
        out = self.dec(z + (q - z).detach())
        return F.mse_loss(out, x) + 0.25 * F.mse_loss(z, q)


def vq() -> Job:
    """VQ-VAE whose codebook is moved in forward."""
    return Job(
        Centers, lambda m, b: m(b[0]), rows, lambda w: torch.optim.Adam(w, 1e-3), micro_batches=3
    )


class Distill(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp()
        teacher = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.__dict__["teacher"] = teacher  # not among the parameters

    def forward(self, x):
        with torch.no_grad():
            self.teacher.train()
            t = self.teacher(x)
        return self.student(x), t


def hidden_teacher() -> Job:
    """A teacher that the module hides, whose statistics move in train mode."""

    def loss(m, b):
        s, t = m(b[0])
        return F.kl_div(
            F.log_softmax(s / 2, -1), F.softmax(t / 2, -1), reduction="batchmean"
        ) * 4 + 0.1 * F.cross_entropy(s, b[1])

    return Job(Distill, loss, rows, lambda w: torch.optim.SGD(w, 0.1), micro_batches=2)


def batch_renorm() -> Job:
    """Batch renormalization: r and d clipped by limits that follow num_batches_tracked."""

    class BRN(nn.Module):
        def __init__(self, f):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.ones(f)), nn.Parameter(torch.zeros(f))
            self.register_buffer("m", torch.zeros(f))
            self.register_buffer("s", torch.ones(f))
            self.register_buffer("n", torch.tensor(0, dtype=torch.long))

        def forward(self, x):
            mu, sd = x.mean(0), x.std(0, unbiased=False) + 1e-3
            rmax = (2 / 35 * self.n + 25 / 35).clamp(1.0, 3.0)
            r = (sd.detach() / self.s).clamp(1 / rmax, rmax)
            d = ((mu.detach() - self.m) / self.s).clamp(-1, 1)
            y = (x - mu) / sd * r + d
            self.m += 0.1 * (mu.detach() - self.m)
            self.s += 0.1 * (sd.detach() - self.s)
            self.n += 1
            return self.w * y + self.b

    net = lambda: nn.Sequential(nn.Linear(12, 16), BRN(16), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    return Job(net, ce, rows, lambda w: torch.optim.SGD(w, 0.1), micro_batches=3)


def nan_guard() -> Job:
    """A loss that leaves out rows which are not finite, which come from micro-batch 9 on."""

    def data(start):
        for n, (x, y) in enumerate(rows(start), start):
            if n >= 9 and n % 4 == 1:
                x[n % 6] = float("nan")
            yield x, y

    def loss(m, b):
        ok = b[0].isfinite().all(1)
        return F.cross_entropy(m(b[0].nan_to_num()), torch.where(ok, b[1], -100), ignore_index=-100)

    return Job(mlp, loss, data, lambda w: torch.optim.SGD(w, 0.1), micro_batches=2)


def ghost_bn() -> Job:
    """Ghost batch norm: chunks of a batch normalized apart, one set of statistics."""

    class Ghost(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(16, momentum=0.02)

        def forward(self, x):
            return torch.cat([self.bn(c) for c in x.chunk(2, 0)])

    net = lambda: nn.Sequential(nn.Linear(12, 16), Ghost(), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    return Job(net, ce, rows, lambda w: torch.optim.Adam(w, 1e-2), micro_batches=2)


def swapped_buffers() -> Job:
    """A running mean that is rebound (self.mean = ...), not written."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = mlp()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = self.f(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y - self.mean

    return Job(Net, ce, rows, lambda w: torch.optim.SGD(w, 0.1), micro_batches=2)
