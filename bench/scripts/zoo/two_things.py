"""What newcomers brought of what people train: each has two things that are not plain."""

import copy
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import penstock as ps

STEPS = {
    "spread_across_samples_from_step_21": 28,
    "clipped_by_a_quantile_of_norms": 20,
    "gumbel_codes_that_cool": 16,
    "units_drawn_anew_by_a_hook": 16,
    "rows_on_the_sphere_from_step_16": 22,
    "quantized_after_30_calls": 12,
    "copy_of_the_model_every_tenth_call": 12,
}


def spread_across_samples_from_step_21() -> ps.Job:
    """From update 21 on a term that compares all samples is faded in by a buffer."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.seen += 1
            return self.net(x)

    def loss(model, batch):
        out = model(batch["x"])
        fade = ((model.seen - 40).clamp(min=0, max=20) / 20).detach()
        spread = torch.cdist(out, out).mean()
        return F.cross_entropy(out, batch["y"]) + fade * (-0.1 * spread)

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            yield {"x": torch.randn(8, 8, generator=g), "y": torch.randint(3, (8,), generator=g)}
            start += 1

    return ps.Job(
        model=Net,
        loss=loss,
        data=data,
        optimizer=lambda w: torch.optim.SGD(w, 0.1),
        micro_batches=2,
    )


def median_of_a_window_of_losses() -> ps.Job:
    """A window of the last losses is a buffer, and a sample above its median counts half."""

    class Robust(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.CELU(), nn.Linear(16, 1))
            self.register_buffer("window", torch.full((12,), 9.0))

        def forward(self, x, y):
            each = (self.net(x) - y).square().squeeze(1)
            weights = torch.where(each.detach() > self.window.median(), 0.5, 1.0)
            self.window.copy_(torch.cat([self.window[4:], each.detach()]))
            return (weights * each).sum() / weights.sum()

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            x = torch.randn(4, 8, generator=g)
            yield {
                "x": x,
                "y": x.mean(1, keepdim=True) + (torch.rand(4, 1, generator=g) < 0.1) * 5.0,
            }
            start += 1

    return ps.Job(
        model=Robust,
        loss=lambda m, b: m(**b),
        data=data,
        optimizer=lambda w: torch.optim.Adamax(w, 1e-2),
        micro_batches=4,
        clip_norm=1.0,
    )


def centres_moved_by_index_add() -> ps.Job:
    """Class centres are a buffer that the loss moves by index_add, beside a softmax loss."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 4))
            self.head = nn.Linear(4, 5)
            self.register_buffer("centres", torch.zeros(5, 4))

        def forward(self, x):
            features = self.body(x)
            return features, self.head(features)

    def loss(model, batch):
        x, y = batch
        features, logits = model(x)
        pull = (features - model.centres[y]).square().sum(1).mean()
        with torch.no_grad():
            model.centres.index_add_(0, y, 0.1 * (features - model.centres[y]))
        return F.cross_entropy(logits, y) + 0.05 * pull

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            yield torch.randn(8, 8, generator=g), torch.randint(5, (8,), generator=g)
            start += 1

    return ps.Job(
        model=Net,
        loss=loss,
        data=data,
        optimizer=lambda w: torch.optim.SGD(w, 0.1, momentum=0.9),
        micro_batches=4,
    )


def clipped_by_a_quantile_of_norms() -> ps.Job:
    """The optimizer keeps the norms of its gradients and clips those above their quantile."""

    class AutoClip(torch.optim.Adam):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.norms = deque(maxlen=50)

        def step(self, closure=None):
            held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = float(torch.stack([p.grad.norm() for p in held]).norm())
            self.norms.append(norm)
            if len(self.norms) > 10:
                limit = sorted(self.norms)[len(self.norms) // 4]
                torch.nn.utils.clip_grad_norm_(held, limit)
            return super().step(closure)

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            x = torch.randn(4, 8, generator=g)
            yield x, x.square().sum(1, keepdim=True)
            start += 1

    return ps.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        loss=lambda m, b: F.mse_loss(m(b[0]), b[1]),
        data=data,
        optimizer=lambda w: AutoClip(w, lr=1e-2),
        micro_batches=4,
    )


def gumbel_codes_that_cool() -> ps.Job:
    """Codes are drawn by Gumbel softmax whose temperature a buffer anneals."""

    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(8, 12), nn.Linear(12, 8)
            self.register_buffer("tau", torch.tensor(2.0))

        def forward(self, x):
            code = F.gumbel_softmax(self.enc(x).view(-1, 3, 4), tau=self.tau, hard=False)
            self.tau = (self.tau * 0.95).clamp(min=0.3)
            return self.dec(code.flatten(1))

    def data(start):
        while True:
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(start))
            start += 1

    return ps.Job(
        model=Codes,
        loss=lambda m, x: F.mse_loss(m(x), x),
        data=data,
        optimizer=lambda w: torch.optim.Adam(w, 1e-2),
        micro_batches=4,
    )


def beta_by_a_controller() -> ps.Job:
    """A controller, a buffer, moves the beta of an autoencoder with transposed convolutions."""

    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv1d(1, 4, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 8)
            )
            self.dec = nn.Sequential(
                nn.Linear(4, 32), nn.Unflatten(1, (4, 8)), nn.ConvTranspose1d(4, 1, 4, 2, 1)
            )
            self.register_buffer("beta", torch.tensor(0.0))
            self.register_buffer("sum", torch.tensor(0.0))

        def forward(self, x):
            mean, log = self.enc(x).chunk(2, 1)
            y = self.dec(mean + torch.randn_like(mean) * (log / 2).exp())
            kl = -0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()
            with torch.no_grad():
                gap = 0.5 - kl
                self.sum.add_(gap * 0.001)
                self.beta.copy_((0.05 * torch.sigmoid(-gap) - self.sum).clamp(0, 1))
            return F.mse_loss(y, x) + self.beta.clone() * kl

    def data(start):
        while True:
            yield torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(start))
            start += 1

    return ps.Job(
        model=Vae,
        loss=lambda m, x: m(x),
        data=data,
        optimizer=lambda w: torch.optim.Adam(w, 5e-3),
        micro_batches=4,
    )


def units_drawn_anew_by_a_hook() -> ps.Job:
    """Units that seldom fire are drawn anew by a hook that reads a buffer of counts."""

    LAST = {}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 24), nn.Linear(24, 3)
            with torch.no_grad():
                self.a.bias[:6] = -5.0
            self.register_buffer("fired", torch.zeros(24))
            LAST["model"] = self

        def forward(self, x):
            h = self.a(x).relu()
            self.fired += (h.detach() > 0).sum(0)
            return self.b(h)

    def optimizer(weights):
        made = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
        state = {"n": 0}

        def revive(optimizer, args, kwargs):
            state["n"] += 1
            if state["n"] % 5:
                return
            model = LAST["model"]
            dead = model.fired < 1
            with torch.no_grad():
                fresh = torch.randn(24, 8) * 0.2
                model.a.weight[dead] = fresh[dead]
                model.a.bias[dead] = 0
                model.b.weight[:, dead] = 0
                model.fired.zero_()

        made.register_step_post_hook(revive)
        return made

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            yield torch.randn(4, 8, generator=g), torch.randint(3, (4,), generator=g)
            start += 1

    return ps.Job(
        model=Net,
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=data,
        optimizer=optimizer,
        micro_batches=4,
    )


def flow_by_slogdet() -> ps.Job:
    """A flow of dense matrices learns by slogdet and a triangular solve, in float64."""

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(
                torch.eye(6, dtype=torch.float64) + 0.1 * torch.randn(6, 6).double()
            )
            self.l = nn.Parameter(0.1 * torch.randn(6, 6).double())

        def forward(self, x):
            low = self.l.tril(-1) + torch.eye(6, dtype=torch.float64)
            z = torch.linalg.solve_triangular(low, (x @ self.w).t(), upper=False).t()
            return 0.5 * z.square().sum(1).mean() - torch.linalg.slogdet(self.w).logabsdet

    def data(start):
        while True:
            yield torch.randn(
                8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(start)
            ).cumsum(1)
            start += 1

    return ps.Job(
        model=Flow,
        loss=lambda m, x: m(x),
        data=data,
        optimizer=lambda w: torch.optim.Adam(w, 1e-2),
        micro_batches=4,
    )


def norms_of_gradients_by_vmap() -> ps.Job:
    """Gradients per sample come from vmap, and a penalty on the largest of their norms is added."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)

        def forward(self, x):
            return self.b(self.a(x).tanh())

    def loss(model, batch):
        named = dict(model.named_parameters())

        def one(p, x, y):
            return F.cross_entropy(functional_call(model, p, x[None]), y[None])

        each = vmap(grad(one), (None, 0, 0))(named, batch["x"], batch["y"])
        norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
        return F.cross_entropy(model(batch["x"]), batch["y"]) + 0.05 * norms.max()

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            yield {"x": torch.randn(4, 8, generator=g), "y": torch.randint(3, (4,), generator=g)}
            start += 1

    return ps.Job(
        model=Net,
        loss=loss,
        data=data,
        optimizer=lambda w: torch.optim.SGD(w, 0.1),
        micro_batches=2,
    )


def weights_perturbed_inside() -> ps.Job:
    """Weights are perturbed along their gradient inside the loss, and the copy is what learns."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.b(F.silu(self.a(x)))

    def loss(model, batch):
        named = dict(model.named_parameters())
        first = F.cross_entropy(functional_call(model, named, batch["x"]), batch["y"])
        grads = torch.autograd.grad(first, list(named.values()))
        norm = torch.sqrt(sum((g**2).sum() for g in grads)) + 1e-12
        moved = {
            n: p + 0.05 * g.detach() / norm.detach()
            for (n, p), g in zip(named.items(), grads, strict=True)
        }
        return F.cross_entropy(functional_call(model, moved, batch["x"]), batch["y"])

    def data(start):
        while True:
            g = torch.Generator().manual_seed(100 + start)
            yield {"x": torch.randn(6, 8, generator=g), "y": torch.randint(3, (6,), generator=g)}
            start += 1

    return ps.Job(
        model=Net,
        loss=loss,
        data=data,
        optimizer=lambda w: torch.optim.SGD(w, 0.1, momentum=0.9),
        micro_batches=4,
    )


def bank_of_features_by_index() -> ps.Job:
    """Features of each sample by its index are kept in a bank that is contrasted with."""

    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
            self.bank = nn.Buffer(F.normalize(torch.randn(32, 4), dim=1))

        def forward(self, x, index):
            z = F.normalize(self.net(x), dim=1)
            old = self.bank.clone()
            with torch.no_grad():
                self.bank[index] = F.normalize(0.5 * self.bank[index] + 0.5 * z, dim=1)
            return F.cross_entropy(z @ old.t() / 0.3, index)

    X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))

    def data(start):
        while True:
            index = (torch.arange(4) + 4 * start) % 32
            yield X[index], index
            start += 1

    return ps.Job(
        model=Bank,
        loss=lambda m, b: m(*b),
        data=data,
        optimizer=lambda w: torch.optim.Adam(w, 1e-2),
        micro_batches=4,
    )


def rows_on_the_sphere_from_step_16() -> ps.Job:
    """A post hook puts the rows of one layer on the sphere from the sixteenth update on."""

    def optimizer(weights):
        made = torch.optim.Adam(weights, 1e-2)

        def project(optimizer, args, kwargs):
            p = weights[2]
            if optimizer.state[p]["step"] >= 16:
                with torch.no_grad():
                    p.div_(p.norm(dim=1, keepdim=True))

        made.register_step_post_hook(project)
        return made

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            yield torch.randn(4, 8, generator=g), torch.randint(4, (4,), generator=g)
            start += 1

    return ps.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=data,
        optimizer=optimizer,
        micro_batches=4,
    )


def groups_by_turns_of_the_optimizer() -> ps.Job:
    """Even updates train the generator and odd ones the critic."""

    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
            self.d = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    class Alternate(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})
            self.turn = 0

        @torch.no_grad()
        def step(self, closure=None):
            group = self.param_groups[self.turn % 2]
            self.turn += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["square"] = torch.zeros_like(p)
                state["square"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.addcdiv_(p.grad, state["square"].sqrt().add_(1e-4), value=-group["lr"])

    def loss(model, x):
        fake = model.g(torch.randn(len(x), 4))
        critic = F.softplus(-model.d(x)).mean() + F.softplus(model.d(fake.detach())).mean()
        frozen = [p.detach() for p in model.d.parameters()]
        h = F.leaky_relu(F.linear(fake, frozen[0], frozen[1]), 0.2)
        return critic + F.softplus(-F.linear(h, frozen[2], frozen[3])).mean()

    def data(start):
        while True:
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(start))
            start += 1

    return ps.Job(
        model=Gan,
        loss=loss,
        data=data,
        optimizer=lambda w: Alternate([{"params": w[:4]}, {"params": w[4:]}], 1e-2),
        micro_batches=4,
    )


def experts_with_a_bias_by_load() -> ps.Job:
    """Tokens go to the best of four experts by topk."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.w = nn.Parameter(torch.randn(4, 8, 8) * 0.3)
            self.register_buffer("bias", torch.zeros(4))

        def forward(self, x):
            scores = self.gate(x).softmax(-1)
            chosen = (scores + self.bias).topk(2, -1).indices
            gates = scores.gather(-1, chosen)
            out = torch.einsum("bkij,bj->bki", self.w[chosen], x)
            load = F.one_hot(chosen, 4).float().mean((0, 1))
            with torch.no_grad():
                self.bias.add_(0.01 * torch.sign(load.mean() - load))
            return (gates[..., None] * out).sum(1), (load * scores.mean(0)).sum()

    def loss(model, x):
        y, balance = model(x)
        return F.mse_loss(y, x.flip(1)) + 0.01 * balance, {"balance": balance.detach()}

    def data(start):
        while True:
            yield torch.randn(8, 8, generator=torch.Generator().manual_seed(start))
            start += 1

    return ps.Job(
        model=Experts,
        loss=loss,
        data=data,
        optimizer=lambda w: torch.optim.Adam(w, 1e-2),
        micro_batches=4,
    )


def quantized_after_30_calls() -> ps.Job:
    """Observers with moving averages quantize weights and activations, enabled after 30 calls."""

    class Observer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("low", torch.tensor(0.0))
            self.register_buffer("high", torch.tensor(0.0))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            with torch.no_grad():
                self.low.mul_(0.9).add_(x.min(), alpha=0.1)
                self.high.mul_(0.9).add_(x.max(), alpha=0.1)
                self.calls += 1
            scale = (self.high - self.low).clamp(min=1e-3) / 15
            q = ((x - self.low) / scale).round().clamp(0, 15) * scale + self.low
            return torch.where(self.calls > 30, x + (q - x).detach(), x)

    class Quant(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
            self.watch = nn.ModuleList(Observer() for _ in range(3))

        def forward(self, x):
            h = F.linear(x, self.watch[0](self.a.weight), self.a.bias).relu()
            return F.linear(self.watch[1](h), self.watch[2](self.b.weight), self.b.bias)

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            yield torch.randn(4, 8, generator=g), torch.randint(4, (4,), generator=g)
            start += 1

    return ps.Job(
        model=Quant,
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=data,
        optimizer=lambda w: torch.optim.Adam(w, 1e-2),
        micro_batches=4,
    )


def triplets_with_a_margin_that_moves() -> ps.Job:
    """The hardest positive and negative of the batch are mined."""

    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
            self.register_buffer("margin", torch.tensor(0.2))

        def forward(self, x):
            return F.normalize(self.net(x), dim=1)

    def loss(model, batch):
        z = model(batch["x"])
        far = torch.cdist(z, z)
        same = batch["y"][:, None] == batch["y"]
        positive = (far * same).max(1).values
        negative = far.masked_fill(same, 9.0).min(1).values
        value = F.relu(positive - negative + model.margin)
        model.margin.mul_(0.99).add_(0.01 * (value > 0).float().mean())
        return value.mean()

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            y = torch.arange(8) % 3
            yield {"x": torch.randn(8, 8, generator=g) + y[:, None], "y": y}
            start += 1

    return ps.Job(
        model=Embed,
        loss=loss,
        data=data,
        optimizer=lambda w: torch.optim.Adam(w, 5e-3),
        micro_batches=4,
    )


def copy_of_the_model_every_tenth_call() -> ps.Job:
    """Every tenth call the loss copies the model deeply and distils from the copy."""

    TEACHER = {"model": None, "calls": 0}

    def loss(model, batch):
        if TEACHER["calls"] % 10 == 0:
            TEACHER["model"] = copy.deepcopy(model).eval()
        TEACHER["calls"] += 1
        out = model(batch[0])
        with torch.inference_mode():
            old = TEACHER["model"](batch[0]).softmax(1)
        return F.cross_entropy(out, batch[1]) + F.kl_div(
            out.log_softmax(1), old.clone(), reduction="batchmean"
        )

    def data(start):
        while True:
            g = torch.Generator().manual_seed(start)
            yield torch.randn(4, 8, generator=g), torch.randint(3, (4,), generator=g)
            start += 1

    return ps.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3)),
        loss=loss,
        data=data,
        optimizer=lambda w: torch.optim.SGD(w, 0.2),
        micro_batches=2,
    )
