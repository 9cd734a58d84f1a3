"""Hooks of the optimizer on weights, weights that rest, sparse buffers; and samples that meet.

Equal all; refused is `adjacency_put_anew`, and a resume of those that step in backward.
"""

import itertools

import torch
from small import WIDTH, Heads, deep, entropy, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F

import penstock as ps


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _kept(make):
    built = []

    def model():
        built.append(make())
        return built[-1]

    return model, built


def optimizer_in_backward() -> ps.Job:
    """Each weight has an optimizer of its own, stepped by a hook once its gradient is there."""

    def optimizer(weights):
        weights = list(weights)
        own = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in weights}

        def step(p):
            own[p].step()
            own[p].zero_grad()

        for p in weights:
            p.register_post_accumulate_grad_hook(step)
        return torch.optim.SGD(weights, lr=0.0)

    return _job(optimizer=optimizer, micro_batches=1)


def sparse_adjacency() -> ps.Job:
    """A GCN with a sparse adjacency as a buffer."""

    class Gcn(nn.Module):
        def __init__(self):
            super().__init__()
            a = (torch.rand(12, 12) > 0.6).float() + torch.eye(12)
            self.register_buffer("adj", (a / a.sum(1, keepdim=True)).to_sparse())
            self.one, self.two, self.three = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = torch.sparse.mm(self.adj, self.one(x)).tanh()
            h = torch.sparse.mm(self.adj, self.two(h)).tanh()
            return torch.sparse.mm(self.adj, self.three(h))

    def data(start):
        for i in itertools.count(start):
            g = torch.Generator().manual_seed(i)
            yield torch.randn(12, WIDTH, generator=g), torch.randint(0, 4, (12,), generator=g)

    return _job(Gcn, entropy, data)


def csr_adjacency_attribute() -> ps.Job:
    """The same in CSR, as a plain attribute."""

    class Gcn(nn.Module):
        def __init__(self):
            super().__init__()
            a = (torch.rand(12, 12) > 0.6).float() + torch.eye(12)
            self.adj = (a / a.sum(1, keepdim=True)).to_sparse_csr()
            self.one, self.three = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.adj @ self.three((self.adj @ self.one(x)).tanh())

    def data(start):
        for i in itertools.count(start):
            g = torch.Generator().manual_seed(i)
            yield torch.randn(12, WIDTH, generator=g), torch.randint(0, 4, (12,), generator=g)

    return _job(Gcn, entropy, data)


def shared_module_hooked() -> ps.Job:
    """The same module each time; the optimizer steps each weight in a hook."""
    job, net = optimizer_in_backward(), deep()
    return ps.Job(lambda: net, squares, pairs, job.optimizer, micro_batches=1)


def scaled_by_hook_of_the_optimizer() -> ps.Job:
    """The optimizer hangs hooks that halve gradients of the biases."""

    def optimizer(ws):
        for n, p in ws.named():
            if "bias" in n:
                p.register_hook(lambda g: g * 0.5)
        return torch.optim.SGD(ws, lr=0.1, momentum=0.9)

    return ps.Job(deep, squares, pairs, optimizer, micro_batches=4)


def adjacency_put_anew() -> ps.Job:
    """A sparse buffer is another tensor after each call."""
    job = sparse_adjacency()

    def loss(m, b):
        value = entropy(m, b)
        m.adj = m.adj * 0.99
        return value

    return ps.Job(job.model, loss, job.data, sgd, micro_batches=4)


def csr_adjacency() -> ps.Job:
    """The adjacency is a buffer in CSR."""

    class Gcn(nn.Module):
        def __init__(self):
            super().__init__()
            a = (torch.rand(12, 12) > 0.6).float() + torch.eye(12)
            self.register_buffer("adj", (a / a.sum(1, keepdim=True)).to_sparse_csr())
            self.one, self.norm, self.three = (
                nn.Linear(WIDTH, 8),
                nn.BatchNorm1d(8),
                nn.Linear(8, 4),
            )

        def forward(self, x):
            return self.adj @ self.three(self.norm(self.adj @ self.one(x)).tanh())

    return ps.Job(Gcn, entropy, csr_adjacency_attribute().data, sgd, micro_batches=4)


def rate_freezes_and_thaws() -> ps.Job:
    """learning_rate freezes the first layer at its step 3, and thaws it at step 8."""
    model, built = _kept(deep)

    def rate(step):
        if step in (3, 8) and built:
            built[-1][0].requires_grad_(step == 8)
        return 1.0

    return ps.Job(model, squares, pairs, sgd, micro_batches=4, learning_rate=rate)


def loss_freezes_and_thaws() -> ps.Job:
    """The loss freezes the first layer by a counter in a buffer, from 12 to 32 calls."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = deep()
            self.register_buffer("n", torch.tensor(0))

        def forward(self, x):
            self.net[0].requires_grad_(not 12 <= int(self.n) < 32)
            self.n += 1
            return self.net(x)

    return ps.Job(Net, squares, pairs, sgd, micro_batches=4)


def heads_rest() -> ps.Job:
    """Heads by the step: one has no gradient for some steps and keeps its momentum."""

    def data(start):
        for i, (x, y) in enumerate(pairs(start), start):
            yield x, y, (i // 8) % 3

    return ps.Job(
        Heads,
        lambda m, b: nn.functional.mse_loss(m(b[0], b[2]), b[1]),
        data,
        lambda w: torch.optim.AdamW(w, lr=1e-2),
        micro_batches=4,
    )


ROWS = 16


def _rows(start):
    for i in itertools.count(start):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(ROWS, WIDTH, generator=g)
        yield x, torch.randn(ROWS, 4, generator=g) + x[:, :4]


def _whole(loss=squares, model=deep, data=_rows) -> ps.Job:
    return ps.Job(model, loss, data, sgd, micro_batches=1)


def _mid(hook):
    def loss(m, b):
        h = m[:3](b[0])
        h.register_hook(hook)
        return F.mse_loss(m[3:](h), b[1])

    return loss


def gradient_by_its_norm() -> ps.Job:
    """A hook divides the gradient of an activation by its norm over the micro-batch."""
    return _whole(loss=_mid(lambda g: 0.1 * g / (g.norm() + 1e-6)))


def gradient_centred() -> ps.Job:
    """A hook takes the mean over samples off the gradient of an activation."""
    return _whole(loss=_mid(lambda g: g - 0.5 * g.mean(0, keepdim=True)))


def function_by_batch() -> ps.Job:
    """A custom function is elementwise forward; its backward normalizes over the micro-batch."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return g / (g.square().mean().sqrt() + 1e-6) * 0.05

    def loss(m, b):
        return F.mse_loss(m[3:](Norm.apply(m[:3](b[0]))), b[1])

    return _whole(loss=loss)


def residual_over_detached_max() -> ps.Job:
    """Each sample's loss is weighed by a softmax of the detached losses."""

    def loss(m, b):
        each = (m(b[0]) - b[1]).square().mean(1)
        return (each * F.softmax(each.detach(), 0)).sum()

    return _whole(loss=loss)


def constant_beside() -> ps.Job:
    """A table of sixteen rows, as many as there are samples, is added to the outputs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.table = deep(), nn.Parameter(torch.randn(ROWS, 4) * 0.3)
            self.register_buffer("prior", torch.randn(ROWS, 4))

        def forward(self, x):
            return self.net(x) + self.table * self.prior

    return _whole(model=Net)


def support_and_queries() -> ps.Job:
    """Prototypes are means of sixteen supports; sixteen queries are classified by distance."""

    def data(start):
        for i in itertools.count(start):
            g = torch.Generator().manual_seed(i)
            labels = torch.arange(16) % 4
            yield (
                torch.randn(16, WIDTH, generator=g) + labels[:, None] * 0.3,
                torch.randn(16, WIDTH, generator=g) + labels[:, None] * 0.3,
                labels,
            )

    def loss(m, b):
        s, q = m(b[0]), m(b[1])
        protos = torch.zeros(4, 4).index_add(0, b[2], s) / 4
        return F.cross_entropy(-torch.cdist(q, protos), b[2])

    return _whole(loss=loss, data=data)
