"""What people write on forums and in repositories: spectra, graphs, guards, noise in hooks.

Each of these was once refused, or went without a plan, though it is right.
"""

import math

import numpy as np
import torch
from small import WIDTH, deep, entropy, images, pairs, sgd, squares, tokens
from torch import nn
from torch.nn import functional as F

import penstock as ps


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _next_token(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


# -- complex numbers ------------------------------------------------------------------------------


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2) * 0.3)
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.up(x)
        modes = torch.fft.rfft(x, dim=-1)
        out = torch.zeros_like(modes)
        out[:, :3] = modes[:, :3] * torch.view_as_complex(self.weight)
        return self.head(x + torch.fft.irfft(out, n=WIDTH, dim=-1))


def neural_operator() -> ps.Job:
    """Some frequencies are weighted and written into a slice of a spectrum."""
    return _job(_Spectral)


class _Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat) * 0.3)
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(self.up(x)) * self.weight, n=WIDTH))


def complex_filter() -> ps.Job:
    """A parameter of complex numbers."""
    return _job(_Filter)


class _StateSpace(nn.Module):
    def __init__(self, states=4) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        readout = torch.randn(WIDTH, states, dtype=torch.cfloat) * 0.3
        self.readout = nn.Parameter(torch.view_as_real(readout))
        self.log_step = nn.Parameter(torch.rand(WIDTH) * -2)
        self.log_decay = nn.Parameter(torch.full((WIDTH, states), math.log(0.5)))
        self.turn = nn.Parameter(math.pi * torch.arange(states).float().repeat(WIDTH, 1))

    def forward(self, x):
        u = self.emb(x).transpose(1, 2)
        length = u.shape[-1]
        poles = -self.log_decay.exp() + 1j * self.turn
        steps = poles * self.log_step.exp()[:, None]
        readout = torch.view_as_complex(self.readout) * (steps.exp() - 1) / poles
        powers = torch.exp(steps[..., None] * torch.arange(length))
        kernel = 2 * torch.einsum("hn,hnl->hl", readout, powers).real
        spectrum = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(u, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return self.head((y + u).transpose(1, 2))


def state_space() -> ps.Job:
    """A convolution whose kernel is a sum of complex exponentials."""
    return _job(_StateSpace, _next_token, tokens)


# -- what Python asks of a batch ------------------------------------------------------------------


class _Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 4))

    def pass_on(self, layer, x, edges):
        ones = torch.ones(edges.shape[1])
        count = torch.zeros(x.shape[0]).scatter_add_(0, edges[1], ones).clamp(min=1)
        return torch.zeros_like(x).index_add_(0, edges[1], layer(x)[edges[0]]) / count[:, None]

    def forward(self, x, edges, graph):
        x = torch.tanh(self.pass_on(self.a, x, edges)) + x
        x = torch.tanh(self.pass_on(self.b, x, edges)) + x
        pooled = torch.zeros(int(graph.max()) + 1, WIDTH)
        place = graph[:, None].expand_as(x)
        return self.head(pooled.scatter_reduce_(0, place, x, "mean", include_self=False))


def graphs_of_a_batch() -> ps.Job:
    """How many graphs there are is `int(graph.max()) + 1`."""

    def data(start):
        while True:
            source = torch.Generator().manual_seed(start)
            edges = torch.randint(0, 6, (2, 12), generator=source)
            x, y = torch.randn(6, WIDTH, generator=source), torch.randn(2, 4, generator=source)
            yield x, edges, torch.tensor([0, 0, 0, 1, 1, 1]), y
            start += 1

    return _job(_Graphs, lambda model, b: F.mse_loss(model(*b[:3]), b[3]), data)


def guarded_against_bad_batches() -> ps.Job:
    """An assertion and a branch that no batch takes."""

    def loss(model, batch):
        x, y = batch
        assert torch.isfinite(x).all(), "a bad batch"
        if (y.abs() > 1e6).any():
            return model(x).sum() * 0
        return F.mse_loss(model(x), y)

    return _job(loss=loss)


class _Truncating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn = nn.Embedding(16, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, lengths):
        y, _ = self.rnn(self.emb(x[:, : lengths.max().item()]))
        return self.head(y[torch.arange(x.shape[0]), lengths - 1])


def truncated_to_the_longest() -> ps.Job:
    """The longest of a batch differs from batch to batch: eager replicas."""

    def data(start):
        for number, x in enumerate(tokens(start), start):
            source = torch.Generator().manual_seed(number)
            lengths = torch.randint(2, 7, (2,), generator=source)
            yield x, lengths, torch.randint(0, 4, (2,), generator=source)

    return _job(_Truncating, lambda model, b: F.cross_entropy(model(*b[:2]), b[2]), data)


def ctc_of_whole_rows() -> ps.Job:
    """The lengths are constants that the loss makes: eager replicas."""

    def loss(model, batch):
        rows = model(batch[0].transpose(0, 1)).log_softmax(-1)
        whole, most = torch.full((4,), 6), torch.full((4,), 2)
        return F.ctc_loss(rows, batch[1], whole, most)

    def data(start):
        while True:
            source = torch.Generator().manual_seed(start)
            x = torch.randn(4, 6, WIDTH, generator=source)
            yield x, torch.randint(1, 5, (4, 2), generator=source)
            start += 1

    return _job(lambda: deep(outputs=5), loss, data)


# -- noise ----------------------------------------------------------------------------------------


def noise_of_a_generator_beside_the_optimizer() -> ps.Job:
    """A hook adds noise from a generator that was made before it: eager replicas."""
    source = torch.Generator().manual_seed(3)

    def optimizer(weights):
        weights = list(weights)
        made = torch.optim.SGD(weights, lr=0.1, momentum=0.9)

        def hook(*_):
            for p in weights:
                p.grad.add_(torch.randn(p.shape, generator=source), alpha=0.01)

        made.register_step_pre_hook(hook)
        return made

    return _job(optimizer=optimizer)


class _Langevin(torch.optim.SGD):
    source = np.random.default_rng(0)

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            noise = torch.from_numpy(self.source.standard_normal(p.shape)).to(p)
            p.add_(noise, alpha=0.001)


def langevin_with_a_generator_of_the_class() -> ps.Job:
    """The noise is the class's: eager replicas."""
    return _job(optimizer=lambda weights: _Langevin(weights, lr=0.1))


# -- weights that are made ------------------------------------------------------------------------


class _Standardized(nn.Conv2d):
    def forward(self, x):
        dims = (1, 2, 3)
        centred = self.weight - self.weight.mean(dims, keepdim=True)
        weight = centred / (self.weight.std(dims, keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def standardized_weights() -> ps.Job:
    """Convolutions whose weights are standardized in forward."""

    def model():
        first, second = _Standardized(3, 8, 3, padding=1), _Standardized(8, 8, 3)
        between, ends = (nn.GroupNorm(2, 8), nn.SiLU()), (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(first, *between, second, *ends, nn.Linear(8, 4))

    return _job(model, entropy, images)
