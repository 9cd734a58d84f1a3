"""Averages, teachers, targets and clamps, kept by hooks of the optimizer as recipes keep them."""

import copy
import itertools
import math

import torch
from small import deep, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import penstock as ps

STEPS = {"weights_swapped_for_their_average_at_step_twenty": 26}


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _after(hook):
    """Return a function that makes an optimizer which tells `hook` the number of each step."""

    def optimizer(weights):
        made, numbers = sgd([p for p in weights if p.requires_grad]), itertools.count(1)
        made.register_step_post_hook(lambda *_: hook(next(numbers)))
        return made

    return optimizer


def _before(hook):
    """Return a function that makes an optimizer which tells `hook` its groups before a step."""

    def optimizer(weights):
        made = sgd(weights)
        made.register_step_pre_hook(lambda optimizer, *_: hook(optimizer.param_groups))
        return made

    return optimizer


@torch.no_grad()
def _follow(target, source, share):
    for t, s in zip(target.parameters(), source.parameters(), strict=True):
        t.lerp_(s, share)


def average_for_the_shelf() -> ps.Job:
    """A copy of the model follows it outside of the job; nothing reads it (nothing is wrong)."""
    built, shelf = [], []

    def model():
        built.append(deep())
        shelf.append(copy.deepcopy(built[-1]))
        return built[-1]

    return _job(model, optimizer=_after(lambda number: _follow(shelf[-1], built[-1], 0.1)))


def pulled_to_the_average_of_torch() -> ps.Job:
    """torch's AveragedModel is updated by a hook, and the loss pulls the outputs to its own."""
    built, averages = [], []

    def model():
        built.append(deep())
        averages.append(AveragedModel(built[-1]))
        return built[-1]

    def loss(model, batch):
        with torch.no_grad():
            aim = averages[-1](batch[0])
        out = model(batch[0])
        return F.mse_loss(out, batch[1]) + F.mse_loss(out, aim)

    return _job(model, loss, optimizer=_after(lambda n: averages[-1].update_parameters(built[-1])))


def teacher_that_only_the_closure_knows() -> ps.Job:
    """A mean teacher stands in a list beside the model; a hook moves it after every step."""
    built, teachers = [], []

    def model():
        built.append(deep())
        teachers.append(copy.deepcopy(built[-1]).requires_grad_(False))
        return built[-1]

    def loss(model, batch):
        out = model(batch[0])
        return F.mse_loss(out, batch[1]) + F.mse_loss(out, teachers[-1](batch[0] * 1.1))

    return _job(model, loss, optimizer=_after(lambda n: _follow(teachers[-1], built[-1], 0.2)))


def byol() -> ps.Job:
    """Online and target net in one module; the target follows by a cosine of the step."""
    built = []

    def model():
        online = deep()
        target = copy.deepcopy(online).requires_grad_(False)
        built.append(nn.ModuleDict({"online": online, "head": nn.Linear(4, 4), "target": target}))
        return built[-1]

    def loss(model, batch):
        one, other = batch[0], batch[0] + 0.1 * batch[0].roll(1, 1)
        total = 0.0
        for a, b in ((one, other), (other, one)):
            found = F.normalize(model["head"](model["online"](a)), dim=-1)
            total = total + 2 - 2 * (found * F.normalize(model["target"](b), dim=-1)).sum(-1)
        return total.mean()

    def move(number):
        share = 0.3 * (1 + math.cos(math.pi * number / 20)) / 2
        _follow(built[-1]["target"], built[-1]["online"], share)

    return _job(model, loss, optimizer=_after(move))


class _Dino(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = deep()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, x):
        aims = self.teacher(x)
        found = self.student(x * 0.9)
        wanted = F.softmax((aims - self.center) / 0.5, -1)
        with torch.no_grad():
            self.center = self.center * 0.9 + aims.mean(0, keepdim=True) * 0.1
        return -(wanted * F.log_softmax(found, -1)).sum(-1).mean()


def dino() -> ps.Job:
    """The center of a teacher's outputs follows in forward, the teacher itself by a hook."""
    built = []

    def model():
        built.append(_Dino())
        return built[-1]

    def loss(model, batch):
        return model(batch[0])

    hook = _after(lambda number: _follow(built[-1].teacher, built[-1].student, 0.1))
    return _job(model, loss, optimizer=hook)


def moco_before_the_step() -> ps.Job:
    """The encoder of the keys follows before each step; keys of the last batches are a queue."""
    built = []

    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = deep(), deep().requires_grad_(False)
            self.key.load_state_dict(self.query.state_dict())
            self.register_buffer("queue", F.normalize(torch.randn(12, 4), dim=-1))
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))

        def forward(self, x):
            query = F.normalize(self.query(x), dim=-1)
            key = F.normalize(self.key(x + 0.05), dim=-1).detach()
            near = (query * key).sum(-1, keepdim=True)
            logits = torch.cat([near, query @ self.queue.clone().t()], 1) / 0.5
            self.queue[(self.at + torch.arange(len(x))) % 12] = key
            self.at[0] = (self.at[0] + len(x)) % 12
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    def model():
        built.append(Moco())
        return built[-1]

    hook = _before(lambda groups: _follow(built[-1].key, built[-1].query, 0.1))
    return _job(model, lambda model, batch: model(batch[0]), optimizer=hook)


def target_copied_every_third_step() -> ps.Job:
    """A net of values whose target is copied by load_state_dict after each third step."""
    built = []

    def model():
        net = deep()
        target = copy.deepcopy(net).requires_grad_(False)
        built.append(nn.ModuleDict({"net": net, "target": target}))
        return built[-1]

    def loss(model, batch):
        state, after = batch[0], batch[0].roll(1, 0)
        worth = model["net"](state)[:, 0]
        best = model["target"](after).logsumexp(1)
        return F.smooth_l1_loss(worth, batch[1][:, 0] + 0.9 * best)

    def copied(number):
        if number % 3 == 0:
            built[-1]["target"].load_state_dict(built[-1]["net"].state_dict())

    return _job(model, loss, optimizer=_after(copied))


def teacher_of_buffers_that_a_hook_moves() -> ps.Job:
    """The teacher is a flat buffer of the model; a hook moves it after each step."""
    built = []

    class Pulled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep()
            self.register_buffer("anchor", self.layers[0].weight.detach().clone())

        def forward(self, x):
            return self.layers(x) + F.linear(x, self.anchor)[:, :4].tanh()

    def model():
        built.append(Pulled())
        return built[-1]

    def move(number):
        built[-1].anchor.lerp_(built[-1].layers[0].weight.detach(), 0.3)

    return _job(model, optimizer=_after(move))


def lookahead_by_a_hook() -> ps.Job:
    """Slow weights in a list of the hook; each fifth step the fast ones go half way back."""
    built, slow = [], []

    def model():
        built.append(deep())
        return built[-1]

    @torch.no_grad()
    def look(number):
        if number == 1:
            slow[:] = [p.clone() for p in built[-1].parameters()]
        if number % 5 == 0:
            for s, p in zip(slow, built[-1].parameters(), strict=True):
                p.copy_(s.lerp_(p, 0.5))

    return _job(model, optimizer=_after(look))


def critic_whose_weights_are_clamped() -> ps.Job:
    """Every weight is clamped to 0.2 after each step, as the critic of WGAN."""
    built = []

    def model():
        built.append(deep())
        return built[-1]

    @torch.no_grad()
    def clamp(number):
        for p in built[-1].parameters():
            p.clamp_(-0.2, 0.2)

    def loss(model, batch):
        return model(batch[0]).mean() - model(batch[1].repeat(1, 2)).mean()

    return _job(model, loss, optimizer=_after(clamp))


def rows_of_limited_norm() -> ps.Job:
    """After each step the rows of every matrix are scaled to a norm of at most one."""
    built = []

    def model():
        built.append(deep())
        return built[-1]

    @torch.no_grad()
    def limit(number):
        for layer in built[-1]:
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(torch.renorm(layer.weight, 2, 0, 0.6))

    return _job(model, optimizer=_after(limit))


def weights_swapped_for_their_average_at_step_twenty() -> ps.Job:
    """From step 12 on weights are averaged in a dict, and put into the model at step 20."""
    built, average = [], {}

    def model():
        built.append(deep())
        average.clear()
        return built[-1]

    @torch.no_grad()
    def swap(number):
        for name, p in built[-1].named_parameters() if number >= 12 else ():
            average.setdefault(name, torch.zeros_like(p)).add_(p / 9)
        if number == 20:
            built[-1].load_state_dict(average)

    return _job(model, optimizer=_after(swap))


# -- what hooks do to gradients -------------------------------------------------------------------


def gradients_clamped_by_value() -> ps.Job:
    """clip_grad_value_ before each step (nothing is wrong)."""

    def clip(groups):
        for group in groups:
            nn.utils.clip_grad_value_(group["params"], 0.02)

    return _job(optimizer=_before(clip))


def gradients_clipped_layer_by_layer() -> ps.Job:
    """Each parameter's gradient is clipped to a norm of its own before each step."""

    def clip(groups):
        for p in groups[0]["params"]:
            nn.utils.clip_grad_norm_([p], 0.05)

    return _job(optimizer=_before(clip))


def gradients_clipped_by_twos() -> ps.Job:
    """Weight and bias of a layer are clipped together, by their common norm."""

    def clip(groups):
        parameters = groups[0]["params"]
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            nn.utils.clip_grad_norm_([weight, bias], 0.05)

    return _job(optimizer=_before(clip))


def gradients_centralised() -> ps.Job:
    """The mean over a row is taken off every matrix's gradient before each step."""

    @torch.no_grad()
    def centre(groups):
        for p in groups[0]["params"]:
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))

    return _job(optimizer=_before(centre))


def gradients_with_noise_of_a_generator() -> ps.Job:
    """A generator made once, with the job, gives noise for the gradients before each step."""
    source = torch.Generator().manual_seed(7)

    def disturb(groups):
        for p in groups[0]["params"]:
            p.grad.add_(0.01 * torch.randn(p.shape, generator=source))

    return _job(optimizer=_before(disturb))


def drawn_to_where_it_began() -> ps.Job:
    """A hook adds the way from the first weights to the gradient, as L2-SP does."""

    def optimizer(weights):
        first = [p.detach().clone() for p in weights]
        made = sgd(weights)

        @torch.no_grad()
        def pull(*_):
            for p, origin in zip(weights, first, strict=True):
                p.grad.add_(p - origin, alpha=0.3)

        made.register_step_pre_hook(pull)
        return made

    return _job(optimizer=optimizer)


def momentum_forgotten_every_fourth_step() -> ps.Job:
    """A hook clears the optimizer's state after each fourth step, as warm restarts do."""

    def optimizer(weights):
        made, numbers = torch.optim.Adam(weights, 0.01), itertools.count(1)
        made.register_step_post_hook(lambda o, *_: next(numbers) % 4 or o.state.clear())
        return made

    return _job(optimizer=optimizer)
