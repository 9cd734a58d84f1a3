"""A job of a LightningModule: Trainer's steps; options, callbacks and hooks taken or refused."""

import copy
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from penstock.each_epoch import EachEpoch
from penstock.errors import JobError
from penstock.lightning_job import BatchNumber
from penstock.plan import plan_by_hand
from penstock.runtime.validate import validated
from tests.parity.training import Run, difference, train

SOURCE = torch.Generator().manual_seed(0)
X = torch.randn(48, 6, generator=SOURCE)
DATA = TensorDataset(X, X[:, :3].argmax(-1))
OPTIONS = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


class LightningModule(nn.Module):
    """What is asked of Lightning's own."""

    automatic_optimization, trainer = True, None

    def log(self, name, value, **options):
        raise AssertionError("a Trainer is asked")

    def training_step(self, batch, batch_idx): ...
    def validation_step(self, batch, batch_idx): ...
    def train_dataloader(self): ...
    def val_dataloader(self): ...
    def configure_optimizers(self): ...
    def on_train_epoch_end(self): ...
    def setup(self, stage): ...


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_size", loss.detach() ** 2)
        return {"loss": loss}

    def validation_step(self, batch):
        guess = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(guess, batch[1]))
        self.log("val_acc", (guess.argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [made], [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)]


class EarlyStopping:
    def __init__(self, monitor, mode, patience=3):
        self.monitor, self.mode, self.patience = monitor, mode, patience


class Lambda:
    pass


def module(kind=Lit, **methods):
    torch.manual_seed(3)
    return type(kind.__name__, (kind,), methods)()


def loader(size=8, count=48):
    return DataLoader(torch.utils.data.Subset(DATA, range(count)), size)


def trainers_loop(job, num_steps):
    """Return the weights as the Trainer's own loop makes them: clipped, a rate by the epoch."""
    lit, data = module(), job.data(0)
    optimizer = torch.optim.SGD(lit.net.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        for x, y in islice(data, 2):
            (F.cross_entropy(lit.net(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(lit.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step // 3)
        optimizer.step()
        optimizer.zero_grad()
    return {f"weights/{name}": p.detach() for name, p in lit.named_parameters()}


def test_job_of_a_module_by_stages_and_replicas_is_the_trainers_loop(tmp_path):
    job = ps.from_lightning(module(), loader(), OPTIONS)
    assert (job.num_steps, job.micro_batches, job.clip_norm, job.validation) == (6, 2, 0.5, None)
    graph = ps.trace(job)
    assert [name for name, _ in graph.figures] == ["size"]
    plan = plan_by_hand(graph, [0], "gpipe", num_micro_batches=1, replicas=2, clip=True)
    found = train(Run(plan, job, graph.capture), tmp_path, (4,)).weights
    assert difference(found, trainers_loop(job, 4)) < 1e-4


def test_validation_is_what_validation_step_logs_and_callbacks_say_what_is_best():
    options = {
        **OPTIONS,
        "precision": "bf16-mixed",
        "callbacks": EarlyStopping("val_acc", "max", 2),
    }
    lit = module(val_dataloader=lambda self: loader(12))
    job = ps.from_lightning(lit, loader(), options)
    assert (job.best, job.patience, job.validate_every) == ("highest val_acc", 2, 3)
    assert job.autocast == "bfloat16"
    found = validated(job, lit)
    assert set(found) == {"val_loss", "val_acc"}
    guess = lit.net(X)
    assert found["val_acc"] == pytest.approx(
        float((guess.argmax(-1) == DATA.tensors[1]).mean(dtype=torch.float)), abs=0.05
    )
    assert "log" not in vars(lit)
    often = ps.from_lightning(lit, loader(), {**OPTIONS, "val_check_interval": 4})
    assert (often.validate_every, often.best, often.patience) == (2, "lowest val_loss", None)


def test_optimizer_is_of_the_weights_that_it_is_given_and_so_is_the_scheduler():
    lit = module()
    job = ps.from_lightning(lit, loader(), OPTIONS)
    model = job.model()
    optimizer = job.optimizer(ps.job.Parameters(model.named_parameters()))
    given = {id(p) for p in model.parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == given
    scheduler = job.scheduler(optimizer)
    assert isinstance(scheduler, EachEpoch)
    assert scheduler.scheduler.optimizer is optimizer
    assert lit.trainer is None


def steps_by_estimate(self):
    made = torch.optim.SGD(self.parameters(), lr=0.1)
    steps = self.trainer.estimated_stepping_batches
    row = {"scheduler": torch.optim.lr_scheduler.LinearLR(made, total_iters=steps)}
    return {"optimizer": made, "lr_scheduler": {**row, "interval": "step"}}


def test_configure_optimizers_may_ask_how_many_steps_there_are():
    job = ps.from_lightning(module(configure_optimizers=steps_by_estimate), loader(), OPTIONS)
    model = job.model()
    scheduler = job.scheduler(job.optimizer(ps.job.Parameters(model.named_parameters())))
    assert scheduler.total_iters == 6


def test_short_last_batch_of_an_epoch_is_a_step_as_in_the_trainers_loop():
    job = ps.from_lightning(module(), loader(size=20), {"max_epochs": 2})
    assert (job.num_steps, job.micro_batches) == (6, 1)
    assert [len(x) for x, _ in islice(job.data(0), 6)] == [20, 20, 8] * 2


def two(self):
    return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net[0], self.net[2])]


def asks_more(self):
    return torch.optim.SGD(self.parameters(), lr=self.trainer.world_size)


@pytest.mark.parametrize(
    ("methods", "words", "hint"),
    [
        ({"on_train_epoch_end": lambda self: None}, "on_train_epoch_end is a hook", "by hand"),
        ({"setup": lambda self, stage: None}, "setup is a hook", "before the job is made"),
        ({"automatic_optimization": False}, "automatic_optimization=False", "in_turn"),
        ({"configure_optimizers": two}, "not one optimizer", "ps.by_name"),
        ({"configure_optimizers": asks_more}, "the Trainer for world_size", "itself"),
        ({"configure_optimizers": lambda self: 1 / 0}, "ZeroDivisionError", "by hand"),
    ],
)
def test_what_needs_lightnings_loop_is_refused_by_name(methods, words, hint):
    with pytest.raises(JobError, match=words) as caught:
        ps.from_lightning(module(**methods), loader(), OPTIONS)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({"max_epoch": 1}, "has no max_epoch", "did you mean max_epochs"),
        ({"precision": "16-mixed"}, "precision is '16-mixed'", "float16"),
        ({"strategy": "fsdp"}, "strategy is 'fsdp'", "a plan divides"),
        ({"limit_val_batches": 3}, "limit_val_batches is 3", "Subset"),
        ({"gradient_clip_algorithm": "value"}, "algorithm is 'value'", "pre_hook"),
        ({"accumulate_grad_batches": 4}, "has 2 batches, the others 4", "drop the last 2"),
        ({"accumulate_grad_batches": {0: 2}}, "accumulate_grad_batches is", "a number"),
        ({"max_epochs": None}, "no end is set", "max_steps"),
        ({"callbacks": [Lambda()]}, "callback Lambda is told", "leave it out"),
        (
            {"callbacks": [EarlyStopping("val_x", "min")]},
            "there is none: lowest val_x",
            "validation=",
        ),
    ],
)
def test_options_without_a_counterpart_are_refused_by_name(options, words, hint):
    with pytest.raises(JobError, match=words) as caught:
        ps.from_lightning(module(), loader(), {**OPTIONS, **options})
    assert hint in caught.value.hint


def test_what_is_no_lightning_module_and_what_has_no_data_are_refused():
    with pytest.raises(JobError, match="given the Linear, no LightningModule"):
        ps.from_lightning(nn.Linear(1, 1), loader(), OPTIONS)
    with pytest.raises(JobError, match="given no loader"):
        ps.from_lightning(module(), None, OPTIONS)


def test_a_step_that_reads_the_number_of_its_batch_is_refused_when_it_does():
    def step(self, batch, batch_idx):
        return self.net(batch[0]).mean() * (batch_idx % 2)

    job = ps.from_lightning(module(training_step=step), loader(), OPTIONS)
    with pytest.raises(JobError, match="reads batch_idx"):
        job.loss(job.model(), next(job.data(0)))
    for read in (int, float, bool, str, lambda n: n == 0, lambda n: n > 3, lambda n: [1][n]):
        with pytest.raises(JobError, match="reads batch_idx"):
            read(BatchNumber())


def test_a_step_without_a_loss_is_refused():
    job = ps.from_lightning(module(training_step=lambda self, batch: None), loader(), OPTIONS)
    with pytest.raises(JobError, match="returns None, and no loss"):
        job.loss(job.model(), next(job.data(0)))


def test_a_module_is_copied_and_stays_as_it_was():
    lit = module()
    before = copy.deepcopy(lit.state_dict())
    job = ps.from_lightning(lit, loader(), OPTIONS)
    with torch.no_grad():
        job.model().net[0].weight.zero_()
    assert all(torch.equal(value, before[name]) for name, value in lit.state_dict().items())
