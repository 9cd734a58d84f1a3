"""What functions of a job keep where no checkpoint looks: an average in a hook's dict, a teacher in
the loss's closure, a count.  A run that goes on from a checkpoint is refused with its line, unless
`Job.state` names it; what is only logged, or made anew in each step, refuses nothing."""

import contextvars
import copy
import itertools
import queue
import weakref
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock.errors import JobError
from penstock.examine.examine import Examined, bounded, examine
from penstock.job import Job
from penstock.search import Fixed
from penstock.training.resumed import check_resumed


def batches(start: int):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        yield torch.randn(3, 4, generator=source), torch.randn(3, 2, generator=source)


def plainly(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def job_of(loss=plainly, optimizer=lambda w: SGD(w, lr=0.1), model=None, **options) -> Job:
    make = model or (lambda: nn.Linear(4, 2))
    return Job(make, loss, batches, optimizer, micro_batches=2, num_steps=6, **options)


def hooked(hook_of, **options) -> Job:
    """Return a job whose optimizer has a hook after steps, made of its named parameters."""

    def optimizer(parameters):
        named = list(parameters.named())
        made = SGD([p for _, p in named], lr=0.1)
        made.register_step_post_hook(hook_of(named))
        return made

    return job_of(optimizer=optimizer, **options)


# -- kept by a hook -------------------------------------------------------------------------------


def average_in_a_dict(shadow: dict | None = None, **options) -> Job:
    shadow = {} if shadow is None else shadow

    def hook_of(named):
        shadow.update({name: p.detach().clone() for name, p in named})

        def follow(*_):
            for name, p in named:
                shadow[name].data.mul_(0.9).add_(p.detach(), alpha=0.1)

        return follow

    return hooked(hook_of, **options)


GLOBAL: dict[str, torch.Tensor] = {}


def average_in_a_global() -> Job:
    def hook_of(named):
        def follow(*_):
            for name, p in named:
                old = GLOBAL.get(name, p.detach())
                GLOBAL[name] = 0.9 * old + 0.1 * p.detach()

        return follow

    return hooked(hook_of)


class Average:
    def __init__(self, named) -> None:
        self.named, self.shadow = named, [p.detach().clone() for _, p in named]

    def follow(self, *_) -> None:
        for old, (_, p) in zip(self.shadow, self.named, strict=True):
            old.lerp_(p.detach(), 0.1)


def average_in_an_object() -> Job:
    return hooked(lambda named: Average(named).follow)


def average_of_torch() -> Job:
    built: list[nn.Module] = []

    def model():
        built[:] = [nn.Linear(4, 2)]
        return built[0]

    def optimizer(parameters):
        made = SGD(parameters, lr=0.1)
        average = AveragedModel(built[0], multi_avg_fn=get_ema_multi_avg_fn(0.9))
        made.register_step_post_hook(lambda *_: average.update_parameters(built[0]))
        return made

    return job_of(optimizer=optimizer, model=model)


def average_in_an_array() -> Job:
    def hook_of(named):
        mean = np.zeros((2, 4))

        def follow(*_):
            mean[:] = 0.9 * mean + 0.1 * named[0][1].detach().numpy()

        return follow

    return hooked(hook_of)


# -- kept by the loss -----------------------------------------------------------------------------


def teacher_of_the_loss() -> Job:
    kept: dict[str, nn.Module] = {}

    def loss(model, batch):
        teacher = kept.setdefault("teacher", copy.deepcopy(model).requires_grad_(False))
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return plainly(model, batch)

    return job_of(loss)


def average_of_losses() -> Job:
    seen = deque([torch.zeros(())], maxlen=3)

    def loss(model, batch):
        found = plainly(model, batch)
        seen.append(0.5 * seen[-1] + found.detach())
        return found / (1.0 + seen[0])

    return job_of(loss)


class Cycles:
    calls = 0


def iterator_in_a_closure() -> Job:
    weights = itertools.cycle([1.0, 2.0, 3.0])
    return job_of(lambda m, b: plainly(m, b) * next(weights))


def attribute_of_a_class() -> Job:
    def loss(model, batch):
        Cycles.calls += 1
        return plainly(model, batch) / Cycles.calls

    return job_of(loss)


VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


def context_variable() -> Job:
    def loss(model, batch):
        VARIABLE.set(VARIABLE.get() * 0.9)
        return plainly(model, batch) * VARIABLE.get()

    return job_of(loss)


def list_of_a_partial() -> Job:
    def loss(seen, model, batch):
        seen.append(1)
        return plainly(model, batch) / len(seen)

    return job_of(partial(loss, []))


def weak_cache() -> Job:
    cache: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def loss(model, batch):
        cache[model] = cache.get(model, 0) + 1
        return plainly(model, batch) / cache[model]

    return job_of(loss)


def in_a_queue() -> Job:
    line: queue.Queue = queue.Queue()
    line.put(1.0)

    def loss(model, batch):
        scale = line.get()
        line.put(scale * 0.9)
        return plainly(model, batch) * scale

    return job_of(loss)


class Scaled:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, model, batch):
        self.scale *= 0.9
        return plainly(model, batch) * self.scale


def object_as_loss() -> Job:
    return job_of(Scaled())


LOST = [
    average_in_a_dict,
    average_in_a_global,
    average_in_an_object,
    average_of_torch,
    average_in_an_array,
    teacher_of_the_loss,
    average_of_losses,
    iterator_in_a_closure,
    attribute_of_a_class,
    context_variable,
    list_of_a_partial,
    weak_cache,
    in_a_queue,
    object_as_loss,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", LOST)
def test_what_is_kept_beside_is_refused_with_its_line(make):
    job = make()
    with pytest.raises(JobError, match="would begin anew") as refused:
        check_resumed(job, examine(job))
    assert "test_unsaved.py:" in refused.value.message
    assert "Job.state" in refused.value.hint


# -- no state -------------------------------------------------------------------------------------


def named_average() -> Job:
    shadow: dict[str, torch.Tensor] = {}
    return average_in_a_dict(shadow, state={"average": shadow})


def only_logged() -> Job:
    def hook_of(named):
        norms, count = [], [0]

        def follow(*_):
            count[0] += 1
            norms.append(float(named[0][1].norm()))
            if count[0] % 5 == 0:
                print(norms[-1])

        return follow

    return hooked(hook_of)


def made_anew_in_each_step() -> Job:
    before: dict[str, torch.Tensor] = {}

    def optimizer(parameters):
        named = list(parameters.named())
        made = SGD([p for _, p in named], lr=0.1)
        made.register_step_pre_hook(
            lambda *_: before.update({name: p.detach().clone() for name, p in named})
        )

        def limit(*_):
            for name, p in named:
                p.data.copy_(before[name] + (p.data - before[name]).clamp(-0.01, 0.01))

        made.register_step_post_hook(limit)
        return made

    return job_of(optimizer=optimizer)


def features_of_a_hook() -> Job:
    kept: dict[str, torch.Tensor] = {}

    def model():
        made = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        made[0].register_forward_hook(lambda m, x, y: kept.update(features=y))
        return made

    def loss(model, batch):
        return plainly(model, batch) + kept["features"].square().mean()

    return job_of(loss, model=model)


GOES_ON = [named_average, only_logged, made_anew_in_each_step, features_of_a_hook, job_of]


@pytest.mark.parametrize("make", GOES_ON)
@pytest.mark.sampled(2)
def test_what_is_no_state_goes_on(make):
    job = make()
    check_resumed(job, examine(job))


def test_a_hook_that_keeps_tensors_keeps_the_optimizer_whole():
    job = average_in_a_dict()
    fixed, decisions = bounded(job, examine(job), "", Fixed())
    assert fixed.stages == 1
    assert "shadow" in " ".join(str(one) for one in decisions)
    assert bounded(job, Examined(), "", Fixed())[0].stages is None
