"""An optimizer that hangs hooks on its weights trains as its author's loop does, in one process."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.errors import JobError
from penstock.examine.examine import examine
from penstock.job import Job
from penstock.training.resumed import forgotten

STEPS = 5


def batches(start: int):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        yield torch.randn(3, 4, generator=source), torch.randn(3, 2, generator=source)


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def halves(weights):
    for name, weight in weights.named():
        if "bias" in name:
            weight.register_hook(lambda gradient: gradient * 0.5)
    return SGD(weights, lr=0.1, momentum=0.9)


def clamp(weight) -> None:
    weight.grad.clamp_(-0.02, 0.02)


def clamps(weights):
    for weight in weights:
        weight.register_post_accumulate_grad_hook(clamp)
    return SGD(weights, lr=0.1, momentum=0.9)


def steps_in_backward(weights, momentum: float = 0.0):
    """The weight is updated once its gradient is there, and the gradient is let go."""
    weights = list(weights)
    own = {weight: SGD([weight], lr=0.05, momentum=momentum) for weight in weights}

    def step(weight) -> None:
        own[weight].step()
        own[weight].zero_grad()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(step)
    return SGD(weights, lr=0.0)


def job_of(optimizer, model=net, **options) -> Job:
    return Job(model, loss, batches, optimizer, **{"micro_batches": 2, **options})


class Named(list):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.named = model.named_parameters


def by_hand(optimizer, steps: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """The author's loop."""
    torch.manual_seed(0)
    model = net()
    made, data = optimizer(Named(model)), batches(0)
    for _ in range(steps):
        for _ in range(micro_batches):
            (loss(model, next(data)) / micro_batches).backward()
        made.step()
        made.zero_grad()
    return {f"weights/{name}": weight.detach() for name, weight in model.named_parameters()}


def saved(folder) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    return dict(checkpoint.load(newest).tensors)


def is_equal(folder, wanted) -> bool:
    found = saved(folder)
    return all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("optimizer", "micro_batches"), [(halves, 2), (clamps, 2), (steps_in_backward, 1)]
)
def test_it_is_the_authors_loop_and_goes_on_as_that(optimizer, micro_batches, tmp_path):
    job = job_of(optimizer, micro_batches=micro_batches)
    ps.train(job, num_steps=3, ranks=2, out=tmp_path)
    assert is_equal(tmp_path, by_hand(optimizer, 3, micro_batches))
    ps.train(job, num_steps=STEPS, ranks=2, out=tmp_path, resume=True)
    assert is_equal(tmp_path, by_hand(optimizer, STEPS, micro_batches))


def test_a_module_that_is_handed_out_again_is_hooked_once(tmp_path):
    torch.manual_seed(0)
    kept = net()
    ps.train(job_of(halves, model=lambda: kept), num_steps=STEPS, ranks=2, out=tmp_path)
    assert is_equal(tmp_path, by_hand(halves, STEPS, 2))


def test_replicas_do_not_share_it_and_the_reason_names_a_weight():
    found = examine(job_of(halves))
    assert "puts a hook on the gradient of 0.bias" in found.one_process
    assert not found.forgets


def test_what_the_hooks_keep_is_lost_and_told():
    job = job_of(lambda weights: steps_in_backward(weights, momentum=0.9), micro_batches=1)
    assert "weights/" in forgotten(job)
    assert forgotten(job_of(steps_in_backward, micro_batches=1)) == ""


def test_a_plan_is_refused_with_the_reason(tmp_path):
    with pytest.raises(JobError, match=r"puts a hook on the gradient of 0\.bias"):
        ps.train(job_of(halves), schedule="one_f_one_b", stages=2, num_steps=2, out=tmp_path)
