"""Schedulers of torch's kind set the rates that they set in a plain loop, whatever the plan."""

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from penstock.errors import JobError, RunError
from penstock.examine.examine import examine
from penstock.runtime.launch import run_processes
from penstock.state.optimizer.optimizer import undividable
from penstock.state.optimizer.rates import JobScheduler
from tests.parity.optimizing import (
    STEPS,
    Custom,
    assert_as_plain,
    expected_state,
    job_of,
    net,
    plain_loop,
    run_of,
    windows_from,
)
from tests.parity.training import differing, train


def grouped(weights):
    """Three groups, one of which no parameter of the last stage is in."""
    rows = weights.named()
    kinds = (
        [p for n, p in rows if n.startswith("first")],
        [p for n, p in rows if "bias" in n and not n.startswith("first")],
        [p for n, p in rows if "bias" not in n and not n.startswith("first")],
    )
    return AdamW([{"params": kind, "lr": 0.01 * (k + 1)} for k, kind in enumerate(kinds)])


def warm_up(optimizer):
    first = LinearLR(optimizer, 0.1, total_iters=2)
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, 4)], [2])


def of_transformers(optimizer):
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 2, STEPS)


SCHEDULERS = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=3),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=STEPS),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 1e-3, 0.05, step_size_up=2),
    "a_lambda_per_group": lambda optimizer: LambdaLR(
        optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step), lambda step: 1.0]
    ),
    "steps": lambda optimizer: MultiStepLR(optimizer, [1, 4], gamma=0.3),
    "sequential": warm_up,
    "chained": lambda optimizer: ChainedScheduler(
        [ExponentialLR(optimizer, 0.7), PolynomialLR(optimizer, 5)]
    ),
    "transformers": of_transformers,
}


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_means_what_it_means_in_a_plain_loop(name, stages, tmp_path):
    assert_as_plain(job_of(grouped, scheduler=SCHEDULERS[name]), tmp_path, stages)


@pytest.mark.parametrize("name", ["one_cycle", "chained", "sequential"])
@pytest.mark.parametrize("stages", [1, 2])
def test_after_a_resume_too(name, stages, tmp_path):
    run = run_of(job_of(grouped, scheduler=SCHEDULERS[name]), stages)
    train(run, tmp_path / "part", (1,) * 4)
    done = tmp_path / "part" / "step-000004"
    found = train(run, tmp_path / "rest", windows=windows_from(run, 4), resume=done).weights
    plain = plain_loop(run.job)
    assert differing(found, plain.weights) == []
    assert differing(found, expected_state(plain)) == []


@pytest.mark.parametrize("name", ["one_cycle", "cosine"])
def test_where_updates_are_taken_back_and_in_processes(name, tmp_path):
    job = job_of(grouped, scheduler=SCHEDULERS[name], clip_norm=0.3)
    assert_as_plain(job, tmp_path, 2, run_processes, schedule="zb_h2", post_validation=True)


def test_an_optimizer_that_is_kept_whole_has_it_too(tmp_path):
    class Own(Custom):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= 0.5 + len(self.param_groups[0]["params"]) / 100
            super().step(closure)

    job = job_of(lambda weights: Own(weights, momentum=0.9), scheduler=SCHEDULERS["steps"])
    assert undividable(job, net()) is not None
    assert_as_plain(job, tmp_path, 1)


def test_stages_that_are_late_have_the_rates_of_their_own_steps(tmp_path):
    """Under an asynchronous schedule too the update of step t has the rate of step t."""
    job = job_of(lambda w: SGD(w, lr=0.1), scheduler=lambda o: ExponentialLR(o, 0.5))
    same = job_of(lambda w: SGD(w, lr=0.1), learning_rate=lambda step: 0.5**step)
    runs = [run_of(one, 3, "pipedream") for one in (job, same)]
    found = [train(one, tmp_path / str(k), (4, 2)).weights for k, one in enumerate(runs)]
    assert differing(*found) == []
    constant = train(run_of(job_of(lambda w: SGD(w, lr=0.1)), 3, "pipedream"), tmp_path / "c", (6,))
    assert differing(found[0], constant.weights) != []


def test_an_old_step_has_the_options_that_it_had():
    """Also long after, and where they are changed in place."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(1.0))
    schedule = JobScheduler(job_of(SGD, scheduler=lambda o: ExponentialLR(o, 0.9)), optimizer)
    for step in (3, 0, 1, 200, 199, 2):
        assert float(schedule.options(step)[0]["lr"]) == pytest.approx(0.9**step)


class OfTimm:
    """One with the methods of timm's: an epoch, or the count of updates, and perhaps a metric."""

    def __init__(self, optimizer, *, in_updates: bool = True) -> None:
        self.optimizer, self.in_updates = optimizer, in_updates

    def step(self, epoch: int, metric: float | None = None) -> None:
        raise AssertionError("nobody knows the epoch")

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + num_updates)


class Counted:
    """What the hint says to do: a step counts, and tells the count."""

    def __init__(self, optimizer) -> None:
        self.inside, self.count = OfTimm(optimizer), 0

    def step(self) -> None:
        self.count += 1
        self.inside.step_update(self.count)


def asked_for(scheduler) -> JobError:
    with pytest.raises(JobError) as caught:
        JobScheduler(job_of(SGD, scheduler=scheduler), SGD(net().model.parameters(), lr=0.1))
    return caught.value


def test_each_scheduler_that_cannot_be_stepped_has_its_own_sentence_and_hint():
    class ByLoss:
        def __init__(self, optimizer) -> None: ...
        def step(self, val_loss: float) -> None: ...

    class ByEpoch:
        def __init__(self, optimizer) -> None: ...
        def step(self, epoch: int) -> None: ...

    plateau, by_loss, timm, by_epoch = map(asked_for, (ReduceLROnPlateau, ByLoss, OfTimm, ByEpoch))
    assert "ReduceLROnPlateau, waits for a metric" in plateau.message
    assert "ByLoss, waits for a metric" in by_loss.message
    assert "CosineAnnealingLR" in plateau.hint
    assert "metric" not in timm.message
    assert "t_in_epochs=False" in timm.hint
    assert "step_update" in timm.hint
    assert "ByEpoch, takes epoch" in by_epoch.message
    assert "learning_rate=lambda step" in by_epoch.hint


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"scheduler": ReduceLROnPlateau}, "CosineAnnealingLR"),
        ({"scheduler": OfTimm}, "t_in_epochs=False"),
        ({"optimizer": torch.optim.LBFGS}, "as AdamW does"),
    ],
)
def test_examined_job_that_fails_keeps_the_hint_of_its_error(options, hint):
    optimizer = options.pop("optimizer", SGD)
    with pytest.raises(JobError) as caught:
        examine(job_of(optimizer, **options)).refuse_failed()
    assert hint in caught.value.hint


def test_a_scheduler_that_is_wrapped_as_the_hint_says_sets_its_rates():
    made = SGD(net().model.parameters(), lr=0.1)
    schedule = JobScheduler(job_of(SGD, scheduler=Counted), made)
    assert [schedule.options(step)[0]["lr"] for step in (1, 2)] == [0.1 / 2, 0.1 / 3]


class AddsGroups:
    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def test_rate_that_fails_in_a_later_step_is_told_with_its_line(tmp_path):
    job = job_of(SGD, learning_rate=[1.0].__getitem__)
    with pytest.raises(RunError, match="the job's learning_rate fails: IndexError"):
        train(run_of(job, 1), tmp_path, (1, 1))


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (ReduceLROnPlateau, "ReduceLROnPlateau, waits for a metric"),
        (lambda o: ChainedScheduler([ExponentialLR(o, 0.9), ReduceLROnPlateau(o)]), "a metric"),
        (lambda o: OfTimm(o), r"step\(\) of the job's scheduler, OfTimm, takes epoch"),
        (lambda o: None, "is a NoneType"),
        (lambda o: MultiStepLR(o), r"the job's scheduler fails at .*test_schedulers.py"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=2), "fails after step 2"),
        (lambda o: AddsGroups(o), "leaves the optimizer 2 groups, not 1"),
    ],
)
def test_what_cannot_be_a_scheduler_here_is_told(scheduler, words, tmp_path):
    job = job_of(lambda weights: SGD(weights, lr=0.1, momentum=0.9), scheduler=scheduler)
    with pytest.raises(RunError, match=words):
        train(run_of(job, 2), tmp_path, (1,) * 4)


def test_scheduler_and_learning_rate_exclude_each_other():
    with pytest.raises(JobError, match=r"both set the rate of a step"):
        job_of(SGD, scheduler=SCHEDULERS["cosine"], learning_rate=lambda step: 1.0)


def test_a_rate_is_a_factor_on_lr_which_must_be_there(tmp_path):
    class Without(Custom):
        def __init__(self, weights):
            torch.optim.Optimizer.__init__(self, weights, {})

    with pytest.raises(RunError, match="a factor on lr, which a group of the optimizer lacks"):
        train(run_of(job_of(Without, learning_rate=lambda step: 1.0), 1), tmp_path)
