"""Weights and buffers that lists and hooks keep past the module, and CTC losses with lengths."""

import itertools

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


def penalty_over_a_list() -> ps.Job:
    """Penalty over a list."""

    weights = []

    def model():
        made = net()
        weights[:] = made.parameters()
        return made

    return job(
        model, lambda m, b: ce(m, b) + 0.01 * sum(w.square().sum() for w in weights), classes
    )


def penalty_stacked() -> ps.Job:
    """Penalty stacked."""

    weights = []

    def model():
        made = net()
        weights[:] = [p for p in made.parameters() if p.ndim == 2 and p.shape[0] == 16]
        return made

    return job(model, lambda m, b: ce(m, b) + 0.01 * torch.stack(weights).square().mean(), classes)


def penalty_of_the_first_built() -> ps.Job:
    """The list is filled once: by the first module."""
    weights = []

    def model():
        made = net()
        if not weights:
            weights.extend(made.parameters())
        return made

    return job(
        model, lambda m, b: ce(m, b) + 0.01 * sum(w.square().sum() for w in weights), classes
    )


def global_table() -> ps.Job:
    """A layer keeps another's weight in a list so as not to register it (tied output)."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
            self.of = [self.a.weight]

        def forward(self, x):
            return self.b(F.linear(torch.tanh(self.a(x)), self.of[0].T))

    return job(Tied, ce, classes)


def buffer_in_a_list() -> ps.Job:
    """Buffer in a list."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
            self.register_buffer("mean", torch.zeros(16))
            self.kept = {"mean": self.mean}

        def forward(self, x):
            h = self.a(x)
            with torch.no_grad():
                self.kept["mean"].mul_(0.9).add_(h.mean(0), alpha=0.1)
            return self.b(torch.tanh(h - self.kept["mean"]))

    return job(Net, ce, classes)


def hook_reads_the_gradient_so_far() -> ps.Job:
    """Hook reads the gradient so far."""

    def model():
        made = net()
        for p in made.parameters():
            p.register_hook(
                lambda grad, p=p: (
                    grad if p.grad is None else grad + 0.1 * p.grad + 0.001 * p.detach()
                )
            )
        return made

    return job(model, ce, classes)


def hook_of_the_weight_before_it() -> ps.Job:
    """Hook of the weight before it."""

    def model():
        made = net()
        weights = list(made.parameters())
        for one, two in zip(weights[2::2], weights[::2], strict=False):
            one.register_hook(lambda grad, two=two: grad * two.data.abs().mean().clamp(max=1.0))
        return made

    return job(model, ce, classes)


def post_hook_decays() -> ps.Job:
    """Post hook decays."""

    def model():
        made = net()
        for p in made.parameters():

            def after(p):
                p.grad.add_(p.detach(), alpha=0.01)

            p.register_post_accumulate_grad_hook(after)
        return made

    return job(model, ce, classes)


def view_of_a_weight() -> ps.Job:
    """View of a weight."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
            self.of = [self.a.weight.data[0]]

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)) * self.of[0])

    return job(Net, ce, classes)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, 1, 1)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 7)

    def forward(self, x):
        h, _ = self.gru(F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))
        return self.out(h).log_softmax(-1)


def speech(start, *, own=False, kind=lambda x: x):
    for k in itertools.count(start):
        e = g(k)
        lens = torch.randint(12, 21, (3,), generator=e)
        top = int(lens.max()) if own else 20
        ylens = torch.randint(2, 5, (3,), generator=e)
        ytop = int(ylens.max()) if own else 4
        yield (
            torch.randn(3, top, 8, generator=e),
            torch.randint(1, 7, (3, ytop), generator=e),
            kind(lens),
            kind(ylens),
        )


def ctc_functional() -> ps.Job:
    """Ctc functional."""

    return job(Speech, lambda m, b: F.ctc_loss(m(b[0]).transpose(0, 1), b[1], b[2], b[3]), speech)


def ctc_module() -> ps.Job:
    """Ctc module."""

    crit = nn.CTCLoss(blank=0, zero_infinity=True)
    return job(Speech, lambda m, b: crit(m(b[0]).transpose(0, 1), b[1], b[2], b[3]), speech)


def ctc_full_lengths() -> ps.Job:
    """deepspeech tutorials: input lengths are all the full length, made in the loss."""

    def loss(m, b):
        x, y, _, ylens = b
        out = m(x).transpose(0, 1)
        full = torch.full((out.size(1),), out.size(0), dtype=torch.long)
        return F.ctc_loss(out, y, full, ylens)

    return job(Speech, loss, speech)


def ctc_full_targets() -> ps.Job:
    """CRNN captcha: fixed everything."""

    def loss(m, b):
        x, y, _, _ = b
        out = m(x).transpose(0, 1)
        n, t = out.size(1), out.size(0)
        return F.ctc_loss(
            out,
            y,
            torch.full((n,), t, dtype=torch.int32),
            torch.full((n,), y.size(1), dtype=torch.int32),
        )

    return job(Speech, loss, speech)
