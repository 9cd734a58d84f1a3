"""Scripts of strangers: phases and notes at the model, holders of odd kinds, losses of papers."""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import penstock as ps


def _rng(k):
    return torch.Generator().manual_seed(k)


def _pairs(start):
    for k in itertools.count(start):
        g = _rng(k)
        yield torch.randn(4, 8, generator=g), torch.randint(3, (4,), generator=g)


def _ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def _mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def _sgd(w):
    return torch.optim.SGD(w, lr=0.05)


def _adam(w):
    return torch.optim.AdamW(w, lr=1e-2)


def _job(model=_mlp, loss=_ce, data=_pairs, optimizer=_sgd, micro_batches=2, **more):
    return ps.Job(model, loss, data, optimizer, micro_batches=micro_batches, **more)


class _Config:
    def __init__(self):
        self.temperature = 1.0


def temperature_that_data_lowers() -> ps.Job:
    """The data lowers a temperature of the config every fourth batch."""
    config = _Config()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.config = _mlp(), config

        def forward(self, x):
            return self.body(x) / self.config.temperature

    def data(start):
        for k, batch in enumerate(_pairs(start), start):
            config.temperature = 1.0 / (1 + k // 4)
            yield batch

    return _job(Model, data=data)


def epoch_of_the_model_set_by_data() -> ps.Job:
    """The data notes the epoch at the model, which forward does not read."""
    held = []

    def model():
        held.append(_mlp())
        held[-1].epoch = 0
        return held[-1]

    def data(start):
        for k, batch in enumerate(_pairs(start), start):
            if held:
                held[-1].epoch = k // 5
            yield batch

    return _job(model, data=data)


def mixup_by_the_number_of_the_batch() -> ps.Job:
    """Mixup within a batch, by a permutation that the batch's number seeds."""

    def data(start):
        for k, (x, y) in enumerate(_pairs(start), start):
            order, share = (
                torch.randperm(4, generator=_rng(k + 7)),
                torch.rand((), generator=_rng(k + 9)),
            )
            yield x, y, order, share

    def loss(model, batch):
        x, y, order, share = batch
        out = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    return _job(loss=loss, data=data)


def focal_loss_with_class_weights() -> ps.Job:
    """Focal loss, weights of the classes in a tensor of the closure."""
    weights = torch.tensor([1.0, 2.0, 0.5])

    def loss(model, batch):
        log = F.log_softmax(model(batch[0]), -1)
        one = log.gather(1, batch[1][:, None])[:, 0]
        return -((1 - one.exp()) ** 2 * one * weights[batch[1]]).sum() / weights[batch[1]].sum()

    return _job(loss=loss, optimizer=_adam, micro_batches=4)


def triplets_that_are_hard_in_the_batch() -> ps.Job:
    """Batch-hard triplets: the farthest of its class, the nearest of another."""

    def loss(model, batch):
        e = F.normalize(model(batch[0]), dim=-1)
        d = (e[:, None] - e[None]).square().sum(-1)
        same = batch[1][:, None] == batch[1]
        return F.relu((d * same).amax(1) - (d + 10 * same).amin(1) + 0.2).mean()

    return _job(loss=loss)


class _Rows(Dataset):
    def __init__(self, n=64):
        g = _rng(3)
        self.x, self.y = torch.randn(n, 8, generator=g), torch.randint(3, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i], "id": i}


def rows_as_dicts() -> ps.Job:
    """A dataset of dicts, by ps.batches."""

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return _job(loss=loss, data=ps.batches(_Rows(), 8), optimizer=_adam)


def gradient_noise_by_the_step() -> ps.Job:
    """A hook before the step adds noise that decays with a count, seeded by it."""

    def optimizer(w):
        made, steps = torch.optim.SGD(w, lr=0.05), itertools.count()

        def noise(opt, *_):
            t = next(steps)
            g = _rng(t)
            for group in opt.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(torch.randn(p.shape, generator=g), alpha=0.01 / (1 + t) ** 0.55)

        made.register_step_pre_hook(noise)
        return made

    return _job(optimizer=optimizer)


class _Lookahead(torch.optim.Optimizer):
    def __init__(self, params, inner, k=3, alpha=0.5):
        self.inner = inner
        super().__init__(params, {"lr": 0.05})
        self.param_groups = inner.param_groups
        self.k, self.alpha, self.t = k, alpha, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.t += 1
        if self.t % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.lerp_(p, self.alpha)
                    p.copy_(s)


def lookahead_of_ones_own() -> ps.Job:
    """Lookahead around SGD, its slow weights in a list."""

    def optimizer(w):
        w = list(w)
        return _Lookahead(w, torch.optim.SGD(w, lr=0.05, momentum=0.9))

    return _job(optimizer=optimizer)


class _Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), wd=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "wd": wd})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                b1, b2 = group["betas"]
                p.mul_(1 - group["lr"] * group["wd"])
                p.add_((m * b1 + p.grad * (1 - b1)).sign_(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def lion_of_ones_own() -> ps.Job:
    """Lion, as people copy it."""
    return _job(optimizer=_Lion)


class _Block(nn.Module):
    def __init__(self, d=16, heads=2):
        super().__init__()
        self.n1, self.n2, self.heads = nn.RMSNorm(d), nn.RMSNorm(d), heads
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.w12, self.w3 = nn.Linear(d, 4 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        a, c = self.w12(self.n2(x)).chunk(2, -1)
        return x + self.w3(F.silu(a) * c)


class _Lm(nn.Module):
    def __init__(self, vocab=32, d=16, tie=True):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Parameter(torch.zeros(12, d))
        self.blocks = nn.ModuleList(_Block(d) for _ in range(3))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)
        if tie:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tokens(start):
    for k in itertools.count(start):
        yield torch.randint(32, (4, 9), generator=_rng(k))


def _next(model, ids):
    y = model(ids[:, :-1])
    return F.cross_entropy(y.reshape(-1, y.shape[-1]), ids[:, 1:].reshape(-1))


def small_llama_with_a_tied_head() -> ps.Job:
    """A little llama with tied embeddings."""
    return _job(_Lm, _next, _tokens, _adam)


def z_loss_whose_share_is_the_models() -> ps.Job:
    """A z-loss beside the cross entropy, its share an attribute of the model."""

    def model():
        made = _Lm(tie=False)
        made.z = 1e-3
        return made

    def loss(model, ids):
        y = model(ids[:, :-1])
        cross = F.cross_entropy(y.flatten(0, 1), ids[:, 1:].flatten())
        return cross + model.z * y.logsumexp(-1).square().mean()

    return _job(model, loss, _tokens, _adam)


def padded_rows_with_ignored_labels() -> ps.Job:
    """Rows of their own lengths, padded; the mean over tokens that are there."""

    def data(start):
        for k, ids in enumerate(_tokens(start), start):
            lengths = torch.randint(4, 9, (4,), generator=_rng(k + 100))
            labels = ids[:, 1:].clone()
            labels[torch.arange(8)[None] >= lengths[:, None]] = -100
            yield ids[:, :-1], labels

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    return _job(_Lm, loss, data, _adam, 4)


def decay_of_matrices_alone() -> ps.Job:
    """Decay for matrices alone, in two groups."""

    def optimizer(w):
        w = list(w)
        groups = [
            {"params": [p for p in w if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in w if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    return _job(_Lm, _next, _tokens, optimizer)


def weights_clamped_after_each_step() -> ps.Job:
    """A hook after the step clamps all weights (a critic of Wasserstein's)."""

    def optimizer(w):
        w = list(w)
        made = torch.optim.RMSprop(w, lr=1e-2)

        @torch.no_grad()
        def clamp(*_):
            for p in w:
                p.clamp_(-0.2, 0.2)

        made.register_step_post_hook(clamp)
        return made

    return _job(optimizer=optimizer)


def average_in_a_copy_that_a_hook_moves() -> ps.Job:
    """An average of the weights in torch's AveragedModel, which a hook moves."""
    held = {}

    def model():
        held["model"] = _mlp()
        return held["model"]

    def optimizer(w):
        made = torch.optim.SGD(w, lr=0.05)
        average = torch.optim.swa_utils.AveragedModel(held["model"])
        made.register_step_post_hook(lambda *_: average.update_parameters(held["model"]))
        return made

    return _job(model, optimizer=optimizer)


class _Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x):
        mean, log = self.enc(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return self.dec(z), mean, log


def autoencoder_with_a_prior() -> ps.Job:
    """A variational autoencoder, its loss the mean of two terms."""

    def loss(model, batch):
        y, mean, log = model(batch[0])
        return F.mse_loss(y, batch[0]) - 0.01 * (1 + log - mean.square() - log.exp()).mean()

    return _job(_Vae, loss, optimizer=_adam)


def recurrent_state_from_zero() -> ps.Job:
    """A GRU over the rows, its state made anew for each batch."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
            self.rnn = nn.GRU(8, 8, batch_first=True)

        def forward(self, ids):
            return self.head(self.rnn(self.emb(ids), torch.zeros(1, len(ids), 8))[0])

    return _job(Model, _next, _tokens, _adam)


def experts_with_a_balance() -> ps.Job:
    """Two experts of four by a gate; a balance of their load waits at the model for the loss."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

        def forward(self, x):
            p = self.gate(x).softmax(-1)
            top, at = p.topk(2, -1)
            dense = torch.zeros_like(p).scatter(1, at, top / top.sum(-1, keepdim=True))
            self.balance = 4 * ((dense > 0).float().mean(0) * p.mean(0)).sum()
            return (dense[..., None] * torch.stack([e(x) for e in self.experts], 1)).sum(1)

    def loss(model, batch):
        y = model(batch[0])
        return F.cross_entropy(y, batch[1]) + 0.01 * model.balance

    return _job(Model, loss, optimizer=_adam)


def frozen_backbone_kept_in_eval() -> ps.Job:
    """A frozen backbone kept in eval by a train() of its own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
            self.backbone.requires_grad_(False)
            self.head = nn.Linear(8, 3)
            self.train()

        def train(self, mode=True):
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x):
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x)

    return _job(Model)


def scale_that_is_a_number_of_numpy() -> ps.Job:
    """The scale of the logits is a number of numpy's, read in forward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = _mlp(), np.float32(0.7)

        def forward(self, x):
            return self.body(x) * float(self.scale)

    return _job(Model)


def property_over_a_class_attribute() -> ps.Job:
    """A module with a property that reads a number, and an attribute of its class."""

    class Model(nn.Module):
        depth = 2

        def __init__(self):
            super().__init__()
            self.body, self._gain = _mlp(), 0.9

        @property
        def gain(self):
            return self._gain**self.depth

        def forward(self, x):
            return self.body(x) * self.gain

    return _job(Model)


def attributes_by_ways_of_its_own() -> ps.Job:
    """A module has a __getattribute__ and a __setattr__ of its own (it renames one name)."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gain = _mlp(), 0.5

        def __getattribute__(self, name):
            return super().__getattribute__("gain" if name == "volume" else name)

        def __setattr__(self, name, value):
            super().__setattr__("gain" if name == "volume" else name, value)

        def forward(self, x):
            self.volume = 0.5
            return self.body(x) * self.volume

    return _job(Model)


def stochastic_depth_by_layers() -> ps.Job:
    """Stochastic depth with torch's own random numbers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            for k, layer in enumerate(self.layers):
                mask = torch.empty(len(x), 1).bernoulli_(1 - 0.1 * k)
                x = x + layer(x).tanh() * mask / (1 - 0.1 * k)
            return self.head(x)

    return _job(Model, optimizer=_adam)


def warm_up_then_cosine() -> ps.Job:
    """A rate that warms up and falls as a cosine, by a function of the step."""

    def rate(step):
        return 1e-2 * min((step + 1) / 4, 0.5 * (1 + math.cos(math.pi * step / 40)))

    return _job(optimizer=_adam, learning_rate=rate)


def distilled_from_a_teacher_of_the_closure() -> ps.Job:
    """A teacher that is held by the loss's closure, and never trained."""
    torch.manual_seed(11)
    teacher = _mlp().eval().requires_grad_(False)

    def loss(model, batch):
        own, taught = F.log_softmax(model(batch[0]) / 2, -1), F.softmax(teacher(batch[0]) / 2, -1)
        return F.kl_div(own, taught, reduction="batchmean")

    return _job(loss=loss)


def anchor_moved_every_fifth_step() -> ps.Job:
    """A hook copies the weights into an anchor every fifth step; the loss pulls to it."""
    held = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 3)
            self.register_buffer("anchor", torch.zeros(3, 8))

        def forward(self, x):
            return self.body(x)

    def model():
        held.append(Model())
        return held[-1]

    def loss(model, batch):
        return _ce(model, batch) + 0.1 * (model.body.weight - model.anchor).square().sum()

    def optimizer(w):
        made, steps = torch.optim.SGD(w, lr=0.05), itertools.count(1)

        def move(*_):
            if next(steps) % 5 == 0:
                held[-1].anchor.copy_(held[-1].body.weight.detach())

        made.register_step_post_hook(move)
        return made

    return _job(model, loss, optimizer=optimizer)


def gates_counted_for_a_plot() -> ps.Job:
    """Forward counts the gates that are open in a buffer that nobody reads (a plot, later)."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
            self.register_buffer("opened", torch.zeros(16, dtype=torch.int64))

        def forward(self, x):
            y = self.body(x).relu()
            with torch.no_grad():
                self.opened += (y > 0).sum(0)
            return self.head(y)

    return _job(Model)


def name_of_the_phase_set_by_validation() -> ps.Job:
    """Validation names its phase at the model, which forward reads to choose a temperature."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.phase = _mlp(), "train"

        def forward(self, x):
            return self.body(x) / (1.0 if self.phase == "train" else 0.5)

        def eval(self):
            self.phase = "test"
            return super().eval()

        def train(self, mode=True):
            self.phase = "train" if mode else "test"
            return super().train(mode)

    return _job(Model, validation=lambda: itertools.islice(_pairs(1000), 3), validate_every=4)


def what_was_seen_last_in_validation() -> ps.Job:
    """Forward notes the rows that it saw last when it is in eval, and reads them nowhere."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.rows, self.gain = _mlp(), 0, 0.9

        def forward(self, x):
            if not self.training:
                self.rows = self.rows + len(x)
            return self.body(x) * self.gain

    return _job(Model, validation=lambda: itertools.islice(_pairs(1000), 3), validate_every=4)
