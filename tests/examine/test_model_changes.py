"""What others than the loss change in a model, only in a later step, is found with who did it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.choose.settle import CheckOptions, examined
from penstock.errors import JobError
from penstock.examine.impurities import Impurity, impurities
from penstock.job import Job
from penstock.listener import SILENT

pytestmark = pytest.mark.usefixtures("parsed")
D = 4
Act = Callable[[nn.Sequential, torch.optim.Optimizer], object]


def data(start: int) -> Iterator[Tensor]:
    for index in itertools.count(start):
        yield torch.randn(4, D, generator=torch.Generator().manual_seed(index))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, D), nn.Dropout(0.1), nn.BatchNorm1d(D))
        self.register_buffer("tau", torch.ones(()))


class Run:
    """A job of which some function acts on model and optimizer, from a step on and before."""

    def __init__(self, act: Act, *, at: int = 6) -> None:
        self.act, self.at = act, at
        self.models: list[nn.Sequential] = []
        self.optimizers: list[torch.optim.Optimizer] = []

    def do(self, step: int) -> None:
        if step == self.at:
            self.act(self.models[-1], self.optimizers[-1])

    def model(self) -> nn.Module:
        self.models.append(Net())
        return self.models[-1]

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        self.optimizers.append(torch.optim.SGD(parameters, lr=0.1))
        return self.optimizers[-1]

    def job(self, **options) -> Job:
        options = {"data": data, "optimizer": self.optimizer, "micro_batches": 2, **options}
        return Job(self.model, square, **options)

    def by_rate(self) -> Job:
        return self.job(learning_rate=lambda step: self.do(step) or 1.0)

    def by_hook(self) -> Job:
        def optimizer(parameters) -> torch.optim.Optimizer:
            made, steps = self.optimizer(parameters), itertools.count()
            made.register_step_post_hook(lambda *_: self.do(next(steps)))
            return made

        return self.job(optimizer=optimizer)

    def by_data(self) -> Job:
        def watched(start: int) -> Iterator[Tensor]:
            for index, x in zip(itertools.count(start), data(start), strict=False):
                if index % 2 == 0:
                    self.do(index // 2)
                yield x

        return self.job(data=watched)

    def by_scheduler(self) -> Job:
        return self.job(scheduler=lambda optimizer: Own(self))


class Own:
    """A scheduler of one's own."""

    def __init__(self, run: Run) -> None:
        self.run, self.steps = run, itertools.count(1)

    def step(self) -> None:
        self.run.do(next(self.steps))


def sets_dropout(model: nn.Sequential, _: object) -> None:
    model[1].p = 0.0  # type: ignore[assignment]


def lowers_momentum(model: nn.Sequential, _: object) -> None:
    vars(model[2]).update(momentum=0.01)


def replaces_a_layer(model: nn.Sequential, _: object) -> None:
    model[1] = nn.Tanh()


def hangs_a_hook(model: nn.Sequential, _: object) -> None:
    model[0].register_forward_hook(lambda *told: told[2] / 2)


def hangs_a_hook_on_a_gradient(model: nn.Sequential, _: object) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient / 2)


def prunes(model: nn.Sequential, _: object) -> None:
    next(model.parameters()).data.mul_(0.5)


def fills_a_buffer(model: nn.Sequential, _: object) -> None:
    model.get_buffer("tau").fill_(2.0)


def decays(_: object, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1


def resets_a_statistic(model: nn.Sequential, _: object) -> None:
    model.get_buffer("2.running_mean").fill_(1.0)


def patches_forward(model: nn.Sequential, _: object) -> None:
    old = model.forward
    model.forward = lambda x: old(x) / 2  # type: ignore[method-assign]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("act", "by", "what", "where"),
    [
        (sets_dropout, Run.by_rate, "model.1.p", "the loss"),
        (sets_dropout, Run.by_scheduler, "model.1.p", "the loss"),
        (lowers_momentum, Run.by_hook, "model.2.momentum", "the loss"),
        (replaces_a_layer, Run.by_hook, "the class of 1", "optimizer"),
        (hangs_a_hook, Run.by_data, "the hooks of module 0", "data"),
        (hangs_a_hook_on_a_gradient, Run.by_hook, "the hooks of 0.weight", "optimizer"),
        (patches_forward, Run.by_hook, "model.forward", "the loss"),
        (prunes, Run.by_rate, "the values of 0.weight", "learning_rate"),
        (prunes, Run.by_scheduler, "the values of 0.weight", "scheduler"),
        (fills_a_buffer, Run.by_data, "the values of tau", "data"),
        (resets_a_statistic, Run.by_hook, "the values of 2.running_mean", "optimizer"),
        (decays, Run.by_rate, "weight_decay of group 0", "learning_rate"),
        (decays, Run.by_data, "weight_decay of group 0", "data"),
    ],
)
def test_what_changes_late_is_found(act: Act, by, what: str, where: str) -> None:
    found = {(one.what, one.where) for one in impurities(by(Run(act)))}
    assert (what, where) in found


@pytest.mark.parametrize(
    ("act", "by"), [(prunes, Run.by_hook), (fills_a_buffer, Run.by_hook), (decays, Run.by_hook)]
)
def test_what_an_optimizer_may_do_is_no_finding(act: Act, by) -> None:
    """That it can be divided is another question."""
    assert impurities(by(Run(act))) == ()


def test_options_that_the_loss_will_set_by_its_count_are_found() -> None:
    run, calls = Run(decays), itertools.count(1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if next(calls) == 500:
            run.optimizers[-1].param_groups[0]["weight_decay"] = 0.1
        return square(model, x)

    (found,) = impurities(Job(run.model, loss, data, run.optimizer))
    assert found.what == "calls[0]"


def test_what_the_loss_leaves_for_the_data_is_found() -> None:
    told: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        told.append(square(model, x).detach())
        return square(model, x)

    def mined(start: int) -> Iterator[Tensor]:
        for x in data(start):
            yield x if len(told) < 500 else -x

    (found,) = impurities(Job(Net, loss, mined, torch.optim.SGD))
    assert found.what == "the length of told"
    assert impurities(Job(Net, loss, data, torch.optim.SGD)) == ()


def test_setting_of_a_criterion_that_the_rate_moves_is_found() -> None:
    criterion = nn.HuberLoss(delta=1.0)

    def rate(step: int) -> float:
        criterion.delta = 1.0 if step < 6 else 0.1
        return 1.0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return criterion(model(x), x)

    found = impurities(Job(Net, loss, data, torch.optim.SGD, learning_rate=rate))
    assert found[0].what == "criterion.delta"


def test_what_the_data_leaves_for_the_rate_is_found() -> None:
    seen = [0]

    def counted(start: int) -> Iterator[Tensor]:
        for x in data(start):
            seen[0] += 1
            yield x

    rate = lambda step: 1.0 if seen[0] < 500 else 500 / seen[0]  # noqa: E731
    (found,) = impurities(Job(Net, square, counted, torch.optim.SGD, learning_rate=rate))
    assert found.what == "seen[0]"
    assert "the data changes it" in found.why


def test_rate_that_clips_gradients_later_is_found() -> None:
    run = Run(lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1))
    (found,) = impurities(run.by_rate())
    assert (found.what, found.where) == (
        "the gradient of 0.weight, as it is in one process",
        "learning_rate",
    )


def test_data_that_asks_the_model_later_is_found() -> None:
    run = Run(decays)

    def labelled(start: int) -> Iterator[Tensor]:
        for index, x in zip(itertools.count(start), data(start), strict=False):
            yield x if index < 16 else x + run.models[-1][0](x).detach()

    found = impurities(run.job(data=labelled))
    assert ("0.weight, as it is in one process", "data") in {(o.what, o.where) for o in found}


@pytest.mark.parametrize("what", ["0.weight", "momentum_buffer of 0.weight"])
def test_rate_that_reads_what_training_makes_is_found(what: str) -> None:
    run = Run(decays)

    def optimizer(parameters) -> torch.optim.Optimizer:
        run.optimizers.append(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return run.optimizers[-1]

    def rate(step: int) -> float:
        weight = next(run.models[-1].parameters())
        if step < 8:
            return 1.0
        of_state = run.optimizers[-1].state[weight]["momentum_buffer"]
        return 1 / (1 + float((of_state if "of" in what else weight.detach()).norm()))

    (found,) = impurities(run.job(optimizer=optimizer, learning_rate=rate))
    assert (found.what, found.where) == (f"{what}, as it is in one process", "learning_rate")


def test_what_the_optimizer_does_to_the_model_when_it_is_made_is_found() -> None:
    def optimizer(parameters) -> torch.optim.Optimizer:
        parameters[0].requires_grad_(False)
        return torch.optim.SGD(parameters[1:], lr=0.1)

    (found,) = impurities(Job(Net, square, data, optimizer))
    assert (found.what, found.where) == ("requires_grad of 0.weight", "optimizer")


def test_model_that_is_another_one_when_it_is_built_again_is_found() -> None:
    source = torch.Generator().manual_seed(0)

    def model() -> nn.Module:
        net = Net()
        nn.init.normal_(net[0].weight, generator=source)  # type: ignore[arg-type]
        return net

    (found,) = impurities(Job(model, square, data, torch.optim.SGD))
    assert (found.what, found.where) == ("the values of 0.weight", "model")


def test_loss_of_functions_alone_is_no_finding() -> None:
    found: tuple[Impurity, ...] = impurities(
        Job(Net, lambda model, x: F.mse_loss(model(x), x), data, torch.optim.SGD)
    )
    assert found == ()


@pytest.mark.parametrize("by", [Run.by_rate, Run.by_scheduler])
@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda model, _: model[0].requires_grad_(False), "requires_grad of 0.weight"),
        (fills_a_buffer, "the values of tau"),
        (sets_dropout, "model.1.p"),
    ],
)
@pytest.mark.sampled(2)
def test_what_a_rate_or_a_scheduler_does_hundreds_of_steps_later_is_found(by, act, what) -> None:
    job = replace(by(Run(act, at=700)), num_steps=800)
    assert what in {found.what for found in impurities(job)}
    assert impurities(replace(job, num_steps=600)) == ()


def test_steps_that_a_run_adds_to_those_of_its_job_are_asked_for() -> None:
    job = Run(fills_a_buffer, at=700).by_rate()
    assert job.num_steps < 700
    assert examined(job, "", CheckOptions(), SILENT).one_process == ""
    longer = examined(job, "", CheckOptions(), SILENT, num_steps=800)
    assert "the values of tau: changed at step" in longer.one_process


@pytest.mark.parametrize("at", [2, 13, 700])
def test_scheduler_that_adds_a_group_later_is_refused_with_its_line(at: int) -> None:
    def adds(_: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1})

    job = replace(Run(adds, at=at).by_scheduler(), num_steps=800)
    with pytest.raises(JobError, match=r"test_model_changes\.py:\d+: .* 2 groups, not 1"):
        impurities(job)


def test_rates_of_fewer_steps_than_the_job_says_are_no_finding() -> None:
    rates = [1.0, 0.5, 0.25, 0.125]
    assert (
        impurities(Job(Net, square, data, torch.optim.SGD, learning_rate=rates.__getitem__)) == ()
    )


def test_data_that_goes_on_by_itself_is_no_finding() -> None:
    def drawn(start: int) -> Iterator[Tensor]:
        source = torch.Generator().manual_seed(0)
        for index in itertools.count():
            x = torch.randn(4, D, generator=source)
            if index >= start:
                yield x

    assert impurities(Job(Net, square, drawn, torch.optim.SGD)) == ()


def test_number_in_the_batch_that_changes_later_is_found() -> None:
    def numbered(start: int) -> Iterator[tuple[Tensor, int]]:
        for index, x in zip(itertools.count(start), data(start), strict=False):
            yield x, index // 20

    def loss(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
        return square(model, batch[0]) / (1 + batch[1])

    (found,) = impurities(Job(Net, loss, numbered, torch.optim.SGD))
    assert (found.what, found.where) == ("the batch", "data")
