"""What changes only in a later step, and is set by something that is not the loss."""

import itertools
from collections.abc import Callable

import torch
from small import WIDTH, deep, pair, pairs, squares
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import penstock as ps


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": _sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class _Built:
    """Keeps the models and optimizers that it has made, as scripts do by a global."""

    def __init__(self, make: Callable[[], nn.Module] = deep) -> None:
        self.make = make
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []

    def model(self):
        self.models.append(self.make())
        return self.models[-1]

    def optimizer(self, weights):
        self.optimizers.append(_sgd(weights))
        return self.optimizers[-1]

    def hooked(self, hook: Callable[[int], object]):
        """Return a function that makes an optimizer which tells `hook` the number of each step."""

        def optimizer(weights):
            made, steps = self.optimizer(weights), itertools.count(1)
            made.register_step_post_hook(lambda *_: hook(next(steps)) and None)
            return made

        return optimizer


def _around(layer: Callable[[], nn.Module]) -> _Built:
    """A model whose layer 2 is this one."""

    def make():
        first = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer()]
        return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    return _Built(make)


# -- by the schedule ------------------------------------------------------------------------------


def dropout_that_the_schedule_turns_off() -> ps.Job:
    """learning_rate sets the share of dropout to zero at step 6."""
    built = _around(lambda: nn.Dropout(0.3))

    def rate(step):
        built.models[-1][2].p = 0.3 if step < 6 else 0.0
        return 1.0

    return _job(built.model, learning_rate=rate)


def batch_norm_that_the_schedule_slows() -> ps.Job:
    """learning_rate goes over all modules at step 5 and lowers the momentum of batch norms."""
    built = _around(lambda: nn.BatchNorm1d(WIDTH))

    def rate(step):
        for module in built.models[-1].modules() if step == 5 else ():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.01
        return 1.0

    return _job(built.model, learning_rate=rate)


def activation_that_the_schedule_replaces() -> ps.Job:
    """learning_rate puts another activation into the model at step 6."""
    built = _around(nn.Tanh)

    def rate(step):
        if step == 6:
            built.models[-1][2] = nn.Softsign()
        return 1.0

    return _job(built.model, learning_rate=rate)


def head_that_the_schedule_resets() -> ps.Job:
    """learning_rate sets the head to zero at step 6."""
    built = _Built()

    def rate(step):
        if step == 6:
            nn.init.zeros_(built.models[-1][-1].weight)
        return 1.0

    return _job(built.model, learning_rate=rate)


class _Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()
        self.register_buffer("tau", torch.ones(()))

    def forward(self, x):
        return self.layers(x) / self.tau


def temperature_that_the_schedule_fills() -> ps.Job:
    """learning_rate fills the buffer that forward divides by, at every step."""
    built = _Built(_Tempered)

    def rate(step):
        built.models[-1].tau.fill_(1.0 + 0.2 * step)
        return 1.0

    return _job(built.model, learning_rate=rate)


def decay_that_the_schedule_sets() -> ps.Job:
    """learning_rate sets the weight decay of the optimizer, from step 6 on."""
    built = _Built()

    def rate(step):
        for group in built.optimizers[-1].param_groups if step >= 6 else ():
            group["weight_decay"] = 0.1
        return 1.0

    return _job(optimizer=built.optimizer, learning_rate=rate)


def hook_that_the_schedule_hangs() -> ps.Job:
    """learning_rate registers a forward hook at step 5, which halves the output."""
    built = _Built()

    def rate(step):
        if step == 5:
            built.models[-1].register_forward_hook(lambda module, inputs, output: output / 2)
        return 1.0

    return _job(built.model, learning_rate=rate)


def hook_that_the_schedule_removes() -> ps.Job:
    """A forward hook doubles the output until learning_rate removes it at step 5."""
    built, handles = _Built(), []

    def model():
        made = built.model()
        handles.append(made.register_forward_hook(lambda module, inputs, output: output * 2))
        return made

    def rate(step):
        if step == 5:
            handles[-1].remove()
        return 1.0

    return _job(model, learning_rate=rate)


def criterion_that_the_schedule_sharpens() -> ps.Job:
    """A criterion of torch, kept by the loss's closure, gets another delta at step 6."""
    criterion = nn.HuberLoss(delta=1.0)

    def rate(step):
        criterion.delta = 1.0 if step < 6 else 0.1
        return 1.0

    def loss(model, batch):
        return criterion(model(batch[0]), batch[1])

    return _job(loss=loss, learning_rate=rate)


def teacher_that_the_schedule_puts_into_eval() -> ps.Job:
    """A teacher of the closure, with dropout, is put into eval mode at step 5."""
    torch.manual_seed(5)
    teacher = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5))

    def rate(step):
        if step == 5:
            teacher.eval()
        return 1.0

    def loss(model, batch):
        with torch.no_grad():
            told = teacher(batch[0])
        return squares(model, batch) + 0.5 * F.mse_loss(model(batch[0]), told)

    return _job(loss=loss, learning_rate=rate)


class _Switches:
    """A scheduler of one's own that changes something else than the rate."""

    def __init__(self, built: _Built) -> None:
        self.built, self.steps = built, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == 5:
            self.built.models[-1][2].p = 0.0


def dropout_that_the_scheduler_turns_off() -> ps.Job:
    """Job.scheduler is a class of one's own, which turns dropout off at step 5."""
    built = _around(lambda: nn.Dropout(0.3))
    return _job(built.model, scheduler=lambda optimizer: _Switches(built))


# -- by hooks, by the data, by the loss -----------------------------------------------------------


def activation_that_a_hook_replaces() -> ps.Job:
    """A hook of the optimizer puts another activation into the model after five steps."""
    built = _around(nn.Tanh)

    def hook(step):
        if step == 5:
            built.models[-1][2] = nn.Sigmoid()

    return _job(built.model, optimizer=built.hooked(hook))


def temperature_that_a_hook_raises() -> ps.Job:
    """A hook of the optimizer multiplies a buffer after every step."""
    built = _Built(_Tempered)
    return _job(built.model, optimizer=built.hooked(lambda step: built.models[-1].tau.mul_(1.1)))


def gradient_that_a_hook_damps() -> ps.Job:
    """A hook of the optimizer hangs a hook on the gradient of a parameter after four steps."""
    built = _Built()

    def hook(step):
        if step == 4:
            next(built.models[-1].parameters()).register_hook(lambda gradient: gradient * 0.1)

    return _job(built.model, optimizer=built.hooked(hook))


class _Anneal:
    """A callback as trainers have them."""

    def __init__(self, built: _Built) -> None:
        self.built = built

    def on_step(self, step: int) -> None:
        if step == 5:
            vars(self.built.models[-1][2]).update(p=0.0)


def callbacks_in_a_list() -> ps.Job:
    """Callbacks in a list, told by a hook of the optimizer; one turns dropout off after step 5."""
    built = _around(lambda: nn.Dropout(0.4))
    callbacks = [_Anneal(built)]

    def hook(step):
        for callback in callbacks:
            callback.on_step(step)

    return _job(built.model, optimizer=built.hooked(hook))


def weights_that_a_hook_averages() -> ps.Job:
    """A hook keeps an average of the weights and puts it into the model after six steps."""

    def optimizer(weights):
        made, steps = _sgd(weights), itertools.count(1)
        means = [p.detach().clone() for p in weights]

        @torch.no_grad()
        def hook(*_):
            for mean, p in zip(means, weights, strict=True):
                mean.lerp_(p, 0.3)
            if next(steps) == 6:
                for mean, p in zip(means, weights, strict=True):
                    p.copy_(mean)

        made.register_step_post_hook(hook)
        return made

    return _job(optimizer=optimizer)


def momentum_that_the_data_raises() -> ps.Job:
    """The data raises the momentum of the optimizer when its first epoch is over."""
    built = _Built()

    def data(start):
        for index in itertools.count(start):
            if index >= 24 and built.optimizers:
                built.optimizers[-1].param_groups[0]["momentum"] = 0.9
            yield pair(index)

    return _job(optimizer=built.optimizer, data=data)


def decay_that_the_loss_raises() -> ps.Job:
    """The loss raises the weight decay of the optimizer at its 26th call."""
    built, calls = _Built(), itertools.count(1)

    def loss(model, batch):
        if next(calls) == 26:
            built.optimizers[-1].param_groups[0]["weight_decay"] = 0.1
        return squares(model, batch)

    return _job(optimizer=built.optimizer, loss=loss)


def samples_mined_after_a_warm_up() -> ps.Job:
    """The loss leaves its values in a list; the data repeats samples while the last one is high."""
    told: list[torch.Tensor] = []

    def data(start):
        for index in itertools.count(start):
            yield pair(index % 4 if len(told) > 16 and told[-1] > 0.5 else index)

    def loss(model, batch):
        told.append(squares(model, batch).detach())
        return squares(model, batch)

    return _job(data=data, loss=loss)


def targets_of_the_model_itself() -> ps.Job:
    """From micro-batch 24 on the data asks the model for one half of the targets."""
    built = _Built()

    def data(start):
        for index in itertools.count(start):
            x, y = pair(index)
            if index >= 24:
                with torch.no_grad():
                    y = 0.5 * y + 0.5 * built.models[-1](x)
            yield x, y

    return _job(built.model, data=data)


def rate_by_what_was_read() -> ps.Job:
    """The data counts what it yields; from 25 on the rate is divided by that."""
    seen = [0]

    def data(start):
        for index in itertools.count(start):
            seen[0] += 1
            yield pair(index)

    return _job(data=data, learning_rate=lambda step: 1.0 if seen[0] <= 24 else 20 / seen[0])


def number_in_the_batch() -> ps.Job:
    """Every batch carries the number of its epoch, which is another one from step 5 on."""

    def data(start):
        for index in itertools.count(start):
            yield (*pair(index), index // 20)

    return _job(data=data, loss=lambda model, batch: squares(model, batch[:2]) / (1 + batch[2]))


def forward_that_a_hook_patches() -> ps.Job:
    """A hook of the optimizer gives the model another forward after five steps."""
    built = _Built()

    def hook(step):
        if step == 5:
            old = built.models[-1].forward
            built.models[-1].forward = lambda x: old(x) / 2

    return _job(built.model, optimizer=built.hooked(hook))
