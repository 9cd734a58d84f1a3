"""Scripts by somebody who had not read how jobs are examined: losses, batches and optimizers."""

import itertools
import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import penstock as ps


def gen(k):
    return torch.Generator().manual_seed(k)


def adamw(w):
    return torch.optim.AdamW(w, 3e-3)


def job(model, loss, data, opt=adamw, **more):
    return ps.Job(model=model, loss=loss, data=data, optimizer=opt, **{"micro_batches": 4, **more})


def text(start, n=4, t=7, v=13):
    for k in itertools.count(start):
        x = torch.randint(1, v, (n, t + 1), generator=gen(k))
        yield x[:, :-1], x[:, 1:]


def padded(start, n=4, t=7, v=13):
    for k in itertools.count(start):
        g = gen(k)
        x = torch.randint(1, v, (n, t), generator=g)
        lengths = torch.randint(2, t + 1, (n,), generator=g)
        x[torch.arange(t) >= lengths[:, None]] = 0
        yield {"ids": x, "lengths": lengths, "y": x.sum(1) % 3}


def packed_gru() -> ps.Job:
    """A GRU over packed sequences of many lengths; the last hidden state is classified."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.gru = nn.Embedding(13, 8, padding_idx=0), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, ids, lengths):
            rows = pack_padded_sequence(
                self.emb(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            out, h = self.gru(rows)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=ids.shape[1])
            return self.head(h[-1] + out.mean(1))

    return job(Net, lambda m, b: F.cross_entropy(m(b["ids"], b["lengths"]), b["y"]), padded)


class RevIN(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n))

    def forward(self, x, mode):
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
            return (x - self.mean) / self.stdev * self.gain
        return x / (self.gain + 1e-10) * self.stdev + self.mean


def series(start, n=4, t=12, c=3):
    for k in itertools.count(start):
        x = torch.randn(n, t + 4, c, generator=gen(k)).cumsum(1)
        yield x[:, :t], x[:, t:]


def forecast_with_revin() -> ps.Job:
    """RevIN: forward keeps the statistics of the batch on the module, and undoes them last."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.revin, self.a, self.b = RevIN(3), nn.Linear(12, 16), nn.Linear(16, 4)

        def forward(self, x):
            x = self.revin(x, "norm").transpose(1, 2)
            return self.revin(self.b(F.gelu(self.a(x))).transpose(1, 2), "denorm")

    return job(Net, lambda m, b: F.mse_loss(m(b[0]), b[1]), series)


def deep_ar() -> ps.Job:
    """DeepAR: an LSTM of series scaled by their own mean, and a likelihood of distributions."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.mu, self.sigma = (
                nn.LSTM(3, 8, 2, batch_first=True, dropout=0.1),
                nn.Linear(8, 3),
                nn.Linear(8, 3),
            )

        def forward(self, x):
            scale = 1 + x.abs().mean(1, keepdim=True)
            h, _ = self.rnn(x / scale)
            return torch.distributions.Normal(
                self.mu(h) * scale, F.softplus(self.sigma(h)) * scale + 1e-3
            )

    return job(Net, lambda m, b: -m(b[0][:, :-1]).log_prob(b[0][:, 1:]).mean(), series)


def rwkv() -> ps.Job:
    """RWKV's time mixing as a loop in Python with running numerators, and its token shift."""

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay, self.first = (
                nn.Parameter(torch.linspace(-2, 0, 8)),
                nn.Parameter(torch.zeros(8)),
            )
            self.mix = nn.Parameter(torch.full((3, 8), 0.5))
            self.k, self.v, self.r, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
            self.shift = nn.ZeroPad2d((0, 0, 1, -1))

        def forward(self, x):
            xx = self.shift(x)
            k, v, r = (
                f(x * m + xx * (1 - m))
                for f, m in zip((self.k, self.v, self.r), self.mix, strict=True)
            )
            a = b = torch.zeros_like(x[:, 0])
            p = torch.full_like(a, -1e30)
            out, w = [], -self.decay.exp()
            for t in range(x.shape[1]):
                q = torch.maximum(p, self.first + k[:, t])
                e1, e2 = (p - q).exp(), (self.first + k[:, t] - q).exp()
                out.append((e1 * a + e2 * v[:, t]) / (e1 * b + e2))
                q = torch.maximum(p + w, k[:, t])
                e1, e2 = (p + w - q).exp(), (k[:, t] - q).exp()
                a, b, p = e1 * a + e2 * v[:, t], e1 * b + e2, q
            return x + self.o(r.sigmoid() * torch.stack(out, 1))

    def model():
        return nn.Sequential(nn.Embedding(13, 8), nn.LayerNorm(8), Mix(), Mix(), nn.Linear(8, 13))

    return job(model, lambda m, b: F.cross_entropy(m(b[0]).transpose(1, 2), b[1]), text)


class Box:
    """A batch as torch_geometric has it: attributes, `to`, no pytree."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def to(self, device):
        return Box(
            **{k: v.to(device) if torch.is_tensor(v) else v for k, v in self.__dict__.items()}
        )

    @property
    def num_nodes(self):
        return self.x.shape[0]


def graphs(start, kind=Box):
    for k in itertools.count(start):
        g = gen(k)
        x = torch.randn(12, 6, generator=g)
        edges = torch.randint(0, 4, (2, 20), generator=g) + 4 * torch.arange(20).remainder(3)
        yield kind(
            x=x,
            edge_index=edges,
            batch=torch.arange(12) // 4,
            y=x[::4, 0].gt(0).long(),
            num_graphs=3,
        )


class Gat(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.w, self.head = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(16, 1),
            nn.Linear(8, 2),
        )

    def layer(self, lin, x, edges):
        h, (src, dst) = lin(x), edges
        e = F.leaky_relu(self.w(torch.cat([h[src], h[dst]], -1)))[:, 0]
        top = torch.full((x.shape[0],), -math.inf).scatter_reduce(
            0, dst, e.detach(), "amax", include_self=False
        )
        w = (e - top[dst]).exp()
        w = w / torch.zeros(x.shape[0]).index_add(0, dst, w)[dst]
        return torch.zeros_like(h).index_add(0, dst, w[:, None] * h[src]).relu()

    def forward(self, data):
        x = self.layer(self.b, self.layer(self.a, data.x, data.edge_index), data.edge_index)
        count = torch.bincount(data.batch, minlength=data.num_graphs)[:, None]
        return self.head(torch.zeros(data.num_graphs, 8).index_add(0, data.batch, x) / count)


def graphs_in_objects() -> ps.Job:
    """Graphs of a batch in an object of its own class, as torch_geometric's Data."""
    return job(Gat, lambda m, b: F.cross_entropy(m(b.to("cpu")), b.y), graphs)


def graphs_in_a_namespace() -> ps.Job:
    """The same in a SimpleNamespace."""
    return job(
        Gat, lambda m, b: F.cross_entropy(m(b), b.y), lambda start: graphs(start, SimpleNamespace)
    )


def nerf() -> ps.Job:
    """NeRF: stratified samples, encoded positions, cumprod, more samples by searchsorted."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.coarse, self.fine = (
                nn.Sequential(nn.Linear(15, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)
            )

        @staticmethod
        def encode(x):
            return torch.cat(
                [x] + [f(x * 2**i) for i in range(2) for f in (torch.sin, torch.cos)], -1
            )

        def render(self, net, o, d, z):
            raw = net(self.encode(o[:, None] + d[:, None] * z[..., None]))
            delta = F.pad(z[:, 1:] - z[:, :-1], (0, 1), value=1e2)
            alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * delta)
            trans = torch.cumprod(F.pad(1 - alpha + 1e-10, (1, 0), value=1.0), -1)[:, :-1]
            w = alpha * trans
            return (w[..., None] * raw[..., :3].sigmoid()).sum(1), w

        def forward(self, o, d):
            z = torch.linspace(0, 1, 6).expand(o.shape[0], 6)
            z = z + torch.rand_like(z) / 6
            rough, w = self.render(self.coarse, o, d, z)
            mids = 0.5 * (z[:, 1:] + z[:, :-1])
            pdf = (w[:, 1:-1] + 1e-5).detach()
            cdf = F.pad(torch.cumsum(pdf / pdf.sum(-1, keepdim=True), -1), (1, 0))
            u = torch.rand(o.shape[0], 4).contiguous()
            at = torch.searchsorted(cdf, u, right=True).clamp(1, cdf.shape[1] - 1)
            lo, hi = cdf.gather(1, at - 1), cdf.gather(1, at)
            t = (u - lo) / torch.where(hi - lo < 1e-5, torch.ones_like(hi), hi - lo)
            new = mids.gather(1, at - 1) + t * (mids.gather(1, at) - mids.gather(1, at - 1))
            fine, _ = self.render(self.fine, o, d, torch.cat([z, new], 1).sort(-1)[0])
            return rough, fine

    def data(start):
        for k in itertools.count(start):
            g = gen(k)
            yield (
                torch.randn(6, 3, generator=g),
                F.normalize(torch.randn(6, 3, generator=g), dim=-1),
                torch.rand(6, 3, generator=g),
            )

    def loss(m, b):
        rough, fine = m(b[0], b[1])
        return F.mse_loss(rough, b[2]) + F.mse_loss(fine, b[2])

    return job(Net, loss, data, lambda w: torch.optim.Adam(w, 5e-3))


class Prodigy(torch.optim.Optimizer):
    """Prodigy: the distance d is estimated from sums over all parameters."""

    def __init__(self, params, lr=1.0, d0=1e-3, beta3=0.9):
        super().__init__(params, {"lr": lr, "d": d0, "beta3": beta3, "num": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        d, lr, beta3 = group["d"], group["lr"], group["beta3"]
        num, den = group["num"] * beta3, 0.0
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["p0"], s["s"], s["v"] = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
                num += d * lr * torch.dot(p.grad.flatten(), (s["p0"] - p).flatten()).item()
                s["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=d * d * 0.01)
                s["s"].mul_(beta3).add_(p.grad, alpha=d * lr)
                den += s["s"].abs().sum().item()
        hat = num / den if den else d
        for g in self.param_groups:
            g["num"], g["d"], g["k"] = num, max(d, hat), g["k"] + 1
            for p in g["params"]:
                if p.grad is not None:
                    p.addcdiv_(p.grad, self.state[p]["v"].sqrt().add_(1e-8 * d), value=-d * d * lr)


def deep():
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)
    )


class AdaBelief(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-12, rectify=True):
        self._buffer = [[None, None, None] for _ in range(10)]
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "buffer": self._buffer})
        self.rectify = rectify

    def __setstate__(self, state):
        super().__setstate__(state)
        for g in self.param_groups:
            g.setdefault("amsgrad", False)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if len(s) == 0:
                    s["step"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["step"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                d = p.grad - s["m"]
                s["v"].mul_(b2).addcmul_(d, d, value=1 - b2).add_(g["eps"])
                cached = g["buffer"][s["step"] % 10]
                if cached[0] == s["step"]:
                    rect = cached[2]
                else:
                    t = s["step"]
                    rho_inf = 2 / (1 - b2) - 1
                    rho = rho_inf - 2 * t * b2**t / (1 - b2**t)
                    rect = (
                        math.sqrt(
                            (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
                        )
                        if rho > 5
                        else -1
                    )
                    cached[:] = t, rho, rect
                if rect > 0:
                    p.addcdiv_(
                        s["m"] / (1 - b1 ** s["step"]),
                        (s["v"] / (1 - b2 ** s["step"])).sqrt() + g["eps"],
                        value=-g["lr"] * rect,
                    )
                else:
                    p.add_(s["m"], alpha=-g["lr"] / (1 - b1 ** s["step"]))
        return loss


class TensorDictLike(dict):
    """A dict with a batch size and attributes for its keys."""

    def __init__(self, source, batch_size=None):
        super().__init__(source)
        self.batch_size = batch_size or len(next(iter(self.values())))

    def __getattr__(self, key):
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None

    def to(self, device):
        return type(self)({k: v.to(device) for k, v in self.items()}, self.batch_size)


def dict_with_a_batch_size() -> ps.Job:
    """A subclass of dict whose constructor and attributes are its own."""

    def data(start):
        for k in itertools.count(start):
            x = torch.randn(4, 8, generator=gen(k))
            yield TensorDictLike({"x": x, "y": x.sin()})

    def loss(m, b):
        return F.mse_loss(m(b.to("cpu").x), b.y) * b.batch_size / 4

    return job(deep, loss, data)


def pairs(start):
    for k in itertools.count(start):
        x = torch.randn(4, 8, generator=gen(k))
        yield x, x.roll(1, 1).sin()


def mse(m, b):
    return F.mse_loss(m(b[0]), b[1])


def prodigy() -> ps.Job:
    """Prodigy: a rate from sums over all parameters."""
    return job(deep, mse, pairs, Prodigy)


def adabelief_with_a_buffer_of_groups() -> ps.Job:
    """AdaBelief as published: a list of ten cells in its groups keeps what a step has computed."""
    return job(deep, mse, pairs, AdaBelief)


def hardswish_of_channels_last() -> ps.Job:
    """A group norm and hardswish, all with channels last."""

    def data(start):
        for k in itertools.count(start):
            x = torch.randint(0, 256, (4, 8, 8, 3), generator=gen(k), dtype=torch.uint8)
            yield x.permute(0, 3, 1, 2), x.float().mean((1, 2, 3)).long() % 3

    def loss(m, b):
        x = b[0].float().div(255).to(memory_format=torch.channels_last)
        return F.cross_entropy(m(x), b[1], label_smoothing=0.1)

    def model():
        block = nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.Hardswish(inplace=True)
        net = nn.Sequential(*block, nn.Flatten(), nn.Linear(216, 3))
        return net.to(memory_format=torch.channels_last)

    return job(model, loss, data, lambda w: torch.optim.SGD(w, 0.05, momentum=0.9))


def actor_with_a_distribution() -> ps.Job:
    """Categorical actions, an entropy bonus, and a Normal that is reparametrized, each checked."""

    def loss(m, b):
        out = m(b[0])
        policy = torch.distributions.Categorical(logits=out[:, :4])
        action = b[1].argmax(1) % 4
        noise = torch.distributions.Normal(out[:, 4:6], F.softplus(out[:, 6:]) + 0.1)
        drawn = noise.rsample()
        prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        kl = torch.distributions.kl_divergence(noise, prior).sum(1)
        gain = policy.log_prob(action) * b[1].mean(1) + 0.01 * policy.entropy()
        return (drawn.square().sum(1) + 0.1 * kl - gain).mean()

    return job(deep, loss, pairs)


def parts_by_mixtures() -> ps.Job:
    """A mixture density network: MixtureSameFamily of Normals, by torch.distributions."""

    def loss(m, b):
        weight, mean, spread = m(b[0])[:, :6].chunk(3, 1)
        of = torch.distributions
        parts = of.Normal(mean, spread.exp())
        return (
            -of.MixtureSameFamily(of.Categorical(logits=weight), parts).log_prob(b[1][:, 0]).mean()
        )

    return job(deep, loss, pairs)
