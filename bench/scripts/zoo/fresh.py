"""Scripts by fresh eyes: what an optimizer, a checkpoint or a late batch does, and odd couplings.

The first five were once trained otherwise than their authors meant, or refused.
"""

import copy
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from small import WIDTH, deep, entropy, images, pair, pairs, sgd, squares, tokens
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import penstock as ps

STEPS = {"clipped_by_the_norm_of_all_from_step_fourteen": 24}


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


class _SkipsJumps(torch.optim.SGD):
    usual = None

    def step(self, closure=None):
        weights = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in weights]).norm().item()
        jumps = self.usual is not None and norm > 1.15 * self.usual
        self.usual = norm if self.usual is None else 0.9 * self.usual + 0.1 * norm
        if not jumps:
            super().step(closure)


def steps_left_out_by_the_norm() -> ps.Job:
    """A step is left out whose norm is 15 % above the moving average of the norms."""
    return _job(optimizer=lambda weights: _SkipsJumps(weights, lr=0.1))


class _ClipsLate(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        self.count += 1
        if self.count > 13:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step(closure)


def clipped_by_the_norm_of_all_from_step_fourteen() -> ps.Job:
    """Longer than a trial of an optimizer takes, each parameter is by itself."""
    return _job(optimizer=lambda weights: _ClipsLate(weights, lr=0.1))


class _Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(
            WIDTH, WIDTH, bias=False
        )  # a norm follows: its gradient would be rounding
        self.net = nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        average = get_ema_multi_avg_fn(0.9)
        self.average = AveragedModel(self.net, multi_avg_fn=average, use_buffers=True)
        self.average.requires_grad_(False)

    def forward(self, x):
        return self.net(x), self.average(x)


def average_of_torch_with_its_statistics() -> ps.Job:
    """AveragedModel(use_buffers=True) is a child: forward and a hook both move its statistics."""
    built = []

    def model():
        built.append(_Averaged())
        return built[-1]

    def loss(model, batch):
        out, aim = model(batch[0])
        return F.mse_loss(out, batch[1]) + 0.5 * F.mse_loss(out, aim)

    def optimizer(weights):
        made = torch.optim.Adam([weight for weight in weights if weight.requires_grad], lr=3e-3)
        made.register_step_post_hook(lambda *_: built[-1].average.update_parameters(built[-1].net))
        return made

    return _job(model, loss, optimizer=optimizer)


class _Lookahead(Optimizer):
    """As it is passed on: it does not call Optimizer.__init__."""

    def __init__(self, base) -> None:
        self.base, self.count = base, 0
        self.param_groups, self.state = base.param_groups, base.state
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        rows = zip(self.param_groups, self.slow, strict=True) if self.count % 4 == 0 else ()
        for group, slow in rows:
            for p, s in zip(group["params"], slow, strict=True):
                p.copy_(s.lerp_(p, 0.5))

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


def optimizer_around_another() -> ps.Job:
    """Lookahead around SGD, which it holds."""
    return _job(optimizer=lambda weights: _Lookahead(torch.optim.SGD(weights, lr=0.1)))


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(3)]
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=number == 1).tanh()
        return self.head(x)


def checkpoints_of_both_kinds_with_dropout() -> ps.Job:
    """Blocks with dropout are computed again, one of them by the old kind of checkpoint."""
    return _job(_Repeated)


def archive_of_numpy() -> ps.Job:
    """np.load of an archive stays open for the whole job; its members are read in `data`."""
    rows = np.random.default_rng(0).standard_normal((16, 4, 12)).astype(np.float32)
    path = Path(tempfile.gettempdir()) / "penstock-zoo-archive.npz"
    np.savez(path, **{f"rows{number}": each for number, each in enumerate(rows)})
    archive = np.load(path)

    def data(start):
        for number in itertools.count(start):
            row = torch.from_numpy(archive[f"rows{number % 16}"])
            yield row[:, :WIDTH], row[:, WIDTH:]

    return _job(data=data)


def spike_that_comes_at_38() -> ps.Job:
    """`if targets.abs().max() > 25`: the first such micro-batch is number 38."""

    def data(start):
        for number in itertools.count(start):
            x, y = pair(number)
            yield x, y * (30 if number == 38 else 1)

    def loss(model, batch):
        found = squares(model, batch)
        return found * 1e-3 if batch[1].abs().max() > 25 else found

    return _job(loss=loss, data=data)


def shorter_from_38_on() -> ps.Job:
    """The last micro-batches of ten steps have two rows."""

    def data(start):
        return (pair(number, rows=4 if number < 38 else 2) for number in itertools.count(start))

    return _job(data=data)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.norm(self.up(x)).tanh())


class _Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = _Normed()
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False).eval()

    def forward(self, x):
        return self.student(x)


def teacher_in_eval_whose_statistics_a_hook_moves() -> ps.Job:
    """Weights and running statistics of a teacher follow the student's, by its state_dict."""
    built = []

    def model():
        built.append(_Taught())
        return built[-1]

    def loss(model, batch):
        with torch.no_grad():
            target = model.teacher(batch[0] + 0.01)
        return F.mse_loss(model(batch[0]), target) + squares(model, batch)

    def optimizer(weights):
        @torch.no_grad()
        def follow(*_):
            own = built[-1].student.state_dict()
            for name, value in built[-1].teacher.state_dict().items():
                value.copy_(
                    own[name] if not value.is_floating_point() else value.lerp(own[name], 0.1)
                )

        made = sgd(weights)
        made.register_step_post_hook(follow)
        return made

    return _job(model, loss, optimizer=optimizer)


def targets_that_broadcast() -> ps.Job:
    """Predictions are a column and targets a row: every sample meets all others (a known bug)."""
    return _job(loss=lambda m, b: (m(b[0])[:, :1] - b[1][:, 0]).square().mean())


def weights_of_samples_along_the_outputs() -> ps.Job:
    """There are as many outputs as samples, and weights of samples meet the outputs."""

    def loss(model, batch):
        weights = batch[0][:, 0].abs() + 0.1
        return ((model(batch[0]) - batch[1]).square() * weights).mean()

    return _job(loss=loss)


def risks_in_the_order_of_time() -> ps.Job:
    """Cox's partial likelihood: a logcumsumexp down the samples, sorted by time."""

    def loss(model, batch):
        risk = model(batch[0])[:, 0][batch[1][:, 0].argsort(descending=True)]
        return (torch.logcumsumexp(risk, 0) - risk).mean()

    return _job(loss=loss)


def codes_by_sinkhorn() -> ps.Job:
    """SwAV: codes are balanced over the samples in three rounds."""

    def loss(model, batch):
        z = F.normalize(model(batch[0]), dim=1)
        with torch.no_grad():
            codes = torch.exp(z / 0.5)
            for _ in range(3):
                codes = codes / codes.sum(0, keepdim=True) / 4
                codes = codes / codes.sum(1, keepdim=True) / 4
        return -(codes * 4 * F.log_softmax(z / 0.1, 1)).sum(1).mean()

    return _job(loss=loss)


class _OwnKernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.kernels = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 144)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x).tanh()
        count, channels, *size = x.shape
        kernels = self.kernels(x.mean((2, 3))).view(count * 4, 4, 3, 3)
        x = F.conv2d(x.reshape(1, count * channels, *size), kernels, padding=1, groups=count)
        return self.head(x.view(count, 4, *size).mean((2, 3)))


def kernels_of_each_sample() -> ps.Job:
    """Samples are folded into the channels of one grouped convolution."""
    return _job(_OwnKernels, entropy, images)


class _Words(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(16, WIDTH, **options), deep(outputs=16)

    def forward(self, x):
        return self.layers(self.words(x))


def _next_token(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def gradients_by_frequency() -> ps.Job:
    """The gradient of a word is divided by how often it is in the micro-batch."""
    return _job(lambda: _Words(scale_grad_by_freq=True), _next_token, tokens)


def words_of_limited_norm() -> ps.Job:
    """Forward scales the rows that it looks up in place (max_norm)."""
    return _job(lambda: _Words(max_norm=1.5), _next_token, tokens)


def momentum_that_is_forgotten() -> ps.Job:
    """A hook clears the optimizer's state before each fourth step."""

    def optimizer(weights):
        made, steps = torch.optim.Adam(weights, lr=0.01), itertools.count(1)

        def forget(own, *_):
            if next(steps) % 4 == 0:
                own.state.clear()

        made.register_step_pre_hook(forget)
        return made

    return _job(optimizer=optimizer)
