"""A model that cannot be traced trains as plain data parallelism, and equals the plain loop."""

import itertools
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.errors import CheckpointError, GraphError, JobError, RunError
from penstock.examine.examine import examine
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.trace import build_model, capture
from penstock.job import Job
from penstock.prove.prove import prove_eager
from penstock.runtime.eager import EagerTask, load_model, replicas_of, why_alone, work_eagerly
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.run import Steps
from penstock.state.laws.measured import BufferLaw, measured_laws
from penstock.state.optimizer.optimizer import Optimizers
from tests.parity import models
from tests.parity.models import OPTIMIZERS, TOKENS, VOCABULARY, WIDTH, Trained, job_of, plain_loop
from tests.parity.training import difference, differing

STEPS, MICRO_BATCHES = 4, 4


class Choosing(nn.Module):
    """Which layer it runs depends on the data, so no trace could hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        number = int(x.sum() > 0)
        x = F.dropout(torch.relu(self.layers[number](x)), 0.2, self.training)
        return self.head(self.norm(x.flatten(0, 1)).view(*tokens.shape[:2], WIDTH))


def choosing(optimizer="adamw", **options):
    job = job_of("gpt", torch.float64, optimizer, micro_batches=MICRO_BATCHES, **options)
    return replace(job, model=lambda: Choosing().double())


def train(job, folder, ranks, *, first_step=0, steps=STEPS, every=0, **options) -> Trained:
    told = Steps(job.micro_batches)
    task = EagerTask(job, first_step, steps, policy=SavePolicy(folder, every), **options)
    results = run_processes(partial(work_eagerly, task), ranks, told.add)
    assert [len(result.window_s) for result in results] == [steps] * ranks
    assert [len(r.spans) for r in results] == [MICRO_BATCHES // ranks + 2] * ranks
    newest = checkpoint.latest(folder)
    return Trained([step.loss for step in told.finished], checkpoint.load(newest).tensors)


def test_the_model_cannot_be_traced_and_the_message_names_the_line():
    with pytest.raises(GraphError, match=r"test_eager.py:\d+: number = int\(x.sum\(\) > 0\)"):
        capture(choosing())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_gives_the_bits_of_the_plain_loop(optimizer, tmp_path):
    trained = train(choosing(optimizer), tmp_path, 1)
    expected = plain_loop(choosing(optimizer), STEPS, MICRO_BATCHES)
    assert differing(trained.weights, expected.weights) == []
    assert trained.losses == pytest.approx(expected.losses, rel=1e-14)


def test_loss_that_fails_in_a_later_step_is_told_with_its_line(tmp_path):
    job, factors = choosing("sgd"), iter([1.0] * 6)

    def loss(model, batch):
        return job.loss(model, batch) * next(factors)

    with pytest.raises(RunError, match=r"loss fails in step 1 at .*test_eager.py:\d+"):
        train(replace(job, loss=loss), tmp_path, 1)


def test_scheduler_has_come_to_a_step_before_its_forward_pass(tmp_path):
    """One that changes the model, too, does so where it does in a plain loop."""
    seen: list[int] = []

    class Counts:
        steps = 0

        def __init__(self, optimizer) -> None:
            Counts.steps = 0

        def step(self) -> None:
            Counts.steps += 1

    job = choosing("sgd", scheduler=Counts)

    def loss(model, batch):
        seen.append(Counts.steps)
        return job.loss(model, batch)

    task = EagerTask(replace(job, loss=loss), 0, 3, policy=SavePolicy(tmp_path))
    run_threads(partial(work_eagerly, task), 1, lambda told: None)
    assert seen == [0] * MICRO_BATCHES + [1] * MICRO_BATCHES + [2] * MICRO_BATCHES


@pytest.mark.parametrize("ranks", [2, 4])
def test_more_ranks_differ_only_by_the_order_of_the_sum(ranks, tmp_path):
    options = {"clip_norm": 0.05, "learning_rate": lambda step: 1 / (1 + step)}
    trained = train(choosing("sgd", **options), tmp_path, ranks)
    expected = plain_loop(choosing("sgd", **options), STEPS, MICRO_BATCHES)
    assert difference(trained.weights, expected.weights) < 1e-12
    assert trained.losses == pytest.approx(expected.losses, rel=1e-12)


class Skipping(Choosing):
    """Its norm is left out of one late micro-batch."""

    def forward(self, tokens):
        late = next(itertools.islice(models.data(0), 13, None))["tokens"]
        norm = nn.Identity() if torch.equal(tokens, late) else self.norm
        x = self.embedding(tokens)
        return self.head(norm(x.flatten(0, 1)).view(*tokens.shape[:2], WIDTH))


def test_norm_that_a_later_micro_batch_leaves_out_ends_a_run_of_replicas(tmp_path):
    job = replace(choosing(), model=lambda: Skipping().double())
    assert replicas_of(job, 2) == 2
    with pytest.raises(RunError, match="forward calls norm 0 times in micro-batch 13, and 1 in"):
        train(job, tmp_path, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_that_no_rank_uses_stay_as_they_were(ranks, tmp_path):
    """AdamW would shrink a parameter whose gradient is zero instead of none."""
    trained = train(choosing("adamw"), tmp_path, ranks)
    torch.manual_seed(3)
    first = Choosing().double()
    assert torch.equal(trained.weights["weights/unused.weight"], first.unused.weight)
    assert torch.equal(trained.weights["weights/head.bias"], first.head.bias)
    assert not torch.equal(trained.weights["weights/head.weight"], first.head.weight)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_some_rows_only_are_summed(ranks, tmp_path):
    def sparse():
        model = Choosing().double()
        model.embedding.sparse = True
        return model

    job = replace(choosing("sgd"), model=sparse)
    trained = train(job, tmp_path, ranks)
    expected = plain_loop(job, STEPS, MICRO_BATCHES)
    assert difference(trained.weights, expected.weights) < 1e-12
    proof = prove_eager(job, ranks, (0, 3))
    assert proof.problem == ""
    assert max(d.value for d in proof.differences) < 1e-12


class Rows(nn.Module):
    """Two rows of a table, multiplied: word2vec, or the factors of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, sparse=True)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.table(pairs).prod(1).sum(1)


class Two(torch.optim.Optimizer):
    """Holds one for the table, and one for what else there is."""

    def __init__(self, weights) -> None:
        weights = list(weights)
        super().__init__(weights, {"lr": 0.1})
        self.sparse = torch.optim.SparseAdam(weights, lr=0.1)

    def step(self, closure=None):
        self.sparse.step()


@pytest.mark.parametrize(
    "kind", [lambda weights: torch.optim.SparseAdam(list(weights), lr=0.1), Two]
)
def test_an_optimizer_of_sparse_gradients_is_the_plain_loop_in_one_process(tmp_path, kind):
    def data(start):
        for k in itertools.count(start):
            yield torch.randint(0, 8, (4, 2), generator=torch.Generator().manual_seed(k))

    job = Job(
        model=Rows,
        loss=lambda model, pairs: (model(pairs) - 1).square().mean(),
        data=data,
        optimizer=kind,
        micro_batches=MICRO_BATCHES,
    )
    found = examine(job)
    assert found.failed == ""
    assert "SparseAdam, takes sparse gradients" in found.one_process
    trained = train(job, tmp_path, 1)
    assert difference(trained.weights, plain_loop(job, STEPS, MICRO_BATCHES).weights) == 0.0
    model = Rows()
    assert Optimizers(job, model, list(dict(model.named_parameters()))).lost() == ("", "")


class Slow(Choosing):
    """Another thread's turn comes while this one draws its weights."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.05)
        self.head = nn.Linear(WIDTH, VOCABULARY)


def test_ranks_that_are_threads_begin_with_the_same_weights():
    proof = prove_eager(replace(choosing("sgd"), model=lambda: Slow().double()), 2, (0,))
    assert (proof.problem, max(d.value for d in proof.differences) < 1e-12) == ("", True)


class Teaching(nn.Module):
    """A frozen layer follows another one; forward may also count in a way that is not linear."""

    def __init__(self, *, rare: int = 0, ordered: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("last", torch.zeros(WIDTH))
        self.rare, self.ordered, self.calls = rare, ordered, 0

    def forward(self, tokens):
        self.calls += 1
        x = self.embedding(tokens)
        y = torch.tanh(self.layer(x))
        with torch.no_grad():
            drawn = self.teacher(x) if self.ordered else 0.0
            self.teacher.weight.mul_(0.9).add_(self.layer.weight, alpha=0.1)
            self.teacher.bias.lerp_(y.mean((0, 1)), 0.2)
            if self.rare and self.calls > self.rare:
                self.last += y.mean((0, 1))
        return self.head(y + drawn)


def teaching(**options):
    return replace(choosing("sgd"), model=lambda: Teaching(**options).double())


@pytest.mark.parametrize("ranks", [2, 4])
def test_frozen_weights_that_forward_writes_are_those_of_the_plain_loop(ranks, tmp_path):
    """By laws that hold, as somebody knows: no trace says so."""
    laws = measured_laws(teaching())
    trained = train(teaching(), tmp_path, ranks, every=2, laws=laws)
    assert difference(trained.weights, plain_loop(teaching(), STEPS, MICRO_BATCHES).weights) < 1e-12


def test_what_only_order_tells_has_one_rank(tmp_path):
    assert replicas_of(choosing(), 4) == 4
    assert replicas_of(teaching(), 4, measured_laws(teaching())) == 4
    assert replicas_of(teaching(), 4) == replicas_of(teaching(ordered=True), 4) == 1
    assert replicas_of(replace(teaching(ordered=True), buffers="per replica"), 4) == 4
    with pytest.raises(RunError, match=r"buffer teacher\.bias has to see every micro-batch in ord"):
        train(teaching(ordered=True), tmp_path, 2)


def test_what_forward_begins_to_write_later_is_told(tmp_path):
    with pytest.raises(
        RunError, match="forward, or a hook after steps, writes last in some steps only"
    ):
        train(teaching(rare=4), tmp_path, 2, laws=measured_laws(teaching(rare=4)))


def test_each_replica_may_follow_its_own(tmp_path):
    """At a rate of 0: what the first replica saves follows from its own micro-batches."""
    still = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "buffers": "per replica"}
    trained = train(replace(teaching(), **still), tmp_path, 2)
    torch.manual_seed(3)
    model, batches = Teaching().double(), teaching().data(0)
    for number in range(STEPS * MICRO_BATCHES):
        batch = next(batches)
        if number % MICRO_BATCHES < MICRO_BATCHES // 2:
            model(batch["tokens"])
    assert difference(trained.weights, {"weights/teacher.bias": model.teacher.bias}) < 1e-12


def test_resuming_gives_the_bits_of_one_run(tmp_path):
    whole = train(choosing(), tmp_path / "whole", 1)
    train(choosing(), tmp_path / "part", 1, steps=1)
    done = checkpoint.latest(tmp_path / "part")
    rest = train(choosing(), tmp_path / "rest", 1, first_step=1, steps=STEPS - 1, resume=done)
    assert differing(rest.weights, whole.weights) == []
    assert rest.losses == whole.losses[1:]


def test_checkpoints_are_made_when_due(tmp_path):
    train(choosing(), tmp_path, 2, steps=5, every=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000005"]


@pytest.mark.parametrize(
    ("micro_batches", "most", "ranks"), [(8, 2, 2), (8, 3, 2), (6, 4, 3), (5, 4, 1), (1, 9, 1)]
)
def test_ranks_share_the_micro_batches_evenly(micro_batches, most, ranks):
    assert replicas_of(replace(choosing(), micro_batches=micro_batches), most) == ranks


@pytest.mark.parametrize(
    ("micro_batches", "most", "why"),
    [
        (8, 1, "one rank"),
        (1, 4, "a step is one micro-batch"),
        (5, 4, "4 replicas cannot share the 5 micro-batches"),
        (6, 4, "in order"),
    ],
)
def test_why_one_process_trains_it_is_told(micro_batches, most, why):
    assert why in why_alone(replace(teaching(ordered=True), micro_batches=micro_batches), most)


def test_what_one_process_is_needed_for_is_named():
    job, laws = teaching(ordered=True), {"calls": BufferLaw(None, "it counts")}
    words = why_alone(job, 2, laws)
    assert words == "forward writes calls, which has to see all micro-batches in order: it counts"


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_that_ends_is_told(ranks, tmp_path):
    job = choosing()
    short = replace(job, data=lambda start: (b for i, b in zip(range(start, 6), job.data(start))))  # noqa: B905
    with pytest.raises(RunError, match="the job's data ended at micro-batch 6"):
        train(short, tmp_path, ranks)


def test_a_model_without_trainable_parameters_is_refused(tmp_path):
    job = replace(choosing(), model=lambda: Choosing().requires_grad_(False))
    with pytest.raises(RunError, match="the model has no trainable parameter"):
        train(job, tmp_path, 1)


def test_a_layer_that_has_no_shape_yet_is_refused():
    with pytest.raises(JobError, match=r"parameter 0\.weight of the job's model has no shape yet"):
        build_model(replace(choosing(), model=lambda: nn.Sequential(nn.LazyLinear(WIDTH))))


def test_an_optimizer_that_is_none_is_refused(tmp_path):
    with pytest.raises(RunError, match="the job's optimizer is a tuple"):
        train(replace(choosing(), optimizer=tuple), tmp_path, 2)


def test_weights_of_another_model_are_refused():
    with pytest.raises(CheckpointError, match=r"holds no weights/embedding\.weight"):
        load_model(Choosing(), {})
    shape = torch.zeros(VOCABULARY, TOKENS)
    with pytest.raises(CheckpointError, match=r"weights/embedding\.weight is \[11, 6\]"):
        load_model(Choosing(), {"weights/embedding.weight": shape})


def test_one_rank_alone_asks_for_its_data_once(tmp_path):
    """Data that goes by no index is then read as the author's own loop reads it."""

    def data(start):
        return models.data(0)

    weights = train(replace(choosing(), data=data), tmp_path / "once", 1).weights
    assert differing(weights, train(choosing(), tmp_path / "by index", 1).weights) == []


def test_building_reads_no_data(tmp_path):
    """Data that has a state of its own is not moved before the first step."""
    source = models.data(0)
    job = replace(choosing(), data=lambda start: source)
    weights = train(job, tmp_path / "one source", 1).weights
    assert differing(weights, train(choosing(), tmp_path / "by index", 1).weights) == []


@pytest.mark.parametrize("by", ["a hook of the optimizer", "learning_rate", "the loss"])
def test_layer_that_thaws_in_a_later_step_learns_from_then_on(by, tmp_path):
    """Fine-tuning: the body is frozen first, and let learn once the head has settled."""
    job = thawing(by)
    told = Steps(job.micro_batches)
    task = EagerTask(job, 0, STEPS, policy=SavePolicy(tmp_path))
    run_threads(partial(work_eagerly, task), 1, told.add)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    trained, expected = checkpoint.load(newest).tensors, plain_weights(thawing(by))
    assert not torch.equal(expected["layers.0.weight"], build_model(job).layers[0].weight)
    for name, value in expected.items():
        assert torch.equal(trained[f"weights/{name}"], value), name


def thawing(by):
    job, built, calls = choosing("sgd"), [], itertools.count(1)

    def model():
        built.append(Choosing().double())
        built[-1].layers.requires_grad_(False)
        return built[-1]

    def thaw(now):
        if now:
            built[-1].layers.requires_grad_(True)

    def optimizer(weights):
        made, steps = torch.optim.SGD(weights, lr=0.1, momentum=0.9), itertools.count(1)
        if by == "a hook of the optimizer":
            made.register_step_post_hook(lambda *_: thaw(next(steps) == 2))
        return made

    def rate(step):
        thaw(by == "learning_rate" and step == 1)
        return 1.0

    def loss(model, batch):
        thaw(by == "the loss" and next(calls) == 2 * MICRO_BATCHES + 1)
        return job.loss(model, batch)

    made = replace(job, model=model, optimizer=optimizer, learning_rate=rate, loss=loss)
    return replace(made, clip_norm=None)


def test_weight_that_a_hook_takes_out_of_the_module_gets_no_old_gradient_again(tmp_path):
    """Two layers tied after the second step: the optimizer keeps the weight that nobody uses."""
    job, taken = tying()
    task = EagerTask(job, 0, STEPS, policy=SavePolicy(tmp_path))
    run_threads(partial(work_eagerly, task), 1, Steps(job.micro_batches).add)
    plain, expected = tying()
    plain_weights(plain)
    assert torch.equal(taken[-1], expected[-1])


def tying():
    job, built, taken = choosing("sgd"), [], []

    def model():
        built.append(Choosing().double())
        return built[-1]

    def optimizer(weights):
        made, steps = torch.optim.SGD(weights, lr=0.1, momentum=0.9), itertools.count(1)

        def tie(*_):
            if next(steps) == 2:
                first, second = built[-1].layers
                taken.append(second.weight)
                second.weight = first.weight

        made.register_step_post_hook(tie)
        return made

    still = {"clip_norm": None, "learning_rate": lambda step: 1.0}
    return replace(job, model=model, optimizer=optimizer, **still), taken


def plain_weights(job):
    model = build_model(job)
    optimizer, data = job.optimizer(list(model.parameters())), job.data(0)
    for step in range(STEPS):
        for number in range(job.micro_batches):
            batch = next(data)
            with SeededRandom(micro_batch_seed(job.seed, step * job.micro_batches + number)):
                (job.loss(model, batch) / job.micro_batches).backward()
        job.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}
