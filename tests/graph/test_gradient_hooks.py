"""What hooks of parameters make of gradients is in the trace, as autograd calls them."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.errors import GraphError
from penstock.graph.joined.divided_batch import divided
from penstock.graph.joined.joined import joined
from penstock.graph.trace import build, capture, loss_of
from penstock.prove.prove import Planned, prove
from tests.graph.joined.joining import run
from tests.parity.models import plan_of

D = 6


class Tied(nn.Module):
    """The first weight is the last one, too: a hook is given the sum of both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(D, D) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def clamped(name: str, gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def of_unit_norm(name: str, gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def clamped_in_place(name: str, gradient: Tensor) -> None:
    gradient.clamp_(-0.01, 0.01)


def of_one_name(name: str, gradient: Tensor) -> Tensor | None:
    return gradient * torch.ones(D, D).triu() if name == "first.weight" else None


HOOKS = (clamped, of_unit_norm, clamped_in_place, of_one_name)
Hook = Callable[[str, Tensor], Tensor | None]


def job_of(*hooks: Hook) -> ps.Job:
    def model() -> nn.Module:
        made = Tied()
        for name, parameter in made.named_parameters():
            for hook in hooks:
                parameter.register_hook(lambda g, name=name, hook=hook: hook(name, g))
        return made

    def data(start: int):
        for number in itertools.count(start):
            yield torch.randn(4, D, generator=torch.Generator().manual_seed(number))

    return ps.Job(
        model,
        lambda model, x: (model(x) - x.flip(1)).square().mean(),
        data,
        lambda weights: torch.optim.SGD(weights, lr=0.1),
        micro_batches=4,
    )


@pytest.mark.parametrize("hooks", [*((hook,) for hook in HOOKS), (of_unit_norm, clamped)])
def test_traced_gradients_are_those_after_the_hooks(hooks):
    job = job_of(*hooks)
    model, batch = build(job)
    (loss_of(job, model, batch) * 0.25).backward()
    _, found, _ = run(capture(job), batch, 0.25)
    plain = copy.deepcopy(found)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    _, plain, _ = run(capture(job_of()), batch, 0.25)
    assert not torch.allclose(plain["first.weight"], found["first.weight"])


@pytest.mark.parametrize("hook", HOOKS)
def test_plan_of_hooked_weights_equals_the_plain_loop(hook):
    job = job_of(hook)
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2, replicas=2)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""


@pytest.mark.parametrize("hook", [clamped, of_one_name])
def test_step_with_hooks_is_not_joined_or_divided(hook):
    captured = capture(job_of(hook))
    for change in (joined, divided):
        with pytest.raises(GraphError, match=r"first\.weight has a gradient hook"):
            change(captured, 2)
        assert change(capture(job_of()), 2)


def with_decay(*, by_module: bool) -> ps.Job:
    def model() -> nn.Module:
        made = Tied()
        weight = made.first.weight
        weight.register_hook(lambda g: g + (made.first.weight if by_module else weight).detach())
        return made

    job = job_of()
    return ps.Job(model, job.loss, job.data, job.optimizer)


@pytest.mark.parametrize("by_module", [True, False])
def test_hook_that_looks_at_a_weight_reads_that_of_the_run(by_module):
    job = with_decay(by_module=by_module)
    captured = capture(job)
    for parameter in captured.model.parameters():
        parameter.data.mul_(1.5)
    model, batch = build(job)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    loss_of(job, model, batch).backward()
    _, found, _ = run(captured, batch)
    torch.testing.assert_close(found["first.weight"], model.first.weight.grad)


def test_hook_that_asks_for_the_gradient_so_far_is_not_traced():
    def model() -> nn.Module:
        made = Tied()
        weight = made.first.weight
        weight.register_hook(lambda g: g + weight.detach() if weight.grad is None else g)
        return made

    job = job_of()
    with pytest.raises(GraphError, match=r"gradient of first\.weight, as micro-batches so far"):
        capture(ps.Job(model, job.loss, job.data, job.optimizer))


def test_hook_is_not_traced_where_gradients_have_another_precision():
    job = job_of(clamped)
    narrow = ps.Job(job.model, job.loss, job.data, job.optimizer, precision="bfloat16")
    with pytest.raises(GraphError, match=r"first\.weight has a gradient hook"):
        capture(narrow)


def test_module_that_is_copied_in_the_loss_is_traced():
    """Frozen in the copy, a critic hands on the gradient of what it is given."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        frozen = copy.deepcopy(model.last).requires_grad_(False)
        return frozen(model.first(x)).square().mean() + model(x).square().mean()

    job = job_of()
    job = ps.Job(job.model, loss, job.data, job.optimizer)
    model, batch = build(job)
    loss(model, batch).backward()
    _, found, _ = run(capture(job), batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
