"""Rollouts, views and memories: what reinforcement and self-supervised learning keep."""

import copy
import math
from collections import deque
from itertools import count

import torch
import torch.nn.functional as F
from torch import nn

from penstock import Job


def rng(n):
    return torch.Generator().manual_seed(1000 + n)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 3), nn.Linear(32, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, 2**0.5)
        self.register_buffer("obs_mean", torch.zeros(6))
        self.register_buffer("obs_var", torch.ones(6))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, obs):
        if self.training:
            with torch.no_grad():
                m, v, n = obs.mean(0), obs.var(0, unbiased=False), obs.shape[0]
                delta, tot = m - self.obs_mean, self.count + n
                self.obs_var.copy_(
                    (self.obs_var * self.count + v * n + delta**2 * self.count * n / tot) / tot
                )
                self.obs_mean.add_(delta * n / tot)
                self.count.copy_(tot)
        h = self.body(((obs - self.obs_mean) / (self.obs_var + 1e-8).sqrt()).clamp(-5, 5))
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def ppo() -> Job:
    """PPO over stored rollouts, with running observation statistics in forward."""

    def rollouts(start):
        for n in count(start):
            g = rng(n)
            obs = torch.randn(16, 6, generator=g) * 2 + 0.3
            act = torch.randint(0, 3, (16,), generator=g)
            old = (
                torch.log_softmax(torch.randn(16, 3, generator=g), -1)
                .gather(1, act[:, None])
                .squeeze(1)
            )
            yield {
                "obs": obs,
                "act": act,
                "old": old,
                "adv": torch.randn(16, generator=g),
                "ret": torch.randn(16, generator=g),
            }

    def loss(model, b):
        dist, value = model(b["obs"])
        adv = (b["adv"] - b["adv"].mean()) / (b["adv"].std() + 1e-8)
        ratio = (dist.log_prob(b["act"]) - b["old"]).exp()
        pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        return pg + 0.5 * F.mse_loss(value, b["ret"]) - 0.01 * dist.entropy().mean()

    return Job(
        ActorCritic,
        loss,
        rollouts,
        lambda w: torch.optim.Adam(w, 3e-4, eps=1e-5),
        micro_batches=4,
        clip_norm=0.5,
    )


def kl_stop() -> Job:
    """PPO that leaves out the policy loss where KL is already too large."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))

        def forward(self, x):
            return F.log_softmax(self.f(x), -1)

    def data(start):
        for n in count(start):
            g = rng(n)
            yield (
                torch.randn(8, 6, generator=g) * (1 + n % 5),
                torch.randint(0, 3, (8,), generator=g),
                torch.full((8,), -1.1),
            )

    def loss(model, b):
        x, a, old = b
        new = model(x).gather(1, a[:, None]).squeeze(1)
        kl = (old - new).mean().detach()
        return -(new - old).exp().mean() * (kl < 0.02).float() + 0.1 * (new**2).mean()

    return Job(Net, loss, data, lambda w: torch.optim.RMSprop(w, 1e-3), micro_batches=4)


class DINOHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(16, 24, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1)
        self.last.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last(F.normalize(self.mlp(x), dim=-1))


class DINO(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), DINOHead())
        self.teacher = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), DINOHead())
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 24))

    def forward(self, globals_, locals_):
        with torch.no_grad():
            t = self.teacher(globals_.flatten(0, 1))
            target = F.softmax((t - self.center) / 0.04, -1).view(2, -1, 24)
            if self.training:
                self.center.mul_(0.9).add_(t.mean(0, keepdim=True), alpha=0.1)
        n = globals_.shape[1]
        s = torch.cat(
            [
                self.student(globals_.flatten(0, 1)),
                self.student(F.pad(locals_, (1, 1, 1, 1)).flatten(0, 1)),
            ]
        )
        s = F.log_softmax(s / 0.1, -1).view(-1, n, 24)
        total, terms = 0, 0
        for i in range(2):
            for j in range(s.shape[0]):
                if i != j:
                    total, terms = total - (target[i] * s[j]).sum(-1).mean(), terms + 1
        return total / terms


def dino() -> Job:
    """DINO: multi-crop, a centre in a buffer, the teacher moved by a hook of the optimizer."""
    held = {}

    def model():
        held["m"] = DINO()
        return held["m"]

    def optimizer(weights):
        opt = torch.optim.AdamW([p for p in weights if p.requires_grad], 1e-3)
        m = held["m"]

        def ema(*_):
            with torch.no_grad():
                for q, k in zip(m.student.parameters(), m.teacher.parameters(), strict=False):
                    k.mul_(0.99).add_(q.detach(), alpha=0.01)

        opt.register_step_post_hook(ema)
        return opt

    def data(start):
        for n in count(start):
            g = rng(n)
            yield torch.randn(2, 6, 3, 4, 4, generator=g), torch.randn(3, 6, 3, 2, 2, generator=g)

    return Job(model, lambda m, b: m(*b), data, optimizer, micro_batches=2)


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(12, 32), nn.Linear(32, 12)
        self.pos = nn.Parameter(torch.randn(1, 16, 32) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 32))

        def layer():
            return nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)

        self.enc, self.dec = layer(), layer()

    def forward(self, x):
        b = x.shape[0]
        h = self.embed(x) + self.pos
        noise = torch.rand(b, 16, device=x.device)
        shuffle = noise.argsort(1)
        restore = shuffle.argsort(1)
        keep = shuffle[:, :4]
        h = self.enc(h.gather(1, keep[..., None].expand(-1, -1, 32)))
        h = torch.cat([h, self.mask_token.expand(b, 12, -1)], 1)
        h = h.gather(1, restore[..., None].expand(-1, -1, 32))
        out = self.head(self.dec(h + self.pos))
        mask = torch.ones(b, 16, device=x.device)
        mask[:, :4] = 0
        mask = mask.gather(1, restore)
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        err = (out - (x - mean) / (var + 1e-6) ** 0.5).pow(2).mean(-1)
        return (err * mask).sum() / mask.sum()


def mae() -> Job:
    """MAE: random masking by argsort of noise, in forward."""

    def data(start):
        for n in count(start):
            yield torch.randn(4, 16, 12, generator=rng(n))

    def groups(weights):
        named = list(weights.named())
        return torch.optim.SGD(
            [
                {"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.05},
                {"params": [p for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
            ],
            1e-3,
            momentum=0.9,
        )

    return Job(
        MAE,
        lambda m, x: m(x),
        data,
        groups,
        micro_batches=4,
        learning_rate=lambda s: min(1, (s + 1) / 5) * 0.5 * (1 + math.cos(math.pi * s / 40)),
    )


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys):
        i = int(self.ptr)
        self.queue[:, i : i + keys.shape[0]] = keys.T
        self.ptr[0] = (i + keys.shape[0]) % 32

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            for x, y in zip(self.q.parameters(), self.k.parameters(), strict=False):
                y.data = y.data * 0.99 + x.data * 0.01
            k = F.normalize(self.k(b), dim=1)
        logits = (
            torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        )
        self.enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


def moco() -> Job:
    """MoCo: a queue with a pointer that is read as a number, the key encoder in forward."""

    def data(start):
        for n in count(start):
            x = torch.randn(8, 10, generator=rng(n))
            yield x + 0.1 * torch.randn(8, 10, generator=rng(n + 7)), x

    return Job(
        MoCo,
        lambda m, b: m(*b),
        data,
        lambda w: torch.optim.SGD([p for p in w if p.requires_grad], 0.05, 0.9),
        micro_batches=4,
    )


def memory_bank() -> Job:
    """Instance discrimination: a bank of features by index, in a tensor of the closure."""
    bank = F.normalize(torch.randn(64, 8, generator=rng(5)), dim=1)

    def data(start):
        for n in count(start):
            g = rng(n)
            idx = torch.randperm(64, generator=g)[:8]
            yield idx, torch.randn(8, 10, generator=g)

    def loss(model, b):
        idx, x = b
        f = F.normalize(model(x), dim=1)
        out = F.cross_entropy(f @ bank.clone().T / 0.1, idx)
        bank[idx] = F.normalize(0.5 * bank[idx] + 0.5 * f.detach(), dim=1)
        return out

    return Job(
        lambda: nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8)),
        loss,
        data,
        lambda w: torch.optim.SGD(w, 0.05),
        micro_batches=4,
    )


def xbm() -> Job:
    """Cross-batch memory in a deque, declared as the job's state."""
    memory = deque(maxlen=4)

    def data(start):
        for n in count(start):
            g = rng(n)
            yield torch.randn(8, 10, generator=g), torch.randint(0, 4, (8,), generator=g)

    def loss(model, b):
        x, y = b
        f = F.normalize(model(x), dim=1)
        feats, labels = [f], [y]
        for old, ol in memory:
            feats.append(old)
            labels.append(ol)
        sim = f @ torch.cat(feats).T
        same = y[:, None] == torch.cat(labels)[None]
        out = torch.where(same, 1 - sim, (sim - 0.5).relu()).mean()
        memory.append((f.detach(), y))
        return out

    return Job(
        lambda: nn.Linear(10, 8),
        loss,
        data,
        lambda w: torch.optim.Adam(w, 1e-3),
        micro_batches=2,
        state={"memory": memory},
    )
