"""Figures beside the loss, and validation in the midst of a run, against a plain loop."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from penstock.checkpoints import checkpoint, folders
from penstock.checkpoints.saver import SavePolicy
from penstock.errors import JobError
from penstock.graph.graph import Graph
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import is_asynchronous
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.run import Steps
from penstock.runtime.validate import validated
from penstock.runtime.worker import Task, work
from tests.graph.joined.joining import difference
from tests.parity.models import plan_of
from tests.parity.training import listed

WIDTH, CLASSES, SAMPLES, MICRO_BATCHES, STEPS = 16, 16, 8, 4, 4


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.early = x = self.embed(x)
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(x)))
        return self.head(self.norm(x))


def data(start: int) -> Iterator[dict[str, Tensor]]:
    for index in count(start):
        source = torch.Generator().manual_seed(index)
        x = torch.randn(SAMPLES, WIDTH, generator=source)
        yield {"x": x, "y": x.argmax(1)}


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def accuracy_of(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y).float().mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | float]]:
    logits = model(batch["x"])
    value = F.cross_entropy(logits, batch["y"])
    found = {
        "accuracy": accuracy_of(logits, batch["y"]),
        "nats": value,
        "perplexity": value.exp(),
        "early": model.early.square().mean(),  # of another stage than the loss
        "mean_y": batch["y"].double().mean(),
        "rows": len(batch["x"]),
    }
    return value, found


def sgd(parameters):
    return SGD(parameters, lr=0.05, momentum=0.9)


def job(**changes: object) -> Job:
    made = Job(Net, loss, data, sgd, micro_batches=MICRO_BATCHES, num_steps=STEPS)
    return replace(made, **changes)


VALIDATED = {
    "validation": lambda: islice(data(1000), 3),
    "validate_every": 2,
}


def run(own: Job, folder: Path, *, schedule="one_f_one_b", stages=2, replicas=1, launcher, **more):
    """Return the steps of a run by a plan, and its last checkpoint."""
    captured = capture(own)
    share = own.micro_batches // replicas
    plan = plan_of(captured.graph, schedule, stages, share, replicas=replicas, **more)
    length = 2 if is_asynchronous(plan) else 1
    program = lower_plan(plan, captured.graph, num_steps=length)
    windows = tuple((program, step) for step in range(0, STEPS, length))
    task = Task(
        captured,
        stages_of(plan, captured.graph),
        own,
        listed(windows),
        # every second step: one adds up what replicas wrote into buffers
        policy=SavePolicy(folder, 2, own.validate_every or 0),
    )
    return _results(own, folder, partial(work, task), plan.total_ranks, launcher)


def run_eagerly(own: Job, folder: Path, ranks: int = 2):
    task = EagerTask(own, 0, STEPS, policy=SavePolicy(folder, 2, own.validate_every or 0))
    return _results(own, folder, partial(work_eagerly, task), ranks, run_processes)


def _results(own, folder, work, ranks, launcher):
    every = own.validate_every
    steps = Steps(own.micro_batches, awaits=lambda step: bool(every) and (step + 1) % every == 0)
    launcher(work, ranks, steps.add)
    return steps.finished, checkpoint.load(checkpoint.latest(folder)).tensors


def plain(
    own: Job,
) -> tuple[list[dict[str, float]], dict[int, dict[str, float]], dict[str, Tensor]]:
    """Return the figures of each step, those of validations by step, and the last weights."""
    torch.manual_seed(own.seed)
    model = own.model()
    optimizer, batches = own.optimizer(model.parameters()), own.data(0)
    rows, found = [], {}
    for step in range(STEPS):
        seen = []
        optimizer.zero_grad()
        for batch in islice(batches, own.micro_batches):
            told = own.loss(model, batch)
            value, figures = told if isinstance(told, tuple) else (told, {})
            (value / own.micro_batches).backward()
            given = {"loss": value, **figures}
            seen.append({name: float(torch.as_tensor(v).detach()) for name, v in given.items()})
        optimizer.step()
        rows.append({name: statistics.fmean(row[name] for row in seen) for name in seen[0]})
        if own.validate_every and (step + 1) % own.validate_every == 0:
            model.eval()
            with torch.no_grad():
                told = [own.loss(model, batch) for batch in own.validation()]
            parts = [{"val_loss": v, **{f"val_{k}": x for k, x in f.items()}} for v, f in told]
            found[step] = {k: statistics.fmean(float(p[k]) for p in parts) for k in parts[0]}
            model.train()
    weights = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    weights |= {f"buffers/{name}": value for name, value in model.named_buffers()}
    return rows, found, weights


WAYS = {
    "one stage": partial(run, stages=1, launcher=run_threads),
    "pipeline": partial(run, stages=3, launcher=run_processes),
    "replicas": partial(run, stages=2, replicas=2, launcher=run_processes),
    "zero bubble": partial(run, schedule="zb_h1", stages=2, launcher=run_threads),
    "copies": partial(run, schedule="chimera", stages=2, launcher=run_threads),
    "eager": run_eagerly,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_figures_are_averaged_as_the_loss_is(way: str, tmp_path: Path) -> None:
    own = job(**VALIDATED)
    rows, validations, _ = plain(own)
    steps, _ = WAYS[way](own, tmp_path)
    assert [step.step for step in steps] == list(range(STEPS))
    for step, row in zip(steps, rows, strict=True):
        assert {"loss": step.loss, **step.figures} == pytest.approx(row, rel=1e-5)
        if step.step not in validations:
            assert step.validated is None
            continue
        told = dict(step.validated)
        assert told.pop("val_seconds") > 0
        assert told == pytest.approx(validations[step.step], rel=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["pipeline", "replicas", "eager"])
@pytest.mark.parametrize("model", [lambda: Net(0.3), lambda: Net(norm=True)], ids=["drop", "norm"])
def test_neither_figures_nor_validation_change_what_is_trained(way, model, tmp_path) -> None:
    """To the last bit: random states, running statistics, the order of the data."""
    bare = job(model=model, loss=plain_loss)
    steps, weights = WAYS[way](bare, tmp_path / "bare")
    more, same = WAYS[way](job(model=model, **VALIDATED), tmp_path / "more")
    assert [step.loss for step in more] == [step.loss for step in steps]
    assert {name for name in weights if not torch.equal(weights[name], same[name])} == set()
    assert weights.keys() == same.keys()


def test_an_asynchronous_schedule_has_figures_too(tmp_path: Path) -> None:
    own = job(**VALIDATED)
    steps, _ = run(own, tmp_path, schedule="pipedream", launcher=run_threads)
    for step in steps:
        assert step.figures["nats"] == pytest.approx(step.loss, rel=1e-6)
        assert 0 <= step.figures["accuracy"] <= 1
        assert step.figures["rows"] == SAMPLES
    assert [step.step for step in steps if step.validated] == [1, 3]


def test_the_graph_is_as_it_was_where_there_are_no_figures(tmp_path: Path) -> None:
    bare, graph = capture(job(loss=plain_loss)).graph, capture(job()).graph
    assert bare.figures == ()
    assert "figures" not in bare.to_json()
    names = [name for name, _ in graph.figures]
    assert names == ["accuracy", "nats", "perplexity", "early", "mean_y", "rows"]
    assert graph.digest != bare.digest
    assert all(graph.nodes[node].phase == "F" for _, node in graph.figures)
    ops = [n for n in graph.nodes if n.kind == "op" and n.phase == "B"]
    assert len(ops) == sum(n.kind == "op" and n.phase == "B" for n in bare.nodes)
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json").figures == graph.figures


class Branching(Net):
    """A model that only Dynamo can trace: it looks at a value, and does nothing about it."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = float(x.sum().item())
        return super().forward(x)


def test_figures_pass_through_dynamo(tmp_path: Path) -> None:
    own = job(model=Branching)
    steps, _ = run(own, tmp_path, launcher=run_threads)
    for step, row in zip(steps, plain(own)[0], strict=True):
        assert {"loss": step.loss, **step.figures} == pytest.approx(row, rel=1e-5)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"accuracy": torch.ones(3)}, r"the figure accuracy of the loss is \(3,\), not one number"),
        ({"accuracy": "high"}, "the figure accuracy of the loss is a str, not one number"),
        ({"step": 1.0}, "the loss gives a figure named 'step'"),
        ({"val_loss": 1.0}, "the loss gives a figure named 'val_loss'"),
        ({3: 1.0}, "the loss gives a figure named 3"),
    ],
)
def test_a_figure_that_is_none_is_refused(figures, words) -> None:
    with pytest.raises(JobError, match=words):
        capture(job(loss=lambda model, batch: (plain_loss(model, batch), figures)))


def test_figures_of_joined_micro_batches_are_the_means_of_theirs() -> None:
    def counting(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return plain_loss(model, batch), {"sum_y": batch["y"].sum()}

    fits, counts = job(loss=lambda m, b: loss(m, b)[0]), job(loss=counting)
    assert difference(fits, 2) < 1e-5
    assert difference(counts, 2) < 1e-5


def test_micro_batches_of_a_model_with_an_empty_parameter_are_joined() -> None:
    class Empty(Net):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0))

        def forward(self, *batch: torch.Tensor) -> torch.Tensor:
            return super().forward(*batch) + self.none.sum()

    empty = replace(job(loss=plain_loss), model=Empty)
    assert difference(empty, 2) < 1e-5


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path) -> None:
    values = {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan}
    model = Net()
    for step, value in values.items():
        with torch.no_grad():
            model.head.bias.fill_(step)
        state = {f"weights/{name}": p for name, p in model.named_parameters()}, {}
        checkpoint.write_part(tmp_path, step, 0, state)
        checkpoint.finish(tmp_path, step)
        if math.isfinite(value):
            checkpoint.keep_best(tmp_path, step, value)
        folders.tidy(tmp_path, folders.Keep())
    assert checkpoint.best(tmp_path) == (2, 1.0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best", "step-000003", "step-000004"]
    kept = checkpoint.load(tmp_path / "best")
    assert kept.step == 2
    assert (kept.tensors["weights/head.bias"] == 2).all()
    assert checkpoint.latest(tmp_path).name == "step-000004"


def test_validation_puts_modes_and_buffers_and_random_states_back() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.blocks[0].eval()  # one that stays so

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            assert not self.training
            torch.rand(3)
            return super().forward(x)

    model = Counting()
    before = torch.get_rng_state()
    found = validated(job(model=Counting, **VALIDATED), model)
    assert torch.equal(torch.get_rng_state(), before)
    assert float(model.calls) == 0
    assert model.training
    assert not model.blocks[0].training
    assert 0 <= found["val_accuracy"] <= 1


def test_validate_every_without_validation_is_refused() -> None:
    with pytest.raises(JobError, match=r"Job.validate_every is 2, and Job.validation is None"):
        job(validate_every=2)
    with pytest.raises(JobError, match=r"Job.validate_every is 0, not a whole number of 1 or more"):
        job(**{**VALIDATED, "validate_every": 0})
