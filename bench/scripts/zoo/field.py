"""What a field does every day: targets by recursion, hard examples, trust ratios, kept records."""

from dataclasses import dataclass

import torch
from small import WIDTH, classes, deep, entropy, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps


def _job(model=deep, loss=entropy, data=classes, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _drawn(make):
    """Return data whose micro-batch k is `make` of a generator seeded with k."""

    def data(start: int):
        index = start
        while True:
            yield make(torch.Generator().manual_seed(index))
            index += 1

    return data


def _over(rows):
    """Return data that yields the same few objects over and over."""

    def data(start: int):
        index = start
        while True:
            yield rows[index % len(rows)]
            index += 1

    return data


def _batch(index: int) -> tuple[Tensor, Tensor]:
    return next(classes(index))


# -- data sets of objects that are made once -------------------------------------------------------


def casts_in_its_data_set() -> ps.Job:
    """a list of dicts; the loss casts an entry and writes its results beside: alike each time."""
    rows = [{"x": _batch(k)[0].double(), "y": _batch(k)[1]} for k in range(7)]

    def loss(model, batch):
        batch["x"] = batch["x"].float()
        batch["logits"] = model(batch["x"])
        batch["loss"] = F.cross_entropy(batch["logits"], batch["y"])
        return batch["loss"]

    return _job(loss=loss, data=_over(rows), micro_batches=2)


def visits_in_its_data_set() -> ps.Job:
    """a list of dicts in which the loss counts how often it has seen each."""
    rows = [{"x": _batch(k)[0], "y": _batch(k)[1], "visits": 0} for k in range(3)]

    def loss(model, batch):
        batch["visits"] += 1
        return F.cross_entropy(model(batch["x"]), batch["y"]) / batch["visits"] ** 0.5

    return _job(loss=loss, data=_over(rows), micro_batches=2)


@dataclass
class _Sample:
    x: Tensor
    y: Tensor
    mean: Tensor | None = None


def temporal_ensemble() -> ps.Job:
    """records of a data set keep the mean of their own predictions."""
    rows = [_Sample(*_batch(k)) for k in range(3)]

    def loss(model, batch):
        told = model(batch.x).softmax(-1)
        old = told.detach() if batch.mean is None else batch.mean
        batch.mean = 0.6 * old + 0.4 * told.detach()
        return F.nll_loss(told.log(), batch.y) + (told - batch.mean).square().mean()

    return _job(loss=loss, data=_over(rows), micro_batches=2)


# -- losses ----------------------------------------------------------------------------------------


class _Views(nn.Module):
    """The second view goes through all layers again, so that stages share them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = deep(3, outputs=8), nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        return self.norm(self.body(x))


def barlow_twins() -> ps.Job:
    """the correlation of two views over the batch; layers are used twice."""

    def loss(model, batch):
        one, other = batch
        c = model(one).T @ model(other) / len(one)
        apart = c.flatten()[:-1].view(7, 9)[:, 1:].flatten().square().sum()
        return (c.diagonal() - 1).square().sum() + 0.05 * apart

    data = _drawn(
        lambda g: (torch.randn(8, WIDTH, generator=g), torch.randn(8, WIDTH, generator=g))
    )
    return _job(model=_Views, loss=loss, data=data, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = deep(3), deep(3)
        self.scale = nn.Parameter(torch.tensor(2.6593))


def clamped_logit_scale() -> ps.Job:
    """two towers; the scale of their logits is clamped by `.data` before it is used."""

    def loss(model, batch):
        model.scale.data.clamp_(max=2.65)
        one, other = F.normalize(model.one(batch[0])), F.normalize(model.other(batch[1]))
        logits, at = model.scale.exp() * one @ other.T, torch.arange(8)
        return (F.cross_entropy(logits, at) + F.cross_entropy(logits.T, at)) / 2

    data = _drawn(
        lambda g: (torch.randn(8, WIDTH, generator=g), torch.randn(8, WIDTH, generator=g))
    )
    return _job(model=_Towers, loss=loss, data=data)


class _ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = deep(3, outputs=8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)


def advantages_backwards_in_time() -> ps.Job:
    """generalised advantages by a loop from the last step to the first, without gradients."""

    def loss(model, batch):
        states, actions, rewards, ends = batch
        told, values = model(states)
        with torch.no_grad():
            gains, last = torch.zeros(4, 6), torch.zeros(4)
            for t in reversed(range(6)):
                goes_on = (~ends[:, t]).float()
                delta = rewards[:, t] + 0.99 * values[:, t + 1] * goes_on - values[:, t]
                last = delta + 0.94 * goes_on * last
                gains[:, t] = last
            returns = gains + values[:, :-1]
        taken = told[:, :-1].gather(-1, actions[..., None]).squeeze(-1)
        return 0.5 * F.mse_loss(values[:, :-1], returns) - (taken * gains).mean()

    def drawn(g):
        states, actions = (
            torch.randn(4, 7, WIDTH, generator=g),
            torch.randint(0, 3, (4, 6), generator=g),
        )
        return states, actions, torch.randn(4, 6, generator=g), torch.rand(4, 6, generator=g) < 0.2

    return _job(model=_ActorCritic, loss=loss, data=_drawn(drawn))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = deep(3), deep(3)


def each_chooses_for_the_other() -> ps.Job:
    """two nets; each learns from the samples that the other finds easy."""

    def loss(model, batch):
        nets = model.one, model.other
        one, other = (F.cross_entropy(n(batch[0]), batch[1], reduction="none") for n in nets)
        easy = other.detach().argsort()[:3], one.detach().argsort()[:3]
        return one[easy[0]].mean() + other[easy[1]].mean()

    return _job(model=_Pair, loss=loss)


def hard_quantiles() -> ps.Job:
    """pinball losses at three quantiles; the harder half of all counts."""

    def loss(model, batch):
        quantiles = torch.tensor([0.1, 0.5, 0.9])
        off = batch[1].float()[:, None] - model(batch[0])[:, :3]
        each = torch.maximum(quantiles * off, (quantiles - 1) * off).flatten()
        return each.topk(each.numel() // 2)[0].mean()

    return _job(loss=loss)


class _Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fill, self.net = nn.Parameter(torch.zeros(WIDTH)), deep(4, 2 * WIDTH, WIDTH)

    def forward(self, x):
        gone = x.isnan()
        return self.net(torch.cat([torch.where(gone, self.fill, x.nan_to_num()), gone.float()], 1))


def missing_values() -> ps.Job:
    """inputs and targets with NaN; a mean over what is there."""

    def loss(model, batch):
        x, y = batch
        there = ~y.isnan()
        return ((model(x) - y.nan_to_num()).square() * there).sum() / there.sum().clamp(min=1)

    def drawn(g):
        x = torch.randn(8, WIDTH, generator=g)
        gone = torch.rand(8, WIDTH, generator=g) < 0.2, torch.rand(8, WIDTH, generator=g) < 0.3
        nan = torch.tensor(float("nan"))
        return torch.where(gone[0], nan, x), torch.where(gone[1], nan, x.roll(1, 1))

    return _job(model=_Filled, loss=loss, data=_drawn(drawn))


# -- optimizers ------------------------------------------------------------------------------------


class _Lamb(torch.optim.Optimizer):
    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                root = (state["v"] / (1 - 0.99**self.steps)).sqrt() + 1e-3
                change = state["m"] / (1 - 0.9**self.steps) / root + 0.01 * p
                ratio = p.norm() / change.norm()
                p.add_(torch.where(p.norm() > 0, ratio, 1.0) * change, alpha=-group["lr"])


def trust_ratios() -> ps.Job:
    """LAMB: norms of whole tensors, and steps that the optimizer counts on itself."""
    return _job(optimizer=_Lamb)


class _Lookahead(torch.optim.Optimizer):
    def __init__(self, base) -> None:
        self.base, self.steps, self.defaults = base, 0, base.defaults
        self.param_groups, self.state = base.param_groups, base.state
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.steps += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, kept in zip(group["params"], slow, strict=True):
                if self.steps % 3 == 0:
                    p.copy_(kept.lerp_(p, 0.5))


def slow_weights_in_a_list() -> ps.Job:
    """an optimizer around another, without Optimizer.__init__; it has a list of slow weights."""
    return _job(optimizer=lambda p: _Lookahead(sgd(p)))
