"""Teachers, targets and critics: what one half of a model does to the other."""

import copy
import itertools

import torch
from small import WIDTH, classes, deep, pairs, sgd
from torch import nn
from torch.nn import functional as F

import penstock as ps


def _job(model, loss, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


class _Taught(nn.Module):
    """A student with a head, and a teacher beside it."""

    def __init__(self, *, evaluates: bool) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
        self.student, self.head = nn.Sequential(*layers), nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.evaluates = evaluates

    def forward(self, x):
        found = self.head(self.student(x))
        self.teacher.train(not self.evaluates)
        with torch.no_grad():
            aim = self.teacher(x + 0.1 * x.roll(1, 1))
        return 2 - 2 * F.cosine_similarity(found, aim).mean()


def _followed(follow, *, evaluates: bool) -> ps.Job:
    built = []

    def model():
        built[:] = [_Taught(evaluates=evaluates)]
        return built[0]

    @torch.no_grad()
    def after(*_):
        for own, aim in zip(
            built[0].student.parameters(), built[0].teacher.parameters(), strict=True
        ):
            aim.lerp_(own, 0.1)
        for own, aim in zip(built[0].student.buffers(), built[0].teacher.buffers(), strict=True):
            follow(own, aim)

    def optimizer(weights):
        made = sgd([weight for weight in weights if weight.requires_grad])
        made.register_step_post_hook(after)
        return made

    return _job(model, lambda model, batch: model(batch[0]), optimizer=optimizer)


def _average(own, aim):
    aim.copy_(aim.lerp(own, 0.3) if aim.is_floating_point() else own)


def statistics_copied_into_a_teacher_in_eval() -> ps.Job:
    """BYOL as it is passed on: weights follow slowly, buffers are copied after every step."""
    return _followed(lambda own, aim: aim.copy_(own), evaluates=True)


def statistics_averaged_into_a_teacher_in_eval() -> ps.Job:
    """The same with an average of the statistics."""
    return _followed(_average, evaluates=True)


def statistics_copied_into_a_teacher_in_training() -> ps.Job:
    """Forward moves the statistics of the teacher, and a hook writes over them."""
    return _followed(lambda own, aim: aim.copy_(own), evaluates=False)


def statistics_averaged_into_a_teacher_in_training() -> ps.Job:
    """Forward and a hook both move the statistics of the teacher."""
    return _followed(_average, evaluates=False)


class _Player(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = deep()
        self.target = copy.deepcopy(self.online).requires_grad_(False)


def double_q_learning() -> ps.Job:
    """The best action is the online net's, its value the target's, which a hook moves."""
    built = []

    def model():
        built[:] = [_Player()]
        return built[0]

    def loss(model, batch):
        state, action, reward, after, is_last = batch
        found = model.online(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = model.online(after).argmax(1, keepdim=True)
            value = model.target(after).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(found, reward + 0.9 * (1 - is_last) * value)

    @torch.no_grad()
    def follow(*_):
        both = zip(built[0].online.parameters(), built[0].target.parameters(), strict=True)
        for own, aim in both:
            aim.mul_(0.95).add_(0.05 * own)

    def optimizer(weights):
        made = sgd([weight for weight in weights if weight.requires_grad])
        made.register_step_post_hook(follow)
        return made

    def data(start):
        for number in itertools.count(start):
            source = torch.Generator().manual_seed(number)
            state = torch.randn(8, WIDTH, generator=source)
            action = torch.randint(0, 4, (8,), generator=source)
            yield state, action, state.sum(1), state.roll(1, 1), (action == 0).float()

    return _job(model, loss, data, optimizer=optimizer)


class _Game(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.painter, self.critic = deep(outputs=WIDTH), deep(outputs=1)


class _Both(torch.optim.Optimizer):
    """Two optimizers that step together."""

    def __init__(self, named) -> None:
        parts = {"painter": [], "critic": []}
        for name, weight in named:
            parts[name.partition(".")[0]].append(weight)
        self.inside = [
            torch.optim.SGD(own, lr=rate)
            for own, rate in zip(parts.values(), (0.1, 0.05), strict=True)
        ]
        super().__init__([weight for own in parts.values() for weight in own], {"lr": 0.1})

    def step(self, closure=None):
        for one in self.inside:
            one.step()

    def zero_grad(self, set_to_none=True):
        for one in self.inside:
            one.zero_grad(set_to_none)


def critic_copied_in_the_loss() -> ps.Job:
    """The painter learns by a frozen copy of the critic, which the loss makes each time."""

    def loss(model, batch):
        real, noise = batch[0], batch[0].roll(3, 1)
        made = model.painter(noise)
        own = (
            F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(made.detach())).mean()
        )
        frozen = copy.deepcopy(model.critic).requires_grad_(False)
        return own + F.softplus(-frozen(made)).mean()

    return _job(_Game, loss, optimizer=lambda weights: _Both(weights.named()))


def critic_frozen_in_the_loss() -> ps.Job:
    """The critic is frozen while the painter's loss is made, and thawed for its own."""

    def loss(model, batch):
        real, made = batch[0], model.painter(batch[0].roll(3, 1))
        model.critic.requires_grad_(False)
        cheat = -model.critic(made).mean()
        model.critic.requires_grad_(True)
        own = F.relu(1 - model.critic(real)).mean() + F.relu(1 + model.critic(made.detach())).mean()
        return cheat + own

    makers = {
        "painter.*": lambda weights: torch.optim.SGD(weights, lr=0.1),
        "critic.*": lambda weights: torch.optim.Adam(weights, lr=1e-3, betas=(0.5, 0.999)),
    }
    return _job(_Game, loss, optimizer=ps.by_name(makers))


def centres_of_classes() -> ps.Job:
    """Features are pulled to centres that a trainer's object holds."""

    class Trainer:
        def __init__(self) -> None:
            self.centres = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
            self.share = 0.7

        def loss(self, model, batch):
            features = model[:-1](batch[0])
            pull = (features - self.centres[batch[1]]).square().mean()
            return F.cross_entropy(model[-1](features), batch[1]) + self.share * pull

    return _job(deep, Trainer().loss, classes)
