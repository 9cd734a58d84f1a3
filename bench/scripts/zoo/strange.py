"""Strange shapes: holders, losses that couple samples late, odd data, optimizers in optimizers."""

import collections
import io
import itertools
import sqlite3
import zipfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


def g(k):
    return torch.Generator().manual_seed(k)


def job(model, loss, data, opt=None, **o):
    opt = opt or (lambda w: torch.optim.AdamW(w, 1e-3))
    return ps.Job(model=model, loss=loss, data=data, optimizer=opt, **{"micro_batches": 4, **o})


def classes(start):
    for k in itertools.count(start):
        e = g(k)
        yield torch.randn(8, 16, generator=e), torch.randint(0, 4, (8,), generator=e)


def net(n=16, o=4):
    return nn.Sequential(nn.Linear(16, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, o))


def ce(m, b):
    return F.cross_entropy(m(b[0]), b[1])


class Lookahead(torch.optim.Optimizer):
    """A subclass that holds another optimizer, with its slow weights in the state."""

    def __init__(self, params, k=3, alpha=0.5):
        super().__init__(params, {"lr": 0.1, "k": k, "alpha": alpha})
        self.fast = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.fast.step()
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.calls % group["k"] == 0:
                    slow.lerp_(p, group["alpha"])
                    p.copy_(slow)


def lookahead_with_another_inside() -> ps.Job:
    """Lookahead with another inside."""

    return job(net, ce, classes, Lookahead)


class Centralized(torch.optim.AdamW):
    """Gradient centralization, and from step 7 on the rate follows the largest moment of all."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in every:
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
        if self.state and int(self.state[every[0]]["step"]) >= 7:
            most = max(float(self.state[p]["exp_avg"].abs().max()) for p in every)
            for group in self.param_groups:
                group["lr"] = 1e-3 / (1 + 100 * most)
        return super().step(closure)


def moments_of_all_late() -> ps.Job:
    """Moments of all late."""

    return job(net, ce, classes, lambda w: Centralized(w, lr=1e-3))


def mined_late() -> ps.Job:
    """Half of the hardest samples, only in micro-batches with a flag, which come from 25 on."""

    def data(start):
        for k, (x, y) in zip(itertools.count(start), classes(start)):
            yield x, y, torch.tensor(float(k >= 25 and k % 3 == 0))

    def loss(m, b):
        each = F.cross_entropy(m(b[0]), b[1], reduction="none")
        hard = each.topk(4).values.mean()
        return torch.where(b[2] > 0, hard, each.mean())

    return job(net, loss, data)


class Plateau(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler with state of its own, that looks into the optimizer."""

    def __init__(self, optimizer):
        self.seen = collections.deque([0.0], maxlen=4)
        super().__init__(optimizer)

    def get_lr(self):
        first = self.optimizer.param_groups[0]["params"][0]
        kept = self.optimizer.state.get(first, {}).get("exp_avg_sq")
        self.seen.append(0.0 if kept is None else float(kept.sum()))
        scale = 1.0 / (1.0 + sum(self.seen))
        return [base * scale for base in self.base_lrs]


def scheduler_that_reads_moments() -> ps.Job:
    """Scheduler that reads moments."""

    return job(net, ce, classes, scheduler=Plateau)


def pre_hook_that_removes_itself() -> ps.Job:
    """Initialises by data, as weight norm may, in the first call, by a hook that then goes."""

    def model():
        made = net()

        def first(module, args):
            with torch.no_grad():
                made[0].bias.copy_(-(args[0] @ made[0].weight.T).mean(0))
            handle.remove()

        handle = made[0].register_forward_pre_hook(first)
        return made

    return job(model, ce, classes)


def held_in_a_dataclass() -> ps.Job:
    """The loss asks a holder for the model and its temperature, which an optimizer's hook cools."""

    class Holder:
        model = None
        heat = 1.0

    def model():
        Holder.model = net()
        return Holder.model

    def loss(_, b):
        return F.cross_entropy(Holder.model(b[0]) / Holder.heat, b[1])

    def opt(w):
        made = torch.optim.SGD(w, lr=0.1)

        def cool(*_):
            Holder.heat = max(0.5, Holder.heat * 0.98)

        made.register_step_post_hook(cool)
        return made

    return job(model, loss, classes, opt)


def rows_of_a_database() -> ps.Job:
    """sqlite in memory, asked by each data; rows are written back with how often they were read."""
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table rows (k integer primary key, x blob, read integer default 0)")
    for k in range(256):
        base.execute(
            "insert into rows(k, x) values (?, ?)",
            (k, torch.randn(17, generator=g(k)).numpy().tobytes()),
        )

    def data(start):
        for k in itertools.count(start):
            found = base.execute(
                "select x, read from rows where k >= ? order by k limit 8", (8 * k % 256,)
            ).fetchall()
            base.execute(
                "update rows set read = read + 1 where k >= ? and k < ?",
                (8 * k % 256, 8 * k % 256 + 8),
            )
            rows = torch.stack(
                [torch.frombuffer(bytearray(x), dtype=torch.float32) for x, _ in found]
            )
            yield rows[:, :16], (rows[:, 16] > 0).long()

    return job(net, ce, data)


def rows_of_a_zip() -> ps.Job:
    """npy members of a zip in memory, opened anew for each row."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as z:
        for k in range(64):
            part = io.BytesIO()
            np.save(part, np.random.default_rng(k).standard_normal(16).astype(np.float32))
            z.writestr(f"{k}.npy", part.getvalue())
    kept = whole.getvalue()

    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.zip = zipfile.ZipFile(io.BytesIO(kept))

        def __len__(self):
            return 64

        def __getitem__(self, k):
            x = np.load(io.BytesIO(self.zip.read(f"{k}.npy")))
            return x, int(x[0] > 0)

    return job(net, ce, ps.batches(Rows(), 8), micro_batches=4)


class Centers(nn.Module):
    """Centres of classes that forward moves, only of those that are there; class 3 comes late."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)
        self.register_buffer("centers", torch.zeros(4, 16))

    def forward(self, x, y):
        z = self.body(x)
        near = (z - self.centers[y].detach()).square().mean()
        with torch.no_grad():
            for c in range(4):
                mask = (y == c).float()[:, None]
                n = mask.sum()
                mean = (z * mask).sum(0) / n.clamp(min=1)
                self.centers[c] = torch.where(
                    n > 0, 0.9 * self.centers[c] + 0.1 * mean, self.centers[c]
                )
        return F.cross_entropy(self.head(z), y) + 0.1 * near


def centers_that_move() -> ps.Job:
    """Centers that move."""

    def data(start):
        for k, (x, y) in zip(itertools.count(start), classes(start)):
            yield x, y if k > 18 else y.clamp(max=2)

    return job(Centers, lambda m, b: m(*b), data)


def thaws_by_the_optimizer() -> ps.Job:
    """A subclass that unfreezes the body from its sixth step on, by weights' requires_grad."""

    class Thawing(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            if self.steps == 6:
                for group in self.param_groups:
                    for p in group["params"]:
                        p.requires_grad_(True)
            return super().step(closure)

    def model():
        made = net()
        made[0].requires_grad_(False)
        return made

    return job(model, ce, classes, lambda w: Thawing(w, lr=0.1))


class Straight(torch.autograd.Function):
    """Its own backward counts, and from the thirtieth call lets less through."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        Straight.count += 1
        return grad if Straight.count < 30 else grad * 0.5


def function_that_counts() -> ps.Job:
    """Function that counts."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.b(Straight.apply(self.a(x)))

    return job(Net, ce, classes)


def batch_std_when_it_is_large() -> ps.Job:
    """The loss divides by the batch's spread where that is above a bound: 27 is the first."""

    def data(start):
        for k, (x, y) in zip(itertools.count(start), classes(start)):
            yield (x * 5 if k % 9 == 0 and k > 20 else x), y

    def loss(m, b):
        spread = b[0].std()
        return F.cross_entropy(m(b[0] / torch.where(spread > 2, spread, torch.ones(()))), b[1])

    return job(net, loss, data)


def hook_that_keeps_activations() -> ps.Job:
    """A forward hook keeps the hidden state; the loss takes a penalty from what the hook kept."""
    kept = {}

    def model():
        made = net()
        made[1].register_forward_hook(lambda m, a, out: kept.update(h=out))
        return made

    def loss(m, b):
        out = m(b[0])
        return F.cross_entropy(out, b[1]) + 0.01 * kept["h"].abs().mean()

    return job(model, loss, classes)


def penalty_of_the_step_before() -> ps.Job:
    """Like the one above, but the loss reads before it calls: of the micro-batch before."""
    kept = {}

    def model():
        made = net()
        made[1].register_forward_hook(lambda m, a, out: kept.update(h=out.detach()))
        return made

    def loss(m, b):
        before = kept.get("h")
        out = m(b[0])
        return F.cross_entropy(out, b[1]) + (
            0.0 if before is None else 0.1 * (before.mean() - out.mean()).square()
        )

    return job(model, loss, classes)


def two_optimizers_in_one() -> ps.Job:
    """Muon for matrices, AdamW for the rest, in one subclass."""

    class Both(torch.optim.Optimizer):
        def __init__(self, params):
            params = list(params)
            super().__init__(
                [
                    {"params": [p for p in params if p.ndim == 2], "muon": True},
                    {"params": [p for p in params if p.ndim != 2], "muon": False},
                ],
                {"lr": 0.02},
            )
            self.rest = torch.optim.AdamW(self.param_groups[1]["params"], lr=1e-3)

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                x = m / (m.norm() + 1e-7)
                for _ in range(3):
                    a = x @ x.T
                    x = 2.0 * x - 1.5 * a @ x + 0.5 * a @ a @ x
                p.add_(x, alpha=-0.02)
            self.rest.step()

        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)
            self.rest.zero_grad(set_to_none)

    return job(net, ce, classes, Both)
