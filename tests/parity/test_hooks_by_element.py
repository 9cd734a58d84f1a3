"""Hooks that look at one parameter at a time run stage by stage, whatever they close over."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from penstock.checkpoints import checkpoint
from penstock.errors import RunError
from penstock.prove.prove import Planned, prove
from penstock.runtime.launch import run_processes, run_threads
from penstock.state.optimizer.optimizer import undividable
from penstock.state.optimizer.optimizer_trial import _GROUPS, _partitions
from tests.parity.optimizing import (
    Net,
    assert_as_plain,
    expected_state,
    job_of,
    plain_loop,
    run_of,
    windows_from,
)
from tests.parity.training import differing, train

BUILT: list[nn.Module] = []


def built() -> nn.Module:
    BUILT[:] = [Net()]
    return BUILT[0]


def before(change, kind=AdamW):
    """An optimizer whose hook calls `change` with each weight, of the author's own list."""

    def make(weights) -> Optimizer:
        weights = list(weights)
        made = kind(weights, lr=1e-2)

        def hook(*_: object) -> None:
            for p in weights:
                if p.grad is not None:
                    change(p)

        made.register_step_pre_hook(hook)
        return made

    return make


def clips(weights) -> Optimizer:
    weights = list(weights)
    made = RMSprop(weights, lr=1e-2)
    made.register_step_pre_hook(lambda *_: clip_grad_value_(weights, 0.01))
    return made


def clips_the_model(weights) -> Optimizer:
    made = SGD(weights, lr=1e-2, momentum=0.9)
    made.register_step_pre_hook(lambda *_: clip_grad_value_(BUILT[0].parameters(), 0.01))
    return made


@torch.no_grad()
def clamps(weights) -> Optimizer:
    weights = list(weights)
    made = SGD(weights, lr=0.1, momentum=0.9)

    def hook(*_: object) -> None:
        with torch.no_grad():
            for p in weights:
                p.clamp_(-0.2, 0.2)

    made.register_step_post_hook(hook)
    return made


class Clips(SGD):
    """Clips in its step, the weights that it was given as a list of its own."""

    def __init__(self, weights) -> None:
        super().__init__(weights, lr=0.1, momentum=0.9)
        self.clip = lambda: clip_grad_value_(weights, 0.01)

    def step(self, closure=None):
        self.clip()
        super().step(closure)


def replace_gradient(p: nn.Parameter) -> None:
    p.grad = p.grad.clamp(-0.01, 0.01)


def adapt(p: nn.Parameter) -> None:
    """Clip by the norm of the parameter, as AGC does."""
    most = 0.01 * p.detach().norm().clamp(min=1e-3)
    p.grad.mul_((most / p.grad.norm()).clamp(max=1.0))


BY_ELEMENT = {
    "clip": clips,
    "clip of the model": clips_the_model,
    "clamp": clamps,
    "in its step": lambda weights: Clips(list(weights)),
    "sign": before(lambda p: p.grad.sign_()),
    "another gradient": before(replace_gradient),
    "by its norm": before(adapt),
    "centred": before(lambda p: p.grad.sub_(p.grad.mean())),
}


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", BY_ELEMENT)
@pytest.mark.sampled(3)
def test_hooks_by_element_run_stage_by_stage(name, stages, tmp_path):
    job = job_of(BY_ELEMENT[name], built if "model" in name else Net)
    run = run_of(job, stages)
    assert undividable(job, run.captured) is None
    launcher = run_processes if "model" in name else run_threads  # one model was built last
    assert_as_plain(job, tmp_path, stages, launcher)


@pytest.mark.parametrize("name", ["clip", "clamp"])
def test_hooks_by_element_are_proved_resumed_and_run_in_processes(name, tmp_path):
    job = job_of(BY_ELEMENT[name])
    run = run_of(job, 2)
    assert prove(Planned(job, run.captured, run.plan), (0, 3)).problem == ""
    train(run, tmp_path / "first", (1,) * 2, run_processes)
    done = checkpoint.latest(tmp_path / "first")
    other = run_of(job, 3)
    found = train(other, tmp_path / "rest", windows=windows_from(other, 2), resume=done).weights
    plain = plain_loop(job)
    assert differing(found, {**plain.weights, **expected_state(plain)}) == []


def test_the_job_may_always_hand_out_the_same_model_which_stays_as_it_was(tmp_path):
    made = Net()
    first = {name: value.clone() for name, value in made.state_dict().items()}
    job = job_of(clamps, lambda: made)
    found = train(run_of(job, 2), tmp_path, (1,) * 6).weights
    assert all(torch.equal(value, first[name]) for name, value in made.state_dict().items())
    assert differing(found, plain_loop(job).weights) == []


def by_all(weights) -> Optimizer:
    weights = list(weights)
    made = AdamW(weights, lr=1e-2)

    def hook(*_: object) -> None:
        clip_grad_norm_(weights, 0.01)

    made.register_step_pre_hook(hook)
    return made


def averages(weights) -> Optimizer:
    """A teacher, the frozen layer, follows a layer of the same shape."""
    made = SGD(weights, lr=0.1)

    def hook(*_: object) -> None:
        with torch.no_grad():
            BUILT[0].still.weight.lerp_(BUILT[0].first.weight, 0.5)

    made.register_step_post_hook(hook)
    return made


def by_a_buffer(weights) -> Optimizer:
    weights = list(weights)
    made = SGD(weights, lr=0.1)

    def hook(*_: object) -> None:
        for p in weights:
            if p.grad is not None:
                p.grad.mul_(BUILT[0].shift[0])

    made.register_step_pre_hook(hook)
    return made


TOGETHER = {
    "one norm": by_all,
    "noise": before(lambda p: p.grad.add_(torch.randn_like(p), alpha=1e-3)),
    "a teacher": averages,
    "a buffer": by_a_buffer,
    "the greatest": before(
        lambda p: p.grad.clamp_(
            max=max(float(q.grad.max()) for q in BUILT[0].parameters() if q.grad is not None) * 0.5
        )
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_hooks_that_look_at_several_parameters_or_at_buffers_stay_whole(name):
    job = job_of(TOGETHER[name], built)
    assert undividable(job, run_of(job, 2).captured) is not None


def test_a_stage_of_what_stays_whole_is_refused(tmp_path):
    with pytest.raises(RunError, match="cannot be divided by stages"):
        train(run_of(job_of(by_all), 2), tmp_path)


@given(st.integers(2, _GROUPS**2))
def test_any_two_parameters_are_apart_in_one_of_two_ways(count):
    names = list(map(str, range(count)))
    ways = [groups for groups, _ in _partitions(names)]
    for groups in ways:
        assert sorted(n for group in groups for n in group) == sorted(names)
        assert len(groups) <= _GROUPS
    (first, second) = ({n: at for at, group in enumerate(way) for n in group} for way in ways)
    assert len({(first[n], second[n]) for n in names}) == count
